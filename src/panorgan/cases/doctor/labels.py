"""A case's label files: whole numbers, known ids, the image's grid. What is wrong becomes a finding, the rest masks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from panorgan.cases.doctor.files import Problem, look
from panorgan.cases.doctor.geometry import compare, on_grid, to_ras
from panorgan.cases.doctor.masks import Mask
from panorgan.cases.layouts.base import FoundLabelMap, FoundLabels, FoundSegments
from panorgan.cases.segments import SegmentMasks
from panorgan.cases.volume import Volume
from panorgan.errors import DataError

# As the reader of cases: farther from a whole number than this is refused.
_ROUNDING = 1e-2

Tell = Callable[[Problem, object], None]
"""Hears a problem and the file it was found in."""


@dataclass
class ReadLabels:
    """Masks [X, Y, Z] in RAS order by the folder's names, and a hash of them (empty where nothing is drawn)."""

    masks: dict[str, Mask] = field(default_factory=dict)
    content: str = ""


def label_names(found: FoundLabels) -> tuple[str, ...]:
    """The folder's names for what is labelled."""
    if isinstance(found, FoundLabelMap):
        return tuple(found.ids)
    return tuple(found.segments if isinstance(found, FoundSegments) else found.files)


def label_paths(found: FoundLabels, names: Iterable[str] | None = None) -> tuple[Path, ...]:
    """The files that hold these names (all of them when not given), each once."""
    wanted = set(label_names(found) if names is None else names)
    if isinstance(found, FoundLabelMap):
        return (found.path,)
    if isinstance(found, FoundSegments):
        return tuple(sorted({s.path for name, own in found.segments.items() if name in wanted for s in own}))
    return tuple(path for name, path in found.files.items() if name in wanted)


def read_labels(
    found: FoundLabels, organs: Mapping[str, str], image: Volume | None, repair: str, tell: Tell
) -> ReadLabels:
    """Masks of the names in `organs`, as far as they can be read. Without an image the files are only looked at."""
    if isinstance(found, FoundLabelMap):
        return _read_map(found, organs, image, repair, tell)
    if isinstance(found, FoundSegments):
        return _read_segments(found, organs, image, tell)
    return _read_files({n: p for n, p in found.files.items() if n in organs}, image, repair, tell)


def _read_segments(found: FoundSegments, organs: Mapping[str, str], image: Volume | None, tell: Tell) -> ReadLabels:
    """Segments of DICOM files. An organ in two of them may be two readers' opinions: cases are not read so."""
    for organ in sorted(set(organs.values())):
        paths = label_paths(found, [name for name, own in organs.items() if own == organ])
        if len(paths) > 1:
            why = ", ".join(path.name for path in paths) + ": they may be two readers' or two versions"
            fix = "Keep the right one and move the others out of the folder."
            tell(
                Problem("labels-unusable", f"Several segmentations of one series hold the {organ}.", why, fix), paths[0]
            )
    if image is None:
        return ReadLabels()
    try:
        named = {name: found.segments[name] for name in organs if name in found.segments}
        masks = SegmentMasks(named).read(image)
    except DataError as error:
        code = "grid-mismatch" if "grid" in error.what else "file-unreadable"
        tell(Problem(code, error.what, error.why, error.fix), error.where)
        return ReadLabels()
    return _together({name: Mask.cut(to_ras(Volume(mask, image.affine)).voxels) for name, mask in masks.items()})


def _together(masks: dict[str, Mask]) -> ReadLabels:
    """Masks with a hash of all of them."""
    hashed = hashlib.blake2b(digest_size=16)
    for name, mask in sorted(masks.items()):
        if mask.inside.size:
            hashed.update(f"{name}{mask.start}{mask.inside.shape}".encode() + np.packbits(mask.inside).tobytes())
    drawn = any(mask.inside.size for mask in masks.values())
    return ReadLabels(masks, hashed.hexdigest() if drawn else "")


def _read_map(found: FoundLabelMap, names: Iterable[str], image: Volume | None, repair: str, tell: Tell) -> ReadLabels:
    if not found.ids:
        return ReadLabels()
    volume = _usable(found.path, image, repair, tell)
    if volume is None:
        return ReadLabels()
    whole, problem = whole_numbers(volume.voxels, repair)
    if problem:
        tell(problem, found.path)
    if whole is None:
        return ReadLabels()
    present = _present(whole)
    for wrong in _undeclared(present, {i for ids in found.ids.values() for i in ids}):
        tell(wrong, found.path)
    if image is None:
        return ReadLabels()
    ras = to_ras(Volume(whole, image.affine)).voxels
    boxes = ndimage.find_objects(ras, max(i for ids in found.ids.values() for i in ids))
    masks = {name: Mask.of_ids(ras, found.ids[name], boxes) for name in names if name in found.ids}
    return ReadLabels(masks, content_hash(ras) if present.any() else "")


