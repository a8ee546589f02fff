"""One slice of a case for a person to look at."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from panorgan.data.volume import Volume
from panorgan.data_doctor.findings import Thumbnail

_LARGEST = 160
_WINDOW_HU = (-160.0, 240.0)
_PLANES = ("sagittal", "coronal", "axial")
# Above this ratio of spacings, the other planes of a stack of slices are a few blurred lines.
_STACK = 2.5


def draw(image: Volume, labels: NDArray[np.uint8], names: tuple[str, ...], ct: bool) -> Thumbnail:
    """The slice with the largest annotated area (or the middle one) of a volume in RAS order [X, Y, Z]."""
    axis = _normal(image.spacing)
    others = tuple(a for a in range(3) if a != axis)
    areas = np.count_nonzero(labels, axis=others)
    place = int(areas.argmax()) if areas.any() else image.voxels.shape[axis] // 2
    # x grows to the right, y to the front, z to the head: pictures begin at the right, the front and the head.
    grey, drawn = (_turned(np.moveaxis(voxels, axis, 0)[place]) for voxels in (image.voxels, labels))
    step = math.ceil(max(grey.shape) / _LARGEST)
    window = _WINDOW_HU if ct else _percentiles(image.voxels)
    small = _mean_blocks(_windowed(grey, window), step)
    columns, rows = (image.spacing[a] * step for a in others)
    top, side = (min(step // 2, n - 1) for n in drawn.shape)
    picture = drawn[top::step, side::step][: small.shape[0], : small.shape[1]]
    return Thumbnail(small, np.ascontiguousarray(picture), names, _PLANES[axis], (rows, columns))


def _normal(spacing: tuple[float, float, float]) -> int:
    """Axial, unless the scan is a stack of slices along another axis."""
    coarse = int(np.argmax(spacing))
    return coarse if spacing[coarse] > _STACK * sorted(spacing)[1] else 2


def _turned(plane: NDArray[Any]) -> NDArray[Any]:
    return plane[::-1, ::-1].T


def _percentiles(voxels: NDArray[Any]) -> tuple[float, float]:
    some = voxels.ravel(order="K")[:: max(1, voxels.size // 500_000)]
    low, high = np.percentile(some, (1, 99))
    return float(low), float(high)


def _windowed(plane: NDArray[Any], window: tuple[float, float]) -> NDArray[np.float64]:
    low, high = window
    shown: NDArray[np.float64] = np.clip((plane.astype(np.float64) - low) / max(high - low, 1e-9), 0, 1) * 255
    return shown


def _mean_blocks(plane: NDArray[np.float64], step: int) -> NDArray[np.uint8]:
    """Every step × step pixels become one."""
    rows, columns = (max(1, n // step) for n in plane.shape)
    step_rows, step_columns = min(step, plane.shape[0]), min(step, plane.shape[1])
    cut = plane[: rows * step_rows, : columns * step_columns]
    blocks = cut.reshape(rows, step_rows, columns, step_columns).mean(axis=(1, 3))
    small: NDArray[np.uint8] = np.rint(blocks).astype(np.uint8)
    return small
