"""Log rotation: a log over its size is copied aside and emptied, and a few copies are kept.

The network engine keeps `audit.log` and its output open for weeks, so after a rename it would write into the copy. It
opens both to append, so emptying is safe. A line that arrives in the microseconds between copying and emptying is lost.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

LIMIT_BYTES = 10_000_000
KEPT = 3
"""Number of older copies: `audit.log.1` is the newest, `audit.log.3` the oldest."""
LOOK_EVERY_SECONDS = 10.0


def rotate(log: Path, limit: int = LIMIT_BYTES, kept: int = KEPT) -> bool:
    """Copy a log aside and empty it if it is over the limit; returns whether it was."""
    if not log.is_file() or log.stat().st_size <= limit:
        return False
    scratch = log.with_name(f".{log.name}.incomplete")
    try:
        with log.open("rb") as content, scratch.open("wb") as copy:
            shutil.copyfileobj(content, copy)
            for number in range(kept, 1, -1):
                with contextlib.suppress(FileNotFoundError):
                    os.replace(_older(log, number - 1), _older(log, number))
            shutil.copyfileobj(content, copy)  # what was written meanwhile
            os.truncate(log, 0)
        os.replace(scratch, _older(log, 1))
    except OSError:  # no space for the copy: the oldest lines make way for the newest
        scratch.unlink(missing_ok=True)
        os.truncate(log, 0)
    return True


@contextlib.contextmanager
def rotating(logs: Sequence[Path], every: float = LOOK_EVERY_SECONDS) -> Iterator[None]:
    """Rotate the logs regularly while this context is open."""
    ended = threading.Event()

    def watch() -> None:
        while True:
            for log in logs:
                with contextlib.suppress(OSError):  # a log must not stop a site
                    rotate(log)
            if ended.wait(every):
                return

    thread = threading.Thread(target=watch, daemon=True, name="log rotation")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _older(log: Path, number: int) -> Path:
    return log.with_name(f"{log.name}.{number}")
