"""DICOM, MetaImage and NRRD: the same voxels at the same place in the world as a NIfTI of the scan."""

from __future__ import annotations

from pathlib import Path

import nibabel as nib
import numpy as np
import pydicom
import pytest
import SimpleITK as sitk  # noqa: N813
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid
from refusing import refused

from panorgan.anatomy import Vocabulary
from panorgan.data.case import Case, LabelMap
from panorgan.data.formats import files_of
from panorgan.data.layouts import read_cases
from panorgan.data.volume import Volume, read_volume, same_grid, turned_like
from panorgan.preparation.plan import Plan
from panorgan.preparation.store import Store

AFFINE = np.array([[-0.7, 0, 0, 90.0], [0, -0.7, 0, 40.0], [0, 0, 2.5, -300.0], [0, 0, 0, 1]])
HU = np.random.default_rng(0).integers(-1000, 1000, (6, 5, 4)).astype(np.int16)


def write_series(folder: Path, hu: np.ndarray = HU, series: str | None = None, **changes) -> Path:
    """A CT series as a scanner writes it: unsigned pixels with a rescale, one file per slice, names in no order."""
    folder.mkdir(parents=True, exist_ok=True)
    series = series or generate_uid()
    for k in range(hu.shape[2]):
        meta = FileMetaDataset()
        meta.MediaStorageSOPClassUID, meta.TransferSyntaxUID = CTImageStorage, ExplicitVRLittleEndian
        meta.MediaStorageSOPInstanceUID = generate_uid()
        slice_ = FileDataset(None, {}, file_meta=meta, preamble=b"\0" * 128)
        slice_.SOPClassUID, slice_.SOPInstanceUID = CTImageStorage, meta.MediaStorageSOPInstanceUID
        slice_.Modality, slice_.SeriesInstanceUID, slice_.StudyInstanceUID = "CT", series, "1.2.3"
        slice_.Rows, slice_.Columns = hu.shape[1], hu.shape[0]
        slice_.PixelSpacing, slice_.SliceThickness = [0.7, 0.7], 2.5
        slice_.ImageOrientationPatient = [1, 0, 0, 0, 1, 0]
        slice_.ImagePositionPatient = [-90.0, -40.0 + changes.get("tilt", 0.0) * k, -300.0 + 2.5 * k]
        slice_.SamplesPerPixel, slice_.PhotometricInterpretation = 1, "MONOCHROME2"
        slice_.BitsAllocated, slice_.BitsStored, slice_.HighBit, slice_.PixelRepresentation = 16, 16, 15, 0
        slice_.RescaleIntercept, slice_.RescaleSlope, slice_.InstanceNumber = -1024, 1, 100 - k
        slice_.PixelData = (hu[:, :, k].T + 1024).astype(np.uint16).tobytes()
        if k not in changes.get("skip", ()):
            slice_.save_as(folder / f"IM{(k * 7) % 10}_{series[-4:]}", enforce_file_format=True)
    return folder


def test_a_dicom_series_is_in_hu_and_in_its_place(tmp_path):
    volume = read_volume(write_series(tmp_path / "ct"))
    np.testing.assert_array_equal(volume.voxels, HU)
    np.testing.assert_allclose(volume.affine, AFFINE, atol=1e-6)


@pytest.mark.parametrize("ending", ["mha", "nrrd"])
def test_itk_files_agree_with_nifti(tmp_path, ending):
    """The oblique geometry is written by SimpleITK in both formats; ours must see the same world."""
    image = sitk.GetImageFromArray(HU.transpose(2, 1, 0))
    image.SetSpacing((0.7, 0.8, 2.5))
    image.SetOrigin((-10.0, 20.0, 30.0))
    angle = 0.3
    image.SetDirection((np.cos(angle), -np.sin(angle), 0, np.sin(angle), np.cos(angle), 0, 0, 0, 1))
    sitk.WriteImage(image, str(tmp_path / f"scan.{ending}"))
    sitk.WriteImage(image, str(tmp_path / "scan.nii.gz"))
    ours, nifti = read_volume(tmp_path / f"scan.{ending}"), read_volume(tmp_path / "scan.nii.gz")
    np.testing.assert_array_equal(ours.voxels, nifti.voxels)
    np.testing.assert_allclose(ours.affine, nifti.affine, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "code", "hint"),
    [
        ({"tilt": 0.4}, "tilted-gantry", "0.40 mm"),
        ({"skip": (1,)}, "uneven-slices", "5.00 mm"),
    ],
)
def test_bad_series_are_refused_with_the_reason(tmp_path, changes, code, hint):
    with refused(code) as caught:
        read_volume(write_series(tmp_path / "ct", np.repeat(HU, 2, axis=2), **changes))
    assert hint in caught.value.why
    assert caught.value.fix


def test_a_doubled_slice(tmp_path):
    folder = write_series(tmp_path / "ct")
    slice_ = pydicom.dcmread(next(iter(sorted(folder.iterdir()))))
    slice_.SOPInstanceUID = slice_.file_meta.MediaStorageSOPInstanceUID = generate_uid()
    slice_.save_as(folder / "again")
    with refused("uneven-slices"):
        read_volume(folder)


