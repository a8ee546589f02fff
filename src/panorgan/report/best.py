"""The best of several values, by the metric's direction and the digits shown."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import TypeVar

from panorgan.evaluation.metrics import Metric

Name = TypeVar("Name", bound=Hashable)


def best_of(values: Mapping[Name, float | None], metric: Metric, digits: int) -> frozenset[Name]:
    """The names with the best value among the digits shown; none where all are equal, or there is only one."""
    known = {name: round(v, digits) for name, v in values.items() if v is not None and not math.isnan(v)}
    if len(set(known.values())) < 2:
        return frozenset()
    best = _best(list(known.values()), metric)
    return frozenset(name for name, value in known.items() if _rank(value, metric) == best)


def _best(values: list[float], metric: Metric) -> float:
    return min(_rank(value, metric) for value in values)


def _rank(value: float, metric: Metric) -> float:
    """Smaller is better."""
    return {"higher": -value, "lower": value, "zero": abs(value)}[metric.better]
