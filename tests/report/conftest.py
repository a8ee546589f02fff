"""A metric that is not among those of the project, for as long as a test needs it."""

from __future__ import annotations

import pytest
from metric_of_the_docs import metric_of_the_docs

from panorgan.evaluation.metrics import METRICS, Metric


@pytest.fixture
def added_metric(monkeypatch: pytest.MonkeyPatch) -> Metric:
    """Precision, as docs/add-a-metric.md has it: one more entry of the registry, and nothing else."""
    metric = metric_of_the_docs()
    monkeypatch.setitem(METRICS, metric.name, metric)
    return metric
