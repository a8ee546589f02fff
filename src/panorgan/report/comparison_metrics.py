"""The metrics of a comparison besides Dice as words, Markdown, CSV and JSON: methods × organs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from panorgan.evaluation.comparison import ALL_ORGANS, EXTERNAL, FEDERATION, Comparison, Place
from panorgan.evaluation.metric_means import MetricMean
from panorgan.evaluation.metrics import METRICS, Metric, Where
from panorgan.report.comparison_results import Results
from panorgan.report.table_text import csv_text, plain, table_lines
from panorgan.report.tables import NOTHING, title


def metrics_shown(results: Results, where: Where = "comparison") -> list[Metric]:
    """The metrics besides Dice that have a table, or a column of an ablation's module table."""
    return [METRICS[name] for name in results.means if where in METRICS[name].shown]


def note(metric: Metric) -> str:
    """How the figures were computed, for below the table."""
    text = (
        f"{metric.sentence} Mean over seeds of the mean over test cases ± standard deviation over seeds; all organs "
        "together as for Dice, every organ of every case counting once. "
    )
    if metric.undefined == "one mask empty":
        text += (
            "Where one of prediction and truth is empty there is no value: such a score is not in the mean and is "
            "counted as missed, over all cases and seeds. A mean with many missed ones looks better than it is. "
        )
    elif metric.undefined != "never":
        text += "A score without a value is not in the mean and is counted separately. "
    return text + f"All tests here are of Dice; {metric.title} was not tested."


def metric_groups(comparison: Comparison) -> dict[Place, str]:
    """The parts of a table with their headings: the federation, and external sites; only what was scored."""
    groups = {FEDERATION: "Sites of the federation", EXTERNAL: "External sites"}
    return {place: heading for place, heading in groups.items() if comparison.scored_at(place)}


def metric_mean(found: MetricMean | None, metric: Metric, where: Where = "comparison", spread: bool = True) -> str:
    """``2.13 ± 0.10``; without spread when there is only one seed."""
    if found is None or math.isnan(found.mean):
        return NOTHING
    digits = metric.shown[where]
    return f"{found.mean:.{digits}f}" + (f" ± {found.sd:.{digits}f}" if spread and not math.isnan(found.sd) else "")


def left_out(found: MetricMean | None, metric: Metric) -> str:
    """``3 missed``; nothing where all scores have a value."""
    return f"{found.missed} {_without_value(metric)}" if found and found.missed else ""


def _without_value(metric: Metric) -> str:
    """The word for a score without a value."""
    return "missed" if metric.undefined == "one mask empty" else "not defined"


def with_left_out(found: MetricMean | None, metric: Metric, where: Where = "comparison") -> str:
    """``2.13 ± 0.10 (3 missed)``."""
    rest = left_out(found, metric)
    return metric_mean(found, metric, where) + (f" ({rest})" if rest else "")


def spoken_mean(found: MetricMean | None, metric: Metric, method: str, organ: str, group: str) -> str:
    """A cell in words."""
    what = f"{title(organ) if organ else 'All organs'}, {group.lower()}, {method}"
    if found is None:
        return f"{what}: not scored"
    if math.isnan(found.mean):
        return f"{what}: {_without_value(metric)} in all {found.scores}"
    value = f"{metric_mean(found, metric)} {metric.unit}".rstrip()
    left = f"{found.missed} of {found.scores} {_without_value(metric)}"
    return f"{what}: {value}; {found.cases} cases, {found.seeds} seeds; {left}"


FILTERS: dict[str, Callable[..., str]] = {
    "metric_mean": metric_mean,
    "left_out": left_out,
    "spoken_mean": spoken_mean,
    "metric_note": note,
}
"""Functions for the template."""


def metric_markdown(results: Results, metric: Metric) -> list[str]:
    """The section of one metric: a table, another one of external sites, and notes."""
    comparison = results.comparison
    groups = metric_groups(comparison)
    header = [results.plan.kind.thing, *(title(organ) for organ in comparison.organs), "**All organs**"]
    columns = (*comparison.organs, ALL_ORGANS)
    lines = [f"## {metric.heading}", ""]
    for place, heading in groups.items():
        means = {(m, o): results.means[metric.name].get((m, o, place)) for m in comparison.methods for o in columns}
        rows = [[plain(m), *(with_left_out(means[m, organ], metric) for organ in columns)] for m in comparison.methods]
        lines += [] if list(groups) == [FEDERATION] else [f"{heading}:", ""]
        lines += [*table_lines(header, rows), ""]
    return [*lines, note(metric), ""]


def metric_csv(results: Results, metric: Metric) -> str:
    """One line per method, organ (`all` for all together) and place; floats in full precision."""
    return csv_text(metric_as_json(results, metric))


def metric_as_json(results: Results, metric: Metric) -> list[dict[str, Any]]:
    """Every figure; `organ` is "all" for all organs together."""
    return [
        {"method": method, "organ": organ or "all", "place": place.kind, "site": place.site, **asdict(found)}
        for (method, organ, place), found in results.means[metric.name].items()
    ]
