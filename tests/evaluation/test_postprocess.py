"""Post-processing on small hand-made masks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import ndimage

from panorgan.anatomy.own_organs import OwnOrgan, declare_organs
from panorgan.errors import AnatomyError, ConfigError, DataError
from panorgan.evaluation.postprocess import (
    PRESETS,
    apply_preset,
    clean_label_map,
    drop_components_up_to,
    drop_small_components,
    fill_holes,
    inside,
    keep_largest,
)


def picture(*rows: str) -> np.ndarray:
    """A 2D mask from text: # is True."""
    return np.array([[character == "#" for character in row] for row in rows])


def boxes(*sides: tuple[slice, slice, slice], shape: tuple[int, int, int] = (12, 12, 30)) -> np.ndarray:
    mask = np.zeros(shape, dtype=bool)
    for side in sides:
        mask[side] = True
    return mask


def cuboid(depth: slice, row: slice, column: slice) -> tuple[slice, slice, slice]:
    return depth, row, column


# --- the small functions ---


def test_fill_holes_fills_closed_regions_only() -> None:
    mask = picture(
        "####..###",
        "#..#..#..",
        "####..###",
    )
    filled = picture(
        "####..###",
        "####..#..",
        "####..###",
    )
    np.testing.assert_array_equal(fill_holes(mask), filled)


def test_a_wall_of_corners_closes_a_hole() -> None:
    mask = picture(".#.", "#.#", ".#.")
    np.testing.assert_array_equal(fill_holes(mask), picture(".#.", "###", ".#."))


def test_in_3d_a_hole_that_is_open_along_the_third_axis_stays() -> None:
    tube = np.ones((3, 3, 3), dtype=bool)
    tube[:, 1, 1] = False
    np.testing.assert_array_equal(fill_holes(tube), tube)
    shell = np.ones((3, 3, 3), dtype=bool)
    shell[1, 1, 1] = False
    assert fill_holes(shell).all()


@settings(max_examples=60, deadline=None)
@given(hnp.arrays(bool, (4, 5, 4)))
def test_fill_holes_equals_filling_the_whole_image(mask) -> None:
    np.testing.assert_array_equal(fill_holes(mask), ndimage.binary_fill_holes(mask))


THREE_PIECES = picture(
    "#####..##..#",
    "#####......#",
    "...........#",
)  # 10, 2 and 3 pixels


def test_drop_small_components_compares_with_the_largest() -> None:
    np.testing.assert_array_equal(drop_small_components(THREE_PIECES, 0.2), THREE_PIECES)  # 2 is not below 2
    without_two = picture("#####......#", "#####......#", "...........#")
    np.testing.assert_array_equal(drop_small_components(THREE_PIECES, 0.25), without_two)
    largest = picture("#####.......", "#####.......", "............")
    np.testing.assert_array_equal(drop_small_components(THREE_PIECES, 0.31), largest)


def test_drop_components_up_to_includes_the_limit() -> None:
    np.testing.assert_array_equal(drop_components_up_to(THREE_PIECES, 1), THREE_PIECES)
    assert drop_components_up_to(THREE_PIECES, 2).sum() == 13
    assert drop_components_up_to(THREE_PIECES, 3).sum() == 10
    assert not drop_components_up_to(THREE_PIECES, 10).any()


@pytest.mark.parametrize(("k", "pixels"), [(1, 10), (2, 13), (3, 15), (4, 15)])
def test_keep_largest(k: int, pixels: int) -> None:
    kept = keep_largest(THREE_PIECES, k)
    assert kept.sum() == pixels
    assert not (kept & ~THREE_PIECES).any()


def test_of_equal_components_the_first_stays() -> None:
    np.testing.assert_array_equal(keep_largest(picture("##.##")), picture("##..."))


