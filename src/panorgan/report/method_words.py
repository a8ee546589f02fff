"""A method in words, from the first line of its own file."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from panorgan.errors import ConfigError
from panorgan.methods.registry import find_method


@dataclass(frozen=True)
class MethodWords:
    """A method in words. `pooled`: it gathers all cases in one place, which no real federation may."""

    title: str
    explanation: str
    pooled: bool


def describe_method(name: str) -> MethodWords:
    """Title and explanation from the first line of the method's file; the bare name when it is not installed."""
    try:
        method = find_method(name)
    except ConfigError:
        return MethodWords(name, "", pooled=False)
    first_line = (sys.modules[method.__module__].__doc__ or "").strip().split("\n")[0]
    heading, dash, explanation = first_line.partition(" — ")
    return MethodWords(heading if dash else name, explanation, method.pooled)
