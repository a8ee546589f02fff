"""Messages on disk: written with a checksum, and read only if it matches."""

from __future__ import annotations

from pathlib import Path

from panorgan.checksums import DAMAGED, is_damaged
from panorgan.errors import MessageError
from panorgan.federation.message import MessageFile


def open_checked(path: Path) -> MessageFile:
    """Open a file written by `sealed_tensors`; raises MessageError if it is unreadable or damaged."""
    refuse_damaged(path)
    return MessageFile(path)


def refuse_damaged(path: Path) -> None:
    """Raise MessageError if a file is not what was written."""
    try:
        damaged = is_damaged(path)
    except OSError as error:
        raise MessageError("A file cannot be read.", code="file-unreadable", where=str(path), why=str(error)) from error
    if damaged:
        raise MessageError("A file is damaged.", code="file-damaged", where=str(path), why=DAMAGED)
