"""DICOM as hospitals have it: series written slice by slice with pydicom, segmentations written with highdicom."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import highdicom as hd
import numpy as np
import pydicom
from highdicom.seg import SegmentAlgorithmTypeValues, Segmentation, SegmentDescription
from pydicom.dataset import Dataset, FileDataset, FileMetaDataset
from pydicom.sr.codedict import codes
from pydicom.sr.coding import Code
from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, MRImageStorage, generate_uid
from refusing import refused

from panorgan.anatomy import Vocabulary
from panorgan.data.case import Case
from panorgan.data.layouts import read_cases
from panorgan.errors import DataError, PanorganError

# Sagittal and axial slices: directions of rows and of columns in the patient (left, back, head).
AXIAL = (1, 0, 0, 0, 1, 0)
SAGITTAL = (0, 1, 0, 0, 0, -1)

LIVER = Code("10200004", "SCT", "Liver")
SPLEEN = Code("78961009", "SCT", "Spleen")
KIDNEY = Code("64033007", "SCT", "Kidney")
NEOPLASM = Code("108369006", "SCT", "Neoplasm")
LEFT, RIGHT = Code("7771000", "SCT", "Left"), Code("24028007", "SCT", "Right")


@dataclass(frozen=True)
class WrittenSeries:
    """A series on disk: its slices (with pixels) from the first position to the last, and where they lie."""

    slices: list[FileDataset]
    files: list[Path]

    @property
    def uid(self) -> str:
        return str(self.slices[0].SeriesInstanceUID)


def write_series(
    folder: Path,
    voxels: np.ndarray,
    *,
    modality: str = "CT",
    orientation: tuple[int, ...] = AXIAL,
    origin: tuple[float, float, float] = (-90.0, -40.0, -300.0),
    spacing: tuple[float, float, float] = (0.7, 0.8, 2.5),
    tilt: float = 0.0,
    skip: Iterable[int] = (),
    rescale: Mapping[int, tuple[float, float]] | None = None,
    names: str = "IM{shuffled:04d}",
    **header: Any,
) -> WrittenSeries:
    """Write voxels [columns, rows, slices] as a scanner does: one file per slice, names in no order.

    `rescale` gives slope and intercept of single slices; `header` are further attributes (PatientID, SeriesNumber…).
    """
    folder.mkdir(parents=True, exist_ok=True)
    along_row, along_column = np.array(orientation[:3], float), np.array(orientation[3:], float)
    normal = np.cross(along_row, along_column)
    common = {
        "PatientID": "p1", "PatientName": "Doe^J", "PatientBirthDate": "", "PatientSex": "", "StudyID": "1",
        "StudyDate": "20200101", "StudyTime": "120000", "AccessionNumber": "", "ReferringPhysicianName": "",
        "StudyInstanceUID": generate_uid(), "SeriesInstanceUID": generate_uid(), "SeriesNumber": 3,
        "FrameOfReferenceUID": generate_uid(), "PositionReferenceIndicator": "", "Modality": modality,
        "ImageType": ["ORIGINAL", "PRIMARY", "AXIAL"], "Manufacturer": "maker", "InstanceCreationDate": "20200101",
        "SOPClassUID": MRImageStorage if modality == "MR" else CTImageStorage,
    } | header  # fmt: skip
    slices, files = [], []
    count = voxels.shape[2]
    for k in range(count):
        slope, intercept = (rescale or {}).get(k, (1, -1024))
        one = _slice(common, (voxels[:, :, k].T - intercept) / slope)
        one.ImageOrientationPatient, one.PixelSpacing = list(orientation), [spacing[1], spacing[0]]
        one.ImagePositionPatient = list(np.array(origin) + k * (spacing[2] * normal + tilt * along_column))
        one.SliceThickness, one.InstanceNumber = spacing[2], 2 * count - k
        one.RescaleSlope, one.RescaleIntercept = slope, intercept
        if k in set(skip):
            continue
        path = folder / names.format(shuffled=(k * 7 + 3) % 1009, series=common["SeriesInstanceUID"][-6:], k=k)
        assert not path.exists(), "names must tell files apart"
        one.save_as(path, enforce_file_format=True)
        slices.append(one)
        files.append(path)
    return WrittenSeries(slices, files)


def _slice(common: Mapping[str, Any], stored: np.ndarray) -> FileDataset:
    """A slice whose stored values are unsigned 16-bit numbers."""
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID, meta.TransferSyntaxUID = common["SOPClassUID"], ExplicitVRLittleEndian
    meta.MediaStorageSOPInstanceUID = generate_uid()
    one = FileDataset(None, {}, file_meta=meta, preamble=b"\0" * 128)
    for name, value in common.items():
        setattr(one, name, value)
    one.SOPInstanceUID = meta.MediaStorageSOPInstanceUID
    one.Rows, one.Columns = stored.shape
    one.SamplesPerPixel, one.PhotometricInterpretation = 1, "MONOCHROME2"
    one.BitsAllocated, one.BitsStored, one.HighBit, one.PixelRepresentation = 16, 16, 15, 0
    assert np.array_equal(stored, np.rint(stored)), "the rescale must give the voxels exactly"
    assert stored.min(initial=0) >= 0, "stored values are unsigned"
    one.PixelData = stored.astype(np.uint16).tobytes()
    return one


def describe(
    number: int, label: str, code: Code, side: Code | None = None, region: Code | None = None
) -> SegmentDescription:
    """One segment: its label, its SNOMED code, its side as a modifier, and the organ it lies in."""
    segment = SegmentDescription(
        number,
        label,
        codes.SCT.AnatomicalStructure,
        code,
        SegmentAlgorithmTypeValues.MANUAL,
        anatomic_regions=[region] if region else None,
    )
    if side:
        item = Dataset()
        item.CodeValue, item.CodingSchemeDesignator, item.CodeMeaning = side.value, side.scheme_designator, side.meaning
        segment.SegmentedPropertyTypeCodeSequence[0].SegmentedPropertyTypeModifierCodeSequence = [item]
    return segment


def write_segmentation(
    path: Path,
    series: WrittenSeries,
    masks: Iterable[np.ndarray],
    segments: Iterable[SegmentDescription],
    kind: str = "BINARY",
    flip: tuple[int, ...] = (),
    **changes: Any,
) -> Path:
    """Write masks [columns, rows, slices] (booleans, or fractions) as DICOM-SEG; empty frames are left out.

    `flip` names axes of (slices, rows, columns) that run the other way in the file than in the series; `changes` are
    further attributes, None removes one.
    """
    stacked = np.stack([mask.transpose(2, 1, 0) for mask in masks], axis=-1)
    stacked = stacked.astype(np.float32 if kind == "FRACTIONAL" else np.uint8)
    pixels: Any = stacked
    if flip:
        geometry = hd.get_volume_from_series(series.slices)
        volume = geometry.with_array(_like(geometry, series, stacked), channels={"SegmentNumber": _numbers(stacked)})
        pixels = volume.flip_spatial(list(flip))
    written = Segmentation(
        series.slices, pixels, kind, list(segments), hd.UID(), 100, hd.UID(), 1, "maker", "model", "1", "serial"
    )
    for name, value in changes.items():
        if value is None:
            delattr(written, name)
        else:
            setattr(written, name, value)
    path.parent.mkdir(parents=True, exist_ok=True)
    written.save_as(path)
    return path


def _numbers(stacked: np.ndarray) -> list[int]:
    return list(range(1, stacked.shape[-1] + 1))


def _like(geometry: Any, series: WrittenSeries, stacked: np.ndarray) -> np.ndarray:
    """Slices in the order of highdicom's volume, which may begin at the other end."""
    first = np.array(series.slices[0].ImagePositionPatient, float)
    return stacked if np.allclose(geometry.position, first) else stacked[::-1]


