"""Scans that are not NIfTI: DICOM series, MetaImage and NRRD, read by SimpleITK and brought to RAS millimetres."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from panorgan.data.scan_size import check_itk_room, check_room
from panorgan.errors import DataError

ITK_ENDINGS = (".mha", ".mhd", ".nrrd", ".nhdr")

# ITK's and DICOM's world runs to the patient's left and back, NIfTI's to the right and front.
LPS_TO_RAS = np.diag([-1.0, -1.0, 1.0, 1.0])
# Positions are written with few digits; a missing slice is off by a whole spacing.
SLICE_TOLERANCE = 0.1
POSITION_ROUNDING_MM = 0.05
# Sideways drift per way along the slices that rounded directions may give. A gantry is tilted by half a degree or more.
_DRIFT = 1e-3
# In a header that names its data file: MetaImage's key, and NRRD's.
_DATA_FILE = re.compile(rb"^\s*(?:ElementDataFile\s*=|data ?file:)[ \t]*([^\r\n]*)\r?\n?", re.IGNORECASE | re.MULTILINE)
# Headers are text and short; in a file with its data inside, the rest need not be read.
_HEADER_BYTES = 1 << 20
# Rescaled slices may become floats, and are there twice for a moment: as an image and as an array.
_DICOM_BYTES = 8

Scan = tuple[NDArray[Any], NDArray[np.float64]]


def files_of(path: Path) -> tuple[Path, ...]:
    """All files whose content decides a scan: the file itself, and those that hold its voxels.

    A MetaImage or NRRD header may name other files, `.hdr` and `.img` belong together, a folder is a DICOM series.
    Files that are not there are left out, except for `path`.
    """
    if path.is_dir():
        return tuple(sorted(one for one in path.iterdir() if one.is_file() and not one.name.startswith(".")))
    others: list[Path] = []
    name = path.name.removesuffix(".gz")
    if name.endswith((".hdr", ".img")):
        sibling = path.with_name(name[:-4] + (".img" if name.endswith(".hdr") else ".hdr"))
        others = [sibling, sibling.with_name(sibling.name + ".gz")]
    elif name.endswith(ITK_ENDINGS):
        others = [path.parent / one for one in _data_files(path)]
    return (path, *(one for one in others if one != path and one.is_file()))


def _data_files(header: Path) -> Iterator[str]:
    """The files that a MetaImage or NRRD header names: one, a numbered pattern (`s%03d.raw 1 9 1`), or a list."""
    try:
        with header.open("rb") as file:
            text = file.read(_HEADER_BYTES)
    except OSError:
        return
    if header.suffix in (".nrrd", ".nhdr"):
        text = re.split(rb"\r?\n\r?\n", text, maxsplit=1)[0]  # what follows an empty line are voxels
    found = _DATA_FILE.search(text)
    if found is None:
        return
    value = found[1].decode("utf-8", "replace").strip()
    numbered = re.fullmatch(r"(.*%0?\d*d.*?)\s+(-?\d+)\s+(-?\d+)\s+(-?\d+)(?:\s+\d+)?", value)
    if value.upper().startswith("LIST"):
        yield from (
            line.strip() for line in text[found.end() :].decode("utf-8", "replace").splitlines() if line.strip()
        )
    elif numbered:
        first, last, step = (int(numbered[part]) for part in (2, 3, 4))
        yield from (numbered[1] % number for number in range(first, last + (1 if step > 0 else -1), step or 1))
    elif value.upper() != "LOCAL":
        yield value


def read_itk_file(path: Path) -> Scan:
    """Voxels [X, Y, Z] and affine of a MetaImage or NRRD file; a flat picture is one slice."""
    import SimpleITK as sitk  # noqa: N813 - its own documentation's name

    check_itk_room(path)
    return _from_itk(sitk.ReadImage(str(path)))


def read_dicom_series(folder: Path) -> Scan:
    """Voxels and affine of the one series in a folder; see `read_dicom_files`."""
    return read_dicom_files(dicom_series_files(folder), folder)


def dicom_series_files(folder: Path) -> tuple[Path, ...]:
    """The files of the one series in a folder."""
    import SimpleITK as sitk  # noqa: N813

    reader = sitk.ImageSeriesReader
    series = reader.GetGDCMSeriesIDs(str(folder))
    if not series:
        raise DataError(
            "A folder holds no DICOM series.",
            where=str(folder),
            fix="Point to the folder with the slices of one series.",
            code="no-dicom-series",
        )
    if len(series) > 1:
        raise DataError(
            f"A folder holds {len(series)} DICOM series.",
            where=str(folder),
            why="it is not clear which of them the labels belong to",
            fix="Give every series its own folder, or read the whole tree with 'layout: dicom'.",
            code="several-dicom-series",
        )
    return tuple(Path(name) for name in reader.GetGDCMSeriesFileNames(str(folder), series[0]))


def read_dicom_files(files: Sequence[Path], where: Path) -> Scan:
    """Voxels (rescaled slice by slice, so HU for CT) and affine of the files of one series, in whatever order.

    Refuses a tilted gantry, slices that are missing or doubled, and slices that do not fit together.
    """
    import SimpleITK as sitk  # noqa: N813

    slices = [_read_header(path) for path in files]
    frames = sum(one.frames for one in slices)
    check_room(where, (*(max(axis) for axis in zip(*(one.size for one in slices), strict=True)), frames), _DICOM_BYTES)
    if len(slices) == 1 and slices[0].frames > 1:
        return _read_frames(files[0])
    slices = _stacked(slices, where)
    line = _straight_line(slices, where)
    reader = sitk.ImageSeriesReader()
    reader.SetFileNames([str(one.path) for one in slices])
    if hasattr(reader, "SetSpacingWarningRelThreshold"):  # not in older SimpleITK
        reader.SetSpacingWarningRelThreshold(1.0)  # distances have been judged, and the library never prints
    if len({one.values for one in slices}) > 1:
        # ITK keeps all slices in the first one's kind of number, which may not hold what the others' rescale gives.
        reader.SetOutputPixelType(sitk.sitkFloat32)
    voxels, affine = _from_itk(reader.Execute())
    if line is not None and voxels.ndim == 3:
        # ITK draws its line through the first and the last slice; ours is the one that all slices were judged by.
        affine[:3, 2:] = LPS_TO_RAS[:3, :3] @ line
    return voxels, affine


@dataclass(frozen=True)
class _Slice:
    """A file's header: its position, the shape of its pixels, and how stored values become real ones."""

    path: Path
    frames: int
    position: tuple[float, ...]
    orientation: tuple[float, ...]
    size: tuple[int, ...]
    pixels_mm: tuple[float, ...]
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
            code="slice-without-position",
        )
    # Slope, intercept, stored bits and sign.
    values = tuple(text(tag) for tag in ("0028|1053", "0028|1052", "0028|0101", "0028|0103"))
    return _Slice(path, frames, position, orientation, tuple(size[:2]), numbers("0028|0030"), values)


