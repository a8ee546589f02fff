"""Contours (RTSTRUCT): filled to sub-voxel accuracy, the same masks as a DICOM-SEG, and what cannot be filled."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from dicom_files import (
    HIGH,
    HU,
    KIDNEY,
    LIVER,
    LOW,
    SAGITTAL,
    SPLEEN,
    cases_of,
    change,
    describe,
    error_of,
    masks_of,
    write_liver,
    write_segmentation,
    write_series,
)
from pydicom.uid import generate_uid
from rtstruct_files import item, outlines, write_contours

from panorgan.data.rtstruct import fill

ROUND = np.linspace(0, 2 * np.pi, 720, endpoint=False)
# A rotation whose rows and columns lie along no axis of the body.
OBLIQUE = (0.8, 0.36, -0.48, 0.0, 0.8, 0.6)


def ellipse(centre: tuple[float, float], axes: tuple[float, float], place: int) -> np.ndarray:
    points = np.column_stack([np.cos(ROUND), np.sin(ROUND)]) * axes + centre
    return np.column_stack([points, np.full(len(points), place)])


def blobs(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Pieces with holes, some of which touch at corners."""
    return np.random.default_rng(seed).random(shape) > 0.6


@pytest.mark.parametrize("orientation", [(1, 0, 0, 0, 1, 0), SAGITTAL, OBLIQUE])
def test_contours_give_the_masks_of_a_dicom_seg(tmp_path, orientation):
    kinds = {}
    for kind in ("seg", "contours"):
        series = write_series(tmp_path / kind / "p" / "ct", HU, orientation=orientation)
        path = tmp_path / kind / "p" / "labels.dcm"
        if kind == "seg":
            segments = [describe(1, "Liver", LIVER), describe(2, "Spleen", SPLEEN)]
            write_segmentation(path, series, [HIGH, LOW], segments)
        else:
            write_contours(path, series, {"Liver": outlines(HIGH), "Spleen": outlines(LOW)})
        (case,) = cases_of(tmp_path / kind).values()
        assert case.annotated == ("liver", "spleen")
        kinds[kind] = masks_of(case)
    np.testing.assert_array_equal(kinds["contours"]["liver"], HIGH)
    for organ, mask in kinds["seg"].items():
        np.testing.assert_array_equal(kinds["contours"][organ], mask)


def test_an_ellipse_has_its_area_and_centre():
    centre, axes = (30.3, 25.7), (20.4, 13.9)
    mask = fill([ellipse(centre, axes, 0)[:, :2]], (64, 50))
    area = np.pi * axes[0] * axes[1]
    assert mask.sum() == pytest.approx(area, rel=0.005)
    assert np.argwhere(mask).mean(axis=0) == pytest.approx(centre, abs=0.02)
    x, y = np.mgrid[:64, :50]
    exact = ((x - centre[0]) / axes[0]) ** 2 + ((y - centre[1]) / axes[1]) ** 2 < 1
    assert (mask != exact).sum() <= 2  # a corner of the polygon cuts the circle


def test_an_ellipsoid_of_an_oblique_series_lies_where_it_should(tmp_path):
    voxels = np.zeros((60, 50, 24), np.int16)
    series = write_series(tmp_path / "p" / "ct", voxels, orientation=OBLIQUE, spacing=(0.9, 0.9, 2.0))
    centre, radii_mm = np.array([28.3, 24.6, 11.4]), np.array([18.0, 15.0, 16.0])
    contours = []
    for place in range(24):
        left = 1 - ((place - centre[2]) * 2.0 / radii_mm[2]) ** 2
        if left > 0:
            contours.append(ellipse(tuple(centre[:2]), tuple(radii_mm[:2] / 0.9 * np.sqrt(left)), place))
    write_contours(tmp_path / "p" / "rs.dcm", series, {"Liver": contours})
    (case,) = cases_of(tmp_path).values()
    image = case.read_image()
    mask = case.read_masks(image)["liver"]
    voxel_ml = abs(np.linalg.det(image.affine[:3, :3]))
    assert mask.sum() * voxel_ml == pytest.approx(4 / 3 * np.pi * radii_mm.prod(), rel=0.01)
    found = np.argwhere(mask).mean(axis=0)
    # In the world, where the contours were written: RAS is LPS with two signs exchanged.
    first, step = (np.array(one.ImagePositionPatient, float) for one in series.slices[:2])
    axes = np.array(OBLIQUE).reshape(2, 3)
    wanted = first + centre[0] * 0.9 * axes[0] + centre[1] * 0.9 * axes[1] + centre[2] * (step - first)
    there = image.affine[:3, :3] @ found + image.affine[:3, 3]
    assert np.abs(there * [-1, -1, 1] - wanted).max() < 0.05


