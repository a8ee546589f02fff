"""`panorgan predict --from` and `--to`: series from a DICOMweb server, and results to one."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from panorgan.errors import DataError
from panorgan.workflows.dicomweb import DicomWebServer
from panorgan.workflows.dicomweb_access import Access, read_access
from panorgan.workflows.outputs import FORMATS


@contextmanager
def _ended_properly() -> Iterator[None]:
    """Remove the fetched scans when the command receives a signal to end."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@dataclass(frozen=True)
class DicomWebRequest:
    """The options that concern servers; without `origin` and `to` there are none."""

    origin: str = ""
    study: str = ""
    to: str = ""
    credentials: Path | None = None

    @contextmanager
    def opened(
        self, scans: Sequence[Path], series: Sequence[str], formats: Sequence[str]
    ) -> Iterator[tuple[Sequence[Path], Sequence[str]]]:
        """The scans to segment, and the choice among them: those given, or those that a server had."""
        self._check(scans, formats)
        if not self.origin:
            yield scans, series
            return
        with _ended_properly(), DicomWebServer(self.origin, self._access).fetched(self.study, series) as folder:
            yield [folder], ()

    def place_of(self, scan: Path) -> str:
        """Where a scan came from: its path, or its address at the server, after whose UID its folder is named."""
        return f"{self.origin.rstrip('/')}/studies/{self.study}/series/{scan.name}" if self.origin else str(scan)

    def store(self, files: Mapping[str, Path]) -> None:
        """Store the DICOM files among those of one scan."""
        if self.to:
            results = [file for name, file in files.items() if FORMATS[name].is_dicom]
            DicomWebServer(self.to, self._access).store(results)

    @cached_property
    def _access(self) -> Access:
        return read_access(self.credentials)

    def _check(self, scans: Sequence[Path], formats: Sequence[str]) -> None:
        """What cannot work is refused before anything is read or predicted."""
        if bool(scans) == bool(self.origin):
            raise DataError(
                "Scans are given twice." if scans else "There is no scan to segment.",
                code="scans-and-server" if scans else "no-scans",
                fix="Name scans or folders, or a server with --from, and not both.",
            )
        if bool(self.origin) != bool(self.study):
            raise DataError(
                "--from and --study belong together.",
                code="study-or-server-missing",
                fix="Give both: --from https://pacs.example/dicom-web --study UID, and --series where one is meant.",
            )
        if self.to and not any(FORMATS[name].is_dicom for name in formats):
            raise DataError(
                "There is nothing that a DICOMweb server could store.",
                code="nothing-to-store",
                where="--to",
                why=f"{', '.join(formats)} is no DICOM format",
                fix="Add one: --format nifti,dicom-seg.",
            )
        if self.to:
            DicomWebServer(self.to, self._access)  # its address and our credentials, before the work
