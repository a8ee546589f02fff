"""One file, looked at without stopping: what is wrong with it, and its voxels where they can be used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
from nibabel.spatialimages import HeaderDataError
from numpy.typing import NDArray

from panorgan.data.channels import read_image_of
from panorgan.data.volume import FINEST_MM, LONGEST_MM, Volume, grid_distance_mm, read_volume
from panorgan.data_doctor.codes import CODES, FINDING_OF
from panorgan.errors import DataError

NIFTI_ENDINGS = (".nii", ".nii.gz")
# No scan of a person is smaller as a whole; voxels of 12 mm written in metres would pass every other test.
_SMALLEST_EXTENT_MM = 10.0
# Body parts and voxels of everyday scans, to distinguish a header in other units from one that is broken.
_USUAL_VOXEL_MM = (0.05, 30.0)
_USUAL_EXTENT_MM = (10.0, 3000.0)


@dataclass(frozen=True)
class Problem:
    """Something wrong with a file, before it is known which case it belongs to."""

    code: str
    what: str
    why: str
    fix: str


def look(
    path: Path, repair: str, slices: Sequence[Path] = (), index: int | None = None
) -> tuple[Volume | None, list[Problem]]:
    """The volume (None where it cannot be used) and what is wrong; `repair` is the command that corrects headers.

    `slices` are the files of a DICOM series, as for `read_volume`; `index` is the image of a 4-D file that is meant.
    """
    try:
        volume = read_volume(path, slices) if index is None else read_image_of(path, index)
    except DataError as error:
        return None, [_refused(path, error, repair)]
    except OSError as error:  # a path that no system can have, such as one of 5000 letters
        fix = "Check the path, or remove the case."
        return None, [Problem("image-missing", "A scan file is missing.", f"{type(error).__name__}: {error}", fix)]
    if max(extent_mm(volume)) < _SMALLEST_EXTENT_MM:
        return None, [_too_small(volume, repair)]
    return volume, _oddities(path, volume, repair, index is not None) if is_nifti(path) else []


def is_nifti(path: Path) -> bool:
    """By its name; a folder is a DICOM series."""
    return path.name.endswith(NIFTI_ENDINGS) and not path.is_dir()


def extent_mm(volume: Volume) -> tuple[float, ...]:
    """Size of the whole scan along its axes."""
    return tuple(n * mm for n, mm in zip(volume.voxels.shape, volume.spacing, strict=True))


def unit_factor(affine: NDArray[np.float64], shape: tuple[int, ...]) -> float | None:
    """What brings a header in metres or micrometres to millimetres; None when that is not the obvious mistake."""
    spacing = np.sqrt((affine[:3, :3] ** 2).sum(axis=0))
    whole = (spacing * np.array(shape[:3])).max()
    if spacing.min() >= FINEST_MM and _SMALLEST_EXTENT_MM <= whole <= LONGEST_MM:
        return None
    fitting = []
    for factor in (1000.0, 0.001):
        voxel, extent = spacing * factor, spacing * factor * np.array(shape[:3])
        small, large = _USUAL_VOXEL_MM
        least, most = _USUAL_EXTENT_MM
        if small <= voxel.min() and voxel.max() <= large and least <= extent.max() <= most:
            fitting.append(factor)
    return fitting[0] if len(fitting) == 1 else None


def forms_apart_mm(image: Any) -> float:
    """How far qform and sform place the same voxel apart; 0 where not both are given, infinite for a broken qform."""
    if not image.header["qform_code"] or not image.header["sform_code"]:
        return 0.0
    try:
        qform, sform = image.get_qform(), image.get_sform()
    except (ValueError, HeaderDataError):  # nibabel's words for numbers that are no rotation
        return float("inf")
    voxels = np.empty(image.shape[:3], dtype=np.bool_)
    apart = grid_distance_mm(Volume(voxels, qform), Volume(voxels, sform))
    return apart if np.isfinite(apart) else float("inf")


def code_of(error: DataError, otherwise: str) -> str:
    """The kind of finding that an error is, where the doctor knows it."""
    code = FINDING_OF.get(error.code, error.code)
    return code if code in CODES else otherwise


def _refused(path: Path, error: DataError, repair: str) -> Problem:
    """Why `read_volume` refused the file, as a code."""
    code, fix = code_of(error, "file-unreadable"), error.fix
    if code == "implausible-spacing" and is_nifti(path):
        image: Any = nib.load(path)
        if unit_factor(image.affine, image.shape):
            fix = repair
    # A case may have a hundred files: the name of the one that is damaged must not be guessed.
    damaged = code == "file-unreadable" and path.is_file()  # a DICOM series is a folder, and its errors say more
    what = f"{path.name} cannot be read." if damaged else error.what
    return Problem(code, what, error.why, fix)


def _too_small(volume: Volume, repair: str) -> Problem:
    voxel, whole = (" × ".join(f"{mm:.4g}" for mm in sizes) for sizes in (volume.spacing, extent_mm(volume)))
    fixable = unit_factor(volume.affine, volume.voxels.shape)
    return Problem(
        "implausible-spacing",
        f"The voxel size of a scan cannot be right: {voxel} mm.",
        f"the scan would measure {whole} mm",
        repair if fixable else "Correct the spacing in its header: it must be in millimetres.",
    )


def _oddities(path: Path, volume: Volume, repair: str, stacked: bool) -> list[Problem]:
    """What a header says twice, or not at all."""
    image: Any = nib.load(path)
    found = []
    if len(image.shape) > 3 and not stacked:
        found.append(
            Problem(
                "singleton-axis", f"The file has a needless axis: {tuple(image.shape)}.", "it is read as 3D", repair
            )
        )
    if not hasattr(image, "get_sform"):
        return found
    apart = forms_apart_mm(image)
    if apart > max(0.1, 0.5 * min(volume.spacing)):
        found.append(
            Problem(
                "forms-disagree",
                f"qform and sform place the scan up to {apart:.3g} mm apart."
                if np.isfinite(apart)
                else "The header's qform is no rotation.",
                "panorgan and nibabel use the sform, other programs the qform",
                f"Check in a viewer that the sform is right, then: {repair}",
            )
        )
    if not image.header["qform_code"] and not image.header["sform_code"]:
        found.append(
            Problem(
                "no-orientation",
                "The header does not say how the scan lies in the body.",
                "qform and sform are both unset; programs guess differently, so left and right may be swapped",
                "Convert it again from DICOM with its orientation.",
            )
        )
    return found
