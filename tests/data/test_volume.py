"""Reading and writing one scan."""

from __future__ import annotations

from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from refusing import refused

from panorgan.data.volume import Volume, grid_distance_mm, read_scan, read_volume, same_grid, write_labels
from panorgan.errors import DataError, PanorganError


def error_of(code: str, path: Path) -> PanorganError:
    with refused(code, DataError) as caught:
        read_volume(path)
    assert caught.value.where == str(path)
    assert caught.value.fix
    return caught.value


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    error_of("image-missing", tmp_path / "nowhere.nii.gz")


def test_a_folder_without_slices_is_not_a_scan(tmp_path: Path) -> None:
    error_of("no-dicom-series", tmp_path)


def test_a_truncated_gzip_is_refused(write_scan) -> None:
    noise = np.random.default_rng(0).normal(size=(20, 20, 20))
    path = write_scan("scan.nii.gz", noise)
    path.write_bytes(path.read_bytes()[:-5000])
    assert error_of("file-unreadable", path).why


def test_a_gzip_whose_checksum_differs_is_refused(write_scan) -> None:
    """nibabel itself stops at the last voxel, before the checksum."""
    path = write_scan("scan.nii.gz", np.random.default_rng(0).normal(size=(9, 8, 7)).astype(np.float32))
    content = bytearray(path.read_bytes())
    content[-6] ^= 1
    path.write_bytes(content)
    with refused("file-unreadable") as caught:
        read_volume(path)
    assert "CRC" in caught.value.why


def test_bytes_behind_the_end_of_a_gzip_do_no_harm(write_scan) -> None:
    path = write_scan("scan.nii.gz", np.random.default_rng(0).normal(size=(30, 4, 50)).astype(np.float32))
    path.write_bytes(path.read_bytes() + b"something else")
    assert read_volume(path).voxels.shape == (30, 4, 50)


def test_a_text_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "scan.nii"
    path.write_text("this is no scan")
    error_of("file-unreadable", path)


@pytest.mark.parametrize("shape", [(4, 5, 6, 2), (4,), (4, 5, 6, 1, 3)])
def test_only_three_dimensions_are_accepted(write_scan, shape) -> None:
    error = error_of("not-3d", write_scan("scan.nii", np.zeros(shape, dtype=np.int16)))
    assert str(shape) in error.what


def test_a_scan_without_voxels_is_refused(write_scan) -> None:
    error = error_of("no-voxels", write_scan("scan.nii", np.zeros((4, 0, 6), dtype=np.int16)))
    assert "(4, 0, 6)" in error.what


@pytest.mark.parametrize("shape", [(4, 5), (4, 5, 1)])
def test_a_flat_nifti_is_one_slice(write_scan, shape) -> None:
    voxels = np.arange(20, dtype=np.int16).reshape(shape)
    affine = np.array([[0, 2.0, 0, 7], [3.0, 0, 0, 8], [0, 0, 5.0, 9], [0, 0, 0, 1]])
    volume = read_volume(write_scan("scan.nii.gz", voxels, affine))
    np.testing.assert_array_equal(volume.voxels, voxels.reshape(4, 5, 1))
    np.testing.assert_allclose(volume.affine, affine)


def test_a_flat_nifti_without_a_thickness_gets_one_millimetre(write_scan) -> None:
    path = write_scan("scan.nii", np.zeros((4, 5), dtype=np.int16), np.diag([2.0, 3.0, 1.0, 1.0]))
    content = bytearray(path.read_bytes())
    content[312:328] = bytes(16)  # the third row of the header's affine, as flat pictures have it in some programs
    path.write_bytes(content)
    assert read_volume(path).spacing == (2.0, 3.0, 1.0)


@pytest.mark.parametrize("shape", [(4, 5, 6), (4, 5, 6, 1), (4, 5, 6, 1, 1), (4, 5, 1)])
def test_trailing_singleton_axes_after_the_third_are_dropped(write_scan, shape) -> None:
    voxels = np.arange(np.prod(shape), dtype=np.int16).reshape(shape)
    read = read_volume(write_scan("scan.nii", voxels)).voxels
    assert read.shape == shape[:3]
    np.testing.assert_array_equal(read.ravel(), voxels.ravel())


@pytest.mark.parametrize("affine", [np.diag([1.0, 1.0, 0.0, 1.0]), np.diag([1.0, np.nan, 1.0, 1.0])])
def test_an_affine_that_is_not_a_geometry_is_refused(tmp_path: Path, affine) -> None:
    header = nib.Nifti1Header()
    header.set_data_shape((3, 3, 3))
    header.set_sform(affine, code=1)
    path = tmp_path / "scan.nii"
    nib.save(nib.Nifti1Image(np.zeros((3, 3, 3), dtype=np.float32), None, header), path)
    error_of("bad-affine", path)


@pytest.mark.parametrize("dtype", [[("R", "u1"), ("G", "u1"), ("B", "u1")], np.complex64])
def test_colours_and_complex_numbers_are_refused(write_scan, dtype) -> None:
    error_of("not-greyscale", write_scan("scan.nii", np.zeros((3, 3, 3), dtype=dtype)))


