"""Reading and writing one scan: voxels, affine, and errors a person can act on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
from nibabel.arrayproxy import ArrayProxy
from numpy.typing import NDArray

from panorgan.data.formats import (
    ITK_ENDINGS,
    dicom_series_files,
    one_slice,
    read_dicom_files,
    read_dicom_series,
    read_itk_file,
)
from panorgan.data.scan_size import check_nifti_room
from panorgan.data.whole_gzip import whole_gzip
from panorgan.errors import DataError

# No scan has finer voxels or reaches farther: such a header is in other units than millimetres.
FINEST_MM = 0.01
LONGEST_MM = 5000.0
# How far axes may be from right angles. Resampling takes them for right ones.
_SHEAR_DEGREES = 0.1
_ARRAY = "the given array"


@dataclass(frozen=True)
class Volume:
    """A scan in memory: `voxels` [X, Y, Z] and the 4×4 affine from voxel indices to RAS millimetres.

    `voxels` is the first channel, which labels and pictures belong to; `more` are the others, on the same grid.
    """

    voxels: NDArray[Any]
    affine: NDArray[np.float64]
    more: tuple[NDArray[Any], ...] = ()

    @property
    def channels(self) -> tuple[NDArray[Any], ...]:
        """All channels, each [X, Y, Z]; of most scans there is one."""
        return (self.voxels, *self.more)

    @property
    def spacing(self) -> tuple[float, float, float]:
        """Voxel size in mm along the array axes."""
        x, y, z = np.sqrt((self.affine[:3, :3] ** 2).sum(axis=0))
        return float(x), float(y), float(z)


def read_scan(path: Path, slices: Sequence[Path] = ()) -> Volume:
    """Read an image, checked to be finite; `slices` as for `read_volume`."""
    return as_finite(read_volume(path, slices), path)


def scan_from_array(voxels: NDArray[Any], affine: NDArray[Any]) -> Volume:
    """A scan that is in memory already, held to what a file is held to."""
    affine = np.asarray(affine, dtype=np.float64)
    if affine.shape != (4, 4):
        raise DataError(
            "The affine of a scan must be a 4×4 matrix from voxel indices to RAS millimetres.",
            where=_ARRAY,
            why=f"its shape is {affine.shape}",
            fix="Pass the affine of the image, such as nibabel's image.affine.",
            code="bad-affine",
        )
    return as_finite(_checked(np.asarray(voxels), affine, _ARRAY), _ARRAY)


def scan_from_channels(channels: NDArray[Any], affine: NDArray[Any]) -> Volume:
    """The same for the channels of a scan, [C, X, Y, Z]."""
    first, *others = (scan_from_array(channel, affine) for channel in channels)
    return replace(first, more=tuple(other.voxels for other in others))


def as_finite(volume: Volume, where: Path | str) -> Volume:
    """The volume, or an error where it holds NaN or infinity."""
    if not np.isfinite(volume.voxels).all():
        raise DataError(
            "A scan holds values that are not finite numbers.",
            where=str(where),
            fix="Export it again, or replace NaN and infinity by the value of air (-1024 HU for CT).",
            code="not-finite",
        )
    return volume


def read_volume(path: Path, slices: Sequence[Path] = ()) -> Volume:
    """Read a scan with its scaling applied; refuse what is missing, damaged or not a 3D volume (or one flat slice).

    NIfTI, MetaImage and NRRD files, or a folder with one DICOM series. `slices` names the files of the series where
    the folder holds more than that.
    """
    return _checked(*_stored(path, slices), path)


def read_stack(path: Path) -> list[Volume]:
    """The images of a 4-D file, or the one of a 3-D file; refuses what `read_volume` refuses."""
    voxels, affine = _stored(path)
    if voxels.ndim != 4:
        return [_checked(voxels, affine, path)]
    return [_checked(np.ascontiguousarray(voxels[..., index]), affine, path) for index in range(voxels.shape[-1])]


def _stored(path: Path, slices: Sequence[Path] = ()) -> tuple[NDArray[Any], NDArray[np.float64]]:
    """Voxels and affine as a file has them."""
    if not path.exists():
        raise DataError(
            "A scan file is missing.",
            where=str(path),
            fix="Check the path, or remove the case from its folder.",
            code="image-missing",
        )
    try:
        return read_dicom_files(slices, path) if slices else _read_any(path)
    except DataError:
        raise
    except Exception as error:  # nibabel and ITK raise many kinds: gzip, zlib, EOF, header, OS errors
        raise DataError(
            "A scan file cannot be read.",
            where=str(path),
            why=f"{type(error).__name__}: {error}",
            fix="The file is damaged or of a kind that is not read. Copy it again from its source, or remove the case.",
            code="file-unreadable",
        ) from error


def source_files(path: Path) -> tuple[Path, ...]:
    """The files of the DICOM series in a folder; none for a scan in a file."""
    return dicom_series_files(path) if path.is_dir() else ()


def _checked(voxels: NDArray[Any], affine: NDArray[np.float64], path: Path | str) -> Volume:
    """A volume, or an error where it is not a 3D scan (or one flat slice) with a usable geometry."""
    if not (np.issubdtype(voxels.dtype, np.integer) or np.issubdtype(voxels.dtype, np.floating)):
        raise DataError(
            f"A scan must hold one real number per voxel, this one holds {voxels.dtype}.",
            where=str(path),
            fix="Export it again as a greyscale volume, not as colours or complex numbers.",
            code="not-greyscale",
        )
    while voxels.ndim > 3 and voxels.shape[-1] == 1:
        voxels = voxels[..., 0]
    if voxels.ndim == 2:
        voxels, affine = one_slice(voxels, affine)
    if voxels.ndim != 3:
        raise DataError(
            f"A scan must have three dimensions, this one has {voxels.ndim}: {voxels.shape}.",
            where=str(path),
            fix="Say which channels a file holds: 'channels' in the experiment file, and their names in dataset.json. "
            "Split a time series into one 3D file per case."
            if voxels.ndim > 3
            else "Export it again as a volume, or as one flat slice.",
            code="not-3d",
        )
    volume = Volume(voxels, affine)
    _check_geometry(volume, path)
    return volume


def _check_geometry(volume: Volume, path: Path | str) -> None:
    """Refuse what would fail, or fill the memory, much later."""
    shape, affine = volume.voxels.shape, volume.affine
    if 0 in shape:
        raise DataError(f"A scan holds no voxels: {shape}.", where=str(path), fix="Export it again.", code="no-voxels")
    # Relative to the voxel's size, so that tiny voxels are not mistaken for flat ones.
    flat = np.isfinite(affine).all() and abs(np.linalg.det(affine[:3, :3])) <= 1e-6 * np.prod(volume.spacing)
    if flat or not np.isfinite(affine).all():
        raise DataError(
            "A scan has no usable geometry.",
            where=str(path),
            why="its affine is singular or not finite",
            fix="Export the scan again with its spacing and orientation.",
            code="bad-affine",
        )
    off = _off_right_angles(affine)
    if off > _SHEAR_DEGREES:
        raise DataError(
            f"The axes of a scan are sheared: they are {off:.2g}° off right angles.",
            where=str(path),
            why="its affine is no straight grid, as after a tilted gantry or a registration that was saved as a header",
            fix="Resample it to a straight grid (3D Slicer: 'Resample Scalar/Vector/DWI Volume'), its label likewise.",
            code="sheared",
        )
    extent = [n * mm for n, mm in zip(shape, volume.spacing, strict=True)]
    if min(volume.spacing) < FINEST_MM or max(extent) > LONGEST_MM:
        voxel, whole = (" × ".join(f"{mm:.4g}" for mm in sizes) for sizes in (volume.spacing, extent))
        raise DataError(
            f"The voxel size of a scan cannot be right: {voxel} mm.",
            where=str(path),
            why=f"the scan would measure {whole} mm",
            fix="Correct the spacing in its header: it must be in millimetres.",
            code="implausible-spacing",
        )


def _off_right_angles(affine: NDArray[np.float64]) -> float:
    """How many degrees the worst pair of axes is off 90°."""
    axes = affine[:3, :3] / np.linalg.norm(affine[:3, :3], axis=0)
    cosines = np.abs(axes.T @ axes)[np.triu_indices(3, 1)]
    return float(np.degrees(np.arcsin(min(1.0, cosines.max()))))


def _read_any(path: Path) -> tuple[NDArray[Any], NDArray[np.float64]]:
    """Voxels and affine, by the kind of file."""
    if path.is_dir():
        return read_dicom_series(path)
    if path.name.endswith(ITK_ENDINGS):
        return read_itk_file(path)
    check_nifti_room(path)
    with whole_gzip(nib.load(path), path) as image:
        return _scaled(image.dataobj), np.asarray(image.affine, dtype=np.float64)


def _scaled(stored: Any) -> NDArray[Any]:
    """Voxels with the header's scaling, as float32: nibabel would make them float64, twice what a scan needs."""
    if not isinstance(stored, ArrayProxy) or (stored.slope, stored.inter) == (1, 0):
        voxels: NDArray[Any] = np.asanyarray(stored)
        return voxels
    unscaled: NDArray[Any] = stored.get_unscaled()
    if unscaled.dtype.kind not in "iuf":
        return unscaled
    with np.errstate(over="ignore"):  # infinity is refused where it matters
        voxels = unscaled.astype(np.float32)
        voxels *= np.float32(stored.slope)
        voxels += np.float32(stored.inter)
    return voxels


