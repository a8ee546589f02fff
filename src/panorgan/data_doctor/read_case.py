"""One case, read once: facts and findings. Runs in a worker, so nothing heavy is imported here."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import nibabel as nib
import numpy as np
from numpy.typing import NDArray

from panorgan.data.channels import Channel
from panorgan.data.layouts.base import FoundLabels
from panorgan.data.volume import Volume
from panorgan.data_doctor import body_orientation, intensity, masks, organ_positions, plausible, thumbnail
from panorgan.data_doctor.channels import check_channels
from panorgan.data_doctor.codes import CODES, finding
from panorgan.data_doctor.files import Problem, look
from panorgan.data_doctor.findings import CaseFacts, Finding, StructureFacts
from panorgan.data_doctor.geometry import to_ras
from panorgan.data_doctor.label_placement import check_placement
from panorgan.data_doctor.labels import content_hash, label_paths, read_labels
from panorgan.data_doctor.masks import Mask
from panorgan.data_doctor.slices import check_slices

# So many structures with the same trouble, and so large a share of all, are one trouble of the whole label.
_SEVERAL, _MOST = 3, 0.5
# In MR, air is as dark as noise: a small share of the bright tissue.
MR_AIR = 0.1
_DAMAGED = "Open its files in a viewer; copy them again from their source, or remove the case."


@dataclass(frozen=True)
class CaseTask:
    """What a worker needs to know about a case.

    `organs` gives the organ for every one of the folder's label names that is used; `modality` is what the folder
    says (CT, MR or nothing) and `declared_in` where. `layout` is the layout's name where the user had to choose it.
    `image_only` cases are compared with the others and not shown. `channels` are those of a scan that has several.
    """

    site: str
    folder: Path
    case: str
    patient: str
    image: Path
    labels: FoundLabels | None = None
    organs: Mapping[str, str] = field(default_factory=dict)
    modality: str = ""
    split: str = ""
    slices: tuple[Path, ...] = ()
    image_only: bool = False
    declared_in: str = ""
    layout: str = ""
    channels: tuple[Channel, ...] = ()

    @property
    def repair(self) -> str:
        """The command that writes corrected copies."""
        layout = f" --layout {self.layout}" if self.layout else ""
        return f"panorgan doctor {shlex.quote(str(self.folder))}{layout} --fix-headers OUT"


class _Report:
    """Collects the findings of one case."""

    def __init__(self, task: CaseTask) -> None:
        self.task = task
        self.findings: list[Finding] = []

    def add(self, problem: Problem, file: object = "", structure: str = "") -> None:
        where = self.task.site, self.task.case
        file = file or self._file_of(structure)
        words = problem.what, problem.why, problem.fix
        self.findings.append(finding(problem.code, *where, *words, file, structure))

    def _file_of(self, structure: str) -> object:
        """The label file in which a structure lies."""
        names = [name for name, organ in self.task.organs.items() if organ == structure]
        paths = label_paths(self.task.labels, names) if self.task.labels is not None and names else ()
        return paths[0] if paths else ""


@dataclass(frozen=True)
class _Image:
    """The scan as stored and in RAS order; `ct` says that its values are trusted to be HU.

    Values below `air_below` are air; NaN where that is unknown. `stack` is the RAS axis along which slices lie.
    """

    stored: Volume
    ras: Volume
    ct: bool
    usable: bool
    air_below: float = float("nan")
    stack: int = 2


def read_case(task: CaseTask) -> tuple[CaseFacts, list[Finding]]:
    """Facts and findings of one case; never stops at a bad file."""
    report = _Report(task)
    facts = CaseFacts(task.site, task.case, task.patient, task.image, split=task.split, folder=task.folder)
    try:
        return _read(task, facts, report), report.findings
    except Exception as error:  # one unforeseen file must not end the check-up of a thousand
        why = f"{type(error).__name__}: {error}"[:300]
        report.add(Problem("file-unreadable", "A case cannot be checked.", why, _DAMAGED), task.image)
        return facts, report.findings


def _read(task: CaseTask, facts: CaseFacts, report: _Report) -> CaseFacts:
    image, facts = _read_image(task, facts, report)
    for channel, problem in check_channels(task.channels, image.stored if image else None, facts.modality, task.repair):
        report.add(problem, channel.path)
    if task.labels is None or task.image_only:
        if image is not None and image.usable and not task.image_only:
            picture = np.zeros(image.ras.voxels.shape, dtype=np.uint8)
            facts = replace(facts, thumbnail=thumbnail.draw(image.ras, picture, (), image.ct))
            _check_stack(image, None, report)
            _check_body(image, facts, report)
        return facts
    stored = image.stored if image is not None else None
    read = read_labels(task.labels, task.organs, stored, task.repair, report.add)
    facts = replace(facts, label_content=read.content, label_files=_files(task.labels, task.organs))
    if image is not None and image.usable:
        found = masks.inclusive(read.masks, task.organs)
        picture, names = masks.painted(found, image.ras.voxels.shape)
        shown = thumbnail.draw(image.ras, picture, names, image.ct)
        facts = replace(facts, structures=_check_masks(task, image, found, report), thumbnail=shown)
        for structure, problem in masks.check_overlaps(found):
            report.add(problem, structure=structure)
        _check_stack(image, picture, report)
        _check_body(image, facts, report)
        solid = {organ: mask for organ, mask in found.items() if not plausible.is_hollow(organ)}
        if len(solid) < len(found):
            picture, _ = masks.painted(solid, image.ras.voxels.shape)
        misplaced = check_placement(image.ras.voxels, picture, image.ct)
        if misplaced:
            report.add(misplaced, label_paths(task.labels, task.organs)[0])
    return facts


def _check_stack(image: _Image, labels: NDArray[np.uint8] | None, report: _Report) -> None:
    repeated = check_slices(image.ras.voxels, labels, image.stack)
    if repeated:
        report.add(repeated, report.task.image)


def _check_body(image: _Image, facts: CaseFacts, report: _Report) -> None:
    """How the body lies, where organs do not say already that it lies the wrong way round."""
    if image.ct and not any(found.code == "wrong-order" for found in report.findings):
        drawn = {structure.name: structure for structure in facts.structures}
        turned = body_orientation.check_orientation(image.ras, organ_positions.axes_in_order(drawn))
        if turned:
            report.add(turned, report.task.image)


def _files(labels: FoundLabels, organs: Mapping[str, str]) -> tuple[Path, ...]:
    return tuple(path for path in label_paths(labels, organs) if os.path.isfile(path))


def _read_image(task: CaseTask, facts: CaseFacts, report: _Report) -> tuple[_Image | None, CaseFacts]:
    stored, problems = look(task.image, task.repair, task.slices, task.channels[0].index if task.channels else None)
    for problem in problems:
        report.add(problem, task.image)
    if stored is None:
        return None, facts
    finite = np.isfinite(stored.voxels) if stored.voxels.dtype.kind == "f" else None
    if finite is not None and not finite.all():
        report.add(_not_finite(int((~finite).sum()), bool(finite.any()), task.repair), task.image)
        lowest = stored.voxels[finite].min() if finite.any() else 0.0
        stored = Volume(np.where(finite, stored.voxels, lowest), stored.affine)
    ras = to_ras(stored)
    values = intensity.measure(ras.voxels)
    facts = replace(
        facts,
        shape=stored.voxels.shape,
        spacing_mm=stored.spacing,
        orientation="".join(nib.aff2axcodes(stored.affine)),
        modality=task.modality or intensity.guess_modality(values),
        intensity=values.plain(),
        content=content_hash(ras.voxels),
    )
    if values.low == values.high:
        report.add(_constant(values.low), task.image)
        return _Image(stored, ras, ct=False, usable=False), facts
    check = {"CT": intensity.check_ct, "MR": intensity.check_mr}.get(facts.modality)
    problem_found = check(values, task.declared_in) if check else None
    stack = int(nib.orientations.io_orientation(stored.affine)[2, 0])
    if problem_found:
        report.add(problem_found, task.image)
        return _Image(stored, ras, ct=False, usable=True, stack=stack), facts
    air_below = {"CT": plausible.AIR_HU, "MR": MR_AIR * values.percentiles["p99"]}.get(facts.modality, float("nan"))
    return _Image(stored, ras, facts.modality == "CT", usable=True, air_below=air_below, stack=stack), facts


def _not_finite(count: int, some_left: bool, repair: str) -> Problem:
    return Problem(
        "not-finite",
        "A scan holds values that are not finite numbers.",
        f"{count} voxels are NaN or infinite",
        f"Replaced by the lowest finite value in the copies of: {repair}" if some_left else "Export the scan again.",
    )


def _constant(value: float) -> Problem:
    why = f"every voxel is {value:.5g}"
    return Problem("constant-image", "A scan shows nothing.", why, "Export it again, or remove the case.")


def _check_masks(
    task: CaseTask, image: _Image, found: Mapping[str, Mask], report: _Report
) -> tuple[StructureFacts, ...]:
    """Every mask by itself, then where they lie in the body."""
    facts: dict[str, StructureFacts] = {}
    odd: list[tuple[str, Problem]] = []
    for organ, mask in found.items():
        facts[organ], numbers, sizes = masks.describe(organ, mask, image.ras)
        if not facts[organ].voxels:
            continue
        odd += [(organ, problem) for problem in masks.check_one(organ, mask, image.ras, facts[organ], image.ct)]
        odd += [(organ, problem) for problem in masks.check_pieces(organ, mask, numbers, sizes, image.ras)]
    for structure, problem in _merge_shared(odd, sum(bool(f.voxels) for f in facts.values())):
        report.add(problem, structure=structure)
    body = None if np.isnan(image.air_below) else organ_positions.find_body(image.ras, image.air_below)
    names = {organ: name for name, organ in task.organs.items()}
    wrong = organ_positions.check_sides(facts, body, names)
    if wrong:
        report.add(wrong[1], structure=wrong[0])
    for structure, problem in organ_positions.check_order(facts):
        report.add(problem, structure=structure)
    return tuple(facts.values())


def _merge_shared(odd: Sequence[tuple[str, Problem]], drawn: int) -> Iterator[tuple[str, Problem]]:
    """Problems by structure; where most structures share one, it is one problem of the whole label."""
    organs: dict[str, set[str]] = {}
    for organ, problem in odd:
        organs.setdefault(problem.code, set()).add(organ)
    shared = {code for code, own in organs.items() if len(own) >= max(_SEVERAL, _MOST * drawn)}
    for organ, problem in odd:
        if problem.code not in shared:
            yield organ, problem
    for code in sorted(shared):
        first, problem = next((organ, problem) for organ, problem in odd if problem.code == code)
        why = f"{', '.join(sorted(organs[code]))}; for example {first}: {problem.why}"
        fix = "Check the spacing of the scan, its values, and that the label was drawn on this scan."
        what = f"{len(organs[code])} of {drawn} masks: {CODES[code].title}."
        yield "", replace(problem, what=what, why=why, fix=fix)