def test_inner_contours_are_holes_and_pieces_are_many():
    square = np.array([[2, 2], [12, 2], [12, 12], [2, 12]]) + 0.5
    hole = np.array([[5, 5], [8, 5], [8, 8], [5, 8]]) + 0.5
    island = np.array([[6, 6], [7, 6], [7, 7], [6, 7]]) + 0.5
    other = np.array([[14, 3], [16, 3], [16, 5], [14, 5]]) + 0.5
    mask = fill([square, hole, island, other], (20, 15))
    assert mask.sum() == 100 - 9 + 1 + 4
    assert not mask[6, 6]
    assert mask[7, 7]


def test_a_hole_reached_through_a_narrow_cut_is_a_hole():
    outer = [(0.5, 0.5), (9.5, 0.5), (9.5, 9.5), (0.5, 9.5), (0.5, 5.0)]
    inner = [(3.5, 5.0), (3.5, 6.5), (6.5, 6.5), (6.5, 3.5), (3.5, 3.5), (3.5, 5.0)]
    mask = fill([np.array([*outer, *inner, (0.5, 5.0)])], (12, 12))
    assert mask.sum() == 81 - 9


@pytest.mark.parametrize("seed", range(4))
def test_masks_come_back_exactly_whatever_their_pieces_and_holes(seed):
    mask = blobs((23, 17, 1), seed)
    polygons = [contour[:, :2] for contour in outlines(mask)]
    np.testing.assert_array_equal(fill(polygons, (23, 17)), mask[:, :, 0])
    backwards = [polygon[::-1] for polygon in polygons]
    np.testing.assert_array_equal(fill(backwards, (23, 17)), mask[:, :, 0])


def test_a_contour_that_leaves_the_picture_is_cut_there():
    beyond = np.array([[-5.5, -5.5], [3.5, -5.5], [3.5, 20.5], [-5.5, 20.5]])
    assert fill([beyond], (10, 12)).sum() == 4 * 12


def test_slices_without_a_contour_are_empty(tmp_path):
    series = write_series(tmp_path / "p" / "ct", HU)
    part = HIGH & (np.arange(6) == 4)
    write_contours(tmp_path / "p" / "rs.dcm", series, {"Liver": outlines(part)})
    np.testing.assert_array_equal(masks_of(next(iter(cases_of(tmp_path).values())))["liver"], part)


def test_regions_that_nobody_drew_are_unknown(tmp_path):
    """Templates list organs; an empty one is not known to be absent."""
    series = write_series(tmp_path / "p" / "ct", HU)
    write_contours(tmp_path / "p" / "rs.dcm", series, {"Liver": outlines(HIGH), "Spleen": [], "couch": []})
    assert cases_of(tmp_path)["p_ct"].annotated == ("liver",)


def test_names_are_organs_codes_or_for_the_user_to_say(tmp_path):
    series = write_series(tmp_path / "p" / "ct", HU)
    code = item(CodeValue=LIVER.value, CodingSchemeDesignator="SCT", CodeMeaning="Liver")
    codes = {"Structure 1": code, "spleen": item(CodeValue=KIDNEY.value, CodingSchemeDesignator="SCT", CodeMeaning="K")}
    path = tmp_path / "p" / "rs.dcm"
    write_contours(path, series, {"Structure 1": outlines(HIGH)}, codes=codes)
    assert cases_of(tmp_path)["p_ct"].annotated == ("liver",)
    write_contours(path, series, {"Leber": outlines(HIGH), "BODY": outlines(LOW)})
    error_of(tmp_path, "unknown-name")
    (case,) = cases_of(tmp_path, rename={"Leber": "liver"}, ignore=("BODY",)).values()
    np.testing.assert_array_equal(masks_of(case)["liver"], HIGH)
    write_contours(path, series, {"spleen": outlines(HIGH)}, codes=codes)
    assert "coded as kidney" in error_of(tmp_path, "unknown-name").what


