"""Files that are either the old version or the new one, whatever happens in between."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, content: bytes | str, durable: bool = False) -> None:
    """Write beside the target, then rename over it.

    A killed process leaves the old file. `durable` also survives a power cut, at the price of a flush to disk.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.incomplete")
    with scratch.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
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
