"""What predict doubts about a scan, by code."""

from __future__ import annotations

import re
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from panorgan.data.volume import Volume
from panorgan.data_doctor.label_like import looks_like_labels
from panorgan.preparation.plan import Plan
from panorgan.workflows.input_doubts import DOUBTS, doubts_about, nothing_found

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data"
CT, MR = Plan(intensity="window"), Plan(intensity="zscore")
AFFINE = np.diag([2.0, 2.0, 5.0, 1.0])


def ct_voxels() -> np.ndarray:
    """A body of soft tissue in air, with noise."""
    rng = np.random.default_rng(0)
    voxels = rng.normal(-1000, 15, (40, 40, 12))
    voxels[8:32, 8:32] = rng.normal(-100, 15, (24, 24, 12))
    voxels[12:28, 12:28] = rng.normal(50, 20, (16, 16, 12))
    return np.rint(voxels)


def mr_voxels() -> np.ndarray:
    return np.rint(np.abs(np.random.default_rng(0).normal(0, 900, (40, 40, 12))))


def label_map() -> np.ndarray:
    labels = np.zeros((40, 40, 12), dtype=np.uint8)
    labels[5:20, 5:30, 2:9], labels[25:35, 20:30, 3:6] = 1, 4
    return labels


def codes(voxels: np.ndarray, plan: Plan, sliced: int | None = None, modality: str = "") -> list[str]:
    return [doubt.code for doubt in doubts_about(Volume(voxels, AFFINE), plan, sliced, modality)]


@pytest.mark.parametrize(
    ("voxels", "plan", "modality", "expected"),
    [
        (ct_voxels(), CT, "", []),
        (ct_voxels(), CT, "CT", []),
        (mr_voxels(), MR, "", []),
        (mr_voxels(), MR, "MR", []),
        (mr_voxels() * 5, CT, "", ["modality-mismatch"]),
        (ct_voxels(), CT, "MR", ["modality-mismatch"]),
        (ct_voxels(), MR, "", ["modality-mismatch"]),
        (mr_voxels(), MR, "CT", ["modality-mismatch"]),
        (ct_voxels() + 1024, CT, "", ["hu-offset"]),
        (ct_voxels() * 2, CT, "", ["hu-scale"]),
        (np.clip(ct_voxels(), -160, 80), CT, "", ["hu-clipped"]),
        (np.interp(ct_voxels(), (-160, 240), (0, 255)), CT, "", ["hu-lost"]),
        (label_map(), CT, "", ["looks-like-labels"]),
        (label_map(), MR, "", ["looks-like-labels"]),
        (np.full((9, 9, 9), 7.0), MR, "", ["constant-image"]),
    ],
    ids=str,
)
def test_a_scan_is_held_against_what_the_model_was_trained_on(voxels, plan, modality, expected) -> None:
    assert codes(voxels, plan, modality=modality) == expected
    assert set(expected) <= DOUBTS.keys()


def test_one_slice_is_doubted_unless_the_model_sees_such_slices() -> None:
    axial, sagittal = ct_voxels()[:, :, 5:6], ct_voxels()[20:21]
    assert codes(axial, CT) == ["one-slice"]
    assert codes(axial, CT, sliced=2) == []
    assert codes(sagittal, CT, sliced=2) == ["one-slice"]
    # The third axis of this array runs from left to right: it is the first of RAS.
    turned = Volume(np.moveaxis(sagittal, 0, 2), np.array([[0, 0, 2.0, 0], [2, 0, 0, 0], [0, 5, 0, 0], [0, 0, 0, 1]]))
    assert [doubt.code for doubt in doubts_about(turned, CT, 0)] == []
    assert [doubt.code for doubt in doubts_about(turned, CT, 2)] == ["one-slice"]


def test_an_8_bit_picture_is_no_label_map() -> None:
    assert not looks_like_labels(np.clip(mr_voxels() / 10, 0, 255).astype(np.uint8))
    assert not looks_like_labels(label_map() * 0.5)
    assert looks_like_labels(label_map().astype(np.float64))


def test_the_page_lists_every_doubt() -> None:
    page = (ROOT / "docs" / "predict.md").read_text(encoding="utf-8").partition("## Doubts")[2]
    assert dict(re.findall(r"^\| `([a-z-]+)` \| (.+) \|$", page, flags=re.MULTILINE)) == DOUBTS
    assert nothing_found().code in DOUBTS


@pytest.mark.skipif(not DATA.is_dir(), reason="no real scans at ../shared/data")
def test_real_scans_and_their_labels() -> None:
    def read(name: str) -> np.ndarray:
        return np.asarray(nib.load(DATA / name).dataobj)

    examples = "totalsegmentator_examples"
    assert codes(read(f"{examples}/example_ct_sm.nii.gz"), CT) == []
    assert codes(read(f"{examples}/example_ct_sm.nii.gz"), MR) == ["modality-mismatch"]
    assert codes(read("chaos_mr/imagesTr/chaos_01.nii.gz"), MR) == []
    assert codes(read("chaos_mr/imagesTr/chaos_01.nii.gz"), CT) != []
    for labels in (f"{examples}/example_seg.nii.gz", "chaos_mr/labelsTr/chaos_01.nii.gz"):
        assert codes(read(labels), MR) == ["looks-like-labels"]
