"""One source: its layout, its cases, and what is wrong before a single scan is opened."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from panorgan.anatomy import find_organ
from panorgan.cases.doctor.codes import finding
from panorgan.cases.doctor.facts import CaseTask
from panorgan.cases.doctor.findings import Finding, Source
from panorgan.cases.doctor.labels import label_names
from panorgan.cases.layouts import find_layout
from panorgan.cases.layouts.base import FoundImage, FoundLabelMap, FoundLabels, LabelRules, missing_folder
from panorgan.errors import AnatomyError, DataError, PanorganError

_OF_LAYOUT = {"kits": "CT", "lits": "CT", "acdc": "MR"}
_NNUNET = ("nnunet", "msd")
_MR_WORDS = ("mr", "t1", "t2", "flair", "adc", "dwi")
_TEST = "imagesTs"
# What damaged tables and descriptions raise before anybody could have checked them.
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, csv.Error)


@dataclass
class Opened:
    """A source made ready: what to read, and what was found on the way."""

    source: Source
    layout: str = ""
    tasks: list[CaseTask] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def tell(self, code: str, what: str, why: str = "", fix: str = "", file: object = "", case: str = "") -> None:
        """Add a finding about this source."""
        self.findings.append(finding(code, self.source.site, case, what, why, fix, file))


def open_source(source: Source) -> Opened:
    """Find layout, cases and names; what stops `read_cases` becomes a finding."""
    opened = Opened(source)
    folder = source.folder
    found_there = _look_into(opened)
    if found_there is None:
        return opened
    images, labels = found_there
    _tell_orphans(opened, images, labels)
    mine = {case: image for case, image in sorted(images.items()) if source.uses(case, image.patient)}
    if not mine:
        fix = "Check the names of the scans (nnU-Net: imagesTr/<case>_0000.nii.gz)."
        opened.tell("no-scans", "A data folder holds no scans.", "no file is named as the layout asks", fix, folder)
        return opened
    labels = {case: found for case, found in labels.items() if case in mine and label_names(found)}
    _tell_unlabelled(opened, mine, labels)
    organs = _name_organs(opened, labels)
    modality = _declared(folder) if opened.layout in _NNUNET else _OF_LAYOUT.get(opened.layout, "")
    for case, image in mine.items():
        found = labels.get(case)
        own = {name: organs[name] for name in label_names(found) if name in organs} if found else {}
        kind = modality or _by_name(image.path, opened.layout)
        split = source.splits.get(case, "")
        about = (source.site, folder, case, image.patient, image.path, found, own, kind, split)
        opened.tasks.append(CaseTask(*about, slices=image.slices))
    opened.tasks += _test_images(opened, modality)
    return opened


def _look_into(opened: Opened) -> tuple[dict[str, FoundImage], dict[str, FoundLabels]] | None:
    """Scans and labels by case; None, and a finding, where the folder cannot be understood."""
    folder = opened.source.folder
    code = "no-layout" if folder.exists() else "folder-missing"
    try:
        if not folder.exists():
            raise missing_folder(folder)
        layout = find_layout(folder, opened.source.layout)
        opened.layout, code = layout.name, "folder-unreadable"
        return layout.images(folder), layout.labels(folder)
    except PanorganError as error:
        code = "several-layouts" if "several layouts" in error.what else code
        opened.tell(code, error.what, error.why, error.fix, error.where or folder)
    except _UNREADABLE as error:
        what, fix = (
            "A file that describes the folder cannot be read.",
            "Compare the folder with its layout's documentation.",
        )
        opened.tell("folder-unreadable", what, f"{type(error).__name__}: {error}", fix, folder)
    return None


def _name_organs(opened: Opened, labels: Mapping[str, FoundLabels]) -> dict[str, str]:
    """The organ of every label name that is used; tells of names that nobody knows and of labels that do not fit."""
    source = opened.source
    organs: dict[str, str] = {}
    unknown: dict[str, str] = {}
    for name in sorted({name for found in labels.values() for name in label_names(found)} - set(source.ignore)):
        try:
            organs[name] = find_organ(source.rename.get(name, name)).name
        except AnatomyError as error:
            unknown[name] = error.fix
    if unknown:
        hints = " ".join(dict.fromkeys(hint for hint in unknown.values() if hint.startswith("Did you mean")))
        fix = (
            f"Under the site: 'labels: {{{next(iter(unknown))}: <organ>}}' or 'ignore: [{', '.join(unknown)}]'. {hints}"
        )
        what = f"Labels with names that panorgan does not know: {', '.join(unknown)}."
        opened.tell(
            "unknown-name", what, "they are neither organs of the catalogue nor aliases", fix.strip(), source.folder
        )
    if source.vocabulary is None:
        return organs
    return {name: organs[name] for name in _used(opened, labels, tuple(unknown)) if name in organs}


def _used(opened: Opened, labels: Mapping[str, FoundLabels], unknown: tuple[str, ...]) -> set[str]:
    """The folder's names that make up structures of the vocabulary."""
    source = opened.source
    if source.vocabulary is None:
        return set()
    rules = LabelRules(source.vocabulary, source.rename, (*source.ignore, *unknown), source.restrict)
    used: set[str] = set()
    told: dict[str, tuple[DataError, list[str]]] = {}
    for case, found in sorted(labels.items()):
        try:
            used.update(
                name for names in rules.structures(label_names(found), str(source.folder)).values() for name in names
            )
        except DataError as error:
            told.setdefault(error.what, (error, []))[1].append(case)
            used.update(label_names(found))
    for misfit, cases in told.values():
        which = "" if len(cases) == len(labels) else f" (cases: {_some(cases)})"
        opened.tell("labels-unusable", misfit.what, f"{misfit.why}{which}", misfit.fix, source.folder)
    if not used and not source.external:
        opened.tell(
            "nothing-annotated",
            f"Site {source.site} annotates nothing of the vocabulary.",
            f"the vocabulary is {', '.join(source.vocabulary)}",
            "Correct 'vocabulary', name the labels with 'labels: {…}', or mark the site 'external: true'.",
            source.folder,
        )
    return used