def test_contours_and_segmentations_of_one_series_are_merged(tmp_path):
    series = write_series(tmp_path / "p" / "ct", HU)
    write_contours(tmp_path / "p" / "rs.dcm", series, {"Spleen": outlines(LOW)})
    write_liver(tmp_path / "p" / "seg.dcm", series)
    (case,) = cases_of(tmp_path).values()
    masks = masks_of(case)
    np.testing.assert_array_equal(masks["liver"], HIGH)
    np.testing.assert_array_equal(masks["spleen"], LOW)
    write_contours(tmp_path / "p" / "rs.dcm", series, {"Liver": outlines(LOW)})
    error_of(tmp_path, "several-segmentations")


def test_contours_without_their_series_or_in_another_space(tmp_path):
    series = write_series(tmp_path / "p" / "ct", HU)
    elsewhere = write_series(tmp_path.with_name("elsewhere") / "ct", HU)
    write_contours(tmp_path / "p" / "rs.dcm", elsewhere, {"Liver": outlines(HIGH)})
    error_of(tmp_path, "orphan-label")
    path = write_contours(tmp_path / "p" / "rs.dcm", series, {"Liver": outlines(HIGH)})
    for one in series.files:
        change(one, FrameOfReferenceUID="1.2.3.4")
    assert "another frame of reference" in error_of(tmp_path, "frame-of-reference").what
    shutil.move(path, tmp_path.with_name("away.dcm"))
    assert cases_of(tmp_path)["p_ct"].annotated == ()


@pytest.mark.parametrize("move", [(0, 0, 0.4), (0, 0, 40), (0, 0, -3)])
def test_contours_beside_the_slices(tmp_path, move):
    series = write_series(tmp_path / "p" / "ct", HU)
    write_contours(tmp_path / "p" / "rs.dcm", series, {"Liver": [one + np.array(move) for one in outlines(HIGH)]})
    error_of(tmp_path, "contours-off-slices")


def test_contours_in_another_plane(tmp_path):
    series = write_series(tmp_path / "p" / "ct", HU)
    upright = np.array([[3, 0, 0], [3, 4, 0], [3, 4, 5], [3, 0, 5.0]])
    write_contours(tmp_path / "p" / "rs.dcm", series, {"Liver": [upright]})
    error_of(tmp_path, "contours-off-slices")


def test_contours_on_every_second_slice_are_no_stripes(tmp_path):
    series = write_series(tmp_path / "p" / "ct", np.zeros((9, 9, 12), np.int16))
    square = np.array([[1, 1], [6, 1], [6, 6], [1, 6]]) + 0.5
    drawn = [np.column_stack([square, np.full(4, place)]) for place in range(1, 11, 2)]
    path = tmp_path / "p" / "rs.dcm"
    write_contours(path, series, {"Liver": drawn})
    assert "2 slices apart" in error_of(tmp_path, "contours-skip-slices").why
    write_contours(path, series, {"Liver": [*drawn, *(d + np.array([0, 0, 1]) for d in drawn[:3])]})
    assert masks_of(cases_of(tmp_path)["p_ct"])["liver"].any(axis=(0, 1)).sum() == 8


def test_only_marks_and_open_lines(tmp_path):
    series = write_series(tmp_path / "p" / "ct", HU)
    write_contours(tmp_path / "p" / "rs.dcm", series, {"Liver": outlines(HIGH)}, kind="OPEN_PLANAR")
    error_of(tmp_path, "contours-only")
    write_liver(tmp_path / "p" / "seg", series)
    assert cases_of(tmp_path)["p_ct"].annotated == ("liver",)


def test_a_damaged_file_of_contours(tmp_path):
    series = write_series(tmp_path / "p" / "ct", HU)
    path = write_contours(tmp_path / "p" / "rs.dcm", series, {"Liver": outlines(HIGH)})
    change(path, SeriesInstanceUID=generate_uid())
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    error_of(tmp_path, "file-unreadable")
