"""One process per run folder."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from panorgan.errors import RunError

ORPHANS_END_WITHIN = 60.0
"""Seconds. A killed server or site leaves its job's process behind for a moment; the next job waits for its end."""


class BusyError(RunError):
    """Another process holds the folder."""


@contextmanager
def only_one_process(folder: Path, wait: float = 0.0) -> Iterator[None]:
    """Hold the folder's lock; the system releases it when the process ends, for any reason.

    `wait`: seconds to wait for another process that is about to end.
    """
    try:
        import fcntl
    except ImportError:  # Windows: no lock, no protection
        yield
        return
    with (folder / ".lock").open("w") as file:
        ends = time.monotonic() + wait
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if time.monotonic() < ends:
                    time.sleep(0.1)
                    continue
                raise BusyError(
                    "Another process is working in this run folder.",
                    code="run-busy",
                    where=str(folder),
                    fix="Wait until it has finished, or stop it, then resume.",
                ) from error
        yield


def is_locked(folder: Path) -> bool | None:
    """Does a process hold the folder's lock? Works across containers too. None where it is unknown."""
    try:
        import fcntl
    except ImportError:
        return None
    try:
        with (folder / ".lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    except OSError:
        return None
    return False
