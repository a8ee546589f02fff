"""The tables of a comparison as text, Markdown, CSV and JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import panorgan
from panorgan.evaluation.comparison import (
    ALL_ORGANS,
    EXTERNAL,
    FEDERATION,
    LABELLED,
    NOT_LABELLED,
    Comparison,
    Figure,
    Place,
)
from panorgan.report.comparison_metrics import metric_as_json, metric_markdown, metrics_shown
from panorgan.report.comparison_results import Results, figure_rows
from panorgan.report.delivered_rounds import delivered_as_json, delivered_early, delivered_words
from panorgan.report.gap_table import gain_headings, gain_rows, gains_as_json, gap_note
from panorgan.report.table_text import csv_text, defined, plain, table_lines
from panorgan.report.tables import NOTHING, number, size, title
from panorgan.report.tones import heat_tone
from panorgan.workflows.compare_costs import Cost

PLACE_WORDS = {
    FEDERATION: "federation",
    LABELLED: "labelled here",
    NOT_LABELLED: "not labelled here",
    EXTERNAL: "external sites",
}
HOW = (
    "Mean over seeds of the mean Dice over test cases ± standard deviation over seeds. In brackets the 95 % bootstrap "
    "interval: patients are drawn, each with all of its cases and seeds. Every seed draws its own split into training "
    "and test patients, unless `splits.seed` fixes it. A missed organ counts as 0.",
    "p: two-sided paired Wilcoxon signed-rank test against {reference}, over patients, each with the mean over its "
    "cases and seeds; corrected by Holm's method over all {things} × organs of a table (× sites, where a table has "
    "single sites), and for all organs together over the {things}. The test is exact up to 50 patients with a "
    "difference, a normal approximation above. No p below six patients. ▲ better, ▼ worse than {reference}, corrected "
    "p < 0.05.",
    "p says whether the difference between these very models would hold for other patients. How much training again "
    "would change is shown by the spread over seeds: where it is as large as a difference, a small p proves little.",
    "Labelled here: test cases of sites that label the organ themselves; not labelled here: of sites of the federation "
    "that never did.",
)
"""How the figures were computed, for the foot of a table."""
SHARED = "shared machine"
COST_NOTE = (
    "Time per step: the sites' time in a round of the train stage divided by its optimiser steps, everything around a "
    "step included; median over the rounds, without a run's first. The ratio carries over to other machines, if this "
    "one did nothing else while it trained. Traffic, both directions and all sites: the training messages of a round "
    "of the train stage (mean), and all messages of a run, with earlier stages and validation."
)


def place_words(place: Place) -> str:
    """The name of a place in a table."""
    return PLACE_WORDS.get(place, place.site)


def at_place(place: Place) -> str:
    """Where that is, to follow a figure's name: ``in the federation``, ``at external sites``."""
    return f"{'in the' if place == FEDERATION else 'at'} {place_words(place)}"


def heading(comparison: Comparison, place: Place) -> str:
    """The same, for the head of a row or a table."""
    if place.kind != "site":
        return place_words(place).capitalize()
    return f"{place.site} (external)" if place.site in comparison.external_sites else place.site


def summary_places(comparison: Comparison) -> list[Place]:
    """The columns of the summary: over several sites, as far as something was scored there."""
    wanted = (FEDERATION, LABELLED, NOT_LABELLED, EXTERNAL)
    return [place for place in wanted if comparison.scored_at(place)]


def table_places(comparison: Comparison) -> list[Place]:
    """Single sites, then all of the federation, then all external ones if there are several; only what was scored."""
    several = len(comparison.external_sites) > 1
    wanted = [place for place in comparison.places if place.kind == "site" or place == FEDERATION]
    return [place for place in (*wanted, *([EXTERNAL] if several else [])) if comparison.scored_at(place)]


def over_seeds(figure: Figure | None, digits: int = 3) -> str:
    """``0.874 ± 0.010``; without spread when there is only one seed."""
    if figure is None:
        return NOTHING
    spread = "" if math.isnan(figure.sd) else f" ± {figure.sd:.{digits}f}"
    return f"{figure.mean:.{digits}f}{spread}"


def bracket(figure: Figure | None, digits: int = 3) -> str:
    """``[0.812, 0.923]``; empty with a single patient to draw from."""
    if figure is None or figure.low == figure.high:
        return ""
    return f"[{figure.low:.{digits}f}, {figure.high:.{digits}f}]"


def p_value(figure: Figure | None) -> str:
    """``p = 0.031`` after correction; empty where nothing was tested."""
    if figure is None or math.isnan(figure.p_holm):
        return ""
    return "p < 0.001" if figure.p_holm < 0.001 else f"p = {figure.p_holm:.3f}"


def mark(figure: Figure | None) -> str:
    """▲ or ▼ where the method is better or worse than the reference, beyond chance."""
    if figure is None or not figure.differs:
        return ""
    return "▲" if figure.difference > 0 else "▼"


