"""The surface distances of a comparison as words, Markdown, CSV and JSON: methods × organs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from panorgan.evaluation.comparison import ALL_ORGANS, EXTERNAL, FEDERATION, Comparison, Place
from panorgan.evaluation.distances import Distance
from panorgan.report.comparison_results import Results
from panorgan.report.table_text import csv_text, plain, table_lines
from panorgan.report.tables import NOTHING, title

DISTANCES = "Average surface distance in mm"
DISTANCE_NOTE = (
    "Average symmetric surface distance; lower is better. Mean over seeds of the mean over test cases ± standard "
    "deviation over seeds; all organs together as for Dice, every organ of every case counting once. Where one of "
    "prediction and truth is empty there is no distance: such a score is not in the mean and is counted as missed, "
    "over all cases and seeds. A mean beside many missed ones looks better than it is. All tests here are of Dice; "
    "distances were not tested."
)
"""How the figures were made, for below the table."""


def distance_groups(comparison: Comparison) -> dict[Place, str]:
    """The parts of the table with their headings: the federation, and external sites apart; only what was scored."""
    groups = {FEDERATION: "Sites of the federation", EXTERNAL: "External sites"}
    return {place: heading for place, heading in groups.items() if comparison.scored_at(place)}


def millimetres(distance: Distance | None, spread: bool = True) -> str:
    """``2.13 ± 0.10``; without spread when there is only one seed."""
    if distance is None or math.isnan(distance.mean):
        return NOTHING
    return f"{distance.mean:.2f}" + (f" ± {distance.sd:.2f}" if spread and not math.isnan(distance.sd) else "")


def missed(distance: Distance | None) -> str:
    """``3 missed``; nothing where all were found."""
    return f"{distance.missed} missed" if distance and distance.missed else ""


def with_missed(distance: Distance | None) -> str:
    """``2.13 ± 0.10 (3 missed)``."""
    return millimetres(distance) + (f" ({missed(distance)})" if missed(distance) else "")


def spoken_distance(distance: Distance | None, method: str, organ: str, where: str) -> str:
    """A cell in words."""
    what = f"{title(organ) if organ else 'All organs'}, {where.lower()}, {method}"
    if distance is None:
        return f"{what}: not scored"
    if math.isnan(distance.mean):
        return f"{what}: missed in all {distance.scores}"
    counted = f"{distance.missed} of {distance.scores} missed"
    return f"{what}: {millimetres(distance)} mm; {distance.cases} cases, {distance.seeds} seeds; {counted}"


FILTERS: dict[str, Callable[..., str]] = {
    "millimetres": millimetres,
    "missed": missed,
    "spoken_distance": spoken_distance,
}
"""What the template may call."""


def distances_markdown(results: Results) -> list[str]:
    """The section below its heading: a table, another one of external sites, and what they tell."""
    comparison = results.comparison
    groups = distance_groups(comparison)
    header = [results.plan.kind.thing, *(title(organ) for organ in comparison.organs), "**All organs**"]
    lines: list[str] = []
    for place, heading in groups.items():
        rows = [
            [
                plain(method),
                *(with_missed(results.distances.get((method, organ, place))) for organ in _columns(comparison)),
            ]
            for method in comparison.methods
        ]
        lines += [] if list(groups) == [FEDERATION] else [f"{heading}:", ""]
        lines += [*table_lines(header, rows), ""]
    return [*lines, DISTANCE_NOTE]


def _columns(comparison: Comparison) -> tuple[str, ...]:
    return (*comparison.organs, ALL_ORGANS)


def distances_csv(results: Results) -> str:
    """One line per method, organ (`all` for all together) and place; floats in full precision."""
    return csv_text(distances_as_json(results))


def distances_as_json(results: Results) -> list[dict[str, Any]]:
    """Every figure; `organ` is "all" for all organs together."""
    return [
        {"method": method, "organ": organ or "all", "place": place.kind, "site": place.site, **asdict(distance)}
        for (method, organ, place), distance in results.distances.items()
    ]
