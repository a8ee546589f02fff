"""RTSTRUCT files as planning systems write them, from contours or from the outline of a mask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from dicom_files import WrittenSeries
from pydicom.dataset import Dataset, FileDataset, FileMetaDataset
from pydicom.sequence import Sequence as Items
from pydicom.uid import ExplicitVRLittleEndian, RTStructureSetStorage, generate_uid


def item(**values: Any) -> Dataset:
    made = Dataset()
    for name, value in values.items():
        setattr(made, name, value)
    return made


def write_contours(
    path: Path,
    series: WrittenSeries,
    regions: Mapping[str, Sequence[np.ndarray]],
    kind: str = "CLOSED_PLANAR",
    codes: Mapping[str, Dataset] | None = None,
    **changes: Any,
) -> Path:
    """Write regions: for each name the contours [points, 3] in the series' voxels (column, row, slice)."""
    first, second = series.slices[0], series.slices[1]
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID, meta.TransferSyntaxUID = RTStructureSetStorage, ExplicitVRLittleEndian
    meta.MediaStorageSOPInstanceUID = generate_uid()
    made = FileDataset(None, {}, file_meta=meta, preamble=b"\0" * 128)
    made.SOPClassUID, made.SOPInstanceUID = RTStructureSetStorage, meta.MediaStorageSOPInstanceUID
    made.Modality, made.PatientID, made.SeriesInstanceUID = "RTSTRUCT", first.PatientID, generate_uid()
    refers = item(SeriesInstanceUID=first.SeriesInstanceUID)
    study = item(ReferencedSOPInstanceUID=first.StudyInstanceUID, RTReferencedSeriesSequence=Items([refers]))
    space = item(FrameOfReferenceUID=first.FrameOfReferenceUID, RTReferencedStudySequence=Items([study]))
    made.ReferencedFrameOfReferenceSequence = Items([space])
    made.StructureSetROISequence, made.ROIContourSequence, made.RTROIObservationsSequence = Items(), Items(), Items()
    directions = np.array(first.ImageOrientationPatient, float).reshape(2, 3)
    origin, step = (np.array(one.ImagePositionPatient, float) for one in (first, second))
    row_mm, column_mm = (float(mm) for mm in first.PixelSpacing)
    axes = np.stack([directions[0] * column_mm, directions[1] * row_mm, step - origin], axis=1)
    for number, (name, contours) in enumerate(regions.items(), start=1):
        roi = item(ROINumber=number, ROIName=name, ReferencedFrameOfReferenceUID=first.FrameOfReferenceUID)
        made.StructureSetROISequence.append(roi)
        sequence = Items()
        for points in contours:
            places = points @ axes.T + origin
            data = [f"{x:.6g}"[:16] for x in places.ravel()]
            sequence.append(item(ContourGeometricType=kind, NumberOfContourPoints=len(points), ContourData=data))
        made.ROIContourSequence.append(item(ReferencedROINumber=number, ContourSequence=sequence))
        code = (codes or {}).get(name)
        observed = {"RTROIIdentificationCodeSequence": Items([code])} if code else {}
        made.RTROIObservationsSequence.append(item(ObservationNumber=number, ReferencedROINumber=number, **observed))
    for name, value in changes.items():
        setattr(made, name, value)
    path.parent.mkdir(parents=True, exist_ok=True)
    made.save_as(path, enforce_file_format=True)
    return path


def outlines(mask: np.ndarray) -> list[np.ndarray]:
    """The contours of a mask along the edges of its voxels, slice by slice; holes are contours of their own."""
    found = []
    for place in range(mask.shape[2]):
        found += [np.column_stack([loop, np.full(len(loop), place)]) for loop in _loops(mask[:, :, place])]
    return found


def _loops(inside: np.ndarray) -> list[np.ndarray]:
    """Closed ways along voxel edges, with the inside on one hand."""
    ways: dict[tuple[float, float], list[tuple[float, float]]] = {}
    for x, y in np.argwhere(inside):
        corners = [(x - 0.5, y - 0.5), (x + 0.5, y - 0.5), (x + 0.5, y + 0.5), (x - 0.5, y + 0.5)]
        beside = [(x, y - 1), (x + 1, y), (x, y + 1), (x - 1, y)]
        for k, (i, j) in enumerate(beside):
            if not (0 <= i < inside.shape[0] and 0 <= j < inside.shape[1] and inside[i, j]):
                ways.setdefault(corners[k], []).append(corners[(k + 1) % 4])
    loops = []
    while ways:
        start = place = next(iter(ways))
        loop = []
        while True:
            loop.append(place)
            onward = ways[place].pop()
            if not ways[place]:
                del ways[place]
            place = onward
            if place == start:
                break
        loops.append(np.array(loop))
    return loops
