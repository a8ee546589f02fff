"""Slices as a radiologist reads them: which one, which way round, and outlines in millimetres."""

from __future__ import annotations

import nibabel as nib
import numpy as np
import pytest

from panorgan.cases.preprocess import Grid
from panorgan.cases.volume import Volume
from panorgan.report.overlays import choose, outline, pick_slice, radiological


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
