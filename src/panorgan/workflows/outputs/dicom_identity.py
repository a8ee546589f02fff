"""What all DICOM results share: patient and examination, identifiers, and errors in writing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from panorgan.errors import DataError
from panorgan.workflows.outputs.organ_codes import PRIVATE_SCHEME

MAKER = "panorgan"
UTF_8 = "ISO_IR 192"
# DICOM's limit of a long string.
LONGEST = 64
# Patient and examination of a result, as in the slices. The first of each must be there, even if empty.
_REQUIRED = (
    "PatientName", "PatientID", "PatientBirthDate", "PatientSex",
    "StudyInstanceUID", "StudyDate", "StudyTime", "StudyID", "AccessionNumber", "ReferringPhysicianName",
)  # fmt: skip
_COPIED = (
    "IssuerOfPatientID", "PatientAge", "PatientSize", "PatientWeight", "PatientIdentityRemoved",
    "DeidentificationMethod", "DeidentificationMethodCodeSequence", "StudyDescription", "TimezoneOffsetFromUTC",
)  # fmt: skip


def import_highdicom() -> Any:
    """highdicom, or what to install."""
    try:
        import highdicom
    except ImportError as error:
        raise DataError(
            "Writing DICOM segmentations needs highdicom, which is not installed.",
            code="highdicom-missing",
            fix="Install panorgan's wheel with its extra: pip install './panorgan-VERSION-py3-none-any.whl[dicom-out]'",
        ) from error
    return highdicom


@contextmanager
def output_errors(result: str, series: Path) -> Iterator[None]:
    """Turn the errors of highdicom and pydicom, which refuse a series that breaks the standard, into ours."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise DataError(
            f"The {result} cannot be written as DICOM.",
            code="dicom-output-failed",
            where=str(series),
            why=f"{type(error).__name__}: {error}",
            fix="Correct what the series says there, or choose the formats nifti and seg.nrrd.",
        ) from error


def new_uid() -> str:
    """A UID of its own for every result: a result that is made again is another object."""
    from pydicom.uid import generate_uid

    return str(generate_uid(prefix=None))


def series_number(header: Any, beside: int) -> int:
    """A number that stands next to that of the images in a viewer's list."""
    return beside + int(header.get("SeriesNumber") or 0)


def copy_patient_and_study(header: Any, dataset: Any) -> None:
    """Say of patient and study what the images say, in UTF-8."""
    dataset.SpecificCharacterSet = UTF_8
    for name in _REQUIRED:
        setattr(dataset, name, header.get(name) or "")
    for name in _COPIED:
        if name in header:
            setattr(dataset, name, header[name].value)


def private_scheme() -> Any:
    """What the private coding scheme is, for a reader that does not know it."""
    from pydicom.dataset import Dataset

    scheme = Dataset()
    scheme.CodingSchemeDesignator = PRIVATE_SCHEME
    scheme.CodingSchemeName = "Organ names of panorgan"
    scheme.CodingSchemeResponsibleOrganization = MAKER
    return scheme
