"""Files that are either the old version or the new one, whatever happens in between."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


def write_atomically(path: Path, content: bytes | str | Sequence[bytes | memoryview], durable: bool = False) -> None:
    """Write beside the target, then rename over it. Content may come in pieces.

    A killed process leaves the old file. `durable` also survives a power cut, at the price of a flush to disk.
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


def flush_folder(folder: Path) -> None:
    """Make the renames in a folder survive a power cut, where the system can."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
