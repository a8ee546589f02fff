"""Names under a prefix, so that a rule can store its own tensors next to those of the rules that it extends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")


def prefixed(prefix: str, named: Mapping[str, T]) -> dict[str, T]:
    """The entries with a prefix before their names."""
    return {prefix + name: value for name, value in named.items()}


def under(prefix: str, named: Mapping[str, T]) -> dict[str, T]:
    """The entries under a prefix, without it; others are ignored."""
    return {name.removeprefix(prefix): value for name, value in named.items() if name.startswith(prefix)}
