"""The doctor's pieces by themselves: tables, intensities, thumbnails, values and hashes."""

from __future__ import annotations

import numpy as np
import pytest

from panorgan.anatomy import catalogue
from panorgan.data.volume import Volume
from panorgan.data_doctor import intensity, label_placement, plausible, thumbnail
from panorgan.data_doctor.findings import StructureFacts
from panorgan.data_doctor.label_placement import check_placement
from panorgan.data_doctor.labels import content_hash, whole_numbers
from panorgan.data_doctor.masks import Mask, check_one, check_overlaps, describe
from panorgan.data_doctor.organ_positions import Body, check_order, check_sides
from panorgan.data_doctor.slices import check_slices


def test_the_tables_speak_of_organs_of_the_catalogue():
    named = {
        *plausible._HU,
        *plausible._VOLUME_ML,
        *plausible.ONE_PIECE,
        *plausible.AIRY,
        *plausible.STEADY,
    }
    named |= {
        *plausible.TYPICAL_SIDE,
        *(n for pair in (*plausible.ABOVE, *plausible.IN_FRONT, *plausible.LEFT_OF) for n in pair),
    }
    assert named <= set(catalogue())
    assert all(low < high for (low, high), _ in plausible._HU.values())
    assert all(low < high for low, high in plausible._VOLUME_ML.values())


def test_pairs_are_left_and_right():
    assert ("kidney_left", "kidney_right") in plausible.pairs()
    assert ("lung_left", "lung_right") in plausible.pairs()
    assert all(
        catalogue()[left].side == "left" and catalogue()[right].side == "right" for left, right in plausible.pairs()
    )


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("liver", "spleen", True),
        ("kidney_left", "kidney_right", True),
        ("liver", "liver_tumour", False),
        ("kidney_left", "kidney", False),
        ("kidney_left", "kidney_tumour", False),
        ("liver_tumour", "hepatic_vessel", False),
        ("kidney_tumour", "liver", True),
    ],
)
def test_which_organs_exclude_each_other(first, second, expected):
    assert plausible.exclusive(first, second) is expected
    assert plausible.exclusive(second, first) is expected


def test_parts_are_made_of_the_same_and_tumours_are_not():
    assert plausible.hu_range("kidney_left") == plausible.hu_range("kidney") != None  # noqa: E711
    assert plausible.hu_range("liver_tumour") is None
    assert plausible.volume_range_ml("lung_upper_lobe_left") == (0.0, 7000)
    assert plausible.may_hold_air("lung_tumour")
    assert not plausible.may_hold_air("liver")


def scan(air: float, padding: float | None = None, seed: int = 0) -> np.ndarray:
    """Air around a body of fat and soft tissue, in HU with noise; a ring of padding if wanted."""
    rng = np.random.default_rng(seed)
    voxels = np.full((40, 40, 10), float(air))
    voxels[8:32, 8:32] = -100
    voxels[11:29, 11:29] = 50
    voxels[18:21, 18:21] = 400
    voxels += rng.normal(0, 12, voxels.shape)
    if padding is not None:
        voxels[:4], voxels[-4:] = padding, padding
    return voxels.round()


@pytest.mark.parametrize("padding", [None, -1024, -2000, -3024])
def test_ordinary_ct_is_in_order(padding):
    values = intensity.measure(scan(-1000, padding).astype(np.int16))
    assert intensity.guess_modality(values) == "CT"
    assert intensity.check_ct(values) is None


def test_a_crop_without_air_is_in_order():
    values = intensity.measure(scan(-1000)[9:31, 9:31])
    assert intensity.guess_modality(values) == ""
    assert intensity.check_ct(values) is None


def test_a_thin_limb_in_a_wide_padded_view_is_in_order():
    voxels = np.random.default_rng(0).normal(-1000, 12, (60, 60, 20)).round()
    voxels[:10] = -2048
    voxels[28:33, 28:34] = 40  # less than one voxel in a hundred
    assert intensity.check_ct(intensity.measure(voxels)) is None


def test_padding_does_not_hide_a_wrong_slope():
    assert intensity.check_ct(intensity.measure(scan(-1000, -1500) * 2)).code == "hu-scale"


def test_mr_is_recognised():
    values = intensity.measure(np.abs(np.random.default_rng(0).normal(200, 150, (20, 20, 20))))
    assert intensity.guess_modality(values) == "MR"
    assert intensity.check_mr(values) is None


def test_thumbnails_are_turned_as_radiologists_look():
    """One bright voxel at the patient's right, front and head must be at the picture's left and top."""
    voxels = np.full((30, 20, 10), -1000.0)
    voxels[28, 18, 7] = 1000
    labels = np.zeros(voxels.shape, np.uint8)
    labels[28, 17:19, 7] = 1
    picture = thumbnail.draw(Volume(voxels, np.diag([1.0, 2.0, 3.0, 1.0])), labels, ("liver",), ct=True)
    assert picture.plane == "axial"
    assert picture.grey.shape == picture.labels.shape == (20, 30)
    assert picture.pixel_mm == (2.0, 1.0)
    assert np.argwhere(picture.grey).tolist() == [[1, 1]]
    assert picture.grey[1, 1] == 255
    assert np.argwhere(picture.labels).tolist() == [[1, 1], [2, 1]]


