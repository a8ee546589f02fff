"""A source that is being opened: what to read, and what was found on the way."""

from __future__ import annotations

from dataclasses import dataclass, field

from panorgan.data_doctor.codes import finding
from panorgan.data_doctor.findings import Finding, Source
from panorgan.data_doctor.read_case import CaseTask


@dataclass
class OpenedSource:
    """A source made ready."""

    source: Source
    layout: str = ""
    tasks: list[CaseTask] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def add(self, code: str, what: str, why: str = "", fix: str = "", file: object = "", case: str = "") -> None:
        """Add a finding about this source."""
        self.findings.append(finding(code, self.source.site, case, what, why, fix, file))
