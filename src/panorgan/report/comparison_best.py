"""The best method of every figure of a comparison. Methods that pool all cases are bounds, and not among them."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from typing import Any

from panorgan.evaluation.comparison import Place
from panorgan.evaluation.metrics import LEADING, METRICS, Metric
from panorgan.report.best import best_of
from panorgan.report.comparison_results import Results
from panorgan.report.method_words import describe_method

DIGITS = 3
"""Of a mean Dice in the tables."""


def best_values(results: Results) -> dict[str, Any]:
    """For the template: the best methods per organ and place, per metric, and in what sites forget."""
    pooled = {entry.label for entry in results.plan.entries if describe_method(entry.method).pooled}
    methods = [label for label in results.plan.labels if label not in pooled]

    @cache
    def best(organ: str, place: Place) -> frozenset[str]:
        figures = {method: results.comparison.figure(method, organ, place) for method in methods}
        means = {method: figure.mean for method, figure in figures.items() if figure}
        return best_of(means, METRICS[LEADING], DIGITS)

    @cache
    def best_metric(metric: Metric, organ: str, place: Place) -> frozenset[str]:
        """Among the methods that missed least: a mean that leaves cases out looks better than it is."""
        found = {method: results.means[metric.name].get((method, organ, place)) for method in methods}
        least = min((one.missed for one in found.values() if one), default=0)
        means = {method: one.mean for method, one in found.items() if one and one.missed == least}
        return best_of(means, metric, metric.shown["comparison"])

    forgetting = {method: asdict(means) for method, means in results.forgetting.items() if method in methods}
    columns = ("local_owned", "local_others", "global_owned", "global_others")
    return {
        "best": best,
        "best_metric": best_metric,
        "best_forgetting": {
            name: best_of({method: means[name] for method, means in forgetting.items()}, METRICS[LEADING], DIGITS)
            for name in columns
        },
        "bold_words": f"Bold: best {results.plan.kind.thing}{' that pools no data' if pooled else ''}.",
    }