def test_two_series_or_none(tmp_path):
    folder = write_series(tmp_path / "ct")
    write_series(folder)
    with refused("several-dicom-series") as caught:
        read_volume(folder)
    assert "2" in caught.value.what
    (tmp_path / "empty").mkdir()
    with refused("no-dicom-series"):
        read_volume(tmp_path / "empty")


@pytest.mark.parametrize("ending", ["mha", "nrrd"])
@pytest.mark.parametrize("flat", [True, False])
def test_one_slice_with_or_without_a_third_dimension(tmp_path, ending, flat):
    pixels = HU[:, :, 0].T
    image = sitk.GetImageFromArray(pixels if flat else pixels[None])
    image.SetSpacing((0.5, 2.0) if flat else (0.5, 2.0, 1.0))
    image.SetOrigin((10.0, 20.0) if flat else (10.0, 20.0, 0.0))
    sitk.WriteImage(image, str(tmp_path / f"slice.{ending}"))
    volume = read_volume(tmp_path / f"slice.{ending}")
    np.testing.assert_array_equal(volume.voxels, HU[:, :, :1])
    np.testing.assert_allclose(volume.affine, [[-0.5, 0, 0, -10], [0, -2, 0, -20], [0, 0, 1, 0], [0, 0, 0, 1]])


@pytest.mark.parametrize("shape", [(1, 5, 6), (3, 5, 6), (5, 6)])
def test_colours_are_no_greyscale(tmp_path, shape):
    colours = np.zeros((*shape, 3), np.uint8)
    sitk.WriteImage(sitk.GetImageFromArray(colours, isVector=True), str(tmp_path / "photo.mha"))
    with refused("not-3d") as caught:
        read_volume(tmp_path / "photo.mha")
    assert "has 4:" in caught.value.what


def test_flat_slices_listed_in_a_table_become_stored_cases(tmp_path):
    rows = ["case,image,label,annotated,patient"]
    for k in range(2):
        nib.save(nib.Nifti1Image(HU[:, :, k], np.diag([0.7, 0.7, 2.5, 1])), tmp_path / f"{k}.nii.gz")
        labels = (HU[:, :, k] > 500).astype(np.uint8)
        nib.save(nib.Nifti1Image(labels, np.diag([0.7, 0.7, 2.5, 1])), tmp_path / f"{k}_seg.nii.gz")
        rows.append(f"p1_{k},{k}.nii.gz,{k}_seg.nii.gz,liver=1,p1")
    (tmp_path / "cases.csv").write_text("\n".join(rows) + "\n")
    cases = read_cases(tmp_path, "here", Vocabulary(["liver"]))
    assert [case.patient for case in cases] == ["p1", "p1"]
    stored = Store(tmp_path / "store").add(cases[1], Plan(spacing_mm=(0.7, 0.7, 2.5)))
    assert stored.image.shape == (6, 5, 1)
    assert dict(stored.masks())["liver"].sum() == (HU[:, :, 1] > 500).sum()


@pytest.mark.parametrize("name", ["broken.mha", "broken.nrrd"])
def test_a_damaged_itk_file(tmp_path, name):
    (tmp_path / name).write_bytes(b"nonsense")
    with refused("file-unreadable"):
        read_volume(tmp_path / name)


def names_of(path: Path) -> list[str]:
    return [one.name for one in files_of(path)]


@pytest.mark.parametrize(
    ("header", "data"),
    [("a b.mhd", ["a b.raw"]), ("a.nhdr", ["a.raw"]), ("a.mha", []), ("a.nrrd", []), ("a.nii.gz", []), ("a.nii", [])],
)
@pytest.mark.parametrize("compressed", [False, True])
def test_the_files_that_hold_a_scans_voxels(tmp_path, header, data, compressed):
    """Written by SimpleITK itself, which names the data file after the header."""
    sitk.WriteImage(sitk.GetImageFromArray(HU.transpose(2, 1, 0)), str(tmp_path / header), compressed)
    if compressed:
        data = [name.replace(".raw", ".zraw" if header.endswith(".mhd") else ".raw.gz") for name in data]
    assert names_of(tmp_path / header) == [header, *data]
    assert {path.name for path in tmp_path.iterdir()} == {header, *data}
    np.testing.assert_array_equal(read_volume(tmp_path / header).voxels, HU)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("a.mhd", "ElementDataFile = s%02d.raw 2 6 2"),
        ("a.mhd", "ElementDataFile = LIST\ns02.raw\ns04.raw\ns06.raw"),
        ("a.mhd", "elementdatafile=LIST 2D\ns02.raw\ns04.raw\ns06.raw\n"),
        ("a.nhdr", "data file: s%02d.raw 2 6 2 2"),
        ("a.nhdr", "datafile: LIST\ns02.raw\ns04.raw\ns06.raw"),
    ],
)
def test_headers_that_name_several_files(tmp_path, name, line, end):
    for k in range(1, 8):
        (tmp_path / f"s{k:02d}.raw").write_bytes(b"0")
    first = "NDims = 3\n" if name.endswith("mhd") else "NRRD0004\ntype: short\n"
    (tmp_path / name).write_bytes((first + line).replace("\n", end).encode())
    assert names_of(tmp_path / name) == [name, "s02.raw", "s04.raw", "s06.raw"]


