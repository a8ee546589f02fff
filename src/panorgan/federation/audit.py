"""An append-only, hash-chained log of what has left a site, so that later changes can be detected.

One line is one JSON record: `n`, `time`, what happened, `previous` (the hash of the record before) and, last, `hash`:
the SHA-256 of the line without that last field. Change, remove or insert a line, and the chain breaks there.

The chain alone cannot show that lines are missing at its *end*. So a small file next to it (`egress-log.head`) holds
number and hash of the newest record. Together they reveal every accident, and every edit that does not recompute both
files. They contain no secret: write access to both files is enough to forge both. The only protection against that is
to keep the newest hash elsewhere (`panorgan federation egress` shows it), or to ship the log to another machine.

A line that a killed process or a full disk left unfinished stays; the next record states its length and its hash. Its
message did not leave: a record is on disk before its message is sent.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from panorgan.federation.failures import EgressError
from panorgan.federation.files import flush_folder, write_atomically

_BEGINNING = "0" * 64
_APPENDING = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0)
_OWN_FIELDS = ("n", "time", "previous", "hash")
TORN = "torn"
"""`kind` of the record that accounts for an unfinished line before it."""


class AuditError(EgressError):
    """The log cannot be trusted or written, so nothing may leave."""


@dataclass(frozen=True)
class AuditReport:
    """The result of verifying a log. `line` counts from 1; `head` is the hash of the newest record.

    `code` is a fixed word for `why`; empty where the log is sound.
    `torn`: unfinished lines that a later record accounts for. `unfinished`: bytes of one at the very end.
    """

    entries: int
    ok: bool
    head: str
    line: int | None = None
    why: str = ""
    torn: int = 0
    unfinished: int = 0
    code: str = ""

    def as_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)


@dataclass
class _Chain:
    """How far a log has been verified. `end` and `lines` are those of the last good record, `hashes` of all of them."""

    end: int = 0
    lines: int = 0
    hashes: list[str] = field(default_factory=list)
    listings: dict[str, list[Any]] = field(default_factory=dict)
    torn: int = 0
    broken: tuple[int, str] | None = None
    """Line and code."""

    @property
    def head(self) -> str:
        return self.hashes[-1] if self.hashes else _BEGINNING

    def follow(self, content: bytes) -> Iterator[dict[str, Any]]:
        """Continue after `end`; yields good records until something is wrong."""
        pending = bytearray()  # bytes since the last good record that are not a record
        skipped = 0
        for line in io.BytesIO(content):
            whole = line.endswith(b"\n")
            record = _parse_line(line if whole else line + b"\n")
            if record is not None and (code := self._objection(record, bytes(pending))):
                self.broken = (self.lines + 1, code)
                return
            if record is None or not whole:
                pending += line
                skipped += 1
                continue
            self.end += len(pending) + len(line)
            self.lines += skipped + 1
            self.torn += bool(pending)
            pending, skipped = bytearray(), 0
            self.hashes.append(record["hash"])
            yield record

    def _objection(self, record: Mapping[str, Any], pending: bytes) -> str:
        """The code of why a record that is sound in itself does not belong here."""
        if record["n"] != len(self.hashes) + 1 or record["previous"] != self.head:
            return "line-changed" if pending else "entry-missing"
        if (pending or record.get("kind") == TORN) and not _accounts_for(record, pending):
            return "line-changed" if pending else "torn-line-missing"
        if (name := record.get("listing")) is not None:
            if "listed" in record:
                if _hash(_text(record["listed"])) != name:
                    return "list-changed"
                self.listings[name] = record["listed"]
            if name not in self.listings:
                return "list-missing"
        return ""


class AuditLog:
    """Appends records. Safe for several processes of one site, and for a process that is killed at any moment."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._chain = _Chain()
        self._file_id: tuple[int, int] | None = None
        self._threads = threading.Lock()

    def append(self, entry: Mapping[str, Any], listed: Sequence[Any] | None = None) -> dict[str, Any]:
        """Write a record and flush it to disk; returns it.

        `listed` is a long list that repeats, such as the tensors of a model. It is written out at its first occurrence;
        later records refer to it by its hash, so that the line of a round stays short.

        The whole log is verified before an object's first record, then what has been added since. A log that does not
        verify gets no new records: nothing may leave on top of it.
        """
        if clash := [name for name in (*_OWN_FIELDS, "listing", "listed") if name in entry]:
            raise ValueError(f"the log itself sets {', '.join(clash)}")
        if entry.get("kind") == TORN:
            raise ValueError("only the log itself records unfinished lines")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._threads, _lock(self.path, exclusive=True):
            is_new = not self.path.exists()
            handle = os.open(self.path, _APPENDING, 0o640)
            try:
                rest = self._finished(handle, self._catch_up(handle))
                lines = self._lines(entry, listed, rest)
                _write_all(handle, b"".join(lines))
                os.fsync(handle)
            finally:
                os.close(handle)
            if is_new:
                flush_folder(self.path.parent)
            (*_, record) = self._chain.follow(rest + b"".join(lines))
            _write_head(self.path, len(self._chain.hashes), self._chain.head)
            return record

    def _catch_up(self, handle: int) -> bytes:
        """Verify what was added since the last time; returns the rest that an unfinished write left at the end."""
        status = os.fstat(handle)
        if self._file_id != (status.st_dev, status.st_ino) or status.st_size < self._chain.end:
            self._chain = _Chain()  # the file was moved or replaced: verify all of it
        self._file_id = (status.st_dev, status.st_ino)
        head = _read_head(self.path)
        content = _read_from(handle, self._chain.end)
        before = self._chain.end
        for _ in self._chain.follow(content):
            pass
        report = _report_on(self._chain, head, before + len(content))
        if not report.ok:
            self._chain = _Chain()
            place = f"{self.path}, line {report.line}" if report.line else str(self.path)
            raise AuditError(
                "The log of what left this site does not verify, so nothing may leave.",
                code="audit-log-broken",
                where=place,
                why=report.why,
                fix="Find out what happened to it. Then move the log and its .head file to a safe place: "
                "a new log begins with the next message.",
            )
        return content[self._chain.end - before :]

    def _finished(self, handle: int, rest: bytes) -> bytes:
        """Complete a record that lacks only its line break; anything else stays unfinished."""
        if rest and any(True for _ in self._chain.follow(rest + b"\n")):
            _write_all(handle, b"\n")
            return b""
        return rest

    def _lines(self, entry: Mapping[str, Any], listed: Sequence[Any] | None, rest: bytes) -> list[bytes]:
        """The record's line; before it, if needed, one that accounts for an unfinished line."""
        lines: list[bytes] = []
        number, previous = len(self._chain.hashes), self._chain.head
        content = dict(entry)
        if listed is not None:
            text = _text(listed)
            content["listing"] = name = _hash(text)
            if name not in self._chain.listings:
                content["listed"] = json.loads(text)
        torn: list[dict[str, Any]] = []
        if rest:
            lines.append(b"" if rest.endswith(b"\n") else b"\n")
            torn.append({"kind": TORN, "bytes": len(rest), "sha256": hashlib.sha256(rest).hexdigest()})
        for one in (*torn, content):
            number += 1
            line, previous = _line(number, one, previous)
            lines.append(line)
        return lines