def test_pieces_that_meet_at_a_corner_are_one_component() -> None:
    diagonal = np.zeros((3, 3, 3), dtype=bool)
    diagonal[[0, 1, 2], [0, 1, 2], [0, 1, 2]] = True
    np.testing.assert_array_equal(keep_largest(diagonal), diagonal)


def test_inside() -> None:
    np.testing.assert_array_equal(inside(picture("###."), picture(".###")), picture(".##."))


@pytest.mark.parametrize(
    "clean",
    [
        fill_holes,
        keep_largest,
        lambda mask: drop_small_components(mask, 0.2),
        lambda mask: drop_components_up_to(mask, 50),
    ],
)
def test_an_empty_mask_stays_empty(clean) -> None:
    cleaned = clean(np.zeros((3, 4), dtype=bool))
    assert cleaned.shape == (3, 4)
    assert cleaned.dtype == bool
    assert not cleaned.any()


def test_senseless_numbers_are_refused() -> None:
    with pytest.raises(ConfigError) as count:
        keep_largest(THREE_PIECES, 0)
    with pytest.raises(ConfigError) as fraction:
        drop_small_components(THREE_PIECES, 20)
    assert (count.value.code, fraction.value.code) == ("bad-component-count", "bad-component-fraction")


# --- presets ---


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("exclusive", [False, True])
def test_presets_return_new_arrays_and_leave_the_given_ones(name: str, exclusive: bool) -> None:
    masks = {"liver": THREE_PIECES.copy(), "liver_tumour": THREE_PIECES.copy()}
    cleaned = apply_preset(name, masks, exclusive=exclusive)
    assert list(cleaned) == ["liver", "liver_tumour"]
    for organ in masks:
        np.testing.assert_array_equal(masks[organ], THREE_PIECES)
        assert not np.shares_memory(cleaned[organ], masks[organ])


@pytest.mark.parametrize(
    ("organ", "pixels"),
    [
        ("spleen", 10),
        ("kidney_left", 10),
        ("vertebra_l1", 10),
        ("kidney", 15),
        ("lung_left", 15),
        ("aorta", 15),
        ("colon", 15),
        ("liver_tumour", 15),
    ],
)
def test_pieces_leaves_alone_what_may_lie_in_pieces(organ: str, pixels: int) -> None:
    assert apply_preset("pieces", {organ: THREE_PIECES})[organ].sum() == pixels


def test_pieces_keeps_what_is_half_as_large() -> None:
    half = picture("######..###", "######..###")
    np.testing.assert_array_equal(apply_preset("pieces", {"liver": half})["liver"], half)


def test_own_organs_say_whether_they_hang_together() -> None:
    declare_organs({"in_one": OwnOrgan(one_piece=True), "in_many": OwnOrgan()})
    cleaned = apply_preset("pieces", {"in_one": THREE_PIECES, "in_many": THREE_PIECES})
    assert [mask.sum() for mask in cleaned.values()] == [10, 15]


ORGANS = ("liver", "liver_tumour", "aorta", "kidney_left")


@settings(max_examples=200, deadline=None)
@given(hnp.arrays(np.uint8, (6, 5, 3), elements=st.integers(0, len(ORGANS)), fill=st.just(0)))
def test_a_label_map_is_cleaned_as_its_masks_are(labels) -> None:
    """Of a liver with a tumour both count: a rim beyond the tumour stays."""
    given_labels = labels.copy()
    cleaned = clean_label_map("pieces", labels, ORGANS, ORGANS)
    masks = apply_preset("pieces", {o: labels == i for i, o in enumerate(ORGANS, start=1)}, exclusive=True)
    for place, organ in enumerate(ORGANS, start=1):
        np.testing.assert_array_equal(cleaned == place, masks[organ])
    np.testing.assert_array_equal(labels, given_labels)


def test_none_changes_nothing() -> None:
    np.testing.assert_array_equal(apply_preset("none", {"spleen": THREE_PIECES})["spleen"], THREE_PIECES)


