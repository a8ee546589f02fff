"""The DICOM series that a scan was read from: the headers of its slices, in the order of the label map's slices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from panorgan.data.formats import LPS_TO_RAS, POSITION_ROUNDING_MM, SLICE_TOLERANCE, import_pydicom
from panorgan.errors import DataError

# What results refer to the series by. Anonymisers remove some of them.
_NEEDED = ("SOPClassUID", "SOPInstanceUID", "StudyInstanceUID", "SeriesInstanceUID", "FrameOfReferenceUID")
_PLACE = ("ImagePositionPatient", "ImageOrientationPatient", "PixelSpacing", "Rows", "Columns")
# Directions and sizes of pixels: the same as for segmentations that are read.
_TOLERANCE_MM = 1e-2


@dataclass(frozen=True)
class SourceSlices:
    """Slice k of a label map: the header of its image, and its labels [rows, columns]."""

    headers: tuple[Any, ...]
    labels: NDArray[np.uint8]

    @property
    def first(self) -> Any:
        """The header of the first slice, for what all of them share."""
        return self.headers[0]


def read_headers(files: Sequence[Path]) -> tuple[Any, ...]:
    """The headers of a series, without pixels; refuses a series that results could not refer to."""
    if not files:
        raise DataError(
            "DICOM-SEG and RTSTRUCT describe the slices of a DICOM series; this scan is none.",
            code="no-source-series",
            fix="Predict on the DICOM series itself, or choose the formats nifti and seg.nrrd.",
        )
    dcmread = import_pydicom().dcmread
    try:
        headers = tuple(dcmread(path, stop_before_pixels=True) for path in files)
    except Exception as error:  # pydicom raises many kinds
        raise DataError(
            "The headers of a DICOM series cannot be read.",
            code="file-unreadable",
            where=str(files[0].parent),
            why=f"{type(error).__name__}: {error}",
            fix="Copy the series again from its source.",
        ) from error
    for path, header in zip(files, headers, strict=True):
        _check_header(path, header)
    for name in ("StudyInstanceUID", "SeriesInstanceUID", "FrameOfReferenceUID"):
        if len({str(header[name].value) for header in headers}) > 1:
            raise _unusable(files[0].parent, f"its slices have different values of {name}")
    return headers


def _check_header(path: Path, header: Any) -> None:
    if int(header.get("NumberOfFrames") or 1) > 1:
        raise _unusable(path, "it is a multi-frame file; results refer to series of one file per slice")
    missing = [name for name in (*_NEEDED, *_PLACE) if header.get(name) in (None, "")]
    if missing:
        raise _unusable(path, f"it has no {', '.join(missing)}")


def match_slices(files: Sequence[Path], labels: NDArray[np.uint8], affine: NDArray[np.float64]) -> SourceSlices:
    """The labels [X, Y, Z] slice by slice, each with the image that it lies on.

    Refuses labels that are not on the pixels of the series: nothing is resampled.
    """
    headers = read_headers(files)
    where = files[0].parent
    if len(headers) != labels.shape[2]:
        raise _other_grid(where, f"there are {len(headers)} slices, and {labels.shape[2]} of labels")
    to_voxels = np.asarray(np.linalg.inv(affine), dtype=np.float64)
    places: dict[int, Any] = {}
    for header in headers:
        places[_slice_index(header, to_voxels, affine, labels.shape, where)] = header
    if sorted(places) != list(range(labels.shape[2])):
        raise _other_grid(where, "two slices lie at the same place")
    ordered = tuple(places[index] for index in range(labels.shape[2]))
    return SourceSlices(ordered, np.ascontiguousarray(labels.transpose(2, 1, 0)))


def plane_of(header: Any) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Where the first pixel of a slice lies (LPS millimetres), and the steps to the next column and the next row."""
    directions = np.array(header.ImageOrientationPatient, dtype=float).reshape(2, 3)
    row_mm, column_mm = (float(size) for size in header.PixelSpacing)  # the distance between rows comes first
    origin = np.array(header.ImagePositionPatient, dtype=float)
    return origin, directions[0] * column_mm, directions[1] * row_mm


def _slice_index(
    header: Any, to_voxels: NDArray[np.float64], affine: NDArray[np.float64], shape: tuple[int, ...], where: Path
) -> int:
    """The index of the slice whose voxels a slice's pixels are."""
    columns, rows = int(header.Columns), int(header.Rows)
    if (columns, rows) != shape[:2]:
        raise _other_grid(where, f"an image has {columns} × {rows} pixels, and the labels {shape[0]} × {shape[1]}")
    origin, column, row = plane_of(header)
    corners = np.array([origin, origin + (columns - 1) * column, origin + (rows - 1) * row])
    world = np.c_[corners, np.ones(3)] @ LPS_TO_RAS
    found = (world @ to_voxels.T)[:, :3]
    index = int(np.rint(found[0, 2]))
    wanted = np.array([[0, 0, index], [columns - 1, 0, index], [0, rows - 1, index]])
    spacing = np.sqrt((affine[:3, :3] ** 2).sum(axis=0))
    apart = (found - wanted) * spacing
    # Positions are less exact than sizes and directions, because no stack is perfectly even.
    allowed = np.maximum(POSITION_ROUNDING_MM, SLICE_TOLERANCE * spacing)
    if (np.abs(apart) > allowed).any() or (np.ptp(apart, axis=0) > _TOLERANCE_MM).any():
        raise _other_grid(where, "their voxels have another size, direction or place than the pixels of the series")
    return index


def _unusable(where: Path, why: str) -> DataError:
    return DataError(
        "DICOM results cannot refer to this series.",
        code="source-series-unusable",
        where=str(where),
        why=why,
        fix="Predict on the series as its scanner or archive exports it, or choose the formats nifti and seg.nrrd.",
    )


def _other_grid(where: Path, why: str) -> DataError:
    return DataError(
        "The labels do not lie on the slices of the series.",
        code="not-on-source-grid",
        where=str(where),
        why=why,
        fix="Write results for the series that was predicted on, unchanged.",
    )
