"""Scans whose header claims more than the memory holds are refused before anything of that size is read."""

from __future__ import annotations

import gzip
import struct
import tracemalloc
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk  # noqa: N813
from dicom_files import write_series
from refusing import refused

from panorgan.data import scan_size
from panorgan.data.volume import read_volume
from panorgan.errors import DataError, PanorganError

ROOM = 1_000_000


@pytest.fixture
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One megabyte is free."""
    monkeypatch.setattr(scan_size, "free_memory", lambda: float(ROOM))


def too_large(path: Path) -> PanorganError:
    tracemalloc.start()
    try:
        with refused("too-large", DataError) as caught:
            read_volume(path)
        assert tracemalloc.get_traced_memory()[1] < 20_000_000, "something large was read"
    finally:
        tracemalloc.stop()
    assert caught.value.where == str(path)
    return caught.value


def giant(path: Path, shape: tuple[int, int, int], kind: type = nib.Nifti1Image, order: str = "<") -> Path:
    """A small file whose header claims more."""
    header = kind.header_class(endianness=order)
    header.set_data_dtype(np.int16)
    header.set_data_shape(shape)
    header["vox_offset"] = 352 if kind is nib.Nifti1Image else 544
    content = header.binaryblock + bytes(4) + bytes(1000)
    path.write_bytes(gzip.compress(content) if path.name.endswith(".gz") else content)
    return path


@pytest.mark.parametrize("name", ["scan.nii.gz", "scan.nii"])
@pytest.mark.parametrize("kind", [nib.Nifti1Image, nib.Nifti2Image])
@pytest.mark.parametrize("order", ["<", ">"])
def test_nifti_of_eight_terabytes(name, kind, order, tmp_path):
    """On any machine, without help of the test."""
    error = too_large(giant(tmp_path / name, (20000, 20000, 10000), kind, order))
    assert "20000 × 20000 × 10000" in error.why
    assert "8 TB" in error.why
    assert error.fix


def test_bomb_that_unpacks_to_what_it_claims(tmp_path, small_machine):
    """50 MB of zeros in 50 kB: nothing is wrong with the file but its size."""
    whole = nib.Nifti1Image(np.zeros((500, 500, 100), np.int16), np.eye(4)).to_bytes()
    (tmp_path / "bomb.nii.gz").write_bytes(gzip.compress(whole))
    assert (tmp_path / "bomb.nii.gz").stat().st_size < 100_000
    too_large(tmp_path / "bomb.nii.gz")


def test_what_lies_behind_the_voxels_is_not_unpacked(tmp_path):
    scan = nib.Nifti1Image(np.ones((4, 5, 6), np.int16), np.eye(4)).to_bytes()
    (tmp_path / "trailing.nii.gz").write_bytes(gzip.compress(scan + bytes(100_000_000)))
    tracemalloc.start()
    try:
        assert read_volume(tmp_path / "trailing.nii.gz").voxels.shape == (4, 5, 6)
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()


def test_voxels_that_begin_beyond_all_reason_are_refused(tmp_path):
    path = giant(tmp_path / "far.nii", (4, 4, 4))
    content = bytearray(path.read_bytes())
    content[108:112] = struct.pack("<f", 3e12)
    path.write_bytes(bytes(content))
    with refused("file-unreadable") as caught:
        read_volume(path)
    assert "3 TB" in caught.value.why


def test_a_scaled_scan_needs_room_for_floats_too(tmp_path, small_machine):
    """300,000 voxels of 2 bytes fit into a megabyte; as floats besides, they do not."""
    image = nib.Nifti1Image(np.ones((100, 100, 30), np.int16), np.eye(4))
    nib.save(image, tmp_path / "plain.nii.gz")
    assert read_volume(tmp_path / "plain.nii.gz").voxels.shape == (100, 100, 30)
    image.header.set_slope_inter(2.0, -1024.0)
    nib.save(image, tmp_path / "scaled.nii.gz")
    too_large(tmp_path / "scaled.nii.gz")


@pytest.mark.parametrize("ending", [".mha", ".nrrd"])
def test_metaimage_and_nrrd(ending, tmp_path, small_machine):
    path = tmp_path / f"scan{ending}"
    sitk.WriteImage(sitk.Image([200, 200, 50], sitk.sitkInt16), str(path), useCompression=True)
    assert path.stat().st_size < 100_000
    error = too_large(path)
    assert "200 × 200 × 50" in error.why
    sitk.WriteImage(sitk.Image([50, 50, 50], sitk.sitkInt16), str(path), useCompression=True)
    assert read_volume(path).voxels.shape == (50, 50, 50)


def test_dicom_series(tmp_path, monkeypatch):
    write_series(tmp_path / "series", np.zeros((12, 10, 6), np.int16))
    shape = read_volume(tmp_path / "series").voxels.shape
    monkeypatch.setattr(scan_size, "free_memory", lambda: 8.0 * np.prod(shape) - 1)
    error = too_large(tmp_path / "series")
    assert " × ".join(map(str, shape)) in error.why
    monkeypatch.setattr(scan_size, "free_memory", lambda: 8.0 * np.prod(shape))
    read_volume(tmp_path / "series")


def test_where_the_system_does_not_tell_everything_fits(tmp_path, monkeypatch):
    monkeypatch.setattr(scan_size, "free_memory", lambda: None)
    with refused("file-unreadable"):  # cut off, as its reader finds
        read_volume(giant(tmp_path / "scan.nii.gz", (200, 200, 100)))