def test_a_sagittal_stack_is_shown_in_its_own_plane():
    voxels = np.zeros((5, 40, 50))
    voxels[2, 35, 48] = 9
    picture = thumbnail.draw(
        Volume(voxels, np.diag([8.0, 1.0, 1.0, 1.0])), np.zeros(voxels.shape, np.uint8), (), ct=False
    )
    assert picture.plane == "sagittal"
    assert picture.grey.shape == (50, 40)
    assert np.argwhere(picture.grey).tolist() == [[1, 4]]  # head on top, front at the left


def test_large_slices_are_made_small_by_means():
    voxels = np.zeros((400, 200, 3))
    voxels[::2] = 90
    picture = thumbnail.draw(Volume(voxels, np.eye(4)), np.ones(voxels.shape, np.uint8), ("liver",), ct=True)
    assert picture.grey.shape == picture.labels.shape == (66, 133)
    assert picture.pixel_mm == (3.0, 3.0)
    # Blocks of three columns hold one or two of value 90, a mean of 30 or 60; the window is −160 … 240.
    assert set(np.unique(picture.grey)) == {121, 140}  # 255 · 190 / 400 and 255 · 220 / 400


@pytest.mark.parametrize(
    ("values", "code", "says"),
    [
        ([0.0, 1.0, 2.0], None, ""),
        ([0.0, 0.999, 2.0], "label-nearly-whole", "0.001"),
        ([0.0, 0.5, 1.0], "label-not-whole", "0.5"),
        ([0.0, np.nan], "label-not-whole", "1 voxels"),
    ],
)
def test_how_far_labels_are_from_whole_numbers(values, code, says):
    whole, problem = whole_numbers(np.array(values).reshape(-1, 1, 1), "")
    assert (problem.code if problem else None) == code
    if problem:
        assert says in problem.why
    if whole is not None:
        assert whole.reshape(-1).tolist() == np.rint(values).tolist()


def test_the_hash_is_of_values_and_shape():
    voxels = np.arange(24).reshape(2, 3, 4)
    assert content_hash(voxels) == content_hash(voxels.astype(np.float32)) == content_hash(voxels.astype(np.int16))
    assert content_hash(voxels) != content_hash(voxels.reshape(3, 2, 4))
    assert content_hash(np.zeros((1, 1, 1))) == content_hash(np.full((1, 1, 1), -0.0))
    changed = voxels.copy()
    changed[1, 2, 3] += 1
    assert content_hash(voxels) != content_hash(changed)


def test_overlaps_are_counted_between_boxes():
    """Two blocks that share 2 × 5 × 5 voxels; a tumour inside the liver is no overlap."""

    def block(start: int, stop: int) -> Mask:
        whole = np.zeros((20, 10, 10), dtype=bool)
        whole[start:stop, 2:7, 2:7] = True
        return Mask.cut(whole)

    masks = {"liver": block(0, 8), "spleen": block(6, 12), "liver_tumour": block(1, 3), "pancreas": block(14, 16)}
    ((structure, problem),) = check_overlaps(masks)
    assert structure == "liver"
    assert "50 voxels" in problem.why
    assert "33%" in problem.why


def test_a_mask_that_touches_every_face():
    """A shell around the scan: small, but no organ looks like that."""
    shell = np.ones((10, 10, 10), dtype=bool)
    shell[1:-1, 1:-1, 1:-1] = False
    image = Volume(np.full(shell.shape, 50.0), np.diag([5.0, 5.0, 5.0, 1.0]))
    mask = Mask.cut(shell)
    facts, _, sizes = describe("pancreas", mask, image)
    assert (facts.voxels, facts.pieces, sizes.tolist()) == (488, 1, [488])
    assert facts.volume_ml == pytest.approx(488 * 0.125)
    (problem,) = check_one("pancreas", mask, image, facts, ct=True)
    assert problem.code == "huge-mask"
    assert "6 of its 6 faces" in problem.why


def at(**places: float) -> dict[str, StructureFacts]:
    """Organs at these millimetres to the patient's right."""
    return {name: StructureFacts(name, 9, 9.0, (x, 0.0, 0.0), 1, 1.0, 50.0) for name, x in places.items()}


@pytest.mark.parametrize(
    ("organs", "first", "why"),
    [
        (at(liver=60, spleen=-90, kidney_left=-60, kidney_right=60), None, ""),
        (at(liver=-60, spleen=90, kidney_left=60, kidney_right=-60), "kidney_left", "everything is mirrored"),
        (at(liver=60, spleen=-90, kidney_left=60, kidney_right=-60), "kidney_left", "labels are swapped"),
        (at(liver=60, spleen=-90, kidney_left=60), "kidney_left", "labels are swapped"),
        (at(liver=-60), "liver", "or the header's"),
        (at(liver=-60, kidney_left=-60, kidney_right=60), "liver", "the header is right"),
        (at(stomach=20, gallbladder=-20), None, ""),  # near the middle is ordinary
    ],
)
def test_who_is_to_blame_for_a_wrong_side(organs, first, why):
    found = check_sides(organs, Body(middle_mm=0.0, width_mm=350.0), {})
    assert (found[0] if found else None) == first
    if found:
        assert why in found[1].why


