"""`panorgan cache`: show what is kept on disk for reuse, and free space."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from panorgan.cli.console import Console
from panorgan.preparation.cache import CacheEntry, clear, read_cache, size_of
from panorgan.workflows.cache import cache_limit
from panorgan.workflows.site_cases import cache_folder

_DAY = 86400


def run_cache(folder: Path | None, clears: bool, older_than: float | None, as_json: bool) -> None:
    """Show the cache by data set, after removing entries if requested."""
    cache = folder or cache_folder()
    gone = clear(cache, older_than or 0.0) if clears or older_than is not None else []
    entries, limit, size = read_cache(cache), cache_limit(), size_of(cache)
    sets = _by_data_set(entries)
    if as_json:
        removed = {"entries": len(gone), "bytes": sum(entry.size for entry in gone)}
        result = {"folder": str(cache), "bytes": size, "limit": limit, "removed": removed, "data_sets": sets}
        print(json.dumps({"result": result}), flush=True)
        return
    console = Console(highlight=False, soft_wrap=True)
    if gone:
        console.print(f"Removed {len(gone)} entries, {in_words(sum(entry.size for entry in gone))}.")
    if sets:
        console.print(_table(sets))
    may = "no limit" if limit is None else f"at most {in_words(limit)} (PANORGAN_CACHE_LIMIT)"
    console.print(f"{escape(str(cache))}: {in_words(size)}, {may}.")
    if (clears or older_than is not None) and entries:
        console.print("The rest is in use by a running process, or was used more recently.")


def _by_data_set(entries: Sequence[CacheEntry]) -> list[dict[str, Any]]:
    """Entries grouped by site, the most recently used first."""
    groups: dict[tuple[str, str], list[CacheEntry]] = {}
    for entry in entries:
        groups.setdefault((entry.kind, entry.name), []).append(entry)
    return [
        {
            "kind": kind,
            "name": name,
            "source": _common([entry.source for entry in group]),
            "entries": len(group),
            "bytes": sum(entry.size for entry in group),
            "last_used": max(entry.used for entry in group),
        }
        for (kind, name), group in groups.items()
    ]


def _common(sources: Sequence[str]) -> str:
    """The folder that holds all of them."""
    try:
        return os.path.commonpath([os.path.dirname(source) for source in sources])
    except ValueError:  # on different drives, or not known
        return ""


def _table(sets: Sequence[dict[str, Any]]) -> Table:
    table = Table("data set", "from", "entries", "size", "last used")
    for one in sets:
        name = one["name"] if one["kind"] == "case" else f"generated hospitals {one['name']}"
        days = (time.time() - one["last_used"]) / _DAY
        used = "today" if days < 1 else f"{days:.0f} days ago"
        table.add_row(escape(name or "?"), escape(one["source"]), str(one["entries"]), in_words(one["bytes"]), used)
    return table


def in_words(size: int) -> str:
    """`1234567` → `1.2 MB`."""
    for unit, step in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6)):
        if size >= step:
            return f"{size / step:.1f} {unit}"
    return f"{size / 1000:.1f} kB"
