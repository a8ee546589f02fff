"""DICOM trees with something wrong in them: small irregularities are read, single bad cases are recognised."""

from __future__ import annotations

import shutil
from pathlib import Path

import nibabel as nib
import numpy as np
import pydicom
import pytest
from dicom_files import (
    AFFINE,
    HIGH,
    HU,
    cases_of,
    change,
    error_of,
    masks_of,
    write_liver,
    write_series,
)
from pydicom.uid import generate_uid

from panorgan.data.layouts import find_layout, find_problems
from panorgan.data.volume import read_volume
from panorgan.errors import DataError

TALL = np.random.default_rng(1).integers(-1000, 1000, (4, 3, 40))


def put(files: list[Path], place) -> None:
    """Move slices: `place` gets their number and position."""
    for k, path in enumerate(files):
        position = [float(x) for x in pydicom.dcmread(path, stop_before_pixels=True).ImagePositionPatient]
        change(path, ImagePositionPatient=[f"{x:.4f}" for x in place(k, *position)])


# ---------------------------------------------------------------- small irregularities


def test_positions_that_tremble_are_no_tilt(tmp_path, capfd):
    """0.02 mm to and fro: the scan and its segmentation are read where they are."""
    series = write_series(tmp_path / "p" / "ct", HU)
    put(series.files, lambda k, x, y, z: (x + 0.02 * (k % 2), y, z))
    moved = [pydicom.dcmread(path) for path in series.files]
    write_liver(tmp_path / "p" / "seg", type(series)(moved, series.files))
    (case,) = cases_of(tmp_path).values()
    image = case.read_image()
    np.testing.assert_array_equal(image.voxels, HU)
    np.testing.assert_allclose(image.affine, AFFINE, atol=0.021)
    np.testing.assert_allclose(image.affine[:3, 2], [0, 0, 2.5], atol=1e-9, err_msg="slices are stacked straight")
    np.testing.assert_array_equal(masks_of(case)["liver"], HIGH)
    assert capfd.readouterr() == ("", ""), "the library never prints, nor do those it uses"


def test_thin_slices_whose_positions_were_rounded(tmp_path, capfd):
    """0.625 mm written with one digit: steps of 0.6 and 0.7 mm, but never more than 0.05 mm off the even place."""
    series = write_series(tmp_path / "p", TALL, spacing=(0.7, 0.8, 0.625))
    put(series.files, lambda k, x, y, z: (x, y, round(z, 1)))
    (case,) = cases_of(tmp_path).values()
    image = case.read_image()
    assert image.spacing == pytest.approx((0.7, 0.8, 0.625), abs=1e-3)
    assert image.affine[2, 3] == pytest.approx(-300, abs=0.05)
    np.testing.assert_array_equal(image.voxels, TALL)
    assert capfd.readouterr() == ("", "")


def test_pixel_sizes_that_differ_in_the_fifth_digit(tmp_path):
    series = write_series(tmp_path / "p", HU)
    for path in series.files[::2]:
        change(path, PixelSpacing=[0.80001, 0.7])
    (case,) = cases_of(tmp_path).values()
    np.testing.assert_array_equal(case.read_image().voxels, HU)
    change(series.files[1], PixelSpacing=[0.8002, 0.7])
    error_of(tmp_path, "slices-differ")


def test_a_small_tilt_adds_up(tmp_path):
    """0.008 mm from slice to slice is less than the tremble above; over 40 slices of 1 mm it is 0.31 mm, 0.46°."""
    series = write_series(tmp_path / "p", TALL, spacing=(0.7, 0.8, 1.0))
    put(series.files, lambda k, x, y, z: (x, y + 0.008 * k, z))
    error_of(tmp_path, "tilted-gantry")


def test_directions_written_with_few_digits_are_no_tilt(tmp_path):
    """0.0005 mm per mm is what a direction with three digits may be wrong by."""
    series = write_series(tmp_path / "p", TALL, spacing=(0.7, 0.8, 5.0))
    put(series.files, lambda k, x, y, z: (x, y + 0.0025 * k, z))
    (case,) = cases_of(tmp_path).values()
    assert case.read_image().spacing == pytest.approx((0.7, 0.8, 5.0), abs=1e-5)


@pytest.mark.parametrize("missing", [1, 20, 38])
def test_a_missing_slice_is_found_wherever_it_is(tmp_path, missing):
    write_series(tmp_path / "p", TALL, skip=(missing,))
    assert "5.00 mm" in error_of(tmp_path, "uneven-slices").why


def test_a_slice_beside_the_others(tmp_path):
    series = write_series(tmp_path / "p", HU)
    put(series.files, lambda k, x, y, z: (x + 0.3 * (k in (2, 3)), y, z))
    error_of(tmp_path, "slices-shifted")


# ---------------------------------------------------------------- single bad cases


