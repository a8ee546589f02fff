"""The description of a method, for the heading of a report."""

from __future__ import annotations

from dataclasses import dataclass

from panorgan.errors import ConfigError
from panorgan.methods.about.metadata import describe
from panorgan.methods.registry import find_method


@dataclass(frozen=True)
class MethodWords:
    """The description of a method. `pooled`: it gathers all cases in one place, which no real federation may do."""

    title: str
    explanation: str
    pooled: bool


def describe_method(name: str) -> MethodWords:
    """Title and explanation of a method; the bare name when it is not installed."""
    try:
        described = describe(find_method(name))
    except ConfigError:
        return MethodWords(name, "", pooled=False)
    return MethodWords(described.title, described.explanation, described.pooled)
