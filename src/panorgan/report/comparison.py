"""Put finished runs of several methods side by side: comparison.md, .csv, .json and a self-contained .html."""

from __future__ import annotations

from collections.abc import Mapping

from panorgan.anatomy import catalogue
from panorgan.checksums import sealed_json
from panorgan.evaluation.comparison import ALL_ORGANS, EXTERNAL
from panorgan.federation.files import write_atomically
from panorgan.report import comparison_distances as distances
from panorgan.report import comparison_figures as figures
from panorgan.report import comparison_tables as tables
from panorgan.report.comparison_results import ComparisonFiles, Results
from panorgan.report.method_words import describe_method
from panorgan.report.tables import FILTERS, heat_scale
from panorgan.report.templates import fill_in


def write_comparison(results: Results) -> ComparisonFiles:
    """Write all files of a comparison into its folder."""
    scores = tables.scores_csv(results.comparison)
    return write_files(results, render(results), tables.markdown(results), scores, tables.as_json(results))


def write_files(
    results: Results, page: str, markdown: str, scores: str, content: Mapping[str, object]
) -> ComparisonFiles:
    """Write these, how far surfaces lie apart, and what everything costs."""
    files = results.files
    write_atomically(files.markdown, markdown)
    write_atomically(files.scores, scores)
    write_atomically(files.distances, distances.distances_csv(results))
    write_atomically(files.costs, tables.costs_csv(results))
    write_atomically(files.page, page)
    write_atomically(files.data, sealed_json(content, indent=1, allow_nan=False))
    return files


def render(results: Results, template: str = "comparison.html.j2", **more: object) -> str:
    """The page as text; a template that extends the usual one may ask for `more`."""
    plan, comparison = results.plan, results.comparison
    styles = figures.looks(plan.labels, plan.reference)
    runs = [(label, run) for label, runs in results.runs.items() for run in runs]
    return fill_in(
        template,
        {**FILTERS, **tables.FILTERS, **distances.FILTERS},
        results=results,
        plan=plan,
        comparison=comparison,
        styles=styles,
        words={entry.label: describe_method(entry.method) for entry in plan.entries},
        first=runs[0][1],
        runs=runs,
        heat_scale=heat_scale(),
        all_organs=ALL_ORGANS,
        summary_places=tables.summary_places(comparison),
        table_places=tables.table_places(comparison),
        first_place=comparison.first_place,
        external=EXTERNAL,
        distances_heading=distances.DISTANCES,
        distance_groups=distances.distance_groups(results.comparison),
        distance_note=distances.DISTANCE_NOTE,
        how=tables.how(results),
        cost_notes=tables.cost_notes(results),
        colours={organ: catalogue()[organ].colour for organ in comparison.organs},
        curve=figures.mean_curve(results.runs, styles),
        organ_curves=figures.organ_curves(results.runs, styles, comparison.organs),
        boxes={o: figures.case_boxes(results.scores, styles, o) for o in comparison.organs},
        created=max(run.manifest["created"] for _, run in runs).replace("T", " ", 1).replace("+0000", " UTC"),
        **more,
    )