def test_a_crop_says_nothing_about_sides():
    assert check_sides(at(liver=-60, spleen=90), None, {}) is None


def test_one_odd_vena_cava_is_a_variant_and_alone_it_is_a_mirror():
    vessels = at(aorta=20, inferior_vena_cava=-20)
    assert check_sides(vessels, None, {})[0] == "aorta"
    assert check_sides(at(aorta=-20, inferior_vena_cava=20), None, {}) is None
    kidneys = at(kidney_left=-60, kidney_right=60)
    assert check_sides(vessels | kidneys, None, {}) is None


def lying(**places: float) -> dict[str, StructureFacts]:
    """Organs at these millimetres to the front."""
    return {name: StructureFacts(name, 9, 9.0, (0.0, y, 0.0), 1, 1.0, 50.0) for name, y in places.items()}


@pytest.mark.parametrize(
    ("organs", "code", "structure"),
    [
        (lying(liver=20, stomach=30, kidney_left=-40, kidney_right=-40), None, ""),
        (lying(liver=20, stomach=30, kidney_right=80), "odd-place", "kidney"),  # a transplant in the pelvis
        (lying(liver=20, stomach=30, kidney_left=-40, kidney_right=80), None, ""),
        (lying(liver=-20, kidney_left=40, kidney_right=40), "wrong-order", "liver"),  # both native kidneys
    ],
)
def test_one_organ_out_of_place_turns_no_body(organs, code, structure):
    found = list(check_order(organs))
    assert [(problem.code, name) for name, problem in found] == ([(code, structure)] if code else [])


def test_two_pieces_of_a_kidney_mask_are_the_native_pair():
    pair = StructureFacts("kidney", 9, 9.0, (0.0, 40.0, 0.0), 2, 0.5, 50.0)
    ((_, problem),) = check_order(lying(liver=-20) | {"kidney": pair})
    assert problem.code == "wrong-order"


@pytest.mark.parametrize(("every", "value", "code"), [(100, 40000, None), (30, 40000, "hu-overflow"), (30, 3071, None)])
def test_a_little_metal_is_no_overflow(every, value, code):
    """A hip of metal in one voxel of a hundred, which some scanners store without an end."""
    voxels = scan(-1000)
    voxels.flat[::every] = value
    found = intensity.check_ct(intensity.measure(voxels))
    assert (found.code if found else None) == code


def test_a_label_beside_its_organ_is_told_where_it_belongs():
    """A bright cube in darkness, its label four voxels too far to the right; without noise the fit there is perfect."""
    image = np.zeros((30, 30, 30))
    image[10:18, 10:18, 10:18] = 100
    labels = np.zeros(image.shape, np.uint8)
    labels[14:22, 10:18, 10:18] = 1
    found = check_placement(image, labels, ct=False)
    assert found.code == "label-misplaced"
    assert "4 voxels farther towards the left" in found.what
    assert check_placement(image, (image > 0).astype(np.uint8), ct=False) is None
    labels[:] = 0
    labels[14:16, 14:16, 14:16] = 1
    assert check_placement(image, labels, ct=False) is None, "too few voxels to judge by"


def test_spread_by_hand():
    """Classes (0, 0, 10) and (5, 9, 9): 10 and 4 from their medians 0 and 9; from the median 9 of all: 9+9+1+4 = 23."""
    values, classes = np.array([0.0, 0.0, 10.0, 5.0, 9.0, 9.0]), np.array([0, 0, 0, 1, 1, 1], np.uint8)
    assert label_placement._spread(values, classes) == pytest.approx(14 / 23)


def test_slices_in_a_row():
    voxels = np.random.default_rng(0).normal(size=(6, 7, 8))
    assert check_slices(voxels, None, axis=1) is None
    voxels[:, 3] = voxels[:, 2]
    assert check_slices(voxels, None, axis=1) is None, "two may be chance"
    voxels[:, 4] = voxels[:, 2]
    assert "3 slices" in check_slices(voxels, None, axis=1).what
    assert "from slice 3 of 7" in check_slices(voxels, None, axis=1).why
    assert check_slices(voxels, None, axis=0) is None


def test_blank_slices_matter_where_something_is_labelled():
    voxels = np.random.default_rng(0).normal(size=(6, 6, 8))
    voxels[:, :, 5:] = -1024  # padding at the end, as many scans have
    labels = np.zeros(voxels.shape, np.uint8)
    labels[2:4, 2:4, 1:5] = 1
    assert check_slices(voxels, labels, axis=2) is None
    labels[2, 2, 5] = 1
    assert check_slices(voxels, labels, axis=2).what.startswith("1 slices show nothing")