def verify(path: Path) -> AuditReport:
    """Follow the whole chain and compare it with the head file. Changes nothing."""
    return read_log(path)[0]


def read_log(path: Path) -> tuple[AuditReport, list[dict[str, Any]]]:
    """The verification of a log, and its records up to the first that cannot be trusted; lists are filled in."""
    with _lock(path, exclusive=False):
        head = _read_head(path)  # first: a record may be added in between, but none is ever removed
        content = path.read_bytes() if path.is_file() else b""
    chain = _Chain()
    records = []
    for record in chain.follow(content):
        if "listing" in record:
            record["listed"] = chain.listings[record["listing"]]
        records.append(record)
    return _report_on(chain, head, len(content)), records


def _report_on(chain: _Chain, head: tuple[int, str] | str | None, size: int) -> AuditReport:
    """The report on a chain that was followed to the end of its file."""
    entries = len(chain.hashes)
    line, code = chain.broken or (None, "")
    counted = 0
    if not code and isinstance(head, str):
        code = head
    elif not code and head is None and entries > 1:
        code = "head-missing"
    elif not code and isinstance(head, tuple):
        counted, expected = head
        if counted > entries:
            line, code = chain.lines + 1, "end-missing"
        elif chain.hashes[counted - 1] != expected:
            code = "head-replaced"
    why = _WHY[code].format(entries=entries, next=entries + 1, counted=counted) if code else ""
    unfinished = 0 if code else size - chain.end
    return AuditReport(entries, not code, chain.head, line, why, chain.torn, unfinished, code)


