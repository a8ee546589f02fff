"""The size limit of the cache: `PANORGAN_CACHE_LIMIT`, a site's own setting, or 100 GB."""

from __future__ import annotations

import os
import re
from pathlib import Path

from panorgan.errors import ConfigError
from panorgan.preparation.cache import CacheEntry, trim

VARIABLE = "PANORGAN_CACHE_LIMIT"
_DEFAULT_GB = 100.0
_GB = 10**9
_UNITS = {"": _GB, "MB": 10**6, "GB": _GB, "TB": 10**12}


def cache_limit(own_gb: float | None = None) -> int | None:
    """Bytes that the cache may hold; None for no limit. The variable takes precedence over a site's own setting."""
    text = os.environ.get(VARIABLE, "").strip()
    if text.lower() in ("none", "off"):
        return None
    if not text:
        return int((own_gb or _DEFAULT_GB) * _GB)
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(|MB|GB|TB)", text.upper())
    if found is None:
        raise ConfigError(
            f"The limit of the cache is not valid: {text!r}.",
            code="cache-limit",
            where=f"{VARIABLE} in the environment",
            fix="Give a number of GB ('200'), or one with a unit ('500MB', '2TB'), or 'none'.",
        )
    return int(float(found[1]) * _UNITS[found[2]])


def trim_cache(cache: Path, own_gb: float | None = None) -> list[CacheEntry]:
    """Remove the least recently used entries; entries in use by any process stay, even beyond the limit."""
    limit = cache_limit(own_gb)
    return [] if limit is None else trim(cache, limit)