def _present(whole: NDArray[Any]) -> NDArray[Any]:
    """The different values of a label map; a table is far quicker than sorting a hundred million voxels."""
    low, high = int(whole.min()), int(whole.max())
    if high - low > 100_000:
        return np.unique(whole)
    seen = np.zeros(high - low + 1, dtype=np.bool_)
    for plane in _planes(whole):
        seen[plane.astype(np.int64) - low] = True
    return np.flatnonzero(seen) + low


def _undeclared(present: NDArray[Any], declared: set[int]) -> list[Problem]:
    stray = [int(i) for i in present if i > 0 and int(i) not in declared]
    negative = [int(i) for i in present if i < 0]
    found = []
    if stray:
        ids = ", ".join(map(str, stray))
        found.append(
            Problem(
                "stray-label",
                f"A label file holds undeclared ids: {ids}.",
                f"declared are {', '.join(map(str, sorted(declared)))}",
                f"Name {ids} where the folder names its labels (dataset.json, cases.csv …) and, if panorgan is not "
                "to use it, add that name under 'ignore: […]'; or remove it from the file.",
            )
        )
    if negative:
        why = "label ids are positive; a signed type or a wrong slope made them"
        found.append(
            Problem(
                "negative-label",
                f"A label file holds ids below zero: {', '.join(map(str, negative))}.",
                why,
                "Export the label again as an unsigned integer label map.",
            )
        )
    return found


def _read_files(files: Mapping[str, Path], image: Volume | None, repair: str, tell: Tell) -> ReadLabels:
    """One mask per file. The same trouble in many files of a case is told once."""
    told: dict[str, tuple[Problem, list[Path]]] = {}

    def collect(problem: Problem, file: object) -> None:
        told.setdefault(problem.code, (problem, []))[1].append(Path(str(file)))

    masks: dict[str, Mask] = {}
    for name, path in files.items():
        volume = _usable(path, image, repair, collect)
        if volume is None:
            continue
        values, problem = whole_numbers(volume.voxels, repair)
        if problem:
            collect(problem, path)
        if values is None or image is None:
            continue
        masks[name] = Mask.cut(to_ras(Volume(values > 0, image.affine)).voxels)
    for problem, paths in told.values():
        others = f" (and {len(paths) - 1} more files of this case)" if len(paths) > 1 else ""
        tell(Problem(problem.code, problem.what, problem.why + others, problem.fix), paths[0])
    return _together(masks)


def _usable(path: Path, image: Volume | None, repair: str, tell: Tell) -> Volume | None:
    """A label file with its voxels in the order of the image's."""
    label, problems = look(path, repair)
    for problem in problems:
        missing = problem.code == "image-missing"
        tell(
            Problem("label-missing", "A case has no label file.", problem.why, problem.fix) if missing else problem,
            path,
        )
    if label is None or image is None:
        return label
    mismatch = compare(label, image, repair)
    if mismatch:
        tell(mismatch, path)
        return None
    return on_grid(label, image)


def whole_numbers(voxels: NDArray[Any], repair: str) -> tuple[NDArray[Any] | None, Problem | None]:
    """Label values as integers, and how far they were from it; None where they are not labels."""
    if np.issubdtype(voxels.dtype, np.integer):
        return voxels, None
    again = "Export it again as a label map (nearest-neighbour interpolation)."
    if not np.isfinite(voxels).all():
        count = int((~np.isfinite(voxels)).sum())
        return None, Problem("label-not-whole", "A label file holds NaN or infinity.", f"{count} voxels", again)
    whole = np.rint(voxels)
    away = np.abs(voxels - whole)
    farthest = float(away.max(initial=0))
    if farthest == 0:
        return whole.astype(np.int32), None
    example = voxels.flat[int(away.argmax())]
    why = f"{np.count_nonzero(away)} voxels are up to {farthest:.2g} away from a whole number, such as {example:.6g}"
    if farthest > _ROUNDING:
        return None, Problem("label-not-whole", "Label values are not whole numbers.", why, again)
    return whole.astype(np.int32), Problem("label-nearly-whole", "Label values are not quite whole.", why, repair)


def _planes(voxels: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """One [X, Y] after the other, so that no copy of a large scan is made; files keep them together."""
    yield from np.moveaxis(voxels, -1, 0)


def content_hash(voxels: NDArray[Any]) -> str:
    """A hash of values and shape; the type in which they were stored does not matter."""
    hashed = hashlib.blake2b(repr(voxels.shape).encode(), digest_size=16)
    for plane in _planes(voxels):
        # Adding zero makes −0 and 0 the same bytes.
        hashed.update((np.asarray(plane, dtype=np.float32) + np.float32(0)).tobytes())
    return hashed.hexdigest()