def test_voxels_that_look_like_a_header_name_no_file(tmp_path):
    (tmp_path / "other.raw").write_bytes(b"0")
    (tmp_path / "a.nrrd").write_bytes(b"NRRD0004\nencoding: raw\n\n\x00\ndata file: other.raw\n")
    (tmp_path / "a.mha").write_bytes(b"NDims = 3\nElementDataFile = LOCAL\n\x00\nElementDataFile = other.raw\n")
    assert names_of(tmp_path / "a.nrrd") == ["a.nrrd"]
    assert names_of(tmp_path / "a.mha") == ["a.mha"]
    (tmp_path / "b.mhd").write_bytes(b"ElementDataFile = gone.raw\n")
    assert names_of(tmp_path / "b.mhd") == ["b.mhd"], "what is not there cannot be read"
    assert names_of(tmp_path / "nowhere.mhd") == ["nowhere.mhd"]


def test_pairs_of_header_and_image_and_folders_of_slices(tmp_path):
    nib.save(nib.Nifti1Pair(HU, AFFINE), tmp_path / "a.img")
    assert names_of(tmp_path / "a.img") == ["a.img", "a.hdr"]
    assert names_of(tmp_path / "a.hdr") == ["a.hdr", "a.img"]
    nib.save(nib.Nifti1Pair(HU, AFFINE), tmp_path / "b.img.gz")
    assert names_of(tmp_path / "b.img.gz") == ["b.img.gz", "b.hdr.gz"]
    folder = write_series(tmp_path / "ct")
    (folder / ".DS_Store").write_bytes(b"junk")
    assert len(files_of(folder)) == HU.shape[2]


def test_turning_changes_axes_and_nothing_in_the_world():
    flipped = Volume(HU[:, ::-1], AFFINE @ np.array([[1, 0, 0, 0], [0, -1, 0, 4], [0, 0, 1, 0], [0, 0, 0, 1.0]]))
    original = Volume(HU, AFFINE)
    assert not same_grid(flipped, original)
    turned = turned_like(flipped, original)
    assert same_grid(turned, original)
    np.testing.assert_array_equal(turned.voxels, HU)


def test_a_label_whose_axes_run_the_other_way_is_read_in_the_world(tmp_path):
    folder = write_series(tmp_path / "ct")
    labels = (HU > 500).astype(np.uint8)
    flip = np.array([[1, 0, 0, 0], [0, -1, 0, 4], [0, 0, 1, 0], [0, 0, 0, 1.0]])
    nib.save(nib.Nifti1Image(labels[:, ::-1], AFFINE @ flip), tmp_path / "seg.nii.gz")
    case = Case("a", "a", "s", folder, ("liver",), LabelMap(tmp_path / "seg.nii.gz", {"liver": (1,)}, frozenset({1})))
    np.testing.assert_array_equal(case.read_masks(case.read_image())["liver"], HU > 500)


def test_a_dicom_case_through_a_table_into_the_store(tmp_path):
    write_series(tmp_path / "scans" / "p1")
    nib.save(nib.Nifti1Image((HU > 500).astype(np.uint8), AFFINE), tmp_path / "p1.nii.gz")
    (tmp_path / "cases.csv").write_text("case,image,label,annotated\np1,scans/p1,p1.nii.gz,liver=1\n")
    (case,) = read_cases(tmp_path, "here", Vocabulary(["liver"]))
    store, plan = Store(tmp_path / "store"), Plan(spacing_mm=(0.7, 0.7, 2.5))
    stored = store.add(case, plan)
    assert dict(stored.masks())["liver"].sum() == (HU > 500).sum()
    one = next((tmp_path / "scans" / "p1").iterdir())
    one.write_bytes(one.read_bytes()[:-2] + b"\0\1")
    assert store.add(case, plan).folder != stored.folder, "a changed slice makes another entry"


DATA = Path(__file__).parents[3] / "shared" / "data" / "totalsegmentator_examples"


@pytest.mark.skipif(not DATA.is_dir(), reason="the real scans are not here (../shared/data)")
def test_a_real_series_and_its_label_meet_in_the_world():
    """JPEG 2000 slices, and a label whose y axis runs the other way: the liver must look like liver."""
    labels = LabelMap(DATA / "example_seg_dicom.nii.gz", {"liver": (5,)}, frozenset(range(1, 200)))
    case = Case("real", "real", "here", DATA / "example_ct_dicom", ("liver",), labels)
    volume = case.read_image()
    liver = case.read_masks(volume)["liver"]
    assert np.median(volume.voxels[liver]) == pytest.approx(93, abs=2)
    assert volume.spacing == pytest.approx((0.9765625, 0.9765625, 2.0))
