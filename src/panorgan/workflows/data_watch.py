"""Detects changes in a site's cases. It runs before every round, so it must cost next to nothing."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from panorgan.data.case import Case
from panorgan.data.formats import files_of
from panorgan.preparation.store import Store

# A file changed twice within a clock tick keeps its time: so recent ones are hashed again.
_SETTLED_SECONDS = 2.0

Identity = tuple[tuple[int, int, int, int], ...]


class DataWatch:
    """Per case its split and a key of its files' content; files are read again only when their size, times or inode
    have changed."""

    def __init__(self, store: Store, splits: Mapping[str, Sequence[Case]]) -> None:
        self._store, self._splits = store, splits
        self._known: dict[tuple[str, str], tuple[Identity, str]] = {}

    def __call__(self) -> dict[str, str]:
        """`split key` by case, as it is now. A missing file is a `DataError`."""
        return {
            case.id: f"{split} {self._key(split, case)}"
            for split, cases in sorted(self._splits.items())
            for case in sorted(cases, key=lambda case: case.id)
        }

    def _key(self, split: str, case: Case) -> str:
        identity = _identity(case)
        known = self._known.get((split, case.id))
        if known is not None and identity is not None and known[0] == identity:
            return known[1]
        key = self._store.content_of(case)
        if identity is not None:
            self._known[split, case.id] = identity, key
        return key


def _identity(case: Case) -> Identity | None:
    """Size, times and inode of a case's files; None if one is missing, or too recently changed to tell."""
    try:
        labels = [file for path in (case.labels.paths if case.labels else ()) for file in files_of(path)]
        found = [_stat(path) for path in (*case.image_files, *labels)]
    except OSError:
        return None
    newest = max((max(modified, changed) for _, modified, changed, _ in found), default=0)
    return tuple(found) if time.time_ns() - newest > _SETTLED_SECONDS * 1e9 else None


def _stat(path: Path) -> tuple[int, int, int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino
