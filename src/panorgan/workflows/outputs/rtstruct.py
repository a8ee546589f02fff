"""A label map as DICOM structure set (RTSTRUCT): closed contours in the planes of the series' slices."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from panorgan.workflows.outputs.contours import outlines
from panorgan.workflows.outputs.dicom_identity import (
    LONGEST,
    MAKER,
    copy_patient_and_study,
    new_uid,
    output_errors,
    private_scheme,
    series_number,
)
from panorgan.workflows.outputs.organ_codes import Coding, codes_of, rgb
from panorgan.workflows.outputs.source_series import SourceSlices, match_slices, plane_of

if TYPE_CHECKING:
    from panorgan.workflows.prediction import Prediction

# The class that RTSTRUCT names a study by; it is retired everywhere else.
_STUDY_CLASS = "1.2.840.10008.3.1.2.3.1"
# Ten thousandths of a millimetre: a number of DICOM has at most 16 characters.
_DIGITS = 4
_CONTOUR_DATA = 0x30060050


def write_rtstruct(path: Path, prediction: Prediction) -> None:
    """Write one region of interest per organ, also for an organ that was not found: it has no contours."""
    slices = match_slices(prediction.source, prediction.labels, prediction.affine)
    with output_errors("structure set", prediction.source[0].parent):
        dataset = _structure_set(slices, prediction)
        dataset.save_as(path, enforce_file_format=True)


def _structure_set(slices: SourceSlices, prediction: Prediction) -> Any:
    from pydicom.dataset import FileMetaDataset
    from pydicom.uid import ImplicitVRLittleEndian, RTStructureSetStorage

    dataset = _dataset()
    dataset.file_meta = FileMetaDataset()
    # Has room for contours of more than 64 kB.
    dataset.file_meta.TransferSyntaxUID = ImplicitVRLittleEndian
    dataset.SOPClassUID, dataset.SOPInstanceUID = RTStructureSetStorage, new_uid()
    copy_patient_and_study(slices.first, dataset)
    _describe_set(dataset, slices, prediction)
    dataset.ReferencedFrameOfReferenceSequence = [_frame_of_reference(slices)]
    organs = list(enumerate(prediction.names.items(), start=1))
    frame = str(slices.first.FrameOfReferenceUID)
    dataset.StructureSetROISequence = [_roi(number, organ, frame, prediction) for number, (organ, _) in organs]
    dataset.ROIContourSequence = [_contours(number, organ, value, slices) for number, (organ, value) in organs]
    dataset.RTROIObservationsSequence = [_observation(number, organ) for number, (organ, _) in organs]
    if any(codes_of(organ).private for organ in prediction.names):
        dataset.CodingSchemeIdentificationSequence = [private_scheme()]
    return dataset


def _describe_set(dataset: Any, slices: SourceSlices, prediction: Prediction) -> None:
    """The series, the equipment and the set itself; no person has approved it."""
    import panorgan

    now = datetime.datetime.now()
    day, time = now.strftime("%Y%m%d"), now.strftime("%H%M%S")
    model = prediction.about.get("model", "")
    dataset.Modality, dataset.SeriesInstanceUID = "RTSTRUCT", new_uid()
    dataset.SeriesNumber, dataset.InstanceNumber = series_number(slices.first, 2000), 1
    dataset.SeriesDescription = f"{MAKER} {model}"[:LONGEST].strip()
    dataset.SeriesDate = dataset.InstanceCreationDate = dataset.StructureSetDate = day
    dataset.SeriesTime = dataset.InstanceCreationTime = dataset.StructureSetTime = time
    dataset.OperatorsName = ""
    dataset.Manufacturer, dataset.ManufacturerModelName = MAKER, model[:LONGEST] or MAKER
    dataset.SoftwareVersions = panorgan.__version__
    dataset.StructureSetLabel, dataset.StructureSetName = MAKER, model[:LONGEST] or MAKER
    dataset.StructureSetDescription = f"organs by {MAKER}, not for diagnosis"
    dataset.FrameOfReferenceUID = slices.first.FrameOfReferenceUID
    dataset.PositionReferenceIndicator = slices.first.get("PositionReferenceIndicator") or ""
    dataset.ApprovalStatus = "UNAPPROVED"


def _frame_of_reference(slices: SourceSlices) -> Any:
    """The series that was contoured, image by image."""
    series, study, frame = _dataset(), _dataset(), _dataset()
    series.SeriesInstanceUID = slices.first.SeriesInstanceUID
    series.ContourImageSequence = [_image(header) for header in slices.headers]
    study.ReferencedSOPClassUID, study.ReferencedSOPInstanceUID = _STUDY_CLASS, slices.first.StudyInstanceUID
    study.RTReferencedSeriesSequence = [series]
    frame.FrameOfReferenceUID = slices.first.FrameOfReferenceUID
    frame.RTReferencedStudySequence = [study]
    return frame


def _roi(number: int, organ: str, frame: str, prediction: Prediction) -> Any:
    import panorgan

    roi, about = _dataset(), prediction.about
    roi.ROINumber, roi.ROIName, roi.ReferencedFrameOfReferenceUID = number, codes_of(organ).label, frame
    roi.ROIGenerationAlgorithm = "AUTOMATIC"
    facts = (MAKER, panorgan.__version__, about.get("model", ""), about.get("weights", "")[:16])
    roi.ROIGenerationDescription = " ".join(filter(None, facts))[:LONGEST]
    return roi


def _contours(number: int, organ: str, value: int, slices: SourceSlices) -> Any:
    roi = _dataset()
    roi.ReferencedROINumber, roi.ROIDisplayColor = number, list(rgb(organ))
    found = list(_slice_contours(slices, value))
    if found:
        roi.ContourSequence = found
    return roi


def _slice_contours(slices: SourceSlices, value: int) -> Iterator[Any]:
    from pydicom.charset import default_encoding

    for header, labels in zip(slices.headers, slices.labels, strict=True):
        origin, column, row = plane_of(header)
        for ring in outlines(labels == value):
            contour = _dataset()
            contour.ContourImageSequence = [_image(header)]
            contour.ContourGeometricType = "CLOSED_PLANAR"
            contour.NumberOfContourPoints = len(ring)
            contour[_CONTOUR_DATA] = _numbers(origin + ring[:, :1] * column + ring[:, 1:] * row)
            contour.set_original_encoding(True, True, default_encoding)  # so that the numbers are written as they are
            yield contour


def _numbers(points: NDArray[np.float64]) -> Any:
    """The element as it is stored: pydicom would make an object of each number, which takes most of the time."""
    from pydicom.dataelem import RawDataElement
    from pydicom.tag import Tag

    text = "\\".join(f"{number:.{_DIGITS}f}" for number in points.ravel()).encode("ascii")
    text += b" " * (len(text) % 2)
    return RawDataElement(Tag(_CONTOUR_DATA), "DS", len(text), text, 0, True, True)


def _observation(number: int, organ: str) -> Any:
    """What a region of interest is, coded as in the segmentations."""
    codes, seen = codes_of(organ), _dataset()
    seen.ObservationNumber, seen.ReferencedROINumber = number, number
    seen.RTROIInterpretedType, seen.ROIInterpreter = "ORGAN" if codes.of_anatomy else "", ""
    seen.SegmentedPropertyCategoryCodeSequence = [_code(codes.category)]
    seen.RTROIIdentificationCodeSequence = [_code(codes.type)]
    if codes.modifier:
        seen.RTROIIdentificationCodeSequence[0].SegmentedPropertyTypeModifierCodeSequence = [_code(codes.modifier)]
    if codes.region:
        seen.AnatomicRegionSequence = [_code(codes.region)]
        if codes.region_modifier:
            seen.AnatomicRegionSequence[0].AnatomicRegionModifierSequence = [_code(codes.region_modifier)]
    return seen


def _code(code: Coding) -> Any:
    item = _dataset()
    setattr(item, "CodeValue" if code.is_short else "LongCodeValue", code.value)
    item.CodingSchemeDesignator, item.CodeMeaning = code.scheme, code.meaning
    return item


def _image(header: Any) -> Any:
    item = _dataset()
    item.ReferencedSOPClassUID, item.ReferencedSOPInstanceUID = header.SOPClassUID, header.SOPInstanceUID
    return item


def _dataset() -> Any:
    from pydicom.dataset import Dataset

    return Dataset()
