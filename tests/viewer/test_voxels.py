"""Volumes in slabs: the same voxels as nibabel reads, finer or coarser, and never a whole scan at once."""

from __future__ import annotations

import gzip
import io
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from refusing import refused

from panorgan.viewer import voxels
from panorgan.viewer.voxels import nifti_pieces, open_voxels, steps_for

AFFINE = np.array([[0, -1.5, 0, 20], [2.0, 0, 0, -30], [0, 0, 3, -40], [0, 0, 0, 1]])
SHAPE = (9, 8, 7)


def numbers(dtype: str) -> np.ndarray:
    return np.random.default_rng(3).integers(0, 100, SHAPE).astype(dtype)


def write(path: Path, content: np.ndarray, slope: float = 1, inter: float = 0) -> Path:
    image = nib.Nifti1Image(content, AFFINE)
    image.header.set_slope_inter(slope, inter)
    nib.save(image, path)
    return path


def sent(path: Path, most: int | None = None) -> nib.Nifti1Image:
    """What a browser would read."""
    file = open_voxels(path)
    content = b"".join(nifti_pieces(file, most))
    return nib.Nifti1Image.from_bytes(content)


@pytest.mark.parametrize("name", ["a.nii", "a.nii.gz", "a.hdr"])
@pytest.mark.parametrize("dtype", ["u1", "<i2", ">i2", "u2", "i4", "f4", "f8", "i8"])
def test_the_browser_gets_the_voxels_and_the_affine_that_nibabel_reads(tmp_path, name, dtype):
    image = nib.Nifti1Pair if name.endswith(".hdr") else nib.Nifti1Image
    original = image(numbers(dtype), AFFINE, dtype=np.dtype(dtype))
    nib.save(original, tmp_path / name)
    found = sent(tmp_path / name)
    assert np.array_equal(found.get_fdata(), numbers(dtype))
    assert np.array_equal(found.affine, AFFINE)
    assert found.get_data_dtype().str[1:] in ("u1", "i2", "u2", "f4")
    assert (int(found.header["sform_code"]), int(found.header["qform_code"])) == (1, 0), "one affine, no choice"


def test_the_scaling_of_the_header_is_kept(tmp_path):
    found = sent(write(tmp_path / "a.nii.gz", numbers("i2"), slope=0.5, inter=-1024))
    assert np.allclose(found.get_fdata(), nib.load(tmp_path / "a.nii.gz").get_fdata())
    assert found.get_fdata().min() < -900


def test_a_coarse_copy_holds_every_nth_voxel_where_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(voxels, "_SLAB", 200)  # two or three slices at once
    path = write(tmp_path / "a.nii.gz", numbers("i2"))
    file = open_voxels(path)
    for most in (500, 200, 60, 10, 1):
        x, y, z = steps_for(file.shape, file.spacing, most)
        found = sent(path, most)
        assert np.prod(found.shape) <= most
        assert np.array_equal(found.get_fdata(), numbers("i2")[::x, ::y, ::z])
        assert np.allclose(found.affine @ [1, 1, 1, 1], AFFINE @ [x, y, z, 1])
    assert np.array_equal(sent(path, 9 * 8 * 7).get_fdata(), numbers("i2"))


def test_coarse_copies_take_the_finest_axes_first():
    assert steps_for((512, 512, 100), (0.7, 0.7, 5.0), 14_000_000) == (2, 1, 1)
    assert steps_for((512, 512, 600), (0.75, 0.75, 1.0), 2_000_000) == (5, 5, 4)
    assert steps_for((3, 3, 1), (1.0, 1.0, 1.0), 1) == (3, 3, 1)


def test_slabs_are_small_however_large_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(voxels, "_SLAB", 300)
    file = open_voxels(write(tmp_path / "a.nii.gz", numbers("i2")))
    slabs = list(file.slabs())
    assert [first for first, _ in slabs] == [0, 2, 4, 6]
    assert max(slab.nbytes for _, slab in slabs) <= 300
    assert max(map(len, nifti_pieces(file))) <= 352


def test_gzip_files_of_several_parts_are_read(tmp_path):
    plain = write(tmp_path / "a.nii", numbers("i2")).read_bytes()
    (tmp_path / "b.nii.gz").write_bytes(gzip.compress(plain[:400]) + gzip.compress(plain[400:]))
    assert np.array_equal(sent(tmp_path / "b.nii.gz").get_fdata(), numbers("i2"))


def test_a_file_that_ends_early_or_is_damaged_is_refused(tmp_path):
    packed = write(tmp_path / "a.nii.gz", numbers("f8")).read_bytes()
    (tmp_path / "cut.nii.gz").write_bytes(packed[: len(packed) // 2])
    with refused("file-unreadable"):
        list(open_voxels(tmp_path / "cut.nii.gz").slabs())
    middle = len(packed) // 2
    (tmp_path / "odd.nii.gz").write_bytes(packed[:middle] + b"\xff\xff\xff\xff" + packed[middle + 4 :])
    with refused("file-unreadable"):
        list(open_voxels(tmp_path / "odd.nii.gz").slabs())


def test_what_is_no_plain_volume_is_left_to_others(tmp_path):
    write(tmp_path / "time.nii.gz", np.zeros((4, 4, 4, 3), np.int16))
    write(tmp_path / "flat.nii.gz", np.zeros((4, 4), np.int16))
    write(tmp_path / "complex.nii.gz", np.zeros((4, 4, 4), np.complex64))
    (tmp_path / "words.nii.gz").write_bytes(gzip.compress(b"no image"))
    (tmp_path / "words.txt").write_text("no image")
    for path in tmp_path.iterdir():
        assert open_voxels(path) is None, path
    assert open_voxels(tmp_path) is None
    assert open_voxels(write(tmp_path / "one.nii.gz", np.zeros((4, 4, 4, 1), np.int16))).shape == (4, 4, 4)


def test_values_that_are_no_numbers_do_not_reach_the_browser(tmp_path):
    content = numbers("f4")
    content[0, 0, 0], content[1, 0, 0] = np.nan, np.inf
    found = sent(write(tmp_path / "a.nii", content)).get_fdata()
    assert np.isfinite(found).all()
    assert np.array_equal(found[2:], content[2:])
    assert (
        io.BytesIO(b"".join(nifti_pieces(open_voxels(tmp_path / "a.nii")))).getbuffer().nbytes == 352 + content.nbytes
    )
