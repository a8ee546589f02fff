"""DICOM trees as hospitals, archives and anonymisers leave them: which cases are in them, and what they look like."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import nibabel as nib
import numpy as np
import pydicom
import pytest
from dicom_files import (
    AFFINE,
    HIGH,
    HU,
    LOW,
    SAGITTAL,
    cases_of,
    change,
    error_of,
    frame_positions,
    masks_of,
    write_liver,
    write_series,
)
from pydicom.fileset import FileSet
from pydicom.uid import SecondaryCaptureImageStorage, generate_uid
from refusing import refused

from panorgan.data.dicom import read_tree
from panorgan.data.layouts import find_layout
from panorgan.errors import DataError
from panorgan.preparation.plan import Plan
from panorgan.preparation.store import Store

# ---------------------------------------------------------------- which series are cases


def test_patient_study_series_folders(tmp_path):
    for patient in ("anna", "bert"):
        write_series(tmp_path / patient / "2020" / "thin", HU, PatientID=f"id-{patient}")
    write_series(tmp_path / "anna" / "2021" / "thin", HU + 1, PatientID="id-anna", modality="MR")
    assert find_layout(tmp_path).name == "dicom"
    cases = cases_of(tmp_path)
    assert {name: case.patient for name, case in cases.items()} == {
        "anna_2020_thin": "id-anna",
        "anna_2021_thin": "id-anna",
        "bert_2020_thin": "id-bert",
    }
    image = cases["anna_2021_thin"].read_image()
    np.testing.assert_array_equal(image.voxels, HU + 1)
    np.testing.assert_allclose(image.affine, AFFINE, atol=1e-6)


def test_everything_flat_in_one_folder(tmp_path):
    for patient, number, shift in (("p1", 2, 0), ("p1", 5, 1), ("p2", 2, 2)):
        write_series(
            tmp_path, HU + shift, PatientID=patient, SeriesNumber=number, names=f"{patient}{number}" + "{shuffled}"
        )
    (tmp_path / "README").write_text("no picture")
    (tmp_path / ".DS_Store").write_bytes(b"junk")
    assert find_layout(tmp_path).name == "dicom"
    cases = cases_of(tmp_path)
    assert [(c.id, c.patient) for c in cases.values()] == [("p1_2", "p1"), ("p1_5", "p1"), ("p2_2", "p2")]
    for shift, case in enumerate(cases.values()):
        np.testing.assert_array_equal(case.read_image().voxels, HU + shift)


def test_a_dicomdir_is_no_slice(tmp_path):
    write_series(tmp_path / "a", HU)
    listed = FileSet()
    for path in (tmp_path / "a").iterdir():
        listed.add(path)
    listed.write(tmp_path / "disc")
    shutil.rmtree(tmp_path / "a")
    (case,) = cases_of(tmp_path / "disc").values()
    assert (tmp_path / "disc" / "DICOMDIR").is_file()
    np.testing.assert_array_equal(case.read_image().voxels, HU)


def test_folders_named_by_uids_do_not_name_cases(tmp_path):
    for number in (1, 2):
        write_series(tmp_path / "LIDC-1" / generate_uid() / generate_uid(), HU, SeriesNumber=number)
    write_series(tmp_path / "LIDC-2" / generate_uid() / generate_uid(), HU)
    twice = [write_series(tmp_path / "LIDC-3" / generate_uid(), HU, SeriesNumber=4) for _ in "ab"]
    names = list(cases_of(tmp_path))
    assert names[:3] == ["LIDC-1_1", "LIDC-1_2", "LIDC-2"]
    assert [name[:9] for name in names[3:]] == ["LIDC-3_4_"] * 2
    assert len(set(names)) == 5
    assert not any(series.uid in name for series in twice for name in names)
    assert list(cases_of(tmp_path)) == names, "the same each time"


def test_what_is_no_scan_is_skipped(tmp_path):
    real = write_series(tmp_path / "p" / "ct", HU)
    write_series(tmp_path / "p" / "ct", HU[:, :, :2], ImageType=["ORIGINAL", "PRIMARY", "LOCALIZER"], names="scout{k}")
    write_series(tmp_path / "p" / "one", HU[:, :, :1])
    write_series(tmp_path / "p" / "report", HU, SOPClassUID=SecondaryCaptureImageStorage)
    write_series(tmp_path / "p" / "pet", HU, modality="PT")
    (case,) = cases_of(tmp_path).values()
    assert case.id == "p_ct"
    assert set(case.image_files) == set(real.files)
    np.testing.assert_array_equal(case.read_image().voxels, HU)
    shutil.rmtree(tmp_path / "p" / "ct")
    assert "1 series of a single slice" in error_of(tmp_path, "no-scans").why


def test_an_anonymiser_that_removes_uids_and_patients(tmp_path):
    """The series is then what lies in one folder, the patient is the top folder."""
    for patient in ("one", "two"):
        write_series(tmp_path / patient / "ct", HU, SeriesInstanceUID="", PatientID="")
    cases = cases_of(tmp_path)
    assert {name: case.patient for name, case in cases.items()} == {"one_ct": "one", "two_ct": "two"}
    np.testing.assert_array_equal(cases["two_ct"].read_image().voxels, HU)


def test_a_multi_frame_file(tmp_path):
    import highdicom as hd

    series = write_series(tmp_path / "old", HU)
    hd_file = hd.legacy.LegacyConvertedEnhancedCTImage(series.slices, hd.UID(), 5, hd.UID(), 1)
    (tmp_path / "new" / "p").mkdir(parents=True)
    hd_file.save_as(tmp_path / "new" / "p" / "all.dcm")
    places = [place[2] for place in frame_positions(tmp_path / "new" / "p" / "all.dcm")]
    (case,) = cases_of(tmp_path / "new").values()
    image = case.read_image()
    order = [round((z + 300) / 2.5) for z in places]
    np.testing.assert_array_equal(image.voxels, HU[:, :, order])
    np.testing.assert_allclose(image.affine @ [0, 0, 5, 1], AFFINE @ [0, 0, order[5], 1], atol=1e-6)
    dataset = pydicom.dcmread(tmp_path / "new" / "p" / "all.dcm")
    dataset.PerFrameFunctionalGroupsSequence[2].PlanePositionSequence[0].ImagePositionPatient[2] += 1
    dataset.save_as(tmp_path / "new" / "p" / "all.dcm")
    assert "evenly" in error_of(tmp_path / "new", "multiframe-unclear").why


# ---------------------------------------------------------------- reading a series


def test_slices_with_rescales_of_their_own(tmp_path):
    """Slopes that are whole numbers first and fractions later: the kind of number must fit all of them."""
    voxels = HU // 3 * 3.0
    voxels[:, :, 4] = HU[:, :, 4] * 0.75
    rescale = {0: (1, -1024), 1: (3, -1200), 2: (1.5, -999), 3: (1, -1000), 4: (0.75, -750), 5: (3, -999)}
    write_series(tmp_path / "p", voxels, rescale=rescale)
    (case,) = cases_of(tmp_path).values()
    np.testing.assert_array_equal(case.read_image().voxels, voxels)


def test_sagittal_slices_lie_in_the_world(tmp_path):
    series = write_series(tmp_path / "p" / "mr", HU, modality="MR", orientation=SAGITTAL)
    write_liver(tmp_path / "p" / "seg", series)
    (case,) = cases_of(tmp_path).values()
    image = case.read_image()
    # Columns count to the back, rows to the feet; the normal of these directions points to the patient's right.
    np.testing.assert_allclose(image.affine[:3, :3], [[0, 0, 2.5], [-0.7, 0, 0], [0, -0.8, 0]], atol=1e-6)
    np.testing.assert_array_equal(image.voxels, HU)
    np.testing.assert_array_equal(case.read_masks(image)["liver"], HIGH)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"tilt": 0.4}, "tilted-gantry"),
        ({"skip": (2,)}, "uneven-slices"),
    ],
)
def test_bad_series_are_refused(tmp_path, changes, code):
    write_series(tmp_path / "p", HU, **changes)
    assert str(tmp_path / "p") in error_of(tmp_path, code).where


def test_slices_that_do_not_fit_together(tmp_path):
    series = write_series(tmp_path / "p", HU)
    change(series.files[1], PixelSpacing=[0.9, 0.7])
    error_of(tmp_path, "slices-differ")
    change(series.files[1], PixelSpacing=[0.8, 0.7], ImageOrientationPatient=[0, 1, 0, 0, 0, -1])
    error_of(tmp_path, "slices-not-parallel")


def test_a_copy_of_a_series_elsewhere_in_the_tree(tmp_path):
    write_series(tmp_path / "p", HU)
    shutil.copytree(tmp_path / "p", tmp_path / "backup")
    assert "6 slices" in error_of(tmp_path, "uneven-slices").why


@pytest.mark.filterwarnings("ignore:Invalid value for VR UI")
@pytest.mark.parametrize("kept", [140, *range(400, 1070, 30), -5])
def test_a_slice_that_was_cut_never_shortens_the_scan_in_silence(tmp_path, kept):
    series = write_series(tmp_path / "p", HU)
    series.files[0].write_bytes(series.files[0].read_bytes()[:kept])
    with pytest.raises(DataError) as caught:
        _ = [masks_of(case) for case in cases_of(tmp_path).values()]
    assert caught.value.code in ("file-unreadable", "slice-without-position", "slices-differ")


@pytest.mark.filterwarnings("ignore:End of file reached")
def test_a_slice_that_was_overwritten(tmp_path):
    series = write_series(tmp_path / "p", HU)
    series.files[0].write_bytes(series.files[0].read_bytes()[:132] + b"\xff" * 300)
    assert series.files[0].name in error_of(tmp_path, "file-unreadable").where


# ---------------------------------------------------------------- label maps


def write_label_map(path: Path, affine: np.ndarray = AFFINE, flip: bool = False) -> None:
    """High values are 1, low ones 2; `flip` turns the second axis around without moving anything in the world."""
    path.parent.mkdir(parents=True, exist_ok=True)
    labels = (HIGH + 2 * LOW).astype(np.uint8)
    if flip:
        labels, affine = labels[:, ::-1], affine @ np.array([[1, 0, 0, 0], [0, -1, 0, 4], [0, 0, 1, 0], [0, 0, 0, 1.0]])
    nib.save(nib.Nifti1Image(labels, affine), path)


@pytest.mark.parametrize("place", ["p/ct.nii.gz", "p/segmentations/ct.nii.gz", "labels/p_ct.nii.gz"])
@pytest.mark.parametrize("flip", [False, True])
def test_label_maps_beside_the_series(tmp_path, place, flip):
    write_series(tmp_path / "p" / "ct", HU)
    write_label_map(tmp_path / place, flip=flip)
    (tmp_path / "labels.json").write_text(json.dumps({"labels": {"background": 0, "liver": 1, "Milz": [2]}}))
    assert find_layout(tmp_path).name == "dicom"
    (case,) = cases_of(tmp_path, rename={"Milz": "spleen"}).values()
    np.testing.assert_array_equal(masks_of(case)["liver"], HIGH)
    np.testing.assert_array_equal(masks_of(case)["spleen"], LOW)


def test_label_maps_of_a_flat_folder(tmp_path):
    for number in (1, 2):
        write_series(tmp_path, HU, SeriesNumber=number, names=f"{number}" + "{k}")
    write_label_map(tmp_path / "labels" / "p1_2.nii.gz")
    (tmp_path / "labels.json").write_text('{"labels": {"liver": 1, "spleen": 2}}')
    assert list(cases_of(tmp_path)) == ["p1_2"]


def test_label_maps_that_cannot_be_used(tmp_path):
    series = write_series(tmp_path / "p" / "ct", HU)
    write_label_map(tmp_path / "p" / "ct.nii.gz", AFFINE + np.array([[0, 0, 0, 1]] + [[0] * 4] * 3))
    error_of(tmp_path, "labels-without-names")
    (tmp_path / "labels.json").write_text('{"labels": {"liver": "1"}}')
    error_of(tmp_path, "label-names-unreadable")
    (tmp_path / "labels.json").write_text('{"labels": {"liver": 1, "spleen": 2}}')
    error_of(tmp_path, "grid-mismatch")
    write_liver(tmp_path / "p" / "seg", series)
    error_of(tmp_path, "labels-in-several-places")


# ---------------------------------------------------------------- around it


def test_contours_that_outline_nothing(tmp_path):
    series = write_series(tmp_path / "p" / "ct", HU)
    shutil.copy(series.files[0], tmp_path / "p" / "rs.dcm")
    change(tmp_path / "p" / "rs.dcm", Modality="RTSTRUCT", SeriesInstanceUID=generate_uid())
    error_of(tmp_path, "contours-only")
    write_liver(tmp_path / "p" / "seg", series)
    assert cases_of(tmp_path)["p_ct"].annotated == ("liver",)


def test_a_table_of_cases_wins_over_the_dicom_it_lists(tmp_path):
    write_series(tmp_path / "scans" / "p", HU)
    (tmp_path / "cases.csv").write_text("case,image,label,annotated\np,scans/p,,\n")
    assert find_layout(tmp_path).name == "csv"


def test_two_layouts_that_fit_are_both_named(tmp_path):
    write_series(tmp_path / "p" / "ct", HU)
    (tmp_path / "case_00000").mkdir()
    nib.save(nib.Nifti1Image(HU.astype(np.int16), AFFINE), tmp_path / "case_00000" / "imaging.nii.gz")
    with refused("several-layouts") as caught:
        find_layout(tmp_path)
    assert "dicom, kits" in caught.value.what
    assert find_layout(tmp_path, "dicom").name == "dicom"


def test_an_unchanged_tree_is_read_once_and_a_changed_one_again(tmp_path):
    write_series(tmp_path / "p" / "ct", HU)
    tree = read_tree(tmp_path)
    assert read_tree(tmp_path) is tree
    write_series(tmp_path / "q" / "ct", HU)
    assert len(read_tree(tmp_path).series) == 2


def test_without_pydicom_the_error_says_what_to_install(tmp_path, monkeypatch):
    write_series(tmp_path / "p" / "ct", HU)
    monkeypatch.setitem(sys.modules, "pydicom", None)
    assert "[dicom]" in error_of(tmp_path, "pydicom-missing").fix


def test_links_in_a_circle(tmp_path):
    write_series(tmp_path / "p" / "ct", HU)
    (tmp_path / "p" / "up").symlink_to(tmp_path)
    assert list(cases_of(tmp_path)) == ["p_ct"]


def test_only_the_files_of_the_series_make_the_stored_case(tmp_path):
    series = write_series(tmp_path / "data", HU, SeriesNumber=1, names="a{k}")
    other = write_series(tmp_path / "data", HU, SeriesNumber=2, PatientID="p2", names="b{k}")
    path = write_liver(tmp_path / "data" / "seg", series)
    store, plan = Store(tmp_path / "store"), Plan(spacing_mm=(0.7, 0.8, 2.5))
    stored = store.add(cases_of(tmp_path / "data")["p1_1"], plan)
    assert dict(stored.masks())["liver"].sum() == HIGH.sum()
    change(other.files[0], PatientComments="seen")
    assert store.add(cases_of(tmp_path / "data")["p1_1"], plan).folder == stored.folder
    write_liver(path, series, LOW)
    assert store.add(cases_of(tmp_path / "data")["p1_1"], plan).folder != stored.folder


DATA = Path(__file__).parents[4] / "shared" / "data" / "totalsegmentator_examples"


@pytest.mark.skipif(not DATA.is_dir(), reason="the real scans are not here (../shared/data)")
def test_a_real_series_in_a_tree(tmp_path):
    """JPEG 2000 slices without a SeriesInstanceUID, and a label whose y axis runs the other way."""
    (tmp_path / "basel").mkdir()
    (tmp_path / "basel" / "ct").symlink_to(DATA / "example_ct_dicom")
    (tmp_path / "basel" / "ct.nii.gz").symlink_to(DATA / "example_seg_dicom.nii.gz")
    ids = {"liver": 5, **{f"other {i}": i for i in range(1, 120) if i != 5}}
    (tmp_path / "labels.json").write_text(json.dumps({"labels": ids}))
    (case,) = cases_of(tmp_path, ignore=tuple(name for name in ids if name != "liver")).values()
    assert (case.id, case.patient) == ("basel_ct", "basel")
    image = case.read_image()
    assert np.median(image.voxels[case.read_masks(image)["liver"]]) == pytest.approx(93, abs=2)
    assert image.spacing == pytest.approx((0.9765625, 0.9765625, 2.0))
