"""Files that hold either the old version or the new one, whatever happens in between."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from panorgan.checksums import DamagedError, checksum, file_checksum


def write_atomically(path: Path, content: bytes | str | Sequence[bytes | memoryview], durable: bool = False) -> None:
    """Write next to the target, then rename over it. Content may come in pieces.

    A killed process leaves the old file. `durable` also survives a power cut, at the cost of a flush to disk.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.incomplete")
    with scratch.open("wb") as file:
        if isinstance(content, str):
            content = content.encode()
        for piece in (content,) if isinstance(content, bytes) else content:
            file.write(piece)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    os.replace(scratch, path)
    if durable:
        flush_folder(path.parent)


def write_with_checksum(path: Path, text: str) -> None:
    """Write a file that has no place for a checksum (a table), and its checksum into `.<name>.crc32` next to it.

    The checksum is written first, together with that of the previous version: so it matches after a kill at any time.
    """
    try:
        known = [] if _is_other(path) else [file_checksum(path)]
    except FileNotFoundError:
        known = []
    write_atomically(_beside(path), "\n".join([checksum((text.encode(),)), *known]))
    write_atomically(path, text)


def read_with_checksum(path: Path) -> str:
    """The text of such a file; raises DamagedError."""
    if _is_other(path):
        raise DamagedError
    return path.read_text(encoding="utf-8")


def _is_other(path: Path) -> bool:
    try:
        return file_checksum(path) not in _beside(path).read_text(encoding="utf-8", errors="replace").split()
    except FileNotFoundError:
        if not path.exists():
            raise
        return False  # of an older version, or copied without its checksum


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.crc32")


def flush_folder(folder: Path) -> None:
    """Make the renames in a folder survive a power cut, where the system can."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
