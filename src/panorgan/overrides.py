"""`--set a.b=value`: settings changed on the command line. An error in an override names `--set`, not the file."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import yaml

from panorgan.errors import ConfigError, PanorganError

Read = TypeVar("Read")


def read_overridden(
    content: Mapping[str, Any], overrides: Sequence[str], where: str, read: Callable[[dict[str, Any]], Read]
) -> Read:
    """The result of `read` for a file's content with `a.b=value` overrides.

    `where` is the file. An error caused by an override names the override instead.
    """
    try:
        return read(overridden(content, overrides))
    except PanorganError as error:
        if error.where.startswith(where):
            place = _set_there(error, overrides, where) or _set_apart(error, content, overrides, read, where)
            error.where = place or error.where
        raise


def as_assignments(overrides: Sequence[str] | Mapping[str, Any]) -> Sequence[str]:
    """Overrides as on the command line: `{"a.b": value}` becomes `a.b=value`."""
    if not isinstance(overrides, Mapping):
        return overrides
    return [f"{key}={yaml.safe_dump(value, default_flow_style=True)}" for key, value in overrides.items()]


def overridden(content: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy with the overrides applied in order."""
    changed = copy.deepcopy(dict(content))
    for override in overrides:
        _apply(changed, override)
    return changed


def _set_there(error: PanorganError, overrides: Sequence[str], where: str) -> str:
    """The override that set the setting named in an error, or a group that contains it; empty if none did."""
    place = error.where.removeprefix(where).removeprefix(": ").replace(": ", ".")
    for key in reversed([_key(override) for override in overrides]):
        if f"{place}.".startswith(f"{key}."):
            inside = place.removeprefix(key).removeprefix(".")
            return f"--set {key}" + (f": {inside}" if inside else "")
    return ""


def _set_apart(
    error: PanorganError,
    content: Mapping[str, Any],
    overrides: Sequence[str],
    read: Callable[[dict[str, Any]], object],
    where: str,
) -> str:
    """The overrides that cause an error: valid by themselves, they may conflict with other settings."""
    found = []
    for left_out, override in enumerate(overrides):
        try:
            read(overridden(content, [*overrides[:left_out], *overrides[left_out + 1 :]]))
        except PanorganError as other:
            if (other.what, other.where, other.why) == (error.what, error.where, error.why):
                continue
        found.append(f"--set {_key(override)}")
    return f"{', '.join(found)}, with {where}" if found else ""


def _key(override: str) -> str:
    return override.partition("=")[0]


def _apply(content: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    if not equals or not path:
        raise ConfigError(
            f"An override must look like a.b=value, not {override!r}.",
            code="override-malformed",
            where="--set",
            fix="Write it without spaces around '=', such as training.rounds=20.",
        )
    *parents, last = path.split(".")
    place = content
    for depth, name in enumerate(parents, start=1):
        if place.get(name) is None:
            place[name] = {}
        elif parents[:depth] == ["method"] and isinstance(place[name], str):
            place[name] = {"name": place[name]}  # what `method: fedavg` is short for
        place = place[name]
        if not isinstance(place, dict):
            group = ".".join(parents[:depth])
            raise ConfigError(
                f"{group!r} is not a group of settings.",
                code="override-not-a-group",
                where="--set",
                why=f"{override!r} sets a value inside it",
                fix=f"Give the whole value, {group}=…, or change it in the file.",
            )
    try:
        place[last] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"The value of an override is not valid YAML: {text!r}.",
            code="override-not-yaml",
            where="--set",
            why=str(error),
            fix="Close its brackets and quotes, and protect them from the shell: --set 'a.b=[1, 2]'.",
        ) from error
