"""Writes settings into the text of a YAML file; comments, order and everything else stay as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from panorgan.errors import ConfigError
from panorgan.overrides import as_assignments, overridden


def is_set(content: Mapping[str, Any], name: str) -> bool:
    """Whether a file sets a setting, given by its dotted name."""
    place: Any = content
    for key in name.split("."):
        if not isinstance(place, Mapping) or key not in place:
            return False
        place = place[key]
    return place is not None


def filled_in(text: str, settings: Mapping[str, Any], where: Path) -> str:
    """The text with these settings (by dotted name) added or replaced; it is checked before it is returned."""
    expected = overridden(_unshared(yaml.safe_load(text) or {}), as_assignments(settings))
    changed = text
    for name, value in settings.items():
        changed = _with(changed, name.split("."), value)
    if yaml.safe_load(changed) != expected:
        lines = "\n".join(f"{name}: {_plain(value)}" for name, value in settings.items())
        raise ConfigError(
            "The settings could not be written into this file.",
            code="not-filled-in",
            where=str(where),
            why="it is written in a way that cannot be changed line by line",
            fix=f"Write them by hand:\n{lines}",
        )
    return changed


def _with(text: str, path: Sequence[str], value: Any) -> str:
    """The text with one setting."""
    node = yaml.compose(text, yaml.SafeLoader)
    for depth, key in enumerate(path):
        found = _value_of(node, key)
        if found is None:
            return _added(text, node, path[depth:], value)
        last = depth + 1 == len(path)
        if last or not isinstance(found, yaml.MappingNode):
            inner = _plain(_nested(path[depth + 1 :], value))
            start, end = found.start_mark.index, _end(found)
            gap = " " if start == end and text[start - 1 : start] == ":" else ""  # a key without a value
            return text[:start] + gap + inner + text[end:]
        node = found
    return text


def _unshared(content: Any) -> Any:
    """A copy without shared objects: changing an aliased value must not change the value that it repeats."""
    if isinstance(content, dict):
        return {key: _unshared(value) for key, value in content.items()}
    return [_unshared(value) for value in content] if isinstance(content, list) else content


def _value_of(node: yaml.Node, key: str) -> yaml.Node | None:
    pairs = node.value if isinstance(node, yaml.MappingNode) else ()
    return next((value for name, value in pairs if name.value == key), None)


def _added(text: str, node: yaml.MappingNode, path: Sequence[str], value: Any) -> str:
    """The text with a new setting at the end of a mapping."""
    if node.flow_style:
        brace = node.end_mark.index - 1
        comma = ", " if node.value else ""
        entry = _plain(_nested(path, value))[1:-1]
        return text[:brace].rstrip(" ") + comma + entry + text[brace:]
    end = text.find("\n", max(_end(node) - 1, 0))
    head, tail = (text, "") if end < 0 else (text[:end], text[end:])
    indent = node.start_mark.column
    lines = [f"{' ' * (indent + 2 * depth)}{key}:" for depth, key in enumerate(path)]
    return "\n".join([head, *lines]) + f" {_plain(value)}" + (tail or "\n")


def _nested(path: Sequence[str], value: Any) -> Any:
    for key in reversed(path):
        value = {key: value}
    return value


def _plain(value: Any) -> str:
    """A value on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6)
    return text.removesuffix("\n").removesuffix("\n...")


def _end(node: yaml.Node) -> int:
    """The end of a node's own text. YAML counts comments after a block as part of it."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last)
    return int(node.end_mark.index)
