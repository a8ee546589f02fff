"""Writes files of the cache: flushed before they get their name, each with a checksum."""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from panorgan.checksums import Piece, checksum


def write_flushed(path: Path, pieces: Iterable[Piece]) -> str:
    """Write a new file and flush it to disk; returns its checksum. An error (a full disk) names the file."""
    kept = list(pieces)
    try:
        with path.open("wb") as file:
            for piece in kept:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    return checksum(kept)


def array_bytes(array: NDArray[Any]) -> Piece:
    """An array as `.npy`. Not written by numpy itself: its error on a full disk does not say that it is full."""
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getbuffer()


def arrays_bytes(arrays: Mapping[str, NDArray[Any]]) -> Piece:
    """Arrays by name as `.npz`."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]  # names are names of arrays
    return buffer.getbuffer()


def mark_used(path: Path, every: float = 0.0) -> None:
    """Update the time of a file or folder if it is `every` seconds old: the least recently used is removed first."""
    with contextlib.suppress(OSError):  # a shared cache may belong to another user
        if time.time() - path.stat().st_mtime >= every:
            os.utime(path)