def _stacked(slices: Sequence[_Slice], where: Path) -> list[_Slice]:
    """Slices sorted along their common normal; they must be parallel and have the same pixels."""
    first = slices[0]
    if any(one.frames > 1 for one in slices):
        raise DataError(
            "A DICOM series consists of several multi-frame files.",
            where=str(where),
            fix="Convert it to NIfTI (for example with dcm2niix), one file per case.",
            code="several-multiframe-files",
        )
    if len(slices) < 2:
        return list(slices)
    alike = all(np.allclose(one.orientation, first.orientation, atol=1e-3) for one in slices)
    fitting = all(one.size == first.size and _same_pixels(one, first) for one in slices)
    if not alike or not fitting:
        raise DataError(
            "The slices of a DICOM series do not lie parallel."
            if not alike
            else "The slices of a DICOM series differ.",
            where=str(where),
            why="their pixels have different sizes or numbers"
            if alike
            else "their rows and columns run in different directions",
            fix="Export the series again, without localisers or other views in it.",
            code="slices-differ" if alike else "slices-not-parallel",
        )
    normal = np.cross(first.orientation[:3], first.orientation[3:])
    return sorted(slices, key=lambda one: float(np.dot(one.position, normal)))


def _same_pixels(one: _Slice, other: _Slice) -> bool:
    """Whether two slices have pixels of one size, but for its last digits."""
    return len(one.pixels_mm) == len(other.pixels_mm) and np.allclose(one.pixels_mm, other.pixels_mm, rtol=1e-4, atol=0)


