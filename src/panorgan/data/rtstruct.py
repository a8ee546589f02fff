"""DICOM contours (RTSTRUCT): what their regions are called, and their masks on the image's grid.

A region is drawn as closed polygons in the planes of the slices. A voxel belongs to it where its centre lies inside an
odd number of them, so that inner contours are holes, and pieces may be many.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from panorgan.data.formats import LPS_TO_RAS, POSITION_ROUNDING_MM, SLICE_TOLERANCE, import_pydicom
from panorgan.data.volume import Volume
from panorgan.errors import DataError

Mask = NDArray[np.bool_]

# Points and open lines mark something, and outline nothing.
_CLOSED = ("CLOSED_PLANAR", "CLOSEDPLANAR_XOR")
# Fewer slices than this may lie apart by chance.
_ENOUGH_SLICES = 4


def outlined_regions(dataset: Any) -> dict[int, Any]:
    """Regions with a closed contour, by number. The others are unknown: templates list organs that were never drawn."""
    drawn = {int(item.ReferencedROINumber) for item in dataset.get("ROIContourSequence") or [] if _closed(item)}
    return {int(roi.ROINumber): roi for roi in dataset.get("StructureSetROISequence") or [] if roi.ROINumber in drawn}


def region_codes(dataset: Any) -> dict[int, list[Any]]:
    """The codes of what a region is, by its number, where the file has some."""
    observations = dataset.get("RTROIObservationsSequence") or []
    return {
        int(one.ReferencedROINumber): list(one.get("RTROIIdentificationCodeSequence") or []) for one in observations
    }


def referenced_series(dataset: Any) -> tuple[str, ...]:
    """UIDs of the series that the contours were drawn on."""
    return tuple(
        str(series.get("SeriesInstanceUID") or "")
        for frame in dataset.get("ReferencedFrameOfReferenceSequence") or []
        for study in frame.get("RTReferencedStudySequence") or []
        for series in study.get("RTReferencedSeriesSequence") or []
    )


def frame_of_reference(dataset: Any) -> str:
    """UID of the space that the contours lie in; empty where the file names none, or several."""
    spaces = {
        str(item.get(name) or "")
        for sequence, name in (
            ("ReferencedFrameOfReferenceSequence", "FrameOfReferenceUID"),
            ("StructureSetROISequence", "ReferencedFrameOfReferenceUID"),
        )
        for item in dataset.get(sequence) or []
    } - {""}
    return spaces.pop() if len(spaces) == 1 else ""


def read_regions(path: Path, numbers: set[int], image: Volume) -> Iterator[tuple[int, Mask]]:
    """Number and mask of each of these regions, on the grid of the image."""
    try:
        dataset = import_pydicom().dcmread(path)
        items = [item for item in dataset.ROIContourSequence if int(item.ReferencedROINumber) in numbers]
        regions = [(int(item.ReferencedROINumber), [_points(contour) for contour in _closed(item)]) for item in items]
    except (AttributeError, KeyError, TypeError, ValueError, OSError, RuntimeError) as error:
        raise DataError(
            "A file of contours (RTSTRUCT) cannot be read.",
            where=str(path),
            why=f"{type(error).__name__}: {error}",
            fix="Copy or export it again. Or save the regions as DICOM-SEG or NIfTI.",
            code="file-unreadable",
        ) from error
    for number, contours in regions:
        yield number, _mask(contours, image, path)


def fill(polygons: list[NDArray[np.float64]], shape: tuple[int, int]) -> Mask:
    """Voxels [X, Y] whose centres lie inside an odd number of the polygons [points, 2], given in voxels.

    Along every line of voxels, each crossing with an edge begins or ends the inside.
    """
    begins = np.concatenate(polygons)
    ends = np.concatenate([np.roll(polygon, -1, axis=0) for polygon in polygons])
    low, high = np.minimum(begins[:, 1], ends[:, 1]), np.maximum(begins[:, 1], ends[:, 1])
    # Half open, so that a corner on a line of voxels counts once; edges along a line never do.
    first, last = (np.clip(np.ceil(y), 0, shape[1]).astype(np.int64) for y in (low, high))
    count = last - first
    edge = np.repeat(np.arange(len(begins)), count)
    line = first[edge] + np.arange(len(edge)) - np.repeat(np.cumsum(count) - count, count)
    (x0, y0), (x1, y1) = begins[edge].T, ends[edge].T
    x = x0 + (line - y0) * (x1 - x0) / (y1 - y0)
    crossings = np.zeros((shape[0] + 1, shape[1]), dtype=np.int64)
    np.add.at(crossings, (np.clip(np.ceil(x), 0, shape[0]).astype(np.int64), line), 1)
    return np.asarray(np.cumsum(crossings, axis=0)[:-1] % 2 == 1)


def _mask(contours: list[NDArray[np.float64]], image: Volume, path: Path) -> Mask:
    """The mask of one region from its contours in LPS millimetres."""
    to_voxels = np.linalg.inv(image.affine) @ LPS_TO_RAS
    allowed = max(POSITION_ROUNDING_MM / image.spacing[2], SLICE_TOLERANCE)
    polygons: dict[int, list[NDArray[np.float64]]] = {}
    for points in contours:
        voxels = points @ to_voxels[:3, :3].T + to_voxels[:3, 3]
        place = int(np.rint(voxels[:, 2].mean()))
        if np.abs(voxels[:, 2] - place).max() > allowed:
            raise _off_the_slices(path, "a contour lies between two slices, or in another plane than they do")
        if not 0 <= place < image.voxels.shape[2]:
            raise _off_the_slices(path, "a contour lies beyond the first or last slice")
        polygons.setdefault(place, []).append(voxels[:, :2])
    _refuse_gaps(sorted(polygons), path)
    mask: Mask = np.zeros(image.voxels.shape, dtype=bool)
    for place, own in polygons.items():
        mask[:, :, place] = fill(own, image.voxels.shape[:2])
    return mask


def _refuse_gaps(places: list[int], path: Path) -> None:
    """Contours on every second slice would become a mask with stripes."""
    steps = Counter(np.diff(places).tolist())
    if len(places) < _ENOUGH_SLICES or not steps:
        return
    usual, count = steps.most_common(1)[0]
    if usual > 1 and 2 * count > steps.total():
        raise DataError(
            "A region is drawn on some of its slices only.",
            where=str(path),
            why=f"its contours lie {usual} slices apart, and nothing says what lies between them",
            fix="Interpolate the contours in the program in which they were drawn, and export them again.",
            code="contours-skip-slices",
        )


def _off_the_slices(path: Path, why: str) -> DataError:
    return DataError(
        "Contours do not lie on the slices of their series.",
        where=str(path),
        why=why,
        fix="Export them again for the series they were drawn on, or save them there as DICOM-SEG or NIfTI.",
        code="contours-off-slices",
    )


def _closed(item: Any) -> list[Any]:
    """The closed contours of a region."""
    contours = item.get("ContourSequence") or []
    return [one for one in contours if one.get("ContourGeometricType") in _CLOSED and one.get("ContourData")]


def _points(contour: Any) -> NDArray[np.float64]:
    """Corners [points, 3] in LPS millimetres."""
    return np.array(contour.ContourData, dtype=np.float64).reshape(-1, 3)
