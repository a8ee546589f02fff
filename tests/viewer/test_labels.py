"""Masks as one label map, and volumes that equal those computed from the masks."""

from __future__ import annotations

from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from panorgan.data.case import LabelMap, MaskFiles
from panorgan.viewer.labels import Grid, colours, drawing_order, merge_masks, merged_labels, open_labels, title
from panorgan.viewer.voxels import open_voxels

AFFINE = np.array([[-2.0, 0, 0, 30], [0, -1.5, 0, 20], [0, 0, 3, -40], [0, 0, 0, 1]])
ML = 2 * 1.5 * 3 / 1000


def save(path: Path, voxels: np.ndarray) -> Path:
    nib.save(nib.Nifti1Image(voxels, AFFINE), path)
    return path


def drawn(volume) -> np.ndarray:
    return np.asarray(nib.Nifti1Image.from_bytes(b"".join(volume.pieces())).dataobj)


@pytest.fixture
def stored() -> np.ndarray:
    voxels = np.zeros((12, 10, 8), np.int16)
    voxels[2:6, 2:8, 1:6] = 10  # liver
    voxels[3:5, 3:5, 2:4] = 20  # its tumour
    voxels[8:10, 2:5, 3:7] = 300  # spleen
    voxels[0, 0, 0] = 77  # nothing that was declared
    return voxels


def test_names_are_drawn_in_order_and_a_tumour_lies_over_its_organ(tmp_path, stored):
    ids = {"liver_tumour": (20,), "spleen": (300,), "liver": (10, 20)}
    source = LabelMap(save(tmp_path / "l.nii.gz", stored), ids, frozenset({10, 20, 300}))
    volume = open_labels(source)
    assert volume.names[0] == "liver"
    found = drawn(volume)
    assert found.dtype == np.uint8
    for name, place in {"liver": stored == 10, "liver_tumour": stored == 20, "spleen": stored == 300}.items():
        assert np.array_equal(found == volume.names.index(name) + 1, place), name
    assert found[0, 0, 0] == 0


@pytest.mark.parametrize("dtype", ["i2", "i4", "f4", "f8"])
def test_volumes_in_ml_include_what_lies_inside(tmp_path, stored, dtype):
    source = LabelMap(
        save(tmp_path / "l.nii.gz", stored.astype(dtype)), {"liver": (10, 20), "spleen": (300,)}, frozenset()
    )
    assert open_labels(source).volumes_ml() == pytest.approx(
        {"liver": np.isin(stored, (10, 20)).sum() * ML, "spleen": (stored == 300).sum() * ML}
    )


def test_scaled_labels_are_what_the_scaling_makes_of_them(tmp_path, stored):
    image = nib.Nifti1Image(stored // 10, AFFINE)
    image.header.set_slope_inter(10, 0)
    nib.save(image, tmp_path / "l.nii.gz")
    volume = open_labels(LabelMap(tmp_path / "l.nii.gz", {"liver": (10,), "spleen": (300,)}, frozenset()))
    assert volume.volumes_ml()["spleen"] == pytest.approx((stored == 300).sum() * ML)


def test_a_negative_label_is_nothing(tmp_path, stored):
    stored[stored == 300] = -1
    volume = open_labels(LabelMap(save(tmp_path / "l.nii.gz", stored), {"liver": (10, 20)}, frozenset()))
    assert set(np.unique(drawn(volume))) == {0, 1}


def test_mask_files_are_merged_and_counted_where_they_overlap(tmp_path, stored):
    liver, spleen = np.isin(stored, (10, 20)), stored == 300
    both = liver.copy()
    both[5:9] |= spleen[5:9]
    paths = {
        "liver": save(tmp_path / "liver.nii.gz", both.astype(np.uint8)),
        "liver_tumour": save(tmp_path / "t.nii.gz", (stored == 20).astype(np.uint8)),
        "spleen": save(tmp_path / "spleen.nii.gz", spleen.astype(np.uint8)),
    }
    # The tumour comes first, and stays on top.
    source = MaskFiles({name: (paths[name],) for name in ("liver_tumour", "spleen", "liver")})
    assert open_labels(source) is None
    counted = merge_masks(source, Grid(stored.shape, AFFINE), tmp_path / "merged.nii")
    volume = merged_labels(source, open_voxels(tmp_path / "merged.nii"), counted)
    masks = {"liver": both, "liver_tumour": stored == 20, "spleen": spleen}
    assert volume.volumes_ml() == pytest.approx({name: mask.sum() * ML for name, mask in masks.items()})
    found, place = drawn(volume), {name: number for number, name in enumerate(volume.names, start=1)}
    assert np.array_equal(found == place["liver_tumour"], stored == 20)
    assert np.array_equal(found > 0, both | spleen)


def test_every_name_has_a_colour_of_its_own_and_organs_that_of_the_catalogue():
    found = colours(["liver", "left kidney", "odd thing", "other thing"])
    assert found["left kidney"] == colours(["kidney_left"])["kidney_left"]
    assert len(set(found.values())) == 4
    assert title("kidney_left") == "Left kidney"
    assert title("<b>odd") == "<b>odd"


def test_what_contains_others_is_drawn_first():
    source = LabelMap(Path("x"), {"b": (1,), "all": (1, 2, 3), "a": (2,)}, frozenset())
    assert drawing_order(source) == ("all", "a", "b")
    files = MaskFiles({name: (Path(name),) for name in ("liver_tumour", "liver")})
    assert drawing_order(files) == ("liver", "liver_tumour")