def _tell_orphans(opened: Opened, images: Mapping[str, FoundImage], labels: Mapping[str, FoundLabels]) -> None:
    """Labels without an image."""
    orphans = {case: "" for case in labels if case not in images}
    if opened.layout in _NNUNET and images:
        known = {found.path.name for found in labels.values() if isinstance(found, FoundLabelMap)}
        for path in sorted((opened.source.folder / "labelsTr").glob("*.*")):
            if path.name not in known and not path.name.startswith("."):
                orphans[path.name.split(".")[0]] = str(path)
    for case, file in sorted(orphans.items()):
        fix = "Add its scan, or remove the label."
        opened.tell("orphan-label", "A label belongs to no scan.", "it is never read", fix, file, case)


def _tell_unlabelled(opened: Opened, images: Mapping[str, FoundImage], labels: Mapping[str, FoundLabels]) -> None:
    """Images without a label; a table says so on purpose, and a folder without any label is a test set."""
    if not labels or opened.layout == "csv":
        return
    for case in images:
        if case not in labels:
            fix = "Add its label, or leave it: it is not trained on."
            opened.tell(
                "unlabelled", "A scan has no label.", "others in this folder have", fix, images[case].path, case
            )


def _declared(folder: Path) -> str:
    """CT or MR from nnU-Net's `channel_names` or the decathlon's `modality`; empty for other words."""
    try:
        content = json.loads((folder / "dataset.json").read_text(encoding="utf-8"))
        channels = content.get("channel_names") or content.get("modality") or {}
        first = str(channels.get("0", "")).strip().lower()
    except (OSError, ValueError, AttributeError):
        return ""
    if first == "ct":
        return "CT"
    return "MR" if any(word in first for word in _MR_WORDS) else ""


def _by_name(image: Path, layout: str) -> str:
    """TotalSegmentator and BIDS say it in the file's name."""
    stem = image.name.split(".")[0].lower()
    if layout == "totalsegmentator":
        return "MR" if stem == "mri" else "CT"
    if layout == "bids":
        suffix = stem.rsplit("_", 1)[-1]
        return "CT" if suffix == "ct" else "MR" if suffix in ("t1w", "t2w", "flair", "bold", "cine") else ""
    return ""


def _test_images(opened: Opened, modality: str) -> list[CaseTask]:
    """nnU-Net's and the decathlon's test images: nothing of them may be trained on."""
    if opened.layout not in _NNUNET:
        return []
    source, tasks = opened.source, []
    for path in sorted((source.folder / _TEST).glob("*.*")):
        stem = path.name.split(".")[0]
        other_channel = stem[-5:-4] == "_" and stem[-4:].isdigit() and not stem.endswith("_0000")
        if path.name.startswith(".") or (opened.layout == "nnunet" and other_channel):
            continue
        case = stem.removesuffix("_0000")
        tasks.append(CaseTask(source.site, source.folder, case, case, path, None, {}, modality, _TEST, image_only=True))
    return tasks


def _some(cases: list[str]) -> str:
    more = f" and {len(cases) - 5} more" if len(cases) > 5 else ""
    return ", ".join(cases[:5]) + more
