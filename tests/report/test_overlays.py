"""Slices as a radiologist reads them: which one, which way round, and outlines in millimetres."""

from __future__ import annotations

import base64
import io

import nibabel as nib
import numpy as np
import pytest
from PIL import Image

from panorgan.data.volume import Volume
from panorgan.preparation.preprocess import Grid
from panorgan.report.overlays import _Choice, _draw_slice, choose, outline, pick_slice, radiological, ruler_length


@pytest.mark.parametrize("codes", ["RAS", "LPS", "LAS", "PIR"])
def test_patient_right_is_left_and_anterior_is_up(codes: str) -> None:
    ras = np.zeros((6, 5, 4), dtype=bool)
    ras[5, 4, 1] = True  # the far right, the most anterior
    own = nib.orientations.axcodes2ornt(tuple(codes))
    turn = nib.orientations.ornt_transform(nib.orientations.axcodes2ornt(("R", "A", "S")), own)
    voxels = nib.orientations.apply_orientation(ras, turn)
    affine = np.diag([0.0, 0.0, 0.0, 1.0])
    for axis, (target, sign) in enumerate(own):
        affine[int(target), axis] = sign
    assert "".join(nib.aff2axcodes(affine)) == codes
    plane = radiological(Grid.of(Volume(voxels, affine)).turn_to_ras(voxels)[:, :, 1])
    assert plane.shape == (5, 6)
    assert np.argwhere(plane).tolist() == [[0, 0]]


def test_outline_lies_in_millimetres() -> None:
    mask = np.zeros((2, 3), dtype=bool)
    mask[0, 1] = True  # centre at x = 1.5 × 2 mm, y = 0.5 × 5 mm
    path = outline(mask, 2.0, 5.0)
    points = {tuple(map(float, point.split(","))) for point in path.strip("MZ").split(" ")}
    assert points == {(2.0, 2.5), (4.0, 2.5), (3.0, 0.0), (3.0, 5.0)}
    assert path.startswith("M")
    assert path.endswith("Z")
    assert outline(np.zeros((2, 3), dtype=bool), 2.0, 5.0) == ""


def test_slice_shows_most_of_the_truth() -> None:
    truth, nothing = np.zeros((4, 4, 5), dtype=bool), np.zeros((4, 4, 5), dtype=bool)
    truth[0, 0, 1] = truth[0:2, 0:2, 3] = True
    assert pick_slice(truth, truth) == (3, "")
    assert pick_slice(truth, nothing) == (3, "nothing predicted")
    assert pick_slice(nothing, truth) == (3, "organ absent, yet predicted")
    assert pick_slice(nothing, nothing)[0] == 2


@pytest.mark.parametrize(
    ("dice", "expected"),
    [
        ([], []),
        ([0.5], [("Only case", 0.5)]),
        ([0.2, 0.9], [("Best", 0.9), ("Worst", 0.2)]),
        ([0.2, 0.9, 0.4, 0.6, 0.1], [("Best", 0.9), ("Median", 0.4), ("Worst", 0.1)]),
    ],
)
def test_best_median_worst(dice: list[float], expected: list[tuple[str, float]]) -> None:
    rows = [{"organ": "liver", "site": "a", "case": str(i), "dice": value} for i, value in enumerate(dice)]
    rows.append({"organ": "spleen", "site": "a", "case": "x", "dice": 1.0})
    assert [(choice.rank, choice.row["dice"]) for choice in choose(rows, "liver")] == expected


@pytest.mark.parametrize(("width_mm", "length"), [(400, 100), (299, 50), (60, 20), (35, 10), (16, 5), (5, 1)])
def test_the_ruler_fits_the_picture(width_mm: float, length: int) -> None:
    assert ruler_length(width_mm) == length


@pytest.mark.parametrize(("is_ct", "shades"), [(True, 1), (False, 200)])
def test_a_scan_without_hu_gets_its_own_window(is_ct: bool, shades: int) -> None:
    """MR values far above any HU window are one white field in it, and a full range of greys in their own."""
    voxels = np.tile(np.linspace(5000, 9000, 40, dtype=np.float32)[:, None, None], (1, 40, 3))
    volume = Volume(voxels, np.eye(4))
    mask = np.zeros(voxels.shape, dtype=bool)
    mask[10:20, 10:20, 1] = True
    choice = _Choice("Best", {"site": "s", "case": "c", "organ": "liver", "dice": 1.0})
    overlay = _draw_slice(choice, Grid.of(volume), volume, mask, mask, is_ct)
    picture = Image.open(io.BytesIO(base64.b64decode(overlay.scan.partition(",")[2])))
    grey = np.asarray(picture.convert("L"))
    assert len(np.unique(grey)) >= shades
    assert (grey.std() > 50) != is_ct
    assert (overlay.width_mm, overlay.ruler_mm) == (40.0, 10)
