"""Scans of several channels: found by layout, chosen by name, brought to one grid."""

from __future__ import annotations

import json
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from layout_folders import SHAPE, numbered, save
from refusing import refused

from panorgan.anatomy import Vocabulary
from panorgan.data.channels import Channel, find_channel, read_channels
from panorgan.data.layouts import read_cases

ORGANS = Vocabulary(["liver"])
NAMES = ("t1", "t1ce", "t2", "flair")


def filled(value: float) -> np.ndarray:
    return np.full(SHAPE, value, np.float32)


def write_nnunet(folder: Path) -> None:
    for case in ("one", "two"):
        for number in range(4):
            save(folder / "imagesTr" / f"{case}_{number:04d}.nii.gz", filled(number))
        save(folder / "labelsTr" / f"{case}.nii.gz", numbered(1))
    names = {str(number): name for number, name in enumerate(("T1", "T1-CE", "T2", "FLAIR"))}
    (folder / "dataset.json").write_text(
        json.dumps({"channel_names": names, "labels": {"background": 0, "liver": 1}, "file_ending": ".nii.gz"})
    )


def write_msd(folder: Path, images: int = 4) -> None:
    for case in ("one", "two"):
        save(folder / "imagesTr" / f"{case}.nii.gz", np.stack([filled(n) for n in range(images)], axis=-1))
        save(folder / "labelsTr" / f"{case}.nii.gz", numbered(1))
    pairs = [{"image": f"./imagesTr/{c}.nii.gz", "label": f"./labelsTr/{c}.nii.gz"} for c in ("one", "two")]
    modality = {str(number): name for number, name in enumerate(("T1", "T1-CE", "T2", "FLAIR"))}
    labels = {"0": "background", "1": "liver"}
    (folder / "dataset.json").write_text(json.dumps({"modality": modality, "labels": labels, "training": pairs}))


def write_table(folder: Path) -> None:
    rows = ["case,image:T1,image:T1-CE,image:T2,image:FLAIR,label,annotated"]
    for case in ("one", "two"):
        files = [save(folder / f"{case}_{number}.nii.gz", filled(number)).name for number in range(4)]
        save(folder / f"{case}_label.nii.gz", numbered(1))
        rows.append(f"{case},{','.join(files)},{case}_label.nii.gz,liver=1")
    (folder / "cases.csv").write_text("\n".join(rows))


def write_nnunet_v1(folder: Path) -> None:
    write_nnunet(folder)
    pairs = [{"image": f"./imagesTr/{c}.nii.gz", "label": f"./labelsTr/{c}.nii.gz"} for c in ("one", "two")]
    modality = json.loads((folder / "dataset.json").read_text())["channel_names"]
    labels = {"0": "background", "1": "liver"}
    (folder / "dataset.json").write_text(json.dumps({"modality": modality, "labels": labels, "training": pairs}))


WRITERS = {"nnunet": write_nnunet, "nnunet v1": write_nnunet_v1, "msd": write_msd, "csv": write_table}


def values(case) -> list[float]:
    return [float(channel.flat[0]) for channel in case.read_image().channels]


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_channels_come_in_the_order_that_is_asked_for(tmp_path, write):
    write(tmp_path)
    first, second = read_cases(tmp_path, "here", ORGANS, channels=("flair", "t1", "t1ce", "t2"))
    assert (first.id, second.id) == ("one", "two")
    assert values(first) == [3, 0, 1, 2]
    assert [channel.name for channel in first.channels] == ["flair", "t1", "t1ce", "t2"]
    assert list(first.read_masks(first.read_image())) == ["liver"]


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_one_channel_may_be_chosen(tmp_path, write):
    write(tmp_path)
    case = read_cases(tmp_path, "here", ORGANS, channels=("t2",))[0]
    assert values(case) == [2]


@pytest.mark.parametrize("write", [write_nnunet, write_nnunet_v1])
def test_without_a_choice_the_first_channel_is_read_as_ever(tmp_path, write):
    write(tmp_path)
    case = read_cases(tmp_path, "here", ORGANS)[0]
    assert case.channels == ()
    assert values(case) == [0]


def test_a_4d_file_without_a_choice_is_refused(tmp_path):
    write_msd(tmp_path)
    with refused("not-3d"):
        read_cases(tmp_path, "here", ORGANS)[0].read_image()


def test_a_site_says_what_its_names_mean(tmp_path):
    write_nnunet(tmp_path)
    case = read_cases(tmp_path, "here", ORGANS, channels=("native", "t2"), channel_names={"t1": "native"})[0]
    assert values(case) == [0, 2]
    with refused("unknown-channel") as caught:
        read_cases(tmp_path, "here", ORGANS, channels=("native", "t2"))
    assert "native" in caught.value.what
    assert "T1-CE" in caught.value.why


def test_a_missing_channel_names_case_and_channel(tmp_path):
    write_nnunet(tmp_path)
    (tmp_path / "imagesTr" / "two_0002.nii.gz").unlink()
    with refused("channel-missing") as caught:
        read_cases(tmp_path, "here", ORGANS, channels=NAMES)
    assert "two" in caught.value.what
    assert "t2" in caught.value.what
    assert len(read_cases(tmp_path, "here", ORGANS, channels=("t1", "flair"))) == 2
    left = read_cases(tmp_path, "here", ORGANS, channels=NAMES, leave_out=("two",))
    assert values(next(case for case in left if case.id == "one")) == [0, 1, 2, 3]


