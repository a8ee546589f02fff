"""`panorgan compare`: several methods, several seeds, one comparison."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from panorgan.cli.view import watch
from panorgan.config import load_experiment
from panorgan.errors import PanorganError
from panorgan.evaluation.comparison import ALL_ORGANS, EXTERNAL, FEDERATION, LABELLED, NOT_LABELLED
from panorgan.federation.events import Listener
from panorgan.report.comparison import write_comparison
from panorgan.report.comparison_figures import wrapped
from panorgan.report.comparison_results import ComparisonFiles, Results, compare_runs
from panorgan.report.comparison_tables import mark, over_seeds, p_value, ratio, signed, summary_places
from panorgan.report.tables import NOTHING, number, size
from panorgan.runs.compare import Planned, check_comparison, plan_comparison, run_missing, run_missing_at_once

FAILED = 2
_WIDE = 100


@dataclass(frozen=True)
class CompareRequest:
    """What the command line asked for."""

    experiment: Path
    methods: str
    seeds: str
    reference: str | None
    run: Path | None
    overrides: Sequence[str]
    report_only: bool
    as_json: bool
    at_once: int = 1


def run_compare(request: CompareRequest) -> int:
    """Train what is missing, compare, show; returns the exit code."""
    experiment = load_experiment(request.experiment, request.overrides)
    plan = plan_comparison(experiment, request.methods, request.seeds, request.reference, request.run)
    check_comparison(plan, data=not request.report_only)
    console = Console(quiet=request.as_json)
    if plan.finished and not request.report_only:
        console.print(f"{len(plan.finished)} of {len(plan.runs)} runs are finished already.", highlight=False)

    def watch_run(run: Planned, number: int, total: int) -> AbstractContextManager[Listener]:
        return watch(f"run {number} of {total} · {run.title}", request.as_json)

    ended = itertools.count(len(plan.finished) + 1)

    def tell(run: Planned, error: PanorganError | None) -> None:
        words = "failed" if error else "finished"
        if request.as_json:
            print(json.dumps({"event": f"run_{words}", "run": run.title}), flush=True)
        console.print(f"{next(ended)} of {len(plan.runs)} · {run.title}: {words}", highlight=False, markup=False)

    if request.report_only:
        failures = []
    elif request.at_once > 1:
        console.print(f"{len(plan.missing)} runs, {request.at_once} at once", highlight=False)
        failures = run_missing_at_once(plan, request.at_once, tell)
    else:
        failures = run_missing(plan, watch_run)
    errors = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
    for failure in failures:
        errors.print(f"{failure.run.title} failed: {failure.error}")
    results = compare_runs(plan, failures)
    files = write_comparison(results)
    if request.as_json:
        print(json.dumps({"result": _summary(results, files)}, allow_nan=False), flush=True)
    else:
        _show(console, results, files)
    return FAILED if failures else 0


def _summary(results: Results, files: ComparisonFiles) -> dict[str, Any]:
    """The figures over all organs per method, and where everything lies."""
    places = {"dice": FEDERATION, "labelled_here": LABELLED, "not_labelled_here": NOT_LABELLED, "external": EXTERNAL}
    methods: dict[str, Any] = {}
    for method in results.plan.labels:
        found = {name: results.comparison.figure(method, ALL_ORGANS, place) for name, place in places.items()}
        known = {name: figure for name, figure in found.items() if figure is not None}
        methods[method] = {
            name: {
                key: _defined(getattr(figure, key))
                for key in ("mean", "sd", "low", "high", "seeds", "cases", "difference", "p", "p_holm")
            }
            for name, figure in known.items()
        }
    return {
        "folder": str(files.folder),
        "files": [str(path) for path in files.all],
        "reference": results.plan.reference,
        "missing": results.missing,
        "methods": methods,
    }


def _defined(value: float) -> float | None:
    return None if math.isnan(value) else value


def _show(console: Console, results: Results, files: ComparisonFiles) -> None:
    console.print(summary_table(results, console.width))
    if (table := organ_table(results, console.width)) is not None:
        console.print(table)
    reference = results.plan.reference
    spread = "± over seeds. " if len(results.plan.seeds) > 1 else ""
    console.print(
        f"{spread}Difference and p against {reference}; ▲ better, ▼ worse (p < 0.05).",
        style="dim",
        markup=False,
        highlight=False,
    )
    for text in results.missing:
        console.print(Text(f"Not finished: {text}", style="yellow"))
    for path in files.all:
        console.print(str(path), soft_wrap=True, markup=False, highlight=False)


def summary_table(results: Results, width: int) -> Table:
    """One row per method; what it costs only where there is room."""
    comparison = results.comparison
    columns = {FEDERATION: "Dice", LABELLED: "own", NOT_LABELLED: "other", EXTERNAL: "external"}
    places = [place for place in columns if place in summary_places(comparison)]
    costs = ("step\ntime", "per\nround") if width >= _WIDE else ()
    table = Table(title="Test Dice (own: the site labels the organ; other: it does not)", title_justify="left")
    table.add_column("method", overflow="fold", min_width=8)
    for heading in (*(columns[place] for place in places), "differ-\nence", "p\n(Holm)", *costs):
        table.add_column(heading, justify="right", no_wrap=True)
    for method in comparison.methods:
        whole, cost = comparison.figure(method), results.costs.get(method)
        first, *others = (comparison.figure(method, ALL_ORGANS, place) for place in places)
        traffic = cost.bytes_per_round if cost else math.nan
        spent = [ratio(cost.step_ratio if cost else None), NOTHING if math.isnan(traffic) else size(traffic)]
        table.add_row(
            Text(wrapped(method, 16 if costs else 13)),
            over_seeds(first),
            *(number(figure.mean if figure else None, 3) for figure in others),
            NOTHING if method == comparison.reference else signed(whole.difference if whole else None),
            " ".join(filter(None, (mark(whole), p_value(whole).removeprefix("p ").removeprefix("= ")))),
            *spent[: len(costs)],
        )
    return table


def organ_table(results: Results, width: int) -> Table | None:
    """Organ × method, when so many methods fit; the page has it in any case."""
    comparison = results.comparison
    table = Table(title="Test Dice per organ, sites of the federation", title_justify="left")
    table.add_column("organ", overflow="fold")
    for method in comparison.methods:
        table.add_column(Text(wrapped(method, 16)), justify="right", overflow="fold", min_width=7)
    for organ in comparison.organs:
        figures = [comparison.figure(method, organ) for method in comparison.methods]
        cells = [f"{number(f.mean, 3)}{mark(f)}" if f else NOTHING for f in figures]
        table.add_row(organ.replace("_", " "), *cells)
    needed = 16 + sum(3 + max(7, min(16, len(method))) for method in comparison.methods)
    return table if needed <= min(width, _WIDE) else None
