"""Check a data folder before anything is trained on it: reads everything, changes nothing."""

from panorgan.data_doctor.codes import CODES
from panorgan.data_doctor.examine import examine
from panorgan.data_doctor.findings import CaseFacts, Checkup, Finding, Severity, Source, StructureFacts, Thumbnail
from panorgan.data_doctor.headers import FixedFile, fix_headers

__all__ = [
    "CODES",
    "CaseFacts",
    "Checkup",
    "Finding",
    "FixedFile",
    "Severity",
    "Source",
    "StructureFacts",
    "Thumbnail",
    "examine",
    "fix_headers",
]
