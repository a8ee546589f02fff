"""Scans from, and results to, a DICOMweb server such as a PACS: WADO-RS and STOW-RS, by dicomweb-client."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from panorgan.data.formats import import_pydicom
from panorgan.errors import DataError, PanorganError
from panorgan.workflows.dicomweb_access import Access, check_address

# Seconds until a connection is there, and until the next bytes of an answer.
_TIMEOUT = (10.0, 120.0)
_UID = re.compile(r"\d+(\.\d+)*")
_MODALITIES = ("CT", "MR")
# As it is stored: nothing is decompressed or converted on the way.
_ANY_SYNTAX = (("application/dicom", "*"),)
_NO_ACCESS = (401, 403)
# Answers to a request to store that say: these objects not, and not later either.
_NOT_STORED = (400, 409, 413, 415, 422)
_STORING = "store the results"


@dataclass(frozen=True)
class RemoteSeries:
    """A series that a server lists."""

    uid: str
    modality: str
    number: str
    description: str
    instances: int | None

    def is_called(self, text: str) -> bool:
        """Whether it has this number, description or UID."""
        return text.strip().casefold() in {
            name.casefold() for name in (self.uid, self.number, self.description) if name
        }

    def __str__(self) -> str:
        title = f" {self.description!r}" if self.description else ""
        return f"{self.number or '–'}{title} ({self.modality}, {self.uid})"


@dataclass(frozen=True)
class DicomWebServer:
    """One server; certificates are always verified."""

    url: str
    access: Access
    timeout: tuple[float, float] = _TIMEOUT

    def __post_init__(self) -> None:
        check_address(self.url, self.access)
        _import_dicomweb()  # before the work, not after it

    def store(self, files: Sequence[Path]) -> None:
        """Store DICOM files (STOW-RS); raises unless the server has accepted all of them."""
        datasets = [import_pydicom().dcmread(path) for path in files]
        with self._translated(_STORING) as client:
            answer = client.store_instances(datasets)
        failed = {str(item.ReferencedSOPInstanceUID): item for item in answer.get("FailedSOPSequence") or []}
        accepted = {str(item.ReferencedSOPInstanceUID) for item in answer.get("ReferencedSOPSequence") or []}
        sent = {str(dataset.SOPInstanceUID): path for dataset, path in zip(datasets, files, strict=True)}
        # A short answer lists none; one that lists some must list all.
        lost = {uid for uid in sent if uid in failed or (accepted and uid not in accepted)}
        if lost:
            raise self._not_stored({sent[uid]: _reason(failed.get(uid)) for uid in sent if uid in lost}, len(sent))

    def list_series(self, study: str) -> list[RemoteSeries]:
        """The series of a study (QIDO-RS)."""
        fields = ["SeriesDescription", "NumberOfSeriesRelatedInstances"]
        with self._translated("list the series") as client:
            found = client.search_for_series(study, fields=fields)
            return [_remote(import_pydicom().Dataset.from_json(one)) for one in found]

    @contextmanager
    def fetched(self, study: str, wanted: Sequence[str] = ()) -> Iterator[Path]:
        """Series of a study in a temporary folder, which only this user can read; it is removed afterwards.

        `wanted` are numbers, descriptions or UIDs; every CT and MR series if left out.
        """
        series = self._chosen(study, wanted)
        with tempfile.TemporaryDirectory(prefix="panorgan-") as folder:
            for one in series:
                self._fetch(study, one, Path(folder) / one.uid)
            yield Path(folder)

    def _chosen(self, study: str, wanted: Sequence[str]) -> list[RemoteSeries]:
        there = self.list_series(study)
        kept = []
        for text in wanted:
            kept += [one for one in there if one.is_called(text)]
            if not any(one.is_called(text) for one in there):
                raise self._no_series(f"series {text!r}", study, there)
        kept = kept if wanted else [one for one in there if one.modality in _MODALITIES]
        if not kept:
            raise self._no_series("CT or MR series", study, there)
        return list(dict.fromkeys(kept))

    def _fetch(self, study: str, series: RemoteSeries, folder: Path) -> None:
        folder.mkdir()
        count = 0
        with self._translated(f"fetch series {series.uid}") as client:
            for dataset in client.iter_series(study, series.uid, media_types=_ANY_SYNTAX):
                count += 1
                dataset.save_as(folder / f"{count:05d}.dcm", enforce_file_format=True)
        if not count or (series.instances is not None and count != series.instances):
            raise DataError(
                "A series did not arrive complete.",
                code="dicomweb-incomplete",
                where=self.url,
                why=f"{count} of {series.instances if series.instances is not None else 'its'} images of {series.uid}",
                fix="Try again; where it stays so, export the series from the archive and predict on its folder.",
            )

    @contextmanager
    def _translated(self, doing: str) -> Iterator[Any]:
        """A client whose failures become our errors."""
        web, requests = _import_dicomweb()
        session = self.access.session(requests)
        failed = requests.exceptions
        try:
            client = web.DICOMwebClient(self.url, session=session, timeout=self.timeout)
            # It would repeat a request whose body it has used up.
            client.set_http_retry_params(retry=False)
            yield client
        except failed.HTTPError as error:
            raise self._answered(doing, error) from error
        except failed.RequestException as error:
            raise self._disturbed(doing, error, failed) from error
        except (PanorganError, OSError):
            raise
        except Exception as error:  # what is no DICOM fails in many ways
            raise self._failed(doing, error) from error
        finally:
            session.close()

    def _disturbed(self, doing: str, error: Exception, kinds: Any) -> DataError:
        """The server did not answer, or its certificate could not be verified."""
        what = f"The DICOMweb server did not {doing}."
        if isinstance(error, kinds.SSLError):  # before ConnectionError, which it is too
            fix = "Name the file of your hospital's certificate authority as 'ca' in the file of --credentials."
            return self._error(what, code="dicomweb-certificate", why=error, fix=fix)
        fix = "Check the address, the network and that the server runs, and try again."
        if isinstance(error, kinds.Timeout):
            return self._error(what, code="dicomweb-timeout", why=error, fix=fix)
        if isinstance(error, kinds.ConnectionError | kinds.ChunkedEncodingError):
            return self._error(what, code="dicomweb-unreachable", why=error, fix=fix)
        return self._failed(doing, error)

    def _answered(self, doing: str, error: Any) -> DataError:
        """The server's refusal."""
        what, status = f"The DICOMweb server did not {doing}.", error.response.status_code
        answer = f"it answered {status} {error.response.reason}"
        if status in _NO_ACCESS:
            fix = "Set the credentials in the environment or in the file of --credentials (docs/predict.md)."
            return self._error(what, code="dicomweb-refused", why=answer, fix=fix)
        if doing == _STORING and status in _NOT_STORED:
            fix = "The files are in --out. Ask who runs the archive whether it takes such objects."
            return self._error(what, code="dicomweb-not-stored", why=_failures(error.response) or answer, fix=fix)
        return self._failed(doing, answer)

    def _failed(self, doing: str, why: object) -> DataError:
        """Anything else."""
        return DataError(
            f"The DICOMweb server did not {doing}.",
            code="dicomweb-failed",
            where=self.url,
            why=str(why),
            fix="Check that the address is the root of a DICOMweb service, such as https://pacs.example/dicom-web.",
        )

    def _error(self, what: str, *, code: str, why: object, fix: str) -> DataError:
        return DataError(what, code=code, where=self.url, why=str(why), fix=fix)

    def _not_stored(self, reasons: dict[Path, str], sent: int) -> DataError:
        some = len(reasons) < sent
        return DataError(
            f"The DICOMweb server stored {sent - len(reasons)} of {sent} results.",
            code="dicomweb-partly-stored" if some else "dicomweb-not-stored",
            where=self.url,
            why="; ".join(f"{path.name}: {reason}" for path, reason in reasons.items()),
            fix="The files are in --out. Ask who runs the archive whether it takes such objects.",
        )

    def _no_series(self, wanted: str, study: str, there: Sequence[RemoteSeries]) -> DataError:
        return DataError(
            f"The DICOMweb server has no {wanted} of this study.",
            code="dicomweb-no-such-series",
            where=f"{self.url}, study {study}",
            why=f"there are {'; '.join(map(str, there))}" if there else "it lists no series of this study",
            fix="Give the study's UID and a series by number, description or UID, as the archive shows them.",
        )


