"""A case's label files: whole numbers, known ids, the image's grid. What is wrong becomes a finding, the rest masks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from panorgan.data.case import ROUNDING
from panorgan.data.dicom_seg import SegmentMasks
from panorgan.data.layouts.base import FoundLabelMap, FoundLabels, FoundSegments
from panorgan.data.volume import Volume, on_grid
from panorgan.data_doctor.files import Problem, code_of, look
from panorgan.data_doctor.geometry import compare, to_ras
from panorgan.data_doctor.masks import Mask
from panorgan.errors import DataError

# As the reader of cases: in a mask file, more than half is drawn.
_DRAWN = 0.5
# Ids above this are searched one by one, because a table of their boxes would fill the memory.
_LARGEST_ID = 65535
_NAMED_IDS = 8
_NO_LABEL = 100
_INT32, _INT64 = 2.0**31 - 1, 2.0**62

Report = Callable[[Problem, object], None]
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
    found: FoundLabels, organs: Mapping[str, str], image: Volume | None, repair: str, report: Report
) -> ReadLabels:
    """Masks of the names in `organs`, as far as they can be read. Without an image the files are only looked at."""
    if isinstance(found, FoundLabelMap):
        return _read_map(found, organs, image, repair, report)
    if isinstance(found, FoundSegments):
        return _read_segments(found, organs, image, report)
    return _read_files({n: p for n, p in found.files.items() if n in organs}, image, repair, report)


def _read_segments(found: FoundSegments, organs: Mapping[str, str], image: Volume | None, report: Report) -> ReadLabels:
    """Segments of DICOM files. An organ in two of them may be two readers' opinions: cases are not read so."""
    for organ in sorted(set(organs.values())):
        paths = label_paths(found, [name for name, own in organs.items() if own == organ])
        if len(paths) > 1:
            why = ", ".join(path.name for path in paths) + ": they may be two readers' or two versions"
            fix = "Keep the right one and move the others out of the folder."
            report(
                Problem("labels-unusable", f"Several segmentations of one series hold the {organ}.", why, fix), paths[0]
            )
    if image is None:
        return ReadLabels()
    try:
        named = {name: found.segments[name] for name in organs if name in found.segments}
        masks = {
            name: Mask.cut(to_ras(Volume(mask, image.affine)).voxels) for name, mask in SegmentMasks(named).read(image)
        }
    except DataError as error:
        report(Problem(code_of(error, "file-unreadable"), error.what, error.why, error.fix), error.where)
        return ReadLabels()
    return _together(masks)


def _together(masks: dict[str, Mask]) -> ReadLabels:
    """Masks with a hash of all of them."""
    hashed = hashlib.blake2b(digest_size=16)
    for name, mask in sorted(masks.items()):
        if mask.inside.size:
            hashed.update(f"{name}{mask.start}{mask.inside.shape}".encode() + np.packbits(mask.inside).tobytes())
    drawn = any(mask.inside.size for mask in masks.values())
    return ReadLabels(masks, hashed.hexdigest() if drawn else "")


def _read_map(
    found: FoundLabelMap, names: Iterable[str], image: Volume | None, repair: str, report: Report
) -> ReadLabels:
    if not found.ids:
        return ReadLabels()
    volume = _usable(found.path, image, repair, report)
    if volume is None:
        return ReadLabels()
    whole, problem = whole_numbers(volume.voxels, repair)
    if problem:
        report(problem, found.path)
    if whole is None:
        return ReadLabels()
    present = _present(whole)
    declared = {i for ids in found.ids.values() for i in ids}
    for wrong in _undeclared(present, declared):
        report(wrong, found.path)
    # An image saved as a label: what its few declared ids look like is of no interest.
    if image is None or len(present) - len(declared) > _NO_LABEL:
        return ReadLabels()
    ras = to_ras(Volume(whole, image.affine)).voxels
    drawn = declared & set(present.tolist())
    wanted = {name: found.ids[name] for name in names if name in found.ids}
    if max(drawn, default=0) > _LARGEST_ID:
        masks = {name: Mask.cut(np.isin(ras, sorted(drawn & set(ids)))) for name, ids in wanted.items()}
    else:
        boxes = ndimage.find_objects(ras, max(drawn)) if drawn else []
        masks = {name: Mask.of_ids(ras, ids, boxes) for name, ids in wanted.items()}
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
        ids = _first(stray)
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
                f"A label file holds ids below zero: {_first(negative)}.",
                why,
                "Export the label again as an unsigned integer label map.",
            )
        )
    return found


