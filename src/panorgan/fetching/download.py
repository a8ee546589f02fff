"""Download one large file so that a broken connection or a killed process costs nothing that has arrived.

What has arrived is in `<file>.part`; `<file>.part.json` says of which version of which file it is. A download goes on
only where the server confirms that it still has this version (`If-Range`); otherwise it begins again.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from email.message import Message
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import cast
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from panorgan.errors import DataError

Progress = Callable[[int, int | None], None]
"""Gets the bytes that have arrived, and how many there will be where the server says so."""

_BLOCK = 1 << 20
_TRIES = 4
_SECONDS = 60.0
_NOT_SATISFIABLE = 416
_TRY_LATER = (429, 500, 502, 503, 504)


class _BrokenOffError(Exception):
    """The connection ended before the file did."""


def download(
    url: str,
    target: Path,
    on_progress: Progress | None = None,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Write what `url` has to `target`; it appears when it is whole.

    A connection that breaks off is taken up again, four times without a new byte at most. `pause` waits in between.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part, failures, reached = _part(target), 0, False
    while True:
        before = _size(part)
        try:
            _receive(url, part, on_progress or (lambda done, total: None))
            break
        except HTTPError as error:
            trouble, cause = _refused(url, error), cast(Exception, error)
            if error.code not in _TRY_LATER:
                raise trouble from error
        except (_BrokenOffError, HTTPException, OSError) as error:
            _keep_disk_errors(error)
            if isinstance(error, URLError) and not reached:
                raise _unreachable(url, error) from error
            trouble, cause = _broken(url, part, error), error
        reached = True
        failures = 0 if _size(part) > before else failures + 1
        if failures == _TRIES:
            raise trouble from cause
        pause(2.0**failures)
    os.replace(part, target)
    _note(part).unlink(missing_ok=True)


def _receive(url: str, part: Path, on_progress: Progress) -> None:
    """Append what is missing to what has arrived; all of it where that is of another version."""
    start, version = _size(part), _known_version(part, url)
    request = Request(url, headers={"User-Agent": "panorgan", "Accept-Encoding": "identity"})
    if start and version:
        request.add_header("Range", f"bytes={start}-")
        request.add_header("If-Range", version)
    try:
        answer = cast(HTTPResponse, urlopen(request, timeout=_SECONDS))
    except HTTPError as error:
        if error.code == _NOT_SATISFIABLE:  # nothing is missing, or the file has shrunk
            if error.headers.get("Content-Range", "") == f"bytes */{start}":
                return
            part.unlink()
            raise _BrokenOffError("the file has changed at the server") from error
        raise
    with answer:
        _refuse_downgrade(url, answer.url)
        goes_on = answer.status == 206 and answer.headers.get("Content-Range", "").startswith(f"bytes {start}-")
        if not goes_on:
            start = 0
            part.unlink(missing_ok=True)
            _note(part).write_text(json.dumps({"url": url, "version": _version(answer.headers)}), encoding="utf-8")
        length = answer.headers.get("Content-Length")
        total = None if length is None else start + int(length)
        _refuse_full_disk(part, 0 if total is None else total - start)
        with part.open("ab") as file:
            on_progress(start, total)
            while block := answer.read(_BLOCK):
                file.write(block)
                on_progress(file.tell(), total)
    if total is not None and _size(part) != total:
        raise _BrokenOffError(f"{_size(part)} of {total} bytes have arrived")


def _version(headers: Message) -> str:
    """What names this version of the file; empty where the server names none that may be relied on."""
    tag = headers.get("ETag", "")
    return str(tag if tag and not tag.startswith("W/") else headers.get("Last-Modified", ""))


def _known_version(part: Path, url: str) -> str:
    """The version of what has arrived; empty where it is of another address."""
    try:
        known = json.loads(_note(part).read_text(encoding="utf-8"))
        return str(known["version"]) if known["url"] == url else ""
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _part(target: Path) -> Path:
    return target.with_name(f"{target.name}.part")


def _note(part: Path) -> Path:
    return part.with_name(f"{part.name}.json")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _keep_disk_errors(error: Exception) -> None:
    """A full or read-only disk is not the connection's fault. Files have names, connections have not."""
    if isinstance(error, OSError) and (error.filename is not None or error.errno in (28, 30, 122)):
        raise error


def _refuse_downgrade(asked: str, given: str) -> None:
    if asked.startswith("https:") and not given.startswith("https:"):
        raise DataError(
            "The server of a data set sends on to an address without encryption.",
            code="download-unencrypted",
            where=given,
            fix="Do not use it. Get the archive elsewhere and pass it with --from.",
        )


def _refuse_full_disk(part: Path, missing: int) -> None:
    free = shutil.disk_usage(part.parent).free
    if missing > free:
        raise DataError(
            "The disk has no room for this download.",
            code="no-room-to-download",
            where=str(part.parent),
            why=f"{missing / 1e9:.1f} GB are missing, {free / 1e9:.1f} GB are free; unpacking needs as much again",
            fix="Make room, or choose another folder with --to or PANORGAN_DATA.",
        )


def _unreachable(url: str, error: URLError) -> DataError:
    return DataError(
        "The server of a data set cannot be reached.",
        code="server-unreachable",
        where=url,
        why=str(error.reason),
        fix="Check the connection; behind a proxy set https_proxy.",
    )


def _refused(url: str, error: HTTPError) -> DataError:
    return DataError(
        "The server of a data set does not give this file.",
        code="download-refused",
        where=url,
        why=f"it answers {error.code} {error.reason}",
        fix="Try later. If it stays so, the file has moved: see the page of the data set, and use --from.",
    )


def _broken(url: str, part: Path, error: Exception) -> DataError:
    return DataError(
        "A download broke off.",
        code="download-broken-off",
        where=url,
        why=str(error) or type(error).__name__,
        fix=f"Give the same command again: it goes on where it stopped ({_size(part)} bytes are in {part}).",
    )
