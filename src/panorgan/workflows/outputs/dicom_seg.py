"""A label map as DICOM segmentation (DICOM-SEG), written by highdicom on the slices of its series."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from panorgan.workflows.outputs.dicom_identity import (
    LONGEST,
    MAKER,
    UTF_8,
    import_highdicom,
    new_uid,
    output_errors,
    private_scheme,
    series_number,
)
from panorgan.workflows.outputs.organ_codes import Coding, OrganCodes, codes_of, rgb
from panorgan.workflows.outputs.source_series import SourceSlices, match_slices

if TYPE_CHECKING:
    from panorgan.workflows.prediction import Prediction


def write_binary(path: Path, prediction: Prediction) -> None:
    """One bit per pixel and frame, a frame per organ and slice that shows it: what every reader understands."""
    _write(path, prediction, "BINARY")


def write_labelmap(path: Path, prediction: Prediction) -> None:
    """One byte per pixel, a frame per slice, whatever the number of organs; few readers know it yet."""
    _write(path, prediction, "LABELMAP")


def _write(path: Path, prediction: Prediction, kind: str) -> None:
    seg = import_highdicom().seg
    slices = match_slices(prediction.source, prediction.labels, prediction.affine)
    organs = list(prediction.names)
    codes = {organ: codes_of(organ) for organ in organs}
    # A segmentation must have a frame: without any organ it is the first slice, empty, and not all of them.
    shown = len(slices.headers) if prediction.labels.any() else 1
    with output_errors("segmentation", prediction.source[0].parent):
        written = seg.Segmentation(
            source_images=list(slices.headers[:shown]),
            further_source_images=list(slices.headers[shown:]) or None,
            pixel_array=_numbered(slices, list(prediction.names.values()))[:shown],
            segmentation_type=kind,
            segment_descriptions=[
                _describe(number, organ, codes[organ], prediction) for number, organ in enumerate(organs, start=1)
            ],
            omit_empty_frames=shown > 1,
            **_identity(slices, prediction),
        )
        # The images' character set need not have the letters of an organ's title.
        written.SpecificCharacterSet = UTF_8
        if any(one.private for one in codes.values()):
            written.CodingSchemeIdentificationSequence = [private_scheme()]
        written.save_as(path, enforce_file_format=True)


def _numbered(slices: SourceSlices, values: list[int]) -> Any:
    """The labels with segment numbers, which count from 1 without gaps."""
    number = np.zeros(256, dtype=np.uint8)
    number[values] = np.arange(1, len(values) + 1)
    return number[slices.labels]


def _identity(slices: SourceSlices, prediction: Prediction) -> dict[str, Any]:
    """Whose result it is; patient and study are copied from the slices by highdicom."""
    import panorgan

    model = prediction.about.get("model", "")
    return {
        "series_instance_uid": new_uid(),
        "series_number": series_number(slices.first, 1000),
        "sop_instance_uid": new_uid(),
        "instance_number": 1,
        "manufacturer": MAKER,
        "manufacturer_model_name": model[:LONGEST] or MAKER,
        "software_versions": panorgan.__version__,
        "device_serial_number": prediction.about.get("weights", "")[:16] or "unknown",
        "series_description": f"{MAKER} {model}"[:LONGEST].strip(),
        "content_description": f"organs by {MAKER}, not for diagnosis",
        "content_label": MAKER.upper(),
    }


def _describe(number: int, organ: str, codes: OrganCodes, prediction: Prediction) -> Any:
    import highdicom as hd

    described = hd.seg.SegmentDescription(
        segment_number=number,
        segment_label=codes.label,
        segmented_property_category=_concept(codes.category),
        segmented_property_type=_concept(codes.type),
        algorithm_type="AUTOMATIC",
        algorithm_identification=_algorithm(prediction),
        anatomic_regions=[_concept(codes.region)] if codes.region else None,
        display_color=hd.color.CIELabColor.from_rgb(*rgb(organ)),
    )
    if codes.modifier:
        kind = described.SegmentedPropertyTypeCodeSequence[0]
        kind.SegmentedPropertyTypeModifierCodeSequence = [_concept(codes.modifier)]
    if codes.region_modifier:
        region = described.AnatomicRegionSequence[0]
        region.AnatomicRegionModifierSequence = [_concept(codes.region_modifier)]
    return described


def _concept(code: Coding) -> Any:
    from highdicom.sr import CodedConcept

    return CodedConcept(code.value, code.scheme, code.meaning)


def _algorithm(prediction: Prediction) -> Any:
    """panorgan, its version, and the model by name, run and hash."""
    import highdicom as hd
    from pydicom.sr.codedict import codes

    import panorgan

    known = {key: prediction.about[key] for key in ("model", "run", "weights") if prediction.about.get(key)}
    return hd.AlgorithmIdentificationSequence(
        name=MAKER, family=codes.cid7162.ArtificialIntelligence, version=panorgan.__version__, parameters=known or None
    )
