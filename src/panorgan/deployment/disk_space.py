"""Detects a full disk, however a library reports it, and a nearly full one."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

_CODES = (errno.ENOSPC, errno.EDQUOT)
_WORDS = ("no space left on device", "disk quota exceeded", "os error 28", "os error 122")
_NUMPY = ("requested and", "written")  # an OSError without a number: '4096 requested and 100 written'
LITTLE_MB = 100.0
"""With less than this a checkpoint may not fit."""


def is_disk_full(error: BaseException) -> bool:
    """Whether an error, or its cause, is a full disk."""
    cause: BaseException | None = error
    while cause is not None:
        text = str(cause).lower()
        if isinstance(cause, OSError) and (cause.errno in _CODES or all(word in text for word in _NUMPY)):
            return True
        if any(word in text for word in _WORDS):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def disk_full_message(error: BaseException, folder: Path) -> str:
    """`there is no room on the disk of …`: the file that the error names, else the folder that was being written.

    Without a figure: it would change from moment to moment, and the driver reports the same thing only once.
    """
    place = Path(str(error.filename)).parent if isinstance(error, OSError) and error.filename else folder
    return f"there is no room on the disk of {place}"


def low_disk_message(folder: Path) -> str:
    """A clause about a disk that is nearly full; empty if it is not."""
    free = free_mb(folder)
    if free is None or free >= LITTLE_MB:
        return ""
    return f"there is little room on the disk of {folder} ({free:.0f} MB free)"


def free_mb(folder: Path) -> float | None:
    """Free space at a folder, or above it where it does not exist yet; None if that is unknown."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        return shutil.disk_usage(folder).free / 1e6
    except OSError:
        return None
