"""Scans that are not NIfTI: DICOM series, MetaImage and NRRD, read by SimpleITK and brought to RAS millimetres."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from panorgan.errors import DataError

ITK_ENDINGS = (".mha", ".mhd", ".nrrd")

# ITK's and DICOM's world runs to the patient's left and back, NIfTI's to the right and front.
LPS_TO_RAS = np.diag([-1.0, -1.0, 1.0, 1.0])
# Slice positions are written with few digits; a missing slice is off by a whole spacing.
SLICE_TOLERANCE = 0.1

Scan = tuple[NDArray[Any], NDArray[np.float64]]


def read_itk_file(path: Path) -> Scan:
    """Voxels [X, Y, Z] and affine of a MetaImage or NRRD file; a flat picture is one slice."""
    import SimpleITK as sitk  # noqa: N813 - its own documentation's name

    return _from_itk(sitk.ReadImage(str(path)))


def read_dicom_series(folder: Path) -> Scan:
    """Voxels and affine of the one series in a folder; see `read_dicom_files`."""
    import SimpleITK as sitk  # noqa: N813

    reader = sitk.ImageSeriesReader
    series = reader.GetGDCMSeriesIDs(str(folder))
    if not series:
        raise DataError(
            "A folder holds no DICOM series.",
            where=str(folder),
            fix="Point to the folder with the slices of one series.",
        )
    if len(series) > 1:
        raise DataError(
            f"A folder holds {len(series)} DICOM series.",
            where=str(folder),
            why="it is not clear which of them the labels belong to",
            fix="Give every series its own folder, or read the whole tree with 'layout: dicom'.",
        )
    return read_dicom_files([Path(name) for name in reader.GetGDCMSeriesFileNames(str(folder), series[0])], folder)


def read_dicom_files(files: Sequence[Path], where: Path) -> Scan:
    """Voxels (rescaled slice by slice, so HU for CT) and affine of the files of one series, in whatever order.

    Refuses a tilted gantry, slices that are missing or doubled, and slices that do not fit together.
    """
    import SimpleITK as sitk  # noqa: N813

    slices = [_read_header(path) for path in files]
    if len(slices) == 1 and slices[0].frames > 1:
        return _read_frames(files[0])
    slices = _stacked(slices, where)
    reader = sitk.ImageSeriesReader()
    reader.SetFileNames([str(one.path) for one in slices])
    if len({one.values for one in slices}) > 1:
        # ITK keeps all slices in the first one's kind of number, which may not hold what the others' rescale gives.
        reader.SetOutputPixelType(sitk.sitkFloat32)
    return _from_itk(reader.Execute())


@dataclass(frozen=True)
class _Slice:
    """What one file's header says: its place, the shape of its pixels, and how stored values become real ones."""

    path: Path
    frames: int
    position: tuple[float, ...]
    orientation: tuple[float, ...]
    pixels: tuple[float, ...]
    values: tuple[str, ...]


def _read_header(path: Path) -> _Slice:
    import SimpleITK as sitk  # noqa: N813

    reader = sitk.ImageFileReader()
    reader.SetFileName(str(path))
    reader.ReadImageInformation()

    def text(tag: str) -> str:
        return str(reader.GetMetaData(tag)).strip() if reader.HasMetaDataKey(tag) else ""

    def numbers(tag: str) -> tuple[float, ...]:
        return tuple(float(part) for part in text(tag).split("\\") if part.strip())

    size = reader.GetSize()
    frames = size[2] if len(size) > 2 else 1
    position, orientation = numbers("0020|0032"), numbers("0020|0037")
    if frames == 1 and (len(position), len(orientation)) != (3, 6):
        raise DataError(
            "A DICOM slice does not say where it lies.",
            where=str(path),
            why="it has no ImagePositionPatient or ImageOrientationPatient",
            fix="Export the series again from its source, or move a file that is no slice out of the folder.",
        )
    # Slope, intercept, stored bits and sign.
    values = tuple(text(tag) for tag in ("0028|1053", "0028|1052", "0028|0101", "0028|0103"))
    return _Slice(path, frames, position, orientation, (*size[:2], *numbers("0028|0030")), values)


def _stacked(slices: Sequence[_Slice], where: Path) -> list[_Slice]:
    """Slices sorted along their common normal; they must be stacked straight, at equal distances."""
    first = slices[0]
    if any(one.frames > 1 for one in slices):
        raise DataError(
            "A DICOM series consists of several multi-frame files.",
            where=str(where),
            fix="Convert it to NIfTI (for example with dcm2niix), one file per case.",
        )
    if len(slices) < 2:
        return list(slices)
    alike = all(np.allclose(one.orientation, first.orientation, atol=1e-3) for one in slices)
    if not alike or len({one.pixels for one in slices}) > 1:
        raise DataError(
            "The slices of a DICOM series do not lie parallel."
            if not alike
            else "The slices of a DICOM series differ.",
            where=str(where),
            why="" if alike else "their rows and columns run in different directions",
            fix="Export the series again, without localisers or other views in it.",
        )
    normal = np.cross(first.orientation[:3], first.orientation[3:])
    slices = sorted(slices, key=lambda one: float(np.dot(one.position, normal)))
    steps = np.diff(np.array([one.position for one in slices]), axis=0)
    heights = steps @ normal
    _check_steps(heights, float(np.abs(steps - heights[:, None] * normal).max()), where)
    return slices