_WHY = {
    "line-changed": "the line was changed",
    "entry-missing": "entry {next} was removed or changed",
    "torn-line-missing": "the unfinished line that it accounts for was removed",
    "list-changed": "the list does not match its hash",
    "list-missing": "it refers to a list that was never written",
    "head-damaged": "the head file is damaged",
    "head-missing": "the head file is missing, so a missing end of the log cannot be detected",
    "head-replaced": "the head file names another entry {counted}: one of the two files was replaced",
    "end-missing": "the head file counts {counted} entries, the log holds {entries}: the end was changed or removed",
}
"""What is wrong with a log, by code."""


# -- one record ------------------------------------------------------------------------------------------------


def _line(number: int, entry: Mapping[str, Any], previous: str) -> tuple[bytes, str]:
    """The line of a record, and its hash."""
    time = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    # Parsed again as a reader would: tuples become lists, keys become text.
    body = json.loads(_text({"n": number, "time": time, **entry, "previous": previous}))
    digest = _hash(_text(body))
    return (_text({**body, "hash": digest}) + "\n").encode(), digest


def _parse_line(line: bytes) -> dict[str, Any] | None:
    """The record in a line whose hash is right and whose form is exactly ours, else None."""
    try:
        record = json.loads(line)
        if not isinstance(record, dict) or (_text(record) + "\n").encode() != line:
            return None
        body = {name: value for name, value in record.items() if name != "hash"}
        sound = list(record)[-1:] == ["hash"] and record["hash"] == _hash(_text(body))
        return record if sound and isinstance(record.get("n"), int) and "previous" in record else None
    except (ValueError, RecursionError):
        return None


def _accounts_for(record: Mapping[str, Any], pending: bytes) -> bool:
    """Whether a record accounts for the unfinished bytes before it; one line break may have been added to them."""
    length = record.get("bytes")
    if record.get("kind") != TORN or not isinstance(length, int) or length < 1:
        return False
    if pending[length:] not in (b"", b"\n"):
        return False
    return hashlib.sha256(pending[:length]).hexdigest() == record.get("sha256")


def _text(content: Any) -> str:
    """JSON in a single form; the order is the writer's."""
    return json.dumps(content, separators=(",", ":"), allow_nan=False)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


# -- files -----------------------------------------------------------------------------------------------------


def head_path(log: Path) -> Path:
    """The file with number and hash of the newest record."""
    return log.with_suffix(".head")


def _write_head(log: Path, number: int, digest: str) -> None:
    write_atomically(head_path(log), _text({"n": number, "hash": digest}) + "\n", durable=True)


def _read_head(log: Path) -> tuple[int, str] | str | None:
    """Number and hash; a code where the file is damaged; None where there is none."""
    try:
        content = head_path(log).read_bytes()
    except FileNotFoundError:
        return None
    with suppress(ValueError, KeyError, TypeError):
        head = json.loads(content)
        number, digest = head["n"], head["hash"]
        if (_text({"n": number, "hash": digest}) + "\n").encode() == content and type(number) is int and number > 0:
            return number, str(digest)
    return "head-damaged"


def _read_from(handle: int, offset: int) -> bytes:
    os.lseek(handle, offset, os.SEEK_SET)
    with os.fdopen(os.dup(handle), "rb") as file:
        return file.read()


def _write_all(handle: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(handle, left) :]


@contextmanager
def _lock(log: Path, exclusive: bool) -> Iterator[None]:
    """Keep other processes out while writing; a reader without permission to lock reads without."""
    try:
        import fcntl
    except ImportError:  # Windows: no lock, no protection
        yield
        return
    lock = log.with_name(f".{log.stem}.lock")
    try:
        file = lock.open("a" if exclusive else "r")
    except OSError:
        if exclusive:
            raise
        yield
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        yield