def looked_at(folder: Path) -> tuple[list[str], list[str], tuple[DataError, ...]]:
    layout = find_layout(folder)
    return sorted(layout.images(folder)), sorted(layout.labels(folder)), find_problems(layout, folder)


def two_patients(folder: Path):
    """Anna and Bert, each with a series and a liver."""
    found = []
    for name in ("anna", "bert"):
        series = write_series(folder / name / "ct", HU, PatientID=name)
        write_liver(folder / name / "seg.dcm", series)
        found.append(series)
    return found


def write_lost(folder: Path) -> Path:
    """A segmentation of a series that is not there."""
    away = write_series(folder / "away", HU, PatientID="carl")
    shutil.rmtree(folder / "away")
    return write_liver(folder / "lost.dcm", away)


def cut(path: Path, kept: int = 400) -> None:
    path.write_bytes(path.read_bytes()[:kept])


@pytest.mark.filterwarnings("ignore:Invalid value for VR UI")
def test_a_cut_slice_hides_its_own_case_only(tmp_path):
    anna, _ = two_patients(tmp_path)
    cut(anna.files[2])
    images, labels, problems = looked_at(tmp_path)
    assert images == labels == ["bert_ct"]
    assert [(error.code, error.where) for error in problems] == [("file-unreadable", str(anna.files[2]))]
    assert error_of(tmp_path, "file-unreadable").where == str(anna.files[2])


def test_a_cut_slice_with_its_series_uid_in_a_folder_of_many(tmp_path):
    series = [
        write_series(tmp_path, HU, PatientID=f"p{n}", SeriesNumber=n, names=f"{n}" + "_{k}", PatientComments="x" * 2000)
        for n in (1, 2, 3)
    ]
    content = series[1].files[3].read_bytes()
    cut(series[1].files[3], content.index(series[1].uid.encode()) + len(series[1].uid) + 2)
    images, _, problems = looked_at(tmp_path)
    assert images == ["p1_1", "p3_3"]
    assert len(problems) == 1


def test_a_segmentation_without_its_series_hides_nothing_else(tmp_path):
    two_patients(tmp_path)
    write_lost(tmp_path)
    images, labels, problems = looked_at(tmp_path)
    assert images == labels == ["anna_ct", "bert_ct"]
    assert [error.code for error in problems] == ["orphan-label"]
    error_of(tmp_path, "orphan-label")


def test_all_problems_are_named_at_once(tmp_path):
    anna, _ = two_patients(tmp_path)
    lost = write_lost(tmp_path)
    cut(anna.files[0], 200)
    error = error_of(tmp_path, "file-unreadable")
    assert "1 more problem" in error.what
    assert str(anna.files[0]) in error.where
    assert str(lost) in error.where


def test_a_label_in_two_places_hides_its_own_case_only(tmp_path):
    two_patients(tmp_path)
    (tmp_path / "labels.json").write_text('{"labels": {"liver": 1}}')
    nib.save(nib.Nifti1Image(HIGH.astype(np.uint8), AFFINE), tmp_path / "anna" / "ct.nii.gz")
    images, labels, problems = looked_at(tmp_path)
    assert images == labels == ["bert_ct"]
    assert [error.code for error in problems] == ["labels-in-several-places"]


def test_a_tree_of_only_damaged_files(tmp_path):
    series = write_series(tmp_path / "p", HU)
    for path in series.files:
        cut(path, 200)
    images, labels, problems = looked_at(tmp_path)
    assert images == labels == []
    assert len(problems) == len(series.files)


# ---------------------------------------------------------------- what the headers say


def test_the_modality_comes_from_the_header(tmp_path):
    write_series(tmp_path / "p" / "a", HU)
    write_series(tmp_path / "p" / "b", HU, modality="MR")
    images = find_layout(tmp_path).images(tmp_path)
    assert {name: image.modality for name, image in images.items()} == {"p_a": "CT", "p_b": "MR"}


def test_a_segmentation_in_another_frame_of_reference(tmp_path):
    """It names its series, but positions of two frames of reference have nothing to do with each other."""
    two_patients(tmp_path)
    change(tmp_path / "anna" / "seg.dcm", FrameOfReferenceUID=generate_uid())
    images, labels, problems = looked_at(tmp_path)
    assert images == labels == ["bert_ct"]
    assert [error.code for error in problems] == ["frame-of-reference"]
    assert "UIDs" in error_of(tmp_path, "frame-of-reference").fix
    change(tmp_path / "anna" / "seg.dcm", FrameOfReferenceUID="")
    assert looked_at(tmp_path)[2] == (), "what an anonymiser removed does not differ"


def test_a_folder_of_slices_is_judged_in_the_same_way(tmp_path):
    series = write_series(tmp_path / "p", HU)
    put(series.files, lambda k, x, y, z: (x, y + 0.02 * (k % 3), z))
    np.testing.assert_array_equal(read_volume(tmp_path / "p").voxels, HU)