def _check_steps(heights: NDArray[np.float64], sideways: float, where: Path) -> None:
    """Distances from slice to slice along the normal, and the largest one across it."""
    spacing = float(np.median(heights))
    if sideways > max(0.01, 1e-3 * spacing):
        raise DataError(
            "A DICOM series was taken with a tilted gantry.",
            where=str(where),
            why=f"neighbouring slices are shifted sideways by {sideways:.2f} mm",
            fix="Correct the tilt when exporting (most viewers offer it), then use the corrected series.",
        )
    uneven = np.flatnonzero(np.abs(heights - spacing) > SLICE_TOLERANCE * max(spacing, 1e-6))
    if spacing < 1e-6 or len(uneven):
        place = int(uneven[0]) if len(uneven) else 0
        doubled = int((heights < 1e-3).sum())
        why = f"slices lie {spacing:.2f} mm apart, but {float(heights[place]):.2f} mm after slice {place + 1}"
        again = f"{doubled} slices lie where another one does: copies, or several times, phases or echoes in one series"
        raise DataError(
            "A DICOM series has missing or doubled slices.",
            where=str(where),
            why=again if doubled else why,
            fix="Copy the whole series again from its source, each slice once; export one series per time or echo.",
        )


def _read_frames(path: Path) -> Scan:
    """An enhanced (multi-frame) file, if ITK puts every frame where the file says that it lies."""
    import SimpleITK as sitk  # noqa: N813

    voxels, affine = _from_itk(sitk.ReadImage(str(path)))
    header = import_pydicom().dcmread(path, stop_before_pixels=True)
    frames = range(voxels.shape[2])
    try:
        places = [functional_group(header, frame, "PlanePositionSequence").ImagePositionPatient for frame in frames]
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise _unsure_frames(path, f"the file does not say where its frames lie ({error})") from error
    try:
        scales = [functional_group(header, frame, "PixelValueTransformationSequence") for frame in frames]
        rescales = {(float(scale.RescaleSlope), float(scale.RescaleIntercept)) for scale in scales}
    except (AttributeError, KeyError):
        rescales = set()  # stored values are the real ones, as in much MR
    wanted = np.array([[*map(float, place), 1.0] for place in places]) @ LPS_TO_RAS.T
    ours = np.array([[0.0, 0.0, frame, 1.0] for frame in range(len(places))]) @ affine.T
    apart = np.abs(wanted - ours).max()
    if len(rescales) > 1 or apart > max(0.01, SLICE_TOLERANCE * float(np.linalg.norm(affine[:3, 2]))):
        raise _unsure_frames(path, "its frames are not evenly stacked, or have different rescales")
    return voxels, affine


def _unsure_frames(path: Path, why: str) -> DataError:
    return DataError(
        "A multi-frame DICOM file cannot be read with certainty.",
        where=str(path),
        why=why,
        fix="Export the series with one file per slice, or convert it to NIfTI (for example with dcm2niix).",
    )


def functional_group(dataset: Any, frame: int, name: str) -> Any:
    """What a multi-frame file says of one frame, or of all of them together."""
    own = dataset.PerFrameFunctionalGroupsSequence[frame]
    return (own if name in own else dataset.SharedFunctionalGroupsSequence[0])[name].value[0]


def import_pydicom() -> ModuleType:
    """pydicom, or what to install."""
    try:
        import pydicom
    except ImportError as error:
        raise DataError(
            "Reading these DICOM files needs pydicom, which is not installed.", fix="pip install 'panorgan[dicom]'"
        ) from error
    return pydicom


def one_slice(voxels: NDArray[Any], affine: NDArray[np.float64]) -> Scan:
    """A flat picture [X, Y] as one slice [X, Y, 1]; where the slice has no thickness it gets one millimetre."""
    affine = affine.copy()
    if not np.linalg.norm(affine[:3, 2]) > 0:
        normal = np.cross(affine[:3, 0], affine[:3, 1])
        affine[:3, 2] = normal / max(float(np.linalg.norm(normal)), 1e-12)
    return voxels[:, :, None], affine


def _from_itk(image: Any) -> Scan:
    """ITK keeps arrays as [Z, Y, X] and the world as LPS."""
    import SimpleITK as sitk  # noqa: N813

    voxels = sitk.GetArrayFromImage(image).T
    n = image.GetDimension()
    if image.GetNumberOfComponentsPerPixel() > 1:  # colours: last, so that the caller refuses them with their shape
        return np.moveaxis(voxels, 0, -1).reshape(*image.GetSize(), *[1] * (3 - n), -1), np.eye(4)
    if n not in (2, 3):
        return voxels, np.eye(4)  # refused by the caller, too
    affine = np.eye(4)
    affine[:n, :n] = np.array(image.GetDirection()).reshape(n, n) * np.array(image.GetSpacing())
    affine[:n, 3] = image.GetOrigin()
    return voxels, LPS_TO_RAS @ affine