def test_a_case_without_its_first_channel_is_not_passed_over(tmp_path):
    write_nnunet(tmp_path)
    (tmp_path / "imagesTr" / "two_0000.nii.gz").unlink()
    with refused("channel-missing") as caught:
        read_cases(tmp_path, "here", ORGANS, channels=NAMES)
    assert "two" in caught.value.what


def test_a_table_may_leave_a_cell_empty_only_for_what_is_not_asked_for(tmp_path):
    write_table(tmp_path)
    table = tmp_path / "cases.csv"
    table.write_text(table.read_text().replace("two_2.nii.gz", ""))
    with refused("channel-missing"):
        read_cases(tmp_path, "here", ORGANS, channels=NAMES)
    assert values(read_cases(tmp_path, "here", ORGANS, channels=("flair",))[1]) == [3]


def test_a_4d_file_with_too_few_images_is_refused(tmp_path):
    write_msd(tmp_path, images=3)
    with refused("channel-missing") as caught:
        read_cases(tmp_path, "here", ORGANS, channels=NAMES)[0].read_image()
    assert "one" in caught.value.what
    assert "flair" in caught.value.what


def test_folders_that_name_no_channels_have_none(tmp_path):
    save(tmp_path / "case_00000" / "imaging.nii.gz")
    save(tmp_path / "case_00000" / "segmentation.nii.gz", numbered(1))
    with refused("unknown-channel"):
        read_cases(tmp_path, "here", Vocabulary(["kidney"]), channels=("t1", "t2"))


def test_names_differ_in_case_and_punctuation_only():
    assert find_channel("t1ce", ["T1", "T1-CE"]) == "T1-CE"
    assert find_channel("t1", ["T1-CE"]) is None


# -- one grid


def channel(path: Path, name: str = "second") -> Channel:
    return Channel(name, path)


def ramp(shape, affine) -> np.ndarray:
    """x + 2 y + 3 z of every voxel's place in the world."""
    places = np.stack(np.meshgrid(*(np.arange(n) for n in shape), indexing="ij"), axis=-1)
    world = places @ affine[:3, :3].T + affine[:3, 3]
    return (world @ np.array([1.0, 2, 3])).astype(np.float32)


def test_another_channel_is_resampled_in_the_world(tmp_path):
    fine = np.diag([1.0, 1.5, 2.0, 1.0])
    coarse = np.array([[2.0, 0, 0, -4], [0, 0, -3.0, 25], [0, 2.5, 0, -3], [0, 0, 0, 1]])  # other axes, other voxels
    nib.save(nib.Nifti1Image(ramp((10, 12, 8), fine), fine), tmp_path / "a.nii.gz")
    nib.save(nib.Nifti1Image(ramp((10, 12, 12), coarse), coarse), tmp_path / "b.nii.gz")
    volume = read_channels([channel(tmp_path / "a.nii.gz"), channel(tmp_path / "b.nii.gz")])
    np.testing.assert_allclose(volume.more[0], volume.voxels, atol=1e-3)


def test_the_same_voxels_with_flipped_axes_are_not_interpolated(tmp_path):
    random = np.random.default_rng(0).normal(size=(4, 5, 6)).astype(np.float32)
    affine = np.diag([1.0, 2, 3, 1])
    flipped = affine @ np.array([[-1.0, 0, 0, 3], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
    nib.save(nib.Nifti1Image(random, affine), tmp_path / "a.nii.gz")
    nib.save(nib.Nifti1Image(random[::-1], flipped), tmp_path / "b.nii.gz")
    volume = read_channels([channel(tmp_path / "a.nii.gz"), channel(tmp_path / "b.nii.gz")])
    np.testing.assert_array_equal(volume.more[0], random)


def test_beyond_a_channel_its_lowest_value_goes_on(tmp_path):
    affine, moved = np.eye(4), np.eye(4)
    moved[0, 3] = 3
    nib.save(nib.Nifti1Image(np.zeros((10, 4, 4), np.float32), affine), tmp_path / "a.nii.gz")
    nib.save(nib.Nifti1Image(np.full((10, 4, 4), 5, np.float32) + (np.arange(10) == 9)[:, None, None], moved),
             tmp_path / "b.nii.gz")  # fmt: skip
    volume = read_channels([channel(tmp_path / "a.nii.gz"), channel(tmp_path / "b.nii.gz")])
    assert set(np.unique(volume.more[0])) == {5.0}


def test_a_channel_of_another_place_is_refused_with_case_and_channel(tmp_path):
    moved = np.eye(4)
    moved[0, 3] = 8
    nib.save(nib.Nifti1Image(np.zeros((10, 10, 10), np.float32), np.eye(4)), tmp_path / "a.nii.gz")
    nib.save(nib.Nifti1Image(np.ones((10, 10, 10), np.float32), moved), tmp_path / "b.nii.gz")
    with refused("channel-elsewhere") as caught:
        read_channels([channel(tmp_path / "a.nii.gz"), channel(tmp_path / "b.nii.gz", "flair")], "anna")
    assert "flair" in caught.value.what
    assert "anna" in caught.value.where
    assert "20%" in caught.value.why


def test_every_channel_must_be_finite(tmp_path):
    save(tmp_path / "a.nii.gz", filled(1))
    save(tmp_path / "b.nii.gz", filled(np.nan))
    with refused("not-finite") as caught:
        read_channels([channel(tmp_path / "a.nii.gz"), channel(tmp_path / "b.nii.gz", "t2")])
    assert "t2" in caught.value.where
