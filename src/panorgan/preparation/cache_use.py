"""Records which process uses which entries of the cache, so that no entry in use is removed.

Every process has a file in `.in-use` next to the entries, holds its lock as long as it lives, and lists what it uses.
A process that removes something asks for those locks: what a dead process used is free. Without locks (Windows, some
network disks) only the time of the last use protects an entry.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO

IN_USE = ".in-use"
_GATE = "gate"
# Where there are no locks, so much time must have passed since an entry was used.
UNUSED_SECONDS = 24 * 3600
# Each costs an open file. A process works with one or two caches; tests make hundreds, and soon forget them.
_MOST_FOLDERS = 32

_own: dict[tuple[Path, int], IO[str]] = {}
_listed: set[Path] = set()
_thread_lock = threading.Lock()


def mark_in_use(entry: Path) -> None:
    """Mark an entry as used by this process until the process ends."""
    with _thread_lock, contextlib.suppress(OSError):  # a cache that may only be read cannot be emptied either
        if entry in _listed and (entry.parent, os.getpid()) in _own:
            return
        with _gate(entry.parent, exclusive=False):
            file = _own_file(entry.parent)
            file.write(f"{entry.name}\n")
            file.flush()
        _listed.add(entry)


@contextlib.contextmanager
def entries_in_use(folder: Path) -> Iterator[frozenset[str]]:
    """The names of all entries in a folder that a running process uses; none is added while this is open."""
    with _gate(folder, exclusive=True):
        yield _in_use(folder)


def _in_use(folder: Path) -> frozenset[str]:
    if os.name != "posix":
        recent = (p for p in folder.glob("*") if time.time() - p.stat().st_mtime < UNUSED_SECONDS)
        return frozenset(path.name for path in recent)
    names: set[str] = set()
    for path in (folder / IN_USE).glob("*.used"):
        with contextlib.suppress(OSError), path.open(encoding="utf-8") as file:
            if _lock(file, exclusive=True, wait=False):
                path.unlink()  # its process has ended
            else:
                names.update(file.read().split())
    return frozenset(names)


def _own_file(folder: Path) -> IO[str]:
    """This process's list, locked for as long as it lives; a forked child has its own."""
    key = (folder, os.getpid())
    if key not in _own:
        path = folder / IN_USE / f"{uuid.uuid4().hex}.used"
        file = path.open("a", encoding="utf-8")
        _lock(file, exclusive=True, wait=True)
        _own[key] = file
        while len(_own) > _MOST_FOLDERS:
            _own.pop(next(iter(_own))).close()
    return _own[key]


@contextlib.contextmanager
def _gate(folder: Path, exclusive: bool) -> Iterator[None]:
    """Lock for marking entries (shared by many processes) or for removing entries (exclusive)."""
    (folder / IN_USE).mkdir(parents=True, exist_ok=True)
    with (folder / IN_USE / _GATE).open("a") as file:
        _lock(file, exclusive, wait=True)
        yield


def _lock(file: IO[str], exclusive: bool, wait: bool) -> bool:
    """Take a lock that ends with the file or the process; False if another has it, or there are no locks."""
    try:
        import fcntl
    except ImportError:
        return False
    how = (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | (0 if wait else fcntl.LOCK_NB)
    try:
        fcntl.flock(file, how)
    except BlockingIOError:
        return False
    return True