def _straight_line(slices: Sequence[_Slice], where: Path) -> NDArray[np.float64] | None:
    """Step and start [3, 2] in LPS of the line through all positions; None for a single slice.

    A tilt and a missing slice move all that follow, rounded positions do not: so every position is judged by the line.
    """
    if len(slices) < 2:
        return None
    normal = np.cross(slices[0].orientation[:3], slices[0].orientation[3:])
    positions = np.array([one.position for one in slices])
    steps = np.arange(len(slices), dtype=float)
    # Least squares per coordinate: position ≈ step · k + start.
    step, start = np.linalg.lstsq(np.stack([steps, np.ones_like(steps)], axis=1), positions, rcond=None)[0]
    spacing = float(step @ normal)
    apart = positions - (steps[:, None] * step + start)
    _check_distances(positions @ normal, apart @ normal, spacing, where)
    drift = float(np.linalg.norm(step - spacing * normal))
    if drift * steps[-1] > max(2 * POSITION_ROUNDING_MM, _DRIFT * spacing * steps[-1]):
        raise DataError(
            "A DICOM series was taken with a tilted gantry.",
            where=str(where),
            why=f"neighbouring slices are shifted sideways by {drift:.2f} mm",
            fix="Correct the tilt when exporting (most viewers offer it), then use the corrected series.",
            code="tilted-gantry",
        )
    aside = float(np.linalg.norm(apart - np.outer(apart @ normal, normal), axis=1).max())
    if aside > max(POSITION_ROUNDING_MM, SLICE_TOLERANCE * min(slices[0].pixels_mm, default=1.0)):
        raise DataError(
            "The slices of a DICOM series are shifted against each other.",
            where=str(where),
            why=f"one of them lies {aside:.2f} mm off the line through all of them",
            fix="Export the series again; if it was put together from several scans, export each as its own series.",
            code="slices-shifted",
        )
    # Across the slices the grid stays straight; the drift that remains is rounding.
    return np.stack([spacing * normal, start + 0.5 * steps[-1] * (step - spacing * normal)], axis=1)


def _check_distances(heights: NDArray[np.float64], apart: NDArray[np.float64], spacing: float, where: Path) -> None:
    """Slices must lie at equal distances: `heights` along the normal, `apart` how far each is from its even place."""
    gaps = np.diff(heights)
    usual = float(np.median(gaps))
    doubled = int((gaps < max(1e-3, 0.01 * usual)).sum())
    if spacing < 1e-6 or doubled or float(np.abs(apart).max()) > SLICE_TOLERANCE * spacing:
        place = int(np.abs(gaps - usual).argmax())
        why = f"slices lie {usual:.2f} mm apart, but {float(gaps[place]):.2f} mm after slice {place + 1}"
        again = f"{doubled} slices lie where another one does: copies, or several times, phases or echoes in one series"
        raise DataError(
            "A DICOM series has missing or doubled slices.",
            where=str(where),
            why=again if doubled else why,
            fix="Copy the whole series again from its source, each slice once; export one series per time or echo.",
            code="uneven-slices",
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
        code="multiframe-unclear",
    )


def functional_group(dataset: Any, frame: int, name: str) -> Any:
    """A multi-frame file's attribute for one frame, or for all of them."""
    own = dataset.PerFrameFunctionalGroupsSequence[frame]
    return (own if name in own else dataset.SharedFunctionalGroupsSequence[0])[name].value[0]


def import_pydicom() -> ModuleType:
    """Import pydicom, or raise an error that says what to install."""
    try:
        import pydicom
    except ImportError as error:
        raise DataError(
            "Reading these DICOM files needs pydicom, which is not installed.",
            code="pydicom-missing",
            fix="Install panorgan's wheel with its extra: pip install './panorgan-VERSION-py3-none-any.whl[dicom]'",
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
