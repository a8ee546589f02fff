"""NIfTI files read front to back in slabs: a scan of half a gigabyte takes a few megabytes of memory."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import nibabel as nib
import numpy as np
from nibabel.arrayproxy import ArrayProxy
from numpy.typing import NDArray

from panorgan.data.scan_size import check_nifti_room
from panorgan.errors import DataError

_SLAB = 1 << 20
_PIECE = 1 << 20
_GZIP = 31  # zlib's word for a gzip header; it checks the checksum at the end
_HEADER = 352
# What the browser's viewer reads without a copy in another type; everything else becomes float32.
_KEPT = ("u1", "i2", "u2", "f4")

Change = Callable[[NDArray[Any]], NDArray[Any]]


@dataclass(frozen=True)
class VoxelFile:
    """A volume in a NIfTI file: what its header says, and its voxels [X, Y, Z] slab by slab."""

    path: Path
    shape: tuple[int, int, int]
    dtype: np.dtype[Any]
    slope: float
    inter: float
    affine: NDArray[np.float64]
    offset: int

    @property
    def spacing(self) -> tuple[float, float, float]:
        """Voxel size in mm along the array axes."""
        x, y, z = np.sqrt((self.affine[:3, :3] ** 2).sum(axis=0))
        return float(x), float(y), float(z)

    @property
    def voxels(self) -> int:
        """How many there are."""
        return int(np.prod(self.shape))

    @property
    def voxel_ml(self) -> float:
        """The volume of one voxel."""
        return float(abs(np.linalg.det(self.affine[:3, :3]))) / 1000

    def slabs(self) -> Iterator[tuple[int, NDArray[Any]]]:
        """First slice, and stored values [X, Y, slices] without the header's scaling."""
        slice_bytes = self.shape[0] * self.shape[1] * self.dtype.itemsize
        at_once = max(1, _SLAB // slice_bytes)
        with self.path.open("rb") as file:
            source: Any = _Unpacked(file) if self.path.name.endswith(".gz") else file
            _skip(source, self.offset)
            for first in range(0, self.shape[2], at_once):
                count = min(at_once, self.shape[2] - first)
                content = source.read(count * slice_bytes)
                if len(content) < count * slice_bytes:
                    raise _cut(self.path)
                flat = np.frombuffer(content, self.dtype)
                yield first, flat.reshape((*self.shape[:2], count), order="F")
            if isinstance(source, _Unpacked):  # the checksum of the voxels stands at the end of the file
                _skip(source, sys.maxsize)


def open_voxels(path: Path) -> VoxelFile | None:
    """A NIfTI file that can be read in slabs; None for another kind of file, or another form of volume."""
    if path.is_dir() or not path.name.removesuffix(".gz").endswith((".nii", ".img", ".hdr")):
        return None
    try:
        check_nifti_room(path)
        image: Any = nib.load(path)
        stored, affine = image.dataobj, np.asarray(image.affine, dtype=np.float64)
    except DataError:
        raise
    except Exception:  # a damaged header: whoever reads the whole file says what is wrong
        return None
    shape = tuple(int(n) for n in image.shape)
    while len(shape) > 3 and shape[-1] == 1:
        shape = shape[:-1]
    if not isinstance(stored, ArrayProxy) or len(shape) != 3 or 0 in shape or stored.dtype.kind not in "iuf":
        return None
    if not np.isfinite(affine).all() or abs(np.linalg.det(affine[:3, :3])) == 0:
        return None
    slope, inter = float(stored.slope), float(stored.inter)
    file = Path(image.file_map["image"].filename)
    return VoxelFile(file, (shape[0], shape[1], shape[2]), stored.dtype, slope, inter, affine, int(stored.offset))


def steps_for(shape: tuple[int, int, int], spacing: tuple[float, float, float], most: int) -> tuple[int, int, int]:
    """Every how-many-th voxel to take along each axis, so that at most so many are left; finest axes first."""
    steps = [1, 1, 1]
    while np.prod([-(-n // step) for n, step in zip(shape, steps, strict=True)]) > most:
        sizes = [mm * step if n > step else np.inf for n, mm, step in zip(shape, spacing, steps, strict=True)]
        if not np.isfinite(min(sizes)):
            break
        steps[int(np.argmin(sizes))] += 1
    return steps[0], steps[1], steps[2]


def nifti_pieces(file: VoxelFile, most: int | None = None, change: Change | None = None) -> Iterator[bytes]:
    """The volume as an uncompressed NIfTI file, piece by piece; with `most`, coarser where it has more voxels.

    `change` turns stored values into those that are sent, as uint8 without scaling (labels).
    """
    steps = steps_for(file.shape, file.spacing, most) if most else (1, 1, 1)
    kept = file.dtype.str[1:] in _KEPT
    dtype = np.dtype("u1") if change else np.dtype(f"<{file.dtype.str[1:]}" if kept else "<f4")
    yield _header(file, steps, dtype, scaled=change is None)
    x, y, z = steps
    for first, slab in file.slabs():
        taken = slab[::x, ::y, (-first) % z :: z]
        if taken.size:
            sent = (change(taken) if change else taken).astype(dtype, copy=False)
            if dtype.kind == "f":
                sent = np.nan_to_num(sent, posinf=0.0, neginf=0.0)
            yield sent.tobytes(order="F")


def _header(file: VoxelFile, steps: tuple[int, int, int], dtype: np.dtype[Any], scaled: bool) -> bytes:
    """A header with one affine, the one that panorgan works with: others would let the browser choose."""
    header = nib.Nifti1Header()
    header.set_data_shape([-(-n // step) for n, step in zip(file.shape, steps, strict=True)])
    header.set_data_dtype(dtype)
    header.set_xyzt_units("mm")
    coarser = file.affine @ np.diag([*steps, 1.0])
    header.set_sform(coarser, code=1)
    header["pixdim"][1:4] = np.sqrt((coarser[:3, :3] ** 2).sum(axis=0))
    header["magic"], header["vox_offset"] = b"n+1", _HEADER
    header["scl_slope"], header["scl_inter"] = (file.slope, file.inter) if scaled else (1.0, 0.0)
    return bytes(header.binaryblock) + bytes(_HEADER - len(header.binaryblock))


class _Unpacked:
    """The content of a gzip file. The standard library's reader takes 8 kB at a time, and half as long again."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._zlib = file, zlib.decompressobj(_GZIP)
        self._packed = b""

    def read(self, count: int) -> bytes:
        """So many bytes, or what is left of the file."""
        content = bytearray()
        while len(content) < count:
            if self._zlib.eof:  # a file may be several, one behind the other
                self._packed, self._zlib = self._zlib.unused_data, zlib.decompressobj(_GZIP)
            packed = self._packed or self._file.read(_PIECE)
            if not packed:
                break
            try:
                content += self._zlib.decompress(packed, count - len(content))
            except zlib.error:
                raise _cut(Path(self._file.name)) from None
            self._packed = self._zlib.unconsumed_tail
        return bytes(content)


def _skip(source: Any, count: int) -> None:
    while count > 0 and (skipped := len(source.read(min(count, _PIECE)))):
        count -= skipped


def _cut(path: Path) -> DataError:
    return DataError(
        "A scan file cannot be read.",
        where=str(path),
        why="it ends early or is damaged",
        fix="Copy it again from its source, or remove the case.",
        code="file-unreadable",
    )
