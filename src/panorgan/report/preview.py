"""A picture of a prediction: three planes of the scan with the organs over them, and a legend with their volumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from panorgan.anatomy import catalogue
from panorgan.data.volume import Volume
from panorgan.preparation.preprocess import Grid
from panorgan.report.overlays import MR_PERCENTILES, WINDOW_HU
from panorgan.workflows.prediction import Prediction

_OPACITY = 0.45
_PLANES = (("axial", 2), ("coronal", 1), ("sagittal", 0))
_INCHES, _DPI = (12.0, 4.8), 110
_LEGEND_COLUMNS = 4


def write_preview(prediction: Prediction, volume: Volume, path: Path, is_ct: bool) -> Path:
    """Write the picture as PNG. Each plane shows most of the organs, the patient's right on the left."""
    grid = Grid.of(volume)
    scan, labels = grid.turn_to_ras(volume.voxels), grid.turn_to_ras(prediction.labels)
    figure = Figure(figsize=_INCHES, dpi=_DPI, facecolor="white", layout="constrained")
    for axes, (name, axis) in zip(figure.subplots(1, 3), _PLANES, strict=True):
        level = fullest_slice(labels, axis)
        grey, map_ = (np.take(array, level, axis=axis) for array in (scan, labels))
        first, second = (mm for other, mm in enumerate(grid.ras_spacing) if other != axis)
        low, high = _window(grey, is_ct)
        axes.imshow(_upright(grey), cmap="gray", vmin=low, vmax=high, aspect=second / first)
        axes.imshow(_coloured(_upright(map_), prediction), aspect=second / first, interpolation="nearest")
        axes.set_title(f"{name}, slice {level + 1} of {labels.shape[axis]}", fontsize=9)
        axes.set_axis_off()
    if handles := _legend(prediction):
        figure.legend(handles=handles, loc="outside lower center", ncols=_LEGEND_COLUMNS, fontsize=8, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
    return path


def fullest_slice(labels: NDArray[np.uint8], axis: int) -> int:
    """The slice across an axis with most voxels of any organ; the central one where there is none."""
    others = tuple(other for other in range(3) if other != axis)
    filled = (labels > 0).sum(axis=others)
    return int(filled.argmax()) if filled.any() else labels.shape[axis] // 2


def _upright(plane: NDArray[Any]) -> NDArray[Any]:
    """An RAS plane as picture rows and columns: superior or anterior up, right (or anterior) on the left."""
    return plane[::-1, ::-1].T


def _window(grey: NDArray[Any], is_ct: bool) -> tuple[float, float]:
    if is_ct:
        return WINDOW_HU
    low, high = np.percentile(grey, MR_PERCENTILES)
    return float(low), float(max(high, low + 1e-6))


def _coloured(plane: NDArray[np.uint8], prediction: Prediction) -> NDArray[np.float64]:
    """Each organ in its colour, transparent elsewhere: [rows, columns, 4]."""
    colours = np.zeros((len(prediction.vocabulary) + 1, 4))
    for place, organ in enumerate(prediction.vocabulary, start=1):
        colours[place] = (*to_rgb(catalogue()[organ].colour), _OPACITY)
    return np.asarray(colours[plane])


def _legend(prediction: Prediction) -> list[Patch]:
    """The organs that were found, with their volumes; * where the scan cuts an organ off."""
    found = []
    for organ, numbers in prediction.organs.items():
        if numbers.voxels:
            mark = " *" if numbers.cut_off else ""
            words = f"{catalogue()[organ].title}: {numbers.volume_ml:.0f} ml{mark}"
            found.append(Patch(facecolor=catalogue()[organ].colour, label=words))
    if any(numbers.cut_off for numbers in prediction.organs.values()):
        found.append(Patch(facecolor="none", label="* cut off by the edge of the scan"))
    return found