def turned_like(volume: Volume, other: Volume) -> Volume:
    """The same voxels with their axes flipped and swapped to run as the other's do; nothing is interpolated."""
    wanted = nib.orientations.io_orientation(other.affine)
    turn = nib.orientations.ornt_transform(nib.orientations.io_orientation(volume.affine), wanted)
    voxels = nib.orientations.apply_orientation(volume.voxels, turn)
    back = nib.orientations.inv_ornt_aff(turn, volume.voxels.shape)
    return Volume(voxels, volume.affine @ back)


def on_grid(label: Volume, image: Volume) -> Volume | None:
    """The label's voxels in the order of the image's, or None when they are other voxels of the world."""
    if same_grid(label, image):
        return label
    turned = turned_like(label, image)
    return turned if same_grid(turned, image) else None


def write_labels(path: Path, voxels: NDArray[Any], affine: NDArray[np.float64]) -> None:
    """Write an integer label map as NIfTI on the given grid."""
    image = nib.Nifti1Image(voxels.astype(np.uint8 if voxels.max(initial=0) < 256 else np.int16), affine)
    image.header.set_xyzt_units("mm")
    nib.save(image, path)


def same_grid(first: Volume, second: Volume, tolerance_mm: float = 1e-2) -> bool:
    """Whether two volumes share shape and affine, corner by corner, within a hundredth of a millimetre."""
    if first.voxels.shape != second.voxels.shape:
        return False
    return grid_distance_mm(first, second) <= tolerance_mm


def grid_distance_mm(first: Volume, second: Volume) -> float:
    """How far apart the corners of two volumes of one shape lie at most, along an axis of the body."""
    # All eight: swapped axes of a cube agree in the first and the last corner.
    corners = np.array([[*corner, 1.0] for corner in itertools.product(*((0, n) for n in first.voxels.shape))])
    shift = corners @ (first.affine - second.affine).T
    return float(np.abs(shift).max())
