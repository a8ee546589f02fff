"""Lists the entries of the cache, and removes the least recently used ones when it is full.

Entries are prepared cases (`store/<key>`, with the predictions of teachers next to them) and generated hospitals
(`phantom/<key>`). All of them can be made again. What a running process uses stays.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from panorgan.checksums import read_json
from panorgan.preparation.cache_use import entries_in_use
from panorgan.preparation.store import INCOMPLETE

STORE, PHANTOM = "store", "phantom"
# Notes about single scans in the store, which cost next to nothing: they are removed when everything is.
_NOTES = ("*.measured", "*.checked", "hashes/*")


@dataclass(frozen=True)
class CacheEntry:
    """One entry. `name` is its site for a case; `source` the scan that it was made of; `used` a time in seconds."""

    path: Path
    kind: Literal["case", "phantom"]
    name: str
    source: str
    size: int
    used: float


def read_cache(cache: Path) -> list[CacheEntry]:
    """All entries, those that were used last first."""
    found = [*_cases(cache / STORE), *_phantoms(cache / PHANTOM)]
    return sorted(found, key=lambda entry: (-entry.used, entry.path.name))


def size_of(cache: Path) -> int:
    """The size of the cache in bytes."""
    return _size(cache)


def trim(cache: Path, limit: int) -> list[CacheEntry]:
    """Remove entries until the cache holds at most `limit` bytes, or the rest is in use; returns those removed."""
    too_much = size_of(cache) - limit

    def must_go(entry: CacheEntry) -> bool:
        nonlocal too_much
        going = too_much > 0
        too_much -= entry.size if going else 0
        return going

    return remove(cache, must_go) if too_much > 0 else []


def clear(cache: Path, unused_days: float = 0.0) -> list[CacheEntry]:
    """Remove all entries that were unused for this many days, except those that a running process uses."""
    before = time.time() - 86400 * unused_days
    gone = remove(cache, lambda entry: entry.used <= before)
    for note in (path for pattern in _NOTES for path in (cache / STORE).glob(pattern)):
        with contextlib.suppress(OSError):
            if note.stat().st_mtime <= before:
                note.unlink()
    return gone


def remove(cache: Path, wanted: Callable[[CacheEntry], bool]) -> list[CacheEntry]:
    """Remove the entries for which `wanted` is true and that are not in use, the least recently used first."""
    going: list[tuple[CacheEntry, Path]] = []
    with contextlib.suppress(OSError), _in_use(cache) as in_use:  # without locks, or owned by another user: it stays
        for entry in reversed(read_cache(cache)):
            if entry.path not in in_use and wanted(entry):
                # A new name first, so that no process ever finds half an entry.
                scratch = entry.path.with_name(f"{INCOMPLETE}{uuid.uuid4().hex}")
                with contextlib.suppress(OSError):
                    os.replace(entry.path, scratch)
                    going.append((entry, scratch))
    for _, scratch in going:
        shutil.rmtree(scratch, ignore_errors=True)
    return [entry for entry, _ in going]


@contextlib.contextmanager
def _in_use(cache: Path) -> Iterator[set[Path]]:
    """Entries that running processes use; none is added while this is open."""
    with contextlib.ExitStack() as open_:
        folders = [folder for folder in (cache / STORE, cache / PHANTOM) if folder.is_dir()]
        yield {folder / name for folder in folders for name in open_.enter_context(entries_in_use(folder))}


def _cases(store: Path) -> Iterator[CacheEntry]:
    for description in store.glob("*/case.json"):
        entry = description.parent
        if entry.name.startswith("."):
            continue
        with contextlib.suppress(OSError):
            try:
                content = read_json(description.read_bytes())
                name, source = str(content.get("site", "")), str(content.get("source", ""))
            except (ValueError, AttributeError):  # damaged: made again when it is needed
                name, source = "", ""
            yield CacheEntry(entry, "case", name, source, _size(entry), entry.stat().st_mtime)


def _phantoms(folder: Path) -> Iterator[CacheEntry]:
    for entry in folder.glob("*"):
        if not entry.name.startswith(".") and entry.is_dir():
            with contextlib.suppress(OSError):
                yield CacheEntry(entry, "phantom", entry.name, str(entry), _size(entry), entry.stat().st_mtime)


def _size(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_size
    return total
