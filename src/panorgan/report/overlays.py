"""Best, median and worst case per organ: one slice of the scan with the true and the predicted outline.

A picture is laid out in millimetres as a radiologist reads it: the patient's right on the left, anterior up.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.image import imsave
from numpy.typing import NDArray
from scipy import ndimage

from panorgan.anatomy import catalogue
from panorgan.data.case import Case
from panorgan.data.volume import Volume, read_volume, same_grid
from panorgan.errors import DataError
from panorgan.evaluation.inference import structure_mask
from panorgan.evaluation.metrics import dice
from panorgan.preparation.preprocess import Grid
from panorgan.workflows.run import Run
from panorgan.workflows.tables import Row

WINDOW_HU = (-160.0, 240.0)
"""The abdominal window, for CT."""
MR_PERCENTILES = (1.0, 99.0)  # MR has no absolute scale: nearly black to nearly white of the slice

_LONGEST_SIDE = 400  # pixels; about the size of one of three pictures on a wide screen
_TISSUE_HU = -500.0
_MARGIN_MM = 8.0

Mask = NDArray[np.bool_]
CaseKey = tuple[str, str]
"""Site and case id."""


@dataclass(frozen=True)
class Overlay:
    """One picture. `truth` and `prediction` are SVG paths in mm; `scan` is a data URI stretched over the whole.

    `ruler_mm` is the length of its scale bar, `note` a remark (an organ that was not found).
    """

    rank: str
    site: str
    case: str
    organ: str
    dice: float
    colour: str
    width_mm: float
    height_mm: float
    ruler_mm: int
    scan: str
    truth: str
    prediction: str
    note: str


@dataclass(frozen=True)
class _Choice:
    """A row of metrics.csv to draw, and why."""

    rank: str
    row: Row

    @property
    def key(self) -> CaseKey:
        return self.row["site"], self.row["case"]


def draw_overlays(run: Run, cases: Mapping[CaseKey, Case]) -> dict[str, list[Overlay]]:
    """Pictures per organ, best first. Every scan is read once and released before the next.

    Raises DataError when a scan, its labels or its prediction is missing, or differs from what was scored.
    """
    choices = [choice for organ in run.organs for choice in choose(run.scores, organ)]
    drawn: dict[tuple[str, str], Overlay] = {}
    for key in sorted({choice.key for choice in choices}):
        wanted = [choice for choice in choices if choice.key == key]
        for overlay in _draw_case(run, cases, key, wanted):
            drawn[overlay.organ, overlay.rank] = overlay
    found: dict[str, list[Overlay]] = {}
    for choice in choices:
        organ = choice.row["organ"]
        found.setdefault(organ, []).append(drawn[organ, choice.rank])
    return found


def choose(rows: Iterable[Row], organ: str) -> list[_Choice]:
    """Best, median and worst row of an organ by Dice; fewer when there are fewer cases."""
    ranked = sorted((r for r in rows if r["organ"] == organ), key=lambda r: (-r["dice"], r["site"], r["case"]))
    if not ranked:
        return []
    if len(ranked) == 1:
        return [_Choice("Only case", ranked[0])]
    median = [_Choice("Median", ranked[len(ranked) // 2])] if len(ranked) > 2 else []
    return [_Choice("Best", ranked[0]), *median, _Choice("Worst", ranked[-1])]


def _draw_case(run: Run, cases: Mapping[CaseKey, Case], key: CaseKey, wanted: Sequence[_Choice]) -> Iterator[Overlay]:
    site, case_id = key
    if key not in cases:
        raise DataError(
            "A scored case is no longer in its site's test split.", code="case-not-tested", where=f"{site}/{case_id}"
        )
    image = cases[key].read_image()
    truths = cases[key].read_masks(image)
    labels = _read_prediction(run.predictions_folder / site / f"{case_id}.nii.gz", image)
    grid = Grid.of(image)
    for choice in wanted:
        truth = truths.get(choice.row["organ"])
        if truth is None:
            raise DataError(
                "A scored structure is no longer annotated.", code="not-annotated", where=f"{site}/{case_id}"
            )
        predicted = structure_mask(labels, choice.row["organ"], run.vocabulary)
        if abs(dice(predicted, truth) - choice.row["dice"]) > 1e-3:
            raise DataError(
                "The files no longer give the score that was recorded.", code="score-differs", where=f"{site}/{case_id}"
            )
        yield _draw_slice(choice, grid, image, truth, predicted, run.is_ct)


def _read_prediction(path: Path, image: Volume) -> NDArray[np.uint8]:
    volume = read_volume(path)
    if not same_grid(volume, image):
        raise DataError("A prediction lies on another grid than its scan.", code="grid-mismatch", where=str(path))
    labels: NDArray[np.uint8] = np.rint(volume.voxels).astype(np.uint8)
    return labels


def _draw_slice(choice: _Choice, grid: Grid, image: Volume, truth: Mask, predicted: Mask, is_ct: bool) -> Overlay:
    scan, truth, predicted = (grid.turn_to_ras(a) for a in (image.voxels, truth, predicted))
    level, note = pick_slice(truth, predicted)
    scan, truth, predicted = (radiological(a[:, :, level]) for a in (scan, truth, predicted))
    mm_x, mm_y, _ = grid.ras_spacing
    window = WINDOW_HU
    if is_ct:
        rows, columns = _tissue_box(scan, truth | predicted, mm_x, mm_y)
        scan, truth, predicted = (a[rows, columns] for a in (scan, truth, predicted))
    else:
        low, high = np.percentile(scan, MR_PERCENTILES)
        window = (float(low), float(max(high, low + 1e-6)))
    height, width = scan.shape[0] * mm_y, scan.shape[1] * mm_x
    return Overlay(
        rank=choice.rank,
        site=choice.row["site"],
        case=choice.row["case"],
        organ=choice.row["organ"],
        dice=choice.row["dice"],
        colour=catalogue()[choice.row["organ"]].colour,
        width_mm=width,
        height_mm=height,
        ruler_mm=ruler_length(width),
        scan=encode_slice(scan.astype(np.float32), width, height, window),
        truth=outline(truth, mm_x, mm_y),
        prediction=outline(predicted, mm_x, mm_y),
        note=note,
    )


def ruler_length(width_mm: float) -> int:
    """The longest of a few round lengths that takes up to a third of the picture."""
    return next((length for length in (100, 50, 20, 10, 5) if length <= width_mm / 3), 1)


def pick_slice(truth: Mask, predicted: Mask) -> tuple[int, str]:
    """The axial slice with most of the truth, and a note if the truth is empty. Masks are RAS."""
    if truth.any():
        note = "" if predicted.any() else "nothing predicted"
        return int(truth.sum(axis=(0, 1)).argmax()), note
    if predicted.any():
        return int(predicted.sum(axis=(0, 1)).argmax()), "organ absent, yet predicted"
    return truth.shape[2] // 2, "organ absent, rightly nothing predicted"


def radiological(plane: NDArray[Any]) -> NDArray[Any]:
    """An RAS plane [right, anterior] as picture rows and columns: the patient's right on the left, anterior up."""
    return plane[::-1, ::-1].T


