"""Scans that are not NIfTI: DICOM series, MetaImage and NRRD, read by SimpleITK and brought to RAS millimetres."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from panorgan.errors import DataError

ITK_ENDINGS = (".mha", ".mhd", ".nrrd")

# ITK's world runs to the patient's left and back, NIfTI's to the right and front.
_LPS_TO_RAS = np.diag([-1.0, -1.0, 1.0, 1.0])
# Slice positions are written with few digits; a missing slice is off by a whole spacing.
_SLICE_TOLERANCE = 0.1

Scan = tuple[NDArray[Any], NDArray[np.float64]]


def read_itk_file(path: Path) -> Scan:
    """Voxels [X, Y, Z] and affine of a MetaImage or NRRD file."""
    import SimpleITK as sitk  # noqa: N813 - its own documentation's name

    return _from_itk(sitk.ReadImage(str(path)))


def read_dicom_series(folder: Path) -> Scan:
    """Voxels (rescaled, so HU for CT) and affine of the one CT or MR series in a folder, slices sorted by position.

    Refuses several series, a tilted gantry, and slices that are missing or doubled.
    """
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
            fix="Give every series its own folder.",
        )
    files = reader.GetGDCMSeriesFileNames(str(folder), series[0])
    _check_geometry(files, folder)
    image = reader()
    image.SetFileNames(files)
    return _from_itk(image.Execute())


def _check_geometry(files: tuple[str, ...], folder: Path) -> None:
    """Slices must be stacked straight along their common normal, at equal distances."""
    import SimpleITK as sitk  # noqa: N813

    positions, orientations = [], []
    for name in files:
        reader = sitk.ImageFileReader()
        reader.SetFileName(name)
        reader.ReadImageInformation()
        positions.append([float(x) for x in reader.GetMetaData("0020|0032").split("\\")])
        orientations.append([float(x) for x in reader.GetMetaData("0020|0037").split("\\")])
    if len(files) < 2:
        return
    if np.abs(np.ptp(orientations, axis=0)).max() > 1e-3:
        raise DataError(
            "The slices of a DICOM series do not lie parallel.", where=str(folder), fix="Export the series again."
        )
    row, column = np.array(orientations[0][:3]), np.array(orientations[0][3:])
    normal = np.cross(row, column)
    steps = np.diff(np.array(positions), axis=0)
    heights = steps @ normal
    sideways = np.abs(steps - heights[:, None] * normal).max()
    spacing = float(np.median(np.abs(heights)))
    if sideways > max(0.01, 1e-3 * spacing):
        raise DataError(
            "A DICOM series was taken with a tilted gantry.",
            where=str(folder),
            why=f"neighbouring slices are shifted sideways by {sideways:.2f} mm",
            fix="Correct the tilt when exporting (most viewers offer it), then use the corrected series.",
        )
    uneven = np.flatnonzero(np.abs(np.abs(heights) - spacing) > _SLICE_TOLERANCE * max(spacing, 1e-6))
    if spacing < 1e-6 or len(uneven):
        place = int(uneven[0]) if len(uneven) else 0
        gap = abs(float(heights[place]))
        raise DataError(
            "A DICOM series has missing or doubled slices.",
            where=str(folder),
            why=f"slices lie {spacing:.2f} mm apart, but {gap:.2f} mm after slice {place + 1}",
            fix="Copy the whole series again from its source, each slice once.",
        )


def _from_itk(image: Any) -> Scan:
    """ITK keeps arrays as [Z, Y, X] and the world as LPS."""
    import SimpleITK as sitk  # noqa: N813

    voxels = sitk.GetArrayFromImage(image)
    dimensions = image.GetDimension()
    if dimensions != 3:
        return voxels.T, np.eye(4)  # refused by the caller, with its shape
    affine = np.eye(4)
    affine[:3, :3] = np.array(image.GetDirection()).reshape(3, 3) * np.array(image.GetSpacing())
    affine[:3, 3] = image.GetOrigin()
    return voxels.transpose(2, 1, 0), _LPS_TO_RAS @ affine
