"""Descriptions of the methods as stored data, so that `panorgan methods` and completion need not import torch.

`described.json` is written from the registry (`scripts/describe_methods.py`), which stays the only source: it holds a
hash of this room's source files. Where that differs, or other packages bring methods, there is no stored data.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("described.json")
ROOM = Path(__file__).parents[1]


@dataclass(frozen=True)
class Stored:
    """A description, or a part of one, with the attributes of the original."""

    content: Mapping[str, Any]

    def __getattr__(self, name: str) -> Any:
        if name not in self.content:
            raise AttributeError(name)
        value = self.content[name]
        if name in _PARTS:
            return tuple(Stored(part) for part in value)
        return tuple(value) if name in _TUPLES and isinstance(value, list) else value


@dataclass(frozen=True)
class StoredMethods:
    """Every method by name, and the settings that all of them have."""

    methods: Mapping[str, Any]
    common_fields: tuple[Any, ...]


@cache
def stored_methods() -> StoredMethods | None:
    """The stored descriptions; None where they may differ from the methods."""
    try:
        content = json.loads(FILE.read_text(encoding="utf-8"))
        if content["sources"] != sources_hash() or list(entry_points(group="panorgan.methods")):
            return None
        methods = {name: Stored(entry) for name, entry in content["methods"].items()}
        return StoredMethods(methods, tuple(Stored(field) for field in content["common_fields"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def sources_hash() -> str:
    """Of the files of this room, by their names and content."""
    digest = hashlib.sha256()
    for path in sorted(ROOM.rglob("*.py"), key=lambda path: path.relative_to(ROOM).as_posix()):
        digest.update(path.relative_to(ROOM).as_posix().encode() + b"\0")
        digest.update(path.read_bytes().replace(b"\r\n", b"\n"))
    return digest.hexdigest()[:32]


def file_content(described: Iterable[Any], common_fields: Iterable[Any]) -> str:
    """The text of `described.json`."""
    content = {
        "sources": sources_hash(),
        "methods": {one.name: _plain(one, _DESCRIPTION) for one in described},
        "common_fields": [_plain(field, _FIELD) for field in common_fields],
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


_FIELD = ("name", "type", "default", "meaning", "paper")
_UPLOAD = ("stage", "rounds", "weights", "tensors", "words", "size", "relative")
_VARIANT = ("setting", "sent")
_DESCRIPTION = (
    *("name", "group", "summary", "title", "text", "paper", "equations", "recipe", "fields", "own_fields", "numbers"),
    *("tensors", "pooled", "labels", "network", "network_words", "stages", "sent", "variants"),
)
_TUPLES = ("stages", "tensors")
_PARTS = {"fields": _FIELD, "own_fields": _FIELD, "sent": _UPLOAD, "variants": _VARIANT}


def _plain(one: Any, names: Iterable[str]) -> dict[str, Any]:
    found = {name: getattr(one, name) for name in names}
    return {
        name: [_plain(part, _PARTS[name]) for part in value] if name in _PARTS else value
        for name, value in found.items()
    }