def outline(mask: Mask, mm_x: float, mm_y: float) -> str:
    """SVG path around a mask [rows, columns], in mm from the upper left corner; empty for an empty mask."""
    if not mask.any():
        return ""
    # A frame of zeros closes outlines at the border. Voxel (0, 0) has its centre half a voxel inside.
    framed = np.pad(mask.astype(np.float32), 1)
    x = (np.arange(framed.shape[1]) - 0.5) * mm_x
    y = (np.arange(framed.shape[0]) - 0.5) * mm_y
    contours = Figure().add_subplot().contour(x, y, framed, levels=[0.5])
    pieces = []
    for path in contours.get_paths():
        for polygon in path.to_polygons(closed_only=True):
            points = np.asarray(polygon)[:-1]  # the last point repeats the first
            steps = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
            pieces.append(f"M{steps}Z")
    return "".join(pieces)


def _tissue_box(scan: NDArray[Any], organ: Mask, mm_x: float, mm_y: float) -> tuple[slice, slice]:
    """Rows and columns that hold more than air, with a small margin."""
    filled = (scan > _TISSUE_HU) | organ
    # Noise in the air is not the patient.
    body = ndimage.binary_opening(filled, iterations=2) | organ
    if not body.any():
        return slice(None), slice(None)
    rows, columns = np.flatnonzero(body.any(axis=1)), np.flatnonzero(body.any(axis=0))

    def span(found: NDArray[np.intp], mm: float) -> slice:
        margin = round(_MARGIN_MM / mm)
        return slice(max(0, int(found[0]) - margin), int(found[-1]) + margin + 1)

    return span(rows, mm_y), span(columns, mm_x)


def encode_slice(
    scan: NDArray[np.float32],
    width_mm: float,
    height_mm: float,
    window: tuple[float, float],
    longest_side: int = _LONGEST_SIDE,
) -> str:
    """The windowed slice as a small grey JPEG with square pixels, as a data URI."""
    low, high = window
    grey = (np.clip(scan, low, high) - low) / (high - low)
    scale = longest_side / max(width_mm, height_mm)
    shape = (max(1, round(height_mm * scale)), max(1, round(width_mm * scale)))
    zoom = [wanted / had for wanted, had in zip(shape, grey.shape, strict=True)]
    # Shrinking needs a blur first, or noise aliases.
    grey = ndimage.gaussian_filter(grey, [max(0.0, 0.4 * (1 / z - 1)) for z in zoom])
    grey = np.clip(ndimage.zoom(grey, zoom, order=3, mode="nearest", grid_mode=True), 0, 1)
    file = io.BytesIO()
    imsave(file, grey, vmin=0, vmax=1, cmap="gray", format="jpg", pil_kwargs={"quality": 82})
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
