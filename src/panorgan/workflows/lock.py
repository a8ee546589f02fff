"""One process per run folder."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from panorgan.errors import RunError

ORPHANS_END_WITHIN = 60.0
"""Seconds. A killed server or site leaves its job's process behind for a moment; the next job waits for its end."""

_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)


class BusyError(RunError):
    """Another process holds the folder."""


@contextmanager
def only_one_process(folder: Path, wait: float = 0.0) -> Iterator[None]:
    """Hold the folder's lock; the system releases it when the process ends, for any reason.

    `wait`: seconds to wait for another process that is about to end.
    """
    # One thread may enter and another leave. A disk without locks is an error: a mere file would outlive a kill.
    lock = FileLock(folder / ".lock", thread_local=False, fallback_to_soft=False)
    try:
        held = lock.acquire(timeout=wait, poll_interval=0.1)
    except Timeout as error:
        raise BusyError(
            "Another process is working in this run folder.",
            code="run-busy",
            where=str(folder),
            fix="Wait until it has finished, or stop it, then resume.",
        ) from error
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        raise RunError(
            "The run folder cannot be locked.",
            code="no-lock",
            where=str(folder),
            why=f"two processes in one run would damage it, and the disk refuses a lock: {error.strerror or error}",
            fix="Put the run folder on a disk that has file locks, such as a local one.",
        ) from error
    with held:
        yield


def is_locked(folder: Path) -> bool | None:
    """Does a process hold the folder's lock? Works across containers too. None where it is unknown.

    The caller may have no right to write here, so it does not try to take the lock (`FileLock` opens for writing).
    """
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
