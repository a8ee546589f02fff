"""`panorgan ablate`: trains the rows of a method's ablation table, and compares them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from panorgan import load_experiment
from panorgan.cli.compare import FAILED, ComparisonView, metric_tables, print_result, show_ending, summary
from panorgan.cli.console import Console
from panorgan.evaluation.comparison import ALL_ORGANS, FEDERATION, Comparison, Place
from panorgan.report.ablation import (
    PAPER_NOTE,
    TICK,
    difference,
    metric_cell,
    p_number,
    places,
    shows_paper,
    write_ablation,
)
from panorgan.report.comparison_metrics import metrics_shown
from panorgan.report.comparison_results import ComparisonFiles, Results, compare_runs
from panorgan.report.comparison_tables import heading, over_seeds
from panorgan.report.tables import NOTHING, number
from panorgan.workflows.ablate import Ablation, plan_ablation
from panorgan.workflows.train_comparison import train_missing

_GAP = 2
"""Blanks between columns where there is room; else one."""


@dataclass(frozen=True)
class AblateRequest:
    """The options of the command line."""

    experiment: Path
    method: str | None
    rows: str | None
    seeds: str
    reference: str | None
    run: Path | None
    overrides: Sequence[str]
    report_only: bool
    as_json: bool
    at_once: int = 1


def run_ablate(request: AblateRequest) -> int:
    """Train the missing runs, compare the rows, print them; returns the exit code."""
    experiment = load_experiment(request.experiment, request.overrides)
    ablation = plan_ablation(experiment, request.method, request.rows, request.seeds, request.reference, request.run)
    console = Console(quiet=request.as_json)
    view = ComparisonView(console, request.as_json)
    failures = train_missing(ablation.plan, request.at_once, view, report_only=request.report_only)
    results = compare_runs(ablation.plan, failures)
    files = write_ablation(ablation, results)
    if request.as_json:
        print_result(_summary(ablation, results, files))
    else:
        for table in module_tables(ablation, results, console.width):
            console.print(table)
            console.print()
        if shows_paper(ablation):
            console.print(PAPER_NOTE, style="dim", markup=False, highlight=False)
        for table in metric_tables(results, console.width):
            console.print(table)
        show_ending(console, results, files)
    return FAILED if failures else 0


def _summary(ablation: Ablation, results: Results, files: ComparisonFiles) -> dict[str, Any]:
    """That of a comparison, with rows as methods, each with its modules and the paper's figure."""
    content = summary(results, files)
    figures = content.pop("methods")
    rows = {
        row.label: {"modules": list(row.modules), "paper": row.paper, **figures[row.label]} for row in ablation.rows
    }
    return {**content, "method": ablation.method, "rows": rows}


Column = tuple[str, Literal["left", "center", "right"], list[str]]
"""Heading, how it is justified, and its cells."""


def module_tables(ablation: Ablation, results: Results, width: int) -> list[Table]:
    """One table where there is room for everything; else the modules, and then the sites separately."""
    comparison = results.comparison
    title = f"Modules of {ablation.method}: test Dice"
    *sites, whole = places(comparison)
    ticks, verdict = _tick_columns(ablation), _verdict_columns(ablation, results)
    labels: Column = ("row", "left", [row.label for row in ablation.rows])
    federation = _place_column(ablation, comparison, whole)
    apart = [_place_column(ablation, comparison, site) for site in sites]
    together = [labels, *ticks, *apart, federation, *verdict]
    if _width(together, _GAP) <= width:
        return [_table(title, together, width)]
    tables = [_table(title, [labels, *ticks, federation, *verdict], width)]
    if _width([labels, *apart], gap=1) > width:
        apart = [_place_column(ablation, comparison, site, spread=False) for site in sites]
    if sites:
        tables.append(_table("Test Dice per site", [labels, *apart], width))
    return tables


def _tick_columns(ablation: Ablation) -> list[Column]:
    return [
        (module.replace(" ", "\n"), "center", [TICK if module in row.modules else "" for row in ablation.rows])
        for module in ablation.modules
    ]


def _place_column(ablation: Ablation, comparison: Comparison, place: Place, spread: bool = True) -> Column:
    words = "federation" if place == FEDERATION else heading(comparison, place).replace(" ", "\n")
    figures = [comparison.figure(row.label, ALL_ORGANS, place) for row in ablation.rows]
    cells = [over_seeds(figure) if spread else number(figure.mean if figure else None, 3) for figure in figures]
    return words, "right", cells


def _verdict_columns(ablation: Ablation, results: Results) -> list[Column]:
    """The difference in the federation, its p, further metrics there, and the paper's result."""
    comparison, labels = results.comparison, [row.label for row in ablation.rows]
    columns: list[Column] = [
        ("difference", "right", [difference(comparison, label) for label in labels]),
        ("p\n(Holm)", "right", [p_number(comparison.figure(label)) for label in labels]),
    ]
    for metric in metrics_shown(results, "ablation"):
        words = metric.column.replace(" ", "\n")
        columns.append((words, "right", [metric_cell(results, metric, label) for label in labels]))
    if shows_paper(ablation):
        columns.append(("paper", "right", [row.paper or NOTHING for row in ablation.rows]))
    return columns


def _width(columns: Sequence[Column], gap: int) -> int:
    """The width of a table with these columns."""
    widest = [
        max(cell_len(line) for text in (words, *cells) for line in text.split("\n")) for words, _, cells in columns
    ]
    return sum(widest) + gap * (len(columns) - 1)


def _table(title: str, columns: Sequence[Column], width: int) -> Table:
    """No lines between columns: a module table has many narrow ones. Names of rows are folded if necessary."""
    right = _GAP - 1 if _width(columns, _GAP) <= width else 0
    table = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, right, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    for index, (words, justify, _) in enumerate(columns):
        table.add_column(Text(words), justify=justify, overflow="fold", no_wrap=index > 0)
    for cells in zip(*(cells for _, _, cells in columns), strict=True):
        table.add_row(*(Text(cell) for cell in cells))
    return table