def signed(value: float | None, digits: int = 3) -> str:
    """``+0.021``, with a real minus sign."""
    if value is None or math.isnan(value):
        return NOTHING
    return f"{value:+.{digits}f}".replace("-", "−")


def milliseconds(seconds: float | None) -> str:
    """``38 ms``, ``1.24 s``."""
    if seconds is None or math.isnan(seconds):
        return NOTHING
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def step_time(cost: Cost | None) -> str:
    """``38 ms``, with a warning where other runs slowed it down."""
    if cost is None:
        return NOTHING
    return milliseconds(cost.step_seconds) + (f" ({SHARED})" if cost.shared else "")


def traffic(count: float | None) -> str:
    """``1.2 MB``."""
    return NOTHING if count is None or math.isnan(count) else size(count)


def ratio(value: float | None) -> str:
    """``1.38 ×``."""
    return NOTHING if value is None or math.isnan(value) else f"{value:.2f} ×"


def figure_tone(figure: Figure | None) -> str:
    """Background of a cell."""
    return heat_tone(figure.mean) if figure else ""


def spoken(figure: Figure | None, method: str, organ: str, place: Place) -> str:
    """A cell as a sentence."""
    what = f"{title(organ) if organ else 'All organs'}, {place_words(place)}, {method}"
    if figure is None:
        return f"{what}: not scored"
    said = [f"mean Dice {over_seeds(figure)}", f"{figure.cases} cases, {figure.seeds} seeds"]
    if not math.isnan(figure.difference):
        said.append(f"{signed(figure.difference)} against the reference over {figure.pairs} patients")
    if not math.isnan(figure.p):
        said.append(f"p = {figure.p:.4f} before and {figure.p_holm:.4f} after correction")
    if figure.missed:
        said.append(f"{figure.missed} missed")
    return f"{what}: " + "; ".join(said)


FILTERS: dict[str, Callable[..., Any]] = {
    "over_seeds": over_seeds,
    "bracket": bracket,
    "p_value": p_value,
    "mark": mark,
    "signed": signed,
    "milliseconds": milliseconds,
    "traffic": traffic,
    "ratio": ratio,
    "figure_tone": figure_tone,
    "place_words": place_words,
    "at_place": at_place,
    "heading": heading,
    "spoken": spoken,
}
"""Functions for the template."""


# -- Markdown ----------------------------------------------------------------------------------------------


def markdown(results: Results, about: str = "", opening: Sequence[str] = ()) -> str:
    """All tables as Markdown; `about` is part of the title, the lines of `opening` precede the first table."""
    plan, comparison = results.plan, results.comparison
    seeds = ", ".join(str(seed) for seed in plan.seeds)
    parts = [f"# {plain(plan.name)}: {plain(about or f'{len(plan.labels)} methods compared')}", ""]
    parts += [f"Seeds {seeds}. Reference: {plain(plan.reference)}. Dice on test cases.", ""]
    if results.missing:
        parts += ["**Not finished:**", "", *(f"- {plain(text)}" for text in results.missing), ""]
    parts += opening
    parts += ["## Summary", "", *_summary_lines(results), ""]
    if results.gains:
        parts += ["## Against every site alone", "", *_gain_lines(results), ""]
    for place in sorted(table_places(comparison), key=lambda place: place.kind == "site"):  # single sites last
        parts += [f"## {plain(heading(comparison, place))}", "", *_place_lines(comparison, place), ""]
    for metric in metrics_shown(results):
        parts += metric_markdown(results, metric)
    parts += ["## Cost", "", *_cost_lines(results), ""]
    if results.forgetting:
        parts += ["## What sites forget", "", *_forgetting_lines(results), ""]
    parts += ["## How it was computed", "", *(f"- {plain(line)}" for line in how(results))]
    return "\n".join(parts) + "\n"


def how(results: Results) -> list[str]:
    """How the figures were computed, with the particulars of this comparison."""
    lines = [line.format(reference=results.plan.reference, things=f"{results.plan.kind.thing}s") for line in HOW]
    if not results.patients_known:
        lines.append("The data could not be read to say which cases are of one patient: each counts as its own.")
    return lines


def _summary_lines(results: Results) -> list[str]:
    comparison = results.comparison
    places = summary_places(comparison)
    reference = plain(comparison.reference)
    header = [results.plan.kind.thing, *(place_words(p) for p in places), f"against {reference}", "p (Holm)", "seeds"]
    header.append("delivered round")
    rows = []
    for method in comparison.methods:
        whole = comparison.figure(method)
        cells = [_cell(comparison.figure(method, ALL_ORGANS, place)) for place in places]
        difference = "reference" if method == comparison.reference else signed(whole.difference if whole else None)
        p = p_value(whole).removeprefix("p ").removeprefix("= ") or NOTHING
        delivered = delivered_words(results.runs.get(method, ()))
        rows.append([plain(method), *cells, difference, p, str(whole.seeds if whole else 0), delivered])
    early = [f"- {plain(text)}" for text in delivered_early(results.runs)]
    return [*table_lines(header, rows), *(["", "**Delivered early:**", "", *early] if early else [])]


