"""docs/metrics.md, written from the registry: what every metric is and where it is shown."""

from __future__ import annotations

import math
import textwrap

from panorgan.evaluation.metrics import LEADING, METRICS, Metric

COMMAND = "python scripts/metrics_page.py > docs/metrics.md"
_OPENING = (
    "Every metric, from `METRICS` in `src/panorgan/evaluation/metrics.py`. All of them are columns of `metrics.csv`, "
    "in this order and in full precision: one row per case and organ, in 3D, on the scan's own grid. One more is one "
    "more entry: [add-a-metric.md](add-a-metric.md)."
)
_CLOSING = (
    "Surfaces are the mask voxels with a face neighbour outside the mask; beyond the image border counts as outside. "
    "Where both masks are empty the scores are perfect. Where exactly one is, the organ was *missed*: overlaps are 0, "
    "and what is not defined is NaN, is left out of means and counted separately."
)


def metrics_page() -> str:
    """The page as text."""
    header = ["column", "title", "what it is", "better", "range", "not defined", "also shown (decimals)"]
    rows = [header, ["---"] * len(header), *(_row(metric) for metric in METRICS.values())]
    table = [f"| {' | '.join(row)} |" for row in rows]
    opening, closing = (textwrap.wrap(text, 120, break_long_words=False) for text in (_OPENING, _CLOSING))
    return "\n".join(["# Metrics", "", f"<!-- Generated: {COMMAND} -->", "", *opening, "", *table, "", *closing, ""])


def _row(metric: Metric) -> list[str]:
    low, high = metric.range
    end = "∞" if math.isinf(high) else f"{high:g}"
    shown = ", ".join(f"{where} ({digits})" for where, digits in metric.shown.items())
    return [
        f"`{metric.name}`",
        metric.title,
        metric.description,
        metric.verdict.removesuffix(" is better"),
        f"{low:g} to {end} {metric.unit}".rstrip().replace("-", "−"),
        metric.undefined,
        "everywhere" if metric.name == LEADING else shown or "–",
    ]
