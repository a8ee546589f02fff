"""Check a data folder before anything is trained on it: reads everything, changes nothing."""

from panorgan.cases.doctor.codes import CODES
from panorgan.cases.doctor.examine import examine
from panorgan.cases.doctor.findings import CaseFacts, Checkup, Finding, Severity, Source, StructureFacts, Thumbnail
from panorgan.cases.doctor.headers import FixedFile, fix_headers

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