def _gain_lines(results: Results) -> list[str]:
    rows = [[plain(method), *map(plain, cells)] for method, cells in gain_rows(results)]
    return [*table_lines([results.plan.kind.thing, *gain_headings(results)], rows), "", gap_note(results)]


def _place_lines(comparison: Comparison, place: Place) -> list[str]:
    rows = []
    for organ in (*comparison.organs, ALL_ORGANS):
        figures = [comparison.figure(method, organ, place) for method in comparison.methods]
        if any(figures):
            texts = [" ".join(filter(None, (_cell(f), mark(f), p_value(f)))) for f in figures]
            rows.append([title(organ) if organ else "**All organs**", *texts])
    return table_lines(["organ", *(plain(m) for m in comparison.methods)], rows)


def _cell(figure: Figure | None) -> str:
    return " ".join(filter(None, (over_seeds(figure), bracket(figure))))


def _cost_lines(results: Results) -> list[str]:
    header = [
        results.plan.kind.thing,
        "steps",
        "step time",
        "relative",
        "per round",
        "whole run",
        "parameters",
        "inference",
    ]
    rows = []
    for method, cost in results.costs.items():
        seconds = results.inference.seconds.get(method) if results.inference else None
        rows.append(
            [
                plain(method),
                f"{cost.steps:,.0f}",
                step_time(cost),
                ratio(cost.step_ratio),
                traffic(cost.bytes_per_round),
                traffic(cost.bytes_per_run),
                NOTHING if cost.parameters is None else f"{cost.parameters:,}",
                milliseconds(seconds),
            ]
        )
    return [*table_lines(header, rows), "", *(f"- {plain(line)}" for line in cost_notes(results))]


def cost_notes(results: Results) -> list[str]:
    """The meaning of the columns of the cost table, for below it."""
    costs, inference = results.costs.values(), results.inference
    notes = [COST_NOTE]
    if any(cost.shared for cost in costs):
        notes.append(f"{SHARED.capitalize()}: several runs trained at once, so their times cannot be compared.")
    if any(cost.pooled for cost in costs):
        notes.append("Traffic of methods with pooled data is that of one simulated participant.")
    if inference:
        voxels = " × ".join(str(count) for count in inference.voxels)
        notes.append(
            f"Inference: the model on one prepared scan of {voxels} voxels, {inference.device}, all methods in turns, "
            "median of three."
        )
    return notes


def _forgetting_lines(results: Results) -> list[str]:
    header = [
        results.plan.kind.thing,
        "local, own organs",
        "local, others",
        "global, own organs",
        "global, others",
        "seeds",
    ]
    rows = [
        [plain(method), *(number(v, 3) for v in list(asdict(means).values())[:4]), str(means.seeds)]
        for method, means in results.forgetting.items()
    ]
    return table_lines(header, rows)


# -- for programs ------------------------------------------------------------------------------------------


def scores_csv(comparison: Comparison, more: Callable[[str], Mapping[str, object]] = lambda _: {}) -> str:
    """The rows of `figure_rows` as lines; floats in full precision."""
    return csv_text(figure_rows(comparison, more))


def costs_csv(results: Results) -> str:
    """One line per method."""
    seconds = results.inference.seconds if results.inference else {}
    return csv_text(
        {"method": method, **asdict(cost), "inference_seconds": seconds.get(method, "")}
        for method, cost in results.costs.items()
    )


def as_json(results: Results) -> dict[str, Any]:
    """Everything; undefined values are null."""
    plan, comparison = results.plan, results.comparison
    content: dict[str, Any] = {
        "format": 1,
        "panorgan": panorgan.__version__,
        "name": plan.name,
        "reference": plan.reference,
        "seeds": list(plan.seeds),
        "methods": {e.label: {"method": e.method, "settings": dict(e.settings)} for e in plan.entries},
        "runs": [
            {
                "method": label,
                "seed": run.manifest["experiment"]["seed"],
                "run": run.manifest["run"],
                "fingerprint": run.manifest["fingerprint"],
                "test_fingerprint": run.manifest.get("test_fingerprint"),
                "hardware": run.manifest["hardware"],
                **delivered_as_json(run),
            }
            for label, runs in results.runs.items()
            for run in runs
        ],
        "missing": results.missing,
        "patients_known": results.patients_known,
        "figures": [
            {"method": method, "organ": organ or "all", "place": place.kind, "site": place.site, **asdict(figure)}
            for (method, organ, place), figure in comparison.figures.items()
        ],
        "gains": gains_as_json(results),
        **{metric.table_name: metric_as_json(results, metric) for metric in metrics_shown(results)},
        "costs": {method: asdict(cost) for method, cost in results.costs.items()},
        "inference": results.inference.as_json() if results.inference else None,
        "forgetting": {method: asdict(means) for method, means in results.forgetting.items()},
        "how": how(results),
    }
    return defined(content)