def test_the_files_scaling_is_applied(tmp_path: Path) -> None:
    image = nib.Nifti1Image(np.array([[[0, 2049, 2108]]], dtype=np.int16), np.eye(4))
    image.header.set_slope_inter(0.5, -1024)
    nib.save(image, tmp_path / "scan.nii")
    assert read_volume(tmp_path / "scan.nii").voxels.ravel().tolist() == [-1024.0, 0.5, 30.0]


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint16, np.int32, np.float32, np.float64])
def test_a_scaled_scan_is_never_kept_in_double_precision(tmp_path: Path, dtype) -> None:
    image = nib.Nifti1Image(np.array([[[0, 3, 200]]], dtype=dtype), np.eye(4))
    image.header.set_slope_inter(0.5, -1024)
    nib.save(image, tmp_path / "scan.nii.gz")
    voxels = read_volume(tmp_path / "scan.nii.gz").voxels
    assert voxels.dtype == np.float32
    assert voxels.ravel().tolist() == [-1024.0, -1022.5, -924.0]


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32])
def test_whole_numbers_without_a_scaling_stay_as_they_are(write_scan, dtype) -> None:
    assert read_volume(write_scan("scan.nii.gz", np.ones((2, 2, 2), dtype=dtype))).voxels.dtype == dtype


def sheared(degrees: float) -> np.ndarray:
    """Axes of 1, 2 and 3 mm, the third turned towards the second."""
    affine = np.diag([1.0, 2.0, 3.0, 1.0])
    affine[1:3, 2] = 3 * np.sin(np.radians(degrees)), 3 * np.cos(np.radians(degrees))
    return affine


@pytest.mark.parametrize("degrees", [0.12, -5.0, 20.0])
def test_a_sheared_scan_is_refused(write_scan, degrees) -> None:
    error = error_of("sheared", write_scan("scan.nii", np.zeros((3, 3, 3), dtype=np.int16), sheared(degrees)))
    assert f"{abs(degrees):.2g}°" in error.what


def test_a_shear_of_rounding_is_none(write_scan) -> None:
    path = write_scan("scan.nii", np.zeros((3, 3, 3), dtype=np.int16), sheared(0.08))
    assert read_volume(path).spacing == pytest.approx((1, 2, 3))


def test_spacing_of_an_oblique_scan() -> None:
    c, s = np.cos(0.3), np.sin(0.3)
    affine = np.eye(4)
    affine[:3, :3] = np.array([[c, -s, 0], [s, c, 0], [0, 0, 1]]) @ np.diag([2.0, 3.0, 4.0])
    assert Volume(np.zeros((2, 2, 2)), affine).spacing == pytest.approx((2, 3, 4))


def shifted(mm: float) -> np.ndarray:
    affine = np.eye(4)
    affine[1, 3] = mm
    return affine


SWAPPED_AXES = np.eye(4)[[1, 0, 2, 3]]
THIRD_OF_A_TURN_ABOUT_THE_DIAGONAL = np.eye(4)[[2, 0, 1, 3]]


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (np.eye(4), True),
        (shifted(0.009), True),
        (shifted(0.011), False),
        (np.diag([1.0004, 1, 1, 1]), True),  # 20 voxels × 0.0004 mm = 0.008 mm at the far face
        (np.diag([1.0006, 1, 1, 1]), False),  # 0.012 mm
        (SWAPPED_AXES, False),  # maps the first and the last corner of a cube to themselves
        (THIRD_OF_A_TURN_ABOUT_THE_DIAGONAL, False),
        (np.diag([1, 1, -1.0, 1]), False),
    ],
)
def test_same_grid_compares_corners(other, same) -> None:
    voxels = np.zeros((20, 20, 20))
    assert same_grid(Volume(voxels, np.eye(4)), Volume(voxels, other)) is same
    assert same_grid(Volume(voxels, other), Volume(voxels, np.eye(4))) is same


def test_same_grid_needs_the_same_shape() -> None:
    assert not same_grid(Volume(np.zeros((2, 3, 4)), np.eye(4)), Volume(np.zeros((2, 4, 3)), np.eye(4)))


@pytest.mark.parametrize(("largest", "dtype"), [(0, np.uint8), (255, np.uint8), (256, np.int16)])
def test_written_labels_come_back(tmp_path: Path, largest: int, dtype) -> None:
    affine = np.array([[0, -2.0, 0, 10], [1.5, 0, 0, -20], [0, 0, 3, 5], [0, 0, 0, 1]])
    labels = np.zeros((3, 4, 5), dtype=np.int64)
    labels[1, 2, 3] = largest
    write_labels(tmp_path / "labels.nii.gz", labels, affine)
    read = read_volume(tmp_path / "labels.nii.gz")
    np.testing.assert_array_equal(read.voxels, labels)
    np.testing.assert_allclose(read.affine, affine, atol=1e-6)
    header = nib.load(tmp_path / "labels.nii.gz").header
    assert header.get_data_dtype() == dtype
    assert header.get_xyzt_units()[0] == "mm"


@pytest.mark.parametrize("spacing", [0.001, 2500.0])
def test_a_voxel_size_in_other_units_is_refused(write_scan, spacing) -> None:
    """Metres or micrometres in the header would ask for a grid of billions of voxels."""
    path = write_scan("scan.nii", np.zeros((3, 3, 3), dtype=np.int16), np.diag([spacing] * 3 + [1.0]))
    assert f"{spacing:g}" in error_of("implausible-spacing", path).what


def test_a_scan_must_be_finite_and_one_row_is_no_scan(write_scan) -> None:
    voxels = np.zeros((2, 2, 2), dtype=np.float32)
    voxels[0, 0, 0] = np.nan
    with refused("not-finite"):
        read_scan(write_scan("scan.nii", voxels))
    error_of("not-3d", write_scan("row.nii", np.zeros(4, dtype=np.int16)))


def test_the_distance_of_two_grids_is_that_of_their_farthest_corners() -> None:
    voxels = np.zeros((10, 10, 10))
    wider = np.diag([1.5, 1.0, 1.0, 1.0])
    assert grid_distance_mm(Volume(voxels, np.eye(4)), Volume(voxels, wider)) == pytest.approx(5.0)
