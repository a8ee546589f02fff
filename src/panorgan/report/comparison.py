"""Put finished runs of several methods side by side: comparison.md, .tex, .csv, .json and a self-contained .html."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from panorgan.anatomy import catalogue
from panorgan.checksums import sealed_json
from panorgan.evaluation.comparison import ALL_ORGANS, EXTERNAL
from panorgan.federation.files import write_atomically
from panorgan.report import comparison_figures as figures
from panorgan.report import comparison_metrics as metrics
from panorgan.report import comparison_tables as tables
from panorgan.report.comparison_best import best_values
from panorgan.report.comparison_cases import ComparisonCases
from panorgan.report.comparison_results import ComparisonFiles, Results
from panorgan.report.delivered_rounds import delivered_columns, delivered_early, delivered_words
from panorgan.report.gap_table import gain_headings, gain_rows, gap_note
from panorgan.report.method_words import describe_method
from panorgan.report.page_tables import latex_of
from panorgan.report.tables import FILTERS
from panorgan.report.templates import fill_in


def write_comparison(results: Results) -> ComparisonFiles:
    """Write all files of a comparison into its folder."""
    scores = tables.scores_csv(results.comparison, lambda label: delivered_columns(results.runs.get(label, ())))
    return write_files(results, render(results), tables.markdown(results), scores, tables.as_json(results))


def write_files(
    results: Results, page: str, markdown: str, scores: str, content: Mapping[str, object]
) -> ComparisonFiles:
    """Write these, the metrics besides Dice, and the costs."""
    files = results.files
    write_atomically(files.markdown, markdown)
    write_atomically(files.scores, scores)
    for metric in metrics.metrics_shown(results):
        write_atomically(files.metric(metric.name), metrics.metric_csv(results, metric))
    write_atomically(files.costs, tables.costs_csv(results))
    write_atomically(files.page, page)
    write_atomically(files.latex, latex_of(page))
    write_atomically(files.data, sealed_json(content, indent=1, allow_nan=False))
    return files


def render(results: Results, template: str = "comparison.html.j2", **more: Any) -> str:
    """The page as text; a template that extends the usual one may use `more`."""
    plan, comparison = results.plan, results.comparison
    styles = figures.looks(plan.labels, plan.reference)
    cases = ComparisonCases(results)
    runs = [(label, run) for label, runs in results.runs.items() for run in runs]
    return fill_in(
        template,
        {**FILTERS, **tables.FILTERS, **metrics.FILTERS},
        results=results,
        plan=plan,
        comparison=comparison,
        styles=styles,
        words={entry.label: describe_method(entry.method) for entry in plan.entries},
        first=runs[0][1],
        runs=runs,
        delivered={label: delivered_words(runs) for label, runs in results.runs.items()},
        delivered_early=delivered_early(results.runs),
        all_organs=ALL_ORGANS,
        summary_places=tables.summary_places(comparison),
        table_places=tables.table_places(comparison),
        first_place=comparison.first_place,
        external=EXTERNAL,
        gain_headings=gain_headings(results),
        gain_rows=list(gain_rows(results)),
        gap_note=gap_note(results),
        metrics_shown=metrics.metrics_shown(results),
        metric_groups=metrics.metric_groups(comparison),
        how=tables.how(results),
        cost_notes=tables.cost_notes(results),
        colours={organ: catalogue()[organ].colour for organ in comparison.organs},
        curve=figures.mean_curve(results.runs, styles),
        organ_curves=figures.organ_curves(results.runs, styles, comparison.organs),
        points=cases.plots(styles),
        cases=cases.table(),
        **best_values(results),
        created=max(run.manifest["created"] for _, run in runs).replace("T", " ", 1).replace("+0000", " UTC"),
        **more,
    )