def _first(ids: list[int]) -> str:
    """The first few, and how many more: an image saved as a label holds thousands."""
    more = f" and {len(ids) - _NAMED_IDS} more" if len(ids) > _NAMED_IDS else ""
    return ", ".join(map(str, ids[:_NAMED_IDS])) + more


def _read_files(files: Mapping[str, Path], image: Volume | None, repair: str, report: Report) -> ReadLabels:
    """One mask per file. The same problem in many files of a case is one finding."""
    problems: dict[str, tuple[Problem, list[Path]]] = {}

    def collect(problem: Problem, file: object) -> None:
        problems.setdefault(problem.code, (problem, []))[1].append(Path(str(file)))

    masks: dict[str, Mask] = {}
    for name, path in files.items():
        volume = _usable(path, image, repair, collect)
        if volume is None:
            continue
        problem = _binary(volume.voxels, repair)
        if problem:
            collect(problem, path)
        if image is not None:
            masks[name] = Mask.cut(to_ras(Volume(volume.voxels > _DRAWN, image.affine)).voxels)
    for problem, paths in problems.values():
        others = f" (and {len(paths) - 1} more files of this case)" if len(paths) > 1 else ""
        report(Problem(problem.code, problem.what, problem.why + others, problem.fix), paths[0])
    return _together(masks)


def _binary(voxels: NDArray[Any], repair: str) -> Problem | None:
    """A mask file says yes or no: zero, and one other value. What is more than half is read as yes."""
    whole, problem = whole_numbers(voxels, repair)
    again = "Export one file per structure, with 0 outside and 1 inside."
    if whole is None:
        finite = np.isfinite(voxels).all()
        if not finite or problem is None:
            return problem
        why = f"{problem.why}; what is above {_DRAWN} is taken as drawn"
        return Problem("mask-not-binary", "A mask file holds values between no and yes.", why, again)
    values = [int(i) for i in _present(whole) if i != 0]
    if len(values) > 1 or (values and values[0] < 0):
        why = "what is above zero is taken as drawn; a label map of several structures?"
        return Problem("mask-not-binary", f"A mask file holds several values: {_first(values)}.", why, again)
    return problem


def _usable(path: Path, image: Volume | None, repair: str, report: Report) -> Volume | None:
    """A label file with its voxels in the order of the image's."""
    label, problems = look(path, repair)
    for problem in problems:
        if problem.code == "image-missing":
            problem = Problem("label-missing", "A case has no label file.", problem.why, problem.fix)
        elif problem.code == "no-orientation":
            problem = replace(problem, fix="Save the label again with its image loaded, so that it gets its geometry.")
        report(problem, path)
    if label is None or image is None:
        return label
    mismatch = compare(label, image, repair)
    if mismatch:
        report(mismatch, path)
        return None
    return on_grid(label, image)


def whole_numbers(voxels: NDArray[Any], repair: str) -> tuple[NDArray[Any] | None, Problem | None]:
    """Label values as integers, and how far they were from it; None where they are not labels."""
    if np.issubdtype(voxels.dtype, np.integer):
        return voxels, None
    again = "Export it again as a label map (nearest-neighbour interpolation)."
    infinite = sum(int(np.count_nonzero(~np.isfinite(plane))) for plane in _planes(voxels))
    if infinite:
        return None, Problem("label-not-whole", "A label file holds NaN or infinity.", f"{infinite} voxels", again)
    kind = np.int32 if np.abs((voxels.min(initial=0), voxels.max(initial=0))).max() <= _INT32 else np.int64
    whole: NDArray[Any] = np.empty_like(voxels, dtype=kind)
    uneven, farthest, example = 0, 0.0, 0.0
    # Plane by plane: several copies of a large scan in double precision do not fit everywhere.
    for plane, target in zip(_planes(voxels), _planes(whole), strict=True):
        rounded = np.rint(plane)
        away = np.abs(plane - rounded)
        uneven += int(np.count_nonzero(away))
        if away.max(initial=0) > farthest:
            farthest, example = float(away.max()), float(plane.flat[int(away.argmax())])
        target[...] = np.clip(rounded, -_INT64, _INT64)
    if not uneven:
        return whole, None
    why = f"{uneven} voxels are up to {farthest:.2g} away from a whole number, such as {example:.6g}"
    if farthest > ROUNDING:
        return None, Problem("label-not-whole", "Label values are not whole numbers.", why, again)
    return whole, Problem("label-nearly-whole", "Label values are not quite whole.", why, repair)


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