def frame_positions(path: Path) -> list[list[float]]:
    """Where the frames of a file lie, in its own order."""
    header = pydicom.dcmread(path, stop_before_pixels=True)
    return [
        [float(x) for x in f.PlanePositionSequence[0].ImagePositionPatient]
        for f in header.PerFrameFunctionalGroupsSequence
    ]


# 35 pixels per slice: frames of a binary segmentation begin in the middle of a byte.
HU = np.random.default_rng(0).integers(-1000, 1000, (7, 5, 6))
AFFINE = np.array([[-0.7, 0, 0, 90.0], [0, -0.8, 0, 40.0], [0, 0, 2.5, -300.0], [0, 0, 0, 1]])
ORGANS = Vocabulary(["liver", "liver_tumour", "spleen", "kidney_left", "kidney_right"])
HIGH, LOW = HU > 500, HU < -500


def cases_of(folder: Path, **options: Any) -> dict[str, Case]:
    return {case.id: case for case in read_cases(folder, "here", ORGANS, **options)}


def masks_of(case: Case) -> dict[str, np.ndarray]:
    return case.read_masks(case.read_image())


def write_liver(path: Path, series: WrittenSeries, mask: np.ndarray = HIGH, **changes: Any) -> Path:
    """A segmentation with only a liver."""
    return write_segmentation(path, series, [mask], [describe(1, "Liver", LIVER)], **changes)


def error_of(folder: Path, code: str) -> PanorganError:
    """The error that reading the folder, its scans and its masks gives."""
    with refused(code, DataError) as caught:
        _ = [masks_of(case) for case in cases_of(folder).values()]
    assert caught.value.fix
    return caught.value


def change(path: Path, **header: Any) -> None:
    dataset = pydicom.dcmread(path)
    for name, value in header.items():
        setattr(dataset, name, value)
    dataset.save_as(path)