def test_ufps_fills_before_it_compares() -> None:
    # The ring of 8 becomes 9 with its hole filled; 20 % of it is 1.8, so one pixel goes and two stay.
    mask = picture("###.#.##", "#.#.....", "###.....")
    expected = picture("###...##", "###.....", "###.....")
    np.testing.assert_array_equal(apply_preset("ufps", {"liver": mask})["liver"], expected)


@pytest.mark.parametrize(
    ("organ", "pixels"),
    [
        ("liver", 10),
        ("kidney_left", 10),
        ("kidney", 13),
        ("lung", 13),
        ("adrenal_gland", 13),
        ("hippocampus", 10),
    ],
)
def test_flkd_keeps_one_component_or_two_of_a_pair(organ: str, pixels: int) -> None:
    assert apply_preset("flkd", {organ: THREE_PIECES})[organ].sum() == pixels


def test_flkd_leaves_vessels_and_cysts_in_their_many_pieces() -> None:
    cleaned = apply_preset("flkd", {"hepatic_vessel": THREE_PIECES, "kidney_cyst": THREE_PIECES})
    np.testing.assert_array_equal(cleaned["hepatic_vessel"], THREE_PIECES)
    np.testing.assert_array_equal(cleaned["kidney_cyst"], THREE_PIECES)


LIVER = cuboid(slice(0, 12), slice(0, 12), slice(0, 10))
STRAY_LIVER = cuboid(slice(0, 5), slice(0, 5), slice(20, 25))
LARGE_TUMOUR = cuboid(slice(1, 5), slice(1, 5), slice(6, 12))  # 96 voxels, 64 of them in the liver
SMALL_TUMOUR = cuboid(slice(8, 10), slice(6, 11), slice(0, 5))  # 50 voxels in the liver
STRAY_TUMOUR = cuboid(slice(0, 4), slice(0, 4), slice(20, 24))  # 64 voxels, in the stray part of the liver


def test_flkd_keeps_tumours_in_the_kept_part_of_their_organ() -> None:
    masks = {
        # The tumour comes first: the order of the masks must not matter.
        "liver_tumour": boxes(LARGE_TUMOUR, SMALL_TUMOUR, STRAY_TUMOUR),
        "liver": boxes(LIVER, STRAY_LIVER),
    }
    cleaned = apply_preset("flkd", masks)
    np.testing.assert_array_equal(cleaned["liver"], boxes(LIVER))
    np.testing.assert_array_equal(cleaned["liver_tumour"], boxes(cuboid(slice(1, 5), slice(1, 5), slice(6, 10))))


def test_flkd_counts_tumour_voxels_after_the_cut() -> None:
    # 60 voxels, but only 40 of them in the liver.
    tumour = boxes(cuboid(slice(0, 2), slice(0, 5), slice(6, 12)))
    cleaned = apply_preset("flkd", {"liver": boxes(LIVER), "liver_tumour": tumour})
    assert not cleaned["liver_tumour"].any()


def test_flkd_without_the_organ_only_drops_small_tumours() -> None:
    cleaned = apply_preset("flkd", {"liver_tumour": boxes(SMALL_TUMOUR, STRAY_TUMOUR)})
    np.testing.assert_array_equal(cleaned["liver_tumour"], boxes(STRAY_TUMOUR))


LEFT = cuboid(slice(0, 6), slice(0, 6), slice(0, 8))
RIGHT = cuboid(slice(0, 6), slice(0, 6), slice(20, 28))
IN_LEFT = cuboid(slice(0, 4), slice(0, 4), slice(0, 4))
IN_RIGHT = cuboid(slice(0, 4), slice(0, 4), slice(20, 24))
BETWEEN = cuboid(slice(0, 4), slice(0, 4), slice(12, 16))


