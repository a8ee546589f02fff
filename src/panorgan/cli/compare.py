"""`panorgan compare`: several methods, several seeds, one comparison."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from panorgan import ComparisonObserver, compare, load_experiment
from panorgan.cli.console import Console
from panorgan.cli.estimate_words import span
from panorgan.cli.view import watch
from panorgan.errors import PanorganError
from panorgan.evaluation.comparison import ALL_ORGANS, EXTERNAL, FEDERATION, FEWEST_PAIRS, LABELLED, NOT_LABELLED
from panorgan.evaluation.metrics import Metric
from panorgan.federation.events import Listener
from panorgan.report.comparison_figures import wrap_label
from panorgan.report.comparison_metrics import left_out, metric_mean, metrics_shown
from panorgan.report.comparison_results import ComparisonFiles, Results
from panorgan.report.comparison_tables import (
    mark,
    over_seeds,
    p_value,
    place_words,
    ratio,
    signed,
    summary_places,
    traffic,
)
from panorgan.report.delivered_rounds import delivered_as_json, delivered_early, delivered_line
from panorgan.report.gap_table import gain_headings, gain_rows, gains_as_json
from panorgan.report.table_text import defined
from panorgan.report.tables import NOTHING, number
from panorgan.workflows.compare import ComparisonPlan, Failure, Planned

FAILED = 2
_WIDE = 100


@dataclass(frozen=True)
class CompareRequest:
    """The options of the command line."""

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
    """Train the missing runs, compare, print the result; returns the exit code."""
    console = Console(quiet=request.as_json)
    results = compare(
        load_experiment(request.experiment, request.overrides),
        request.methods,
        request.seeds,
        request.run,
        reference=request.reference,
        at_once=request.at_once,
        report_only=request.report_only,
        observer=ComparisonView(console, request.as_json),
    )
    if request.as_json:
        print_result(summary(results, results.files))
    else:
        _show(console, results, results.files)
    return FAILED if results.failures else 0


def print_result(content: dict[str, Any]) -> None:
    """The last line of `--json`."""
    print(json.dumps({"result": content}, allow_nan=False), flush=True)


class ComparisonView(ComparisonObserver):
    """Shows the progress of a comparison.

    A live view run by run. With several at once: the running ones in a line at the bottom of the terminal, and finished
    ones line by line.
    """

    def __init__(self, console: Console, as_json: bool) -> None:
        self._console, self._as_json = console, as_json
        self._done = self._total = self._trained = 0
        self._began = time.monotonic()
        self._under_way: list[str] = []
        self._live = console.is_terminal and not as_json
        self._status = console.status("preparing cases")

    @contextmanager
    def begin(self, plan: ComparisonPlan, at_once: int) -> Iterator[None]:
        """Show how much there is to do; the line at the bottom stays until all is done."""
        self._done, self._total = len(plan.finished), len(plan.runs)
        self._trained, self._began = 0, time.monotonic()
        if plan.finished:
            self._console.print(f"{self._done} of {self._total} runs are already finished.", highlight=False)
        if at_once > 1:
            self._console.print(f"{len(plan.missing)} runs, {at_once} at once", highlight=False)
            if self._live:
                self._status.start()
        try:
            yield
        finally:
            self._status.stop()

    @contextmanager
    def watch(self, run: Planned, number: int, total: int) -> Iterator[Listener]:
        """The view of a single run."""
        if words := self._left():
            self._line(words)
        with watch(f"run {number} of {total} · {run.title}", self._as_json) as listener:
            yield listener
        self._done += 1
        self._trained += 1

    def _left(self) -> str:
        """The time for the remaining runs, judging by those before; empty if unknown."""
        left = self._total - self._done
        if not self._trained or left <= 0:
            return ""
        seconds = left * (time.monotonic() - self._began) / self._trained
        return f"{left} {'run' if left == 1 else 'runs'} left: about {span(seconds)}"

    def failed(self, failure: Failure) -> None:
        """The reason, on standard error."""
        errors = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
        errors.print(f"{failure.run.title} failed: {failure.error}")

    def started(self, run: Planned) -> None:
        """A run has started."""
        self._under_way.append(run.title)
        if self._as_json:
            print(json.dumps({"event": "run_started", "run": run.title}), flush=True)
        if not self._live:
            self._line(f"{run.title}: started")
        self._show()

    def ended(self, run: Planned, error: PanorganError | None) -> None:
        """A run has ended."""
        if run.title in self._under_way:
            self._under_way.remove(run.title)
        self._done += 1
        self._trained += 1
        words = "failed" if error else "finished"
        if self._as_json:
            print(json.dumps({"event": f"run_{words}", "run": run.title}), flush=True)
        self._line(f"{self._done} of {self._total} · {run.title}: {words}")
        if left := self._left():
            self._line(left)
        self._show()

    def _line(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False)

    def _show(self) -> None:
        self._status.update(Text(f"running: {', '.join(self._under_way) or 'nothing'}", style="dim"))


def summary(results: Results, files: ComparisonFiles) -> dict[str, Any]:
    """The figures over all organs per method, and the paths of all files."""
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
        "delivered": {label: [delivered_as_json(r) for r in some] for label, some in results.runs.items()},
        "methods": methods,
        "gains": defined(gains_as_json(results)),
    }


def _defined(value: float) -> float | None:
    return None if math.isnan(value) else value


def _show(console: Console, results: Results, files: ComparisonFiles) -> None:
    console.print(summary_table(results, console.width))
    if results.gains:
        console.print(gain_table(results))
    for table in (organ_table(results, console.width), *metric_tables(results, console.width)):
        if table is not None:
            console.print(table)
    show_ending(console, results, files)


def show_ending(console: Console, results: Results, files: ComparisonFiles) -> None:
    """Below the tables: the meaning of the marks, missing runs, and paths."""
    reference = results.plan.reference
    spread = "± over seeds. " if len(results.plan.seeds) > 1 else ""
    console.print(
        f"{spread}Difference and p against {reference}; ▲ better, ▼ worse (p < 0.05).",
        style="dim",
        markup=False,
        highlight=False,
    )
    if few := few_pairs(results):
        console.print(few, style="dim", highlight=False)
    console.print(delivered_line(results.runs), style="dim", markup=False, highlight=False)
    for text in delivered_early(results.runs):
        console.print(Text(text, style="yellow"))
    for text in results.missing:
        console.print(Text(f"Not finished: {text}", style="yellow"))
    for path in files.all:
        console.print(str(path), soft_wrap=True, markup=False, highlight=False)


def few_pairs(results: Results) -> str:
    """Why a method has no p; empty if all have one."""
    comparison = results.comparison
    tested = [method for method in comparison.methods if method != results.plan.reference]
    figures = [figure for method in tested if (figure := comparison.figure(method)) is not None]
    without = [figure.pairs for figure in figures if math.isnan(figure.p)]
    if not without:
        return ""
    return f"No p: a test needs {FEWEST_PAIRS} patients, and there are {min(without)}; see docs/compare.md."


def summary_table(results: Results, width: int) -> Table:
    """One row per method; costs only where there is room."""
    comparison = results.comparison
    columns = {FEDERATION: "Dice", LABELLED: "own", NOT_LABELLED: "other", EXTERNAL: "external"}
    places = [place for place in columns if place in summary_places(comparison)] or [FEDERATION]
    costs = ("step\ntime", "per\nround", "whole\nrun") if width >= _WIDE else ()
    table = Table(title="Test Dice (own: the site labels the organ; other: it does not)", title_justify="left")
    table.add_column("method", overflow="fold", min_width=8)
    for heading in (*(columns[place] for place in places), "differ-\nence", "p\n(Holm)", *costs):
        table.add_column(heading, justify="right", no_wrap=True)
    for method in comparison.methods:
        whole, cost = comparison.figure(method), results.costs.get(method)
        first, *others = (comparison.figure(method, ALL_ORGANS, place) for place in places)
        spent = [NOTHING] * 3
        if cost is not None:
            step = "shared" if cost.shared else ratio(cost.step_ratio)
            spent = [step, traffic(cost.bytes_per_round), traffic(cost.bytes_per_run)]
        table.add_row(
            Text(wrap_label(method, 16 if costs else 13)),
            over_seeds(first),
            *(number(figure.mean if figure else None, 3) for figure in others),
            NOTHING if method == comparison.reference else signed(whole.difference if whole else None),
            " ".join(filter(None, (mark(whole), p_value(whole).removeprefix("p ").removeprefix("= ")))),
            *spent[: len(costs)],
        )
    return table


def gain_table(results: Results) -> Table:
    """What every method gains over each site alone."""
    table = Table(title="Against every site alone", title_justify="left")
    table.add_column(results.plan.kind.thing, overflow="fold", min_width=8)
    for heading in gain_headings(results):
        table.add_column(heading.replace("at external sites", "external"), overflow="fold")
    for method, cells in gain_rows(results):
        table.add_row(Text(wrap_label(method, 16)), *(Text(cell) for cell in cells))
    return table


def organ_table(results: Results, width: int) -> Table | None:
    """Organ × method, if anything was scored and the methods fit; the page has it in any case."""
    comparison = results.comparison
    where = place_words(comparison.first_place).replace("federation", "sites of the federation")
    table = Table(title=f"Test Dice per organ, {where}", title_justify="left")
    table.add_column("organ", overflow="fold")
    for method in comparison.methods:
        table.add_column(Text(wrap_label(method, 16)), justify="right", overflow="fold", min_width=7)
    for organ in comparison.organs:
        figures = [comparison.figure(method, organ) for method in comparison.methods]
        cells = [f"{number(f.mean, 3)}{mark(f)}" if f else NOTHING for f in figures]
        table.add_row(organ.replace("_", " "), *cells)
    needed = 16 + sum(3 + max(7, min(16, len(method))) for method in comparison.methods)
    return table if comparison.organs and needed <= min(width, _WIDE) else None


def metric_tables(results: Results, width: int) -> list[Table]:
    """One for every metric besides Dice; none where nothing was scored."""
    if not results.comparison.scored_at(results.comparison.first_place):
        return []
    return [_metric_table(results, metric, width) for metric in metrics_shown(results)]


def _metric_table(results: Results, metric: Metric, width: int) -> Table:
    """Method × organ with as much as fits: first the spread is dropped, then single organs, which the page has.

    External sites are shown here only if nothing else is; the page has both.
    """
    where = results.comparison.first_place
    all_columns = (*results.comparison.organs, ALL_ORGANS)
    for organs, spread in ((all_columns, True), (all_columns, False), ((ALL_ORGANS,), True)):
        columns = _metric_columns(results, metric, organs, spread)
        if _boxed_width(columns) <= width:
            break
    table = Table(title=f"{metric.heading}, {place_words(where)} ({metric.verdict})", title_justify="left")
    for index, (heading, *_) in enumerate(columns):
        table.add_column(Text(heading), justify="right" if index else "left", overflow="fold", no_wrap=index > 0)
    for cells in zip(*(cells for _, *cells in columns), strict=True):
        table.add_row(*(Text(cell) for cell in cells))
    return table


def _metric_columns(results: Results, metric: Metric, organs: Sequence[str], spread: bool) -> list[list[str]]:
    """Heading and cells of each column; the number missed is below its mean."""
    methods, means = results.comparison.methods, results.means[metric.name]
    columns = [[results.plan.kind.thing, *(wrap_label(method, 16) for method in methods)]]
    for organ in organs:
        found = [means.get((method, organ, results.comparison.first_place)) for method in methods]
        cells = ["\n".join(filter(None, (metric_mean(m, metric, spread=spread), left_out(m, metric)))) for m in found]
        columns.append([wrap_label(organ.replace("_", " ") or "all organs", 11), *cells])
    return columns


def _boxed_width(columns: Sequence[Sequence[str]]) -> int:
    """The width of a table with these columns, with its lines and blanks."""
    return 1 + sum(3 + max(cell_len(line) for text in column for line in text.split("\n")) for column in columns)
