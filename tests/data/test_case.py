"""A case and its label map: from integers in a file to named masks."""

from __future__ import annotations

import numpy as np
import pytest
from refusing import refused

from panorgan.data.case import Case, LabelMap
from panorgan.data.volume import Volume
from panorgan.errors import DataError, PanorganError

IMAGE = Volume(np.zeros((2, 2, 2)), np.eye(4))
# 0 background, 1 liver, 2 liver tumour, 3 spleen (declared, not used), 4 an id of the kidney that never occurs
VALUES = np.array([[[0, 1], [1, 2]], [[2, 3], [0, 0]]])
IDS = {"liver": (1, 2), "liver_tumour": (2,), "kidney": (4,)}


@pytest.fixture
def label_map(write_scan):
    def make(values, affine=None, declared=(1, 2, 3, 4)) -> LabelMap:
        return LabelMap(write_scan("label.nii", values, affine), IDS, frozenset(declared))

    return make


def error_of(code: str, labels: LabelMap) -> PanorganError:
    with refused(code, DataError) as caught:
        dict(labels.read(IMAGE))
    assert caught.value.where == str(labels.path)
    assert caught.value.fix
    return caught.value


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint16, np.float32, np.float64])
def test_masks_are_inclusive_and_an_absent_organ_is_empty(label_map, dtype) -> None:
    masks = dict(label_map(VALUES.astype(dtype)).read(IMAGE))
    assert set(masks) == {"liver", "liver_tumour", "kidney"}
    np.testing.assert_array_equal(masks["liver"], [[[False, True], [True, True]], [[True, False], [False, False]]])
    np.testing.assert_array_equal(
        masks["liver_tumour"], [[[False, False], [False, True]], [[True, False], [False, False]]]
    )
    assert masks["kidney"].shape == (2, 2, 2)
    assert masks["kidney"].dtype == bool
    assert not masks["kidney"].any()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_nearly_whole_values_are_rounded_not_cut_off(label_map, dtype) -> None:
    values = VALUES.astype(dtype)
    values[0, 0, 1], values[0, 1, 1] = 0.999, 2.001
    masks = dict(label_map(values).read(IMAGE))
    assert masks["liver"].sum() == 4
    assert masks["liver_tumour"].sum() == 2


@pytest.mark.parametrize("value", [1.5, 0.02, np.nan, np.inf])
def test_values_that_are_no_labels_are_refused(label_map, value) -> None:
    values = VALUES.astype(np.float32)
    values[0, 0, 0] = value
    error_of("label-not-whole", label_map(values))


@pytest.mark.parametrize("value", [7, -1])
def test_undeclared_ids_are_named(label_map, value) -> None:
    values = VALUES.astype(np.int16)
    values[0, 0, 0] = value
    assert f"[{value}]" in error_of("stray-label", label_map(values)).what


def test_background_needs_no_declaration_but_unused_labels_do(label_map) -> None:
    assert "[3]" in error_of("stray-label", label_map(VALUES.astype(np.uint8), declared=(1, 2, 4))).what
    dict(label_map(VALUES.astype(np.uint8), declared=(1, 2, 3)).read(IMAGE))


@pytest.mark.parametrize(
    ("values", "affine"),
    [
        (np.zeros((2, 2, 3), dtype=np.uint8), np.eye(4)),
        (VALUES.astype(np.uint8), np.diag([2.0, 1, 1, 1])),
        (VALUES.astype(np.uint8), np.eye(4) + np.eye(4, k=3) * 0.5),
    ],
    ids=["shape", "spacing", "half a voxel beside"],
)
def test_labels_on_another_grid_are_refused(label_map, values, affine) -> None:
    error = error_of("grid-mismatch", label_map(values, affine))
    assert ("mm apart" in error.why) == (values.shape == VALUES.shape)


def test_labels_whose_axes_are_swapped_are_read_in_the_world(label_map) -> None:
    straight = dict(label_map(VALUES.astype(np.uint8)).read(IMAGE))["liver"]
    swapped = dict(label_map(VALUES.astype(np.uint8).swapaxes(0, 1), np.eye(4)[[1, 0, 2, 3]]).read(IMAGE))["liver"]
    np.testing.assert_array_equal(swapped, straight)
    assert (straight != straight.swapaxes(0, 1)).any(), "the mask is too symmetric to tell"


def test_a_case_reads_only_what_it_annotates(write_scan, label_map) -> None:
    image = write_scan("image.nii", np.ones((2, 2, 2), dtype=np.int16))
    case = Case("a", "a", "north", image, ("liver",), label_map(VALUES.astype(np.uint8)))
    volume = case.read_image()
    assert set(case.read_masks(volume)) == {"liver"}
    assert Case("a", "a", "north", image, ()).read_masks(volume) == {}


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_an_image_must_be_finite(write_scan, value) -> None:
    voxels = np.zeros((2, 2, 2), dtype=np.float32)
    voxels[1, 0, 1] = value
    path = write_scan("image.nii", voxels)
    with refused("not-finite") as caught:
        Case("a", "a", "north", path, ()).read_image()
    assert caught.value.where == str(path)


def test_masks_come_one_at_a_time(label_map, write_scan) -> None:
    """A hundred masks of a large scan would fill the memory."""
    each = label_map(VALUES.astype(np.uint8)).read(IMAGE)
    assert iter(each) is each
    assert next(each)[0] == next(iter(IDS))
