"""Predictions on DICOM series without a model, and their results read back with pydicom and numpy alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
from dicom_files import SAGITTAL, WrittenSeries, write_series
from numpy.typing import NDArray

from panorgan.anatomy import Vocabulary
from panorgan.data.volume import read_scan, source_files
from panorgan.workflows.prediction import Prediction

SIZE = (13, 11, 6)
ORGANS = ("liver", "liver_tumour", "spleen", "kidney_left", "kidney_right")
LPS = np.diag([-1.0, -1.0, 1.0, 1.0])
# No axis of the grid is one of the body's.
OBLIQUE = (0.8, 0.6, 0.0, -0.48, 0.64, 0.6)
GEOMETRIES: dict[str, dict[str, Any]] = {
    "axial": {},
    "oblique": {"orientation": OBLIQUE},
    "sagittal": {"orientation": SAGITTAL},
    "thick": {"spacing": (1.25, 1.25, 7.7)},
    "from head to feet": {"orientation": (1, 0, 0, 0, -1, 0)},
    "of MR": {"modality": "MR"},
    "long pixels": {"spacing": (0.5, 1.7, 3.0)},
    "odd numbers": {"spacing": (0.683594, 0.683594, 1.0 / 3), "origin": (-174.658203, 1.23456789, -1000.1)},
}


@dataclass(frozen=True)
class Made:
    """A prediction, and the series that it is of."""

    series: WrittenSeries
    prediction: Prediction

    def saved(self, folder: Path, formats: str) -> Path:
        """Write the formats as `folder/scan.*`; returns what their names begin with."""
        self.prediction.save(folder / "scan", formats)
        return folder / "scan"

    def showing(self, labels: NDArray[np.uint8]) -> Made:
        """The same with other labels."""
        return replace(self, prediction=replace(self.prediction, labels=labels))


def random_labels(shape: tuple[int, ...] = SIZE, organs: int = len(ORGANS)) -> NDArray[np.uint8]:
    """Every voxel on its own: a slip of one voxel, or a flip, changes nearly all of them."""
    return np.random.default_rng(7).integers(0, organs + 1, shape).astype(np.uint8)


def made_prediction(
    folder: Path, labels: NDArray[np.uint8] | None = None, organs: Iterable[str] = ORGANS, **series: Any
) -> Made:
    """Write a series, read it as predict does, and give it labels."""
    vocabulary = Vocabulary(organs)
    labels = random_labels(organs=len(vocabulary)) if labels is None else labels
    hu = np.random.default_rng(0).integers(-1000, 1000, labels.shape)
    written = write_series(folder, hu, **series)
    volume = read_scan(folder)
    about = {"scan": "ct", "model": "demo", "run": "r1", "weights": "0123456789abcdef" * 4}
    return Made(written, Prediction(labels, volume.affine, vocabulary, about, (), source_files(folder)))


def pixels_to_voxels(orientation: Any, position: Any, spacing: Any, affine: NDArray[np.float64]) -> NDArray[np.float64]:
    """Matrix from (column, row, 0, 1) of a plane to voxel indices of the affine (RAS)."""
    along_row, along_column = np.array(orientation, float).reshape(2, 3)
    plane = np.eye(4)
    plane[:3, 0], plane[:3, 1] = along_row * float(spacing[1]), along_column * float(spacing[0])
    plane[:3, 2], plane[:3, 3] = np.cross(along_row, along_column), np.array(position, float)
    return np.linalg.inv(affine) @ LPS @ plane


def read_seg(path: Path, affine: NDArray[np.float64], shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Segment numbers on a grid, from a binary segmentation, by the positions of its frames."""
    dataset = pydicom.dcmread(path)
    found = np.zeros(shape, np.uint8)
    shared = dataset.SharedFunctionalGroupsSequence[0]
    orientation = shared.PlaneOrientationSequence[0].ImageOrientationPatient
    spacing = shared.PixelMeasuresSequence[0].PixelSpacing
    frames = dataset.pixel_array.reshape(-1, dataset.Rows, dataset.Columns)
    for pixels, group in zip(frames, dataset.PerFrameFunctionalGroupsSequence, strict=True):
        position = group.PlanePositionSequence[0].ImagePositionPatient
        to_voxels = pixels_to_voxels(orientation, position, spacing, affine)
        rows, columns = np.nonzero(pixels)
        places = (to_voxels @ np.stack([columns, rows, np.zeros_like(rows), np.ones_like(rows)]))[:3]
        voxels = np.rint(places).astype(int)
        assert np.abs(places - voxels).max(initial=0) < 1e-3, "frames lie on the voxels, exactly"
        if dataset.SegmentationType == "LABELMAP":
            values = pixels[rows, columns]
        else:
            values = group.SegmentIdentificationSequence[0].ReferencedSegmentNumber
        assert not found[tuple(voxels)].any(), "no voxel twice"
        found[tuple(voxels)] = values
    return found


def read_contours(path: Path, affine: NDArray[np.float64], shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """ROI numbers on a grid [X, Y, Z] whose slices were contoured: voxels whose centre is inside, by even and odd."""
    dataset = pydicom.dcmread(path)
    found = np.zeros(shape, np.uint8)
    for roi in dataset.ROIContourSequence:
        inside = np.zeros(shape, bool)
        for contour in roi.get("ContourSequence") or []:
            points = np.array(contour.ContourData, float).reshape(-1, 3)
            assert len(points) == contour.NumberOfContourPoints
            voxels = (np.c_[points, np.ones(len(points))] @ LPS @ np.linalg.inv(affine).T)[:, :3]
            index = int(np.rint(voxels[0, 2]))
            assert np.abs(voxels[:, 2] - index).max() < 1e-3, "contours are flat, in the plane of a slice"
            inside[:, :, index] ^= fill(voxels[:, :2], shape[:2])
        assert not found[inside].any()
        found[inside] = roi.ReferencedROINumber
    return found


def fill(ring: NDArray[np.float64], shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """The grid points [X, Y] inside a polygon, by the even-odd rule."""
    inside = np.zeros(shape, bool)
    x = np.arange(shape[0])
    for (x0, y0), (x1, y1) in zip(ring, np.roll(ring, -1, axis=0), strict=True):
        for y in range(shape[1]):
            if (y0 > y) != (y1 > y):
                inside[:, y] ^= x < x0 + (y - y0) * (x1 - x0) / (y1 - y0)
    return inside


def dice(first: NDArray[Any], second: NDArray[Any]) -> float:
    """Of two masks; 1 where both are empty."""
    both = int(first.sum()) + int(second.sum())
    return 2 * int((first & second).sum()) / both if both else 1.0
