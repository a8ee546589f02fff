"""A method's module table from finished runs: ablation.md, .tex, .csv, .json and a page like that of a comparison."""

from __future__ import annotations

from typing import Any

from panorgan.evaluation.comparison import ALL_ORGANS, EXTERNAL, Comparison, Figure, Place
from panorgan.evaluation.metrics import Metric
from panorgan.report import comparison_tables as tables
from panorgan.report.ablation_figures import module_chart
from panorgan.report.comparison import render, write_files
from panorgan.report.comparison_figures import looks
from panorgan.report.comparison_metrics import metrics_shown, with_left_out
from panorgan.report.comparison_results import ComparisonFiles, Results
from panorgan.report.delivered_rounds import delivered_columns
from panorgan.report.method_words import describe_method
from panorgan.report.table_text import plain, table_lines
from panorgan.report.tables import NOTHING
from panorgan.workflows.ablate import Ablation

TICK = "✓"
PAPER_NOTE = (
    "Paper: mean Dice as printed there, in percent, on its own data. The order of the rows can be compared, the "
    "figures cannot."
)


def write_ablation(ablation: Ablation, results: Results) -> ComparisonFiles:
    """Write all files of an ablation into its folder."""
    return write_files(
        results,
        page(ablation, results),
        tables.markdown(results, f"modules of {ablation.method}", markdown_lines(ablation, results)),
        tables.scores_csv(
            results.comparison,
            lambda label: {**ticks(ablation, label), **delivered_columns(results.runs.get(label, ()))},
        ),
        as_json(ablation, results),
    )


def places(comparison: Comparison) -> list[Place]:
    """The columns: single sites, external ones last (and their mean, of several), then the whole federation.

    Where only external sites were scored, their mean stands in its place.
    """
    whole = comparison.first_place
    return [*(place for place in tables.table_places(comparison) if place != whole), whole]


def ticks(ablation: Ablation, label: str) -> dict[str, int]:
    """A column per module, 1 where it is on, for programs."""
    (row,) = (row for row in ablation.rows if row.label == label)
    return {f"module_{module}": int(module in row.modules) for module in ablation.modules}


def shows_paper(ablation: Ablation) -> bool:
    """Whether the paper has a figure for any row."""
    return any(row.paper for row in ablation.rows)


def difference(comparison: Comparison, label: str) -> str:
    """The difference from the reference, in the federation if it was scored: ``+0.021 ▲``; a word for the reference."""
    if label == comparison.reference:
        return "reference"
    figure = comparison.figure(label)
    return " ".join(filter(None, (tables.signed(figure.difference if figure else None), tables.mark(figure))))


def p_number(figure: Figure | None) -> str:
    """``0.031``, ``< 0.001``; a dash where nothing was tested."""
    return tables.p_value(figure).removeprefix("p ").removeprefix("= ") or NOTHING


def metric_cell(results: Results, metric: Metric, label: str) -> str:
    """A metric other than Dice over all organs, in the federation if it was scored."""
    found = results.means[metric.name].get((label, ALL_ORGANS, results.comparison.first_place))
    return with_left_out(found, metric, "ablation")


def markdown_lines(ablation: Ablation, results: Results) -> list[str]:
    """The section with the table, as Markdown."""
    comparison, metrics = results.comparison, metrics_shown(results, "ablation")
    columns = places(comparison)
    against = f"against {plain(comparison.reference)}"
    header = ["row", *map(plain, ablation.modules)]
    header += [*(plain(tables.heading(comparison, place)) for place in columns), against, "p (Holm)"]
    header += [plain(metric.column) for metric in metrics]
    header += ["paper"] if shows_paper(ablation) else []
    rows = []
    for row in ablation.rows:
        cells = [tables.over_seeds(comparison.figure(row.label, ALL_ORGANS, place)) for place in columns]
        cells += [difference(comparison, row.label), p_number(comparison.figure(row.label))]
        cells += [metric_cell(results, metric, row.label) for metric in metrics]
        cells += [plain(row.paper) or NOTHING] if shows_paper(ablation) else []
        on = [TICK if module in row.modules else "" for module in ablation.modules]
        rows.append([plain(row.label), *on, *cells])
    note = ["", PAPER_NOTE] if shows_paper(ablation) else []
    return ["## Modules", "", *table_lines(header, rows), *note, ""]


def as_json(ablation: Ablation, results: Results) -> dict[str, Any]:
    """The text of a comparison, and the ablation table: the active modules of each row, and the paper's results."""
    rows = [{"label": row.label, "modules": list(row.modules), "paper": row.paper} for row in ablation.rows]
    table = {"method": ablation.method, "modules": list(ablation.modules), "rows": rows}
    return {**tables.as_json(results), "ablation": table}


def page(ablation: Ablation, results: Results) -> str:
    """The page as text."""
    comparison = results.comparison
    return render(
        results,
        "ablation.html.j2",
        ablation=ablation,
        method_title=describe_method(ablation.method).title,
        site_places=places(comparison)[:-1],
        shows_paper=shows_paper(ablation),
        paper_note=PAPER_NOTE,
        module_metrics={
            metric: {row.label: metric_cell(results, metric, row.label) for row in ablation.rows}
            for metric in metrics_shown(results, "ablation")
        },
        tick=TICK,
        module_chart=module_chart(comparison, looks(comparison.methods, comparison.reference)),
        outside=EXTERNAL in comparison.places,
    )
