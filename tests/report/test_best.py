"""The best of several values."""

from __future__ import annotations

import math

import pytest

from panorgan.evaluation.metrics import METRICS
from panorgan.report.best import best_of


@pytest.mark.parametrize(
    ("metric", "values", "best"),
    [
        ("dice", {"a": 0.81, "b": 0.93, "c": None}, {"b"}),
        ("assd", {"a": 2.5, "b": 1.25, "c": math.nan}, {"b"}),
        ("rve", {"a": -0.2, "b": 0.1, "c": 0.4}, {"b"}),
        ("dice", {"a": 0.93, "b": 0.9344, "c": 0.5}, {"a", "b"}),  # equal in the digits shown
        ("dice", {"a": 0.93, "b": 0.9344}, set()),
        ("dice", {"a": 0.93, "b": None}, set()),
        ("dice", {}, set()),
    ],
)
def test_the_best_goes_by_the_metric_and_the_digits_shown(metric, values, best) -> None:
    assert best_of(values, METRICS[metric], 2) == best