def test_a_tumour_may_lie_in_either_of_two_kidneys_annotated_apart() -> None:
    tumour = boxes(IN_LEFT, IN_RIGHT, BETWEEN)
    masks = {"kidney_left": boxes(LEFT), "kidney_right": boxes(RIGHT), "kidney_tumour": tumour}
    cleaned = apply_preset("flkd", masks)
    np.testing.assert_array_equal(cleaned["kidney_tumour"], boxes(IN_LEFT, IN_RIGHT))


def test_with_one_kidney_only_a_tumour_of_the_other_is_not_lost() -> None:
    cleaned = apply_preset("flkd", {"kidney_left": boxes(LEFT), "kidney_tumour": boxes(IN_LEFT, IN_RIGHT)})
    np.testing.assert_array_equal(cleaned["kidney_tumour"], boxes(IN_LEFT, IN_RIGHT))


# --- one organ per voxel ---


def test_exclusive_masks_give_the_same_tumours_and_organs_without_them() -> None:
    whole, tumour = boxes(LIVER, STRAY_LIVER), boxes(IN_LEFT, SMALL_TUMOUR, BETWEEN)
    masks = {"liver": whole & ~tumour, "liver_tumour": tumour}
    cleaned = apply_preset("flkd", masks, exclusive=True)
    np.testing.assert_array_equal(cleaned["liver_tumour"], boxes(IN_LEFT))
    # The small tumour that was dropped is liver again.
    np.testing.assert_array_equal(cleaned["liver"], boxes(LIVER) & ~boxes(IN_LEFT))


def test_exclusive_tumour_belongs_to_the_kidney_it_touches() -> None:
    # The tumour has more voxels than the left kidney; joined to the wrong one it would displace it.
    tumour = boxes(cuboid(slice(0, 6), slice(0, 12), slice(14, 20)))
    left, right = boxes(IN_LEFT), boxes(RIGHT)
    cleaned = apply_preset(
        "flkd", {"kidney_left": left, "kidney_right": right, "kidney_tumour": tumour}, exclusive=True
    )
    np.testing.assert_array_equal(cleaned["kidney_left"], left)
    np.testing.assert_array_equal(cleaned["kidney_right"], right)
    np.testing.assert_array_equal(cleaned["kidney_tumour"], tumour)


def test_exclusive_organ_is_not_cut_in_two_by_its_vessel() -> None:
    vessel = boxes(cuboid(slice(0, 12), slice(0, 12), slice(4, 6)))
    liver = boxes(LIVER) & ~vessel
    masks = {"liver": liver, "hepatic_vessel": vessel}
    np.testing.assert_array_equal(apply_preset("flkd", masks, exclusive=True)["liver"], liver)
    assert apply_preset("flkd", masks)["liver"].sum() == 12 * 12 * 4


# --- errors ---


def test_unknown_preset_names_the_near_one() -> None:
    with pytest.raises(ConfigError) as near:
        apply_preset("upfs", {"liver": THREE_PIECES})
    with pytest.raises(ConfigError) as far:
        apply_preset("xyz", {"liver": THREE_PIECES})
    assert near.value.code == far.value.code == "unknown-preset"
    assert "'ufps'" in near.value.fix
    assert all(name in far.value.fix for name in PRESETS)


def test_unusable_masks_are_refused() -> None:
    with pytest.raises(AnatomyError, match="livr"):
        apply_preset("flkd", {"livr": THREE_PIECES})
    with pytest.raises(DataError) as alias:
        apply_preset("flkd", {"liver tumor": THREE_PIECES})
    with pytest.raises(DataError) as dtype:
        apply_preset("flkd", {"liver": THREE_PIECES.astype(np.uint8)})
    with pytest.raises(DataError) as shapes:
        apply_preset("flkd", {"liver": THREE_PIECES, "spleen": THREE_PIECES[:2]})
    codes = [error.value.code for error in (alias, dtype, shapes)]
    assert codes == ["organ-alias", "mask-not-bool", "shapes-differ"]
    assert "'liver_tumour'" in alias.value.fix