def _import_dicomweb() -> tuple[Any, Any]:
    try:
        import dicomweb_client
        import requests
    except ImportError as error:
        raise DataError(
            "Talking to a DICOMweb server needs dicomweb-client, which is not installed.",
            code="dicomweb-missing",
            fix="Install panorgan's wheel with its extra: pip install './panorgan-VERSION-py3-none-any.whl[dicom-out]'",
        ) from error
    return dicomweb_client, requests


def _remote(listed: Any) -> RemoteSeries:
    if not _UID.fullmatch(str(listed.SeriesInstanceUID)):  # it becomes the name of a folder
        raise ValueError("it lists a series whose UID is none")
    count = listed.get("NumberOfSeriesRelatedInstances")
    return RemoteSeries(
        uid=str(listed.SeriesInstanceUID),
        modality=str(listed.get("Modality") or ""),
        number=str(listed.get("SeriesNumber") or ""),
        description=str(listed.get("SeriesDescription") or "").strip(),
        instances=None if count is None else int(count),
    )


def _reason(item: Any) -> str:
    """DICOM's number for why one object was not stored."""
    number = None if item is None else item.get("FailureReason")
    return "not named among the stored ones" if number is None else f"failure reason 0x{int(number):04X}"


def _failures(response: Any) -> str:
    """The reasons why a server has stored nothing; empty if it names none."""
    try:
        failed = import_pydicom().Dataset.from_json(response.json()).get("FailedSOPSequence") or []
    except (ValueError, KeyError, TypeError, AttributeError):
        failed = []
    return "; ".join(_reason(item) for item in failed)
