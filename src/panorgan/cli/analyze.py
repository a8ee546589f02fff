"""`panorgan analyze`: curvature, loss landscape and layer similarity of a finished run."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from panorgan.cli.console import Console
from panorgan.cli.view import watch
from panorgan.report import write_report
from panorgan.report.analyses import curvature_row, write_figures
from panorgan.report.tables import number
from panorgan.settings import validated
from panorgan.workflows.analysis_files import Analysis
from panorgan.workflows.analyze import AnalysisSettings, analyze
from panorgan.workflows.run import Run


@dataclass(frozen=True)
class AnalyzeRequest:
    """The options of the command line."""

    run: Path
    against: Sequence[Path]
    settings: dict[str, Any]
    device: str
    as_json: bool


def run_analyze(request: AnalyzeRequest) -> None:
    """Analyse, write tables and figures, rewrite the report, show the numbers."""
    settings, run = validated(AnalysisSettings, request.settings, "panorgan analyze"), Run(request.run)
    with watch(f"analysing {request.run}", request.as_json) as listener:
        analysis = analyze(run.path, settings, request.against, request.device, (listener,))
    figures = write_figures(run)
    report = write_report(run.path)
    if request.as_json:
        print(json.dumps({"result": _summary(run, analysis, figures, report)}, allow_nan=False), flush=True)
        return
    console = Console()
    console.print(_curvature_table(analysis))
    if analysis.similarity:
        console.print(_similarity_table(analysis))
    for path in (run.analysis_file, run.analysis_folder, f"Report: {report}"):
        console.print(str(path), soft_wrap=True, markup=False, highlight=False)


def _curvature_table(analysis: Analysis) -> Table:
    table = Table(title="Curvature of the loss (lower is flatter)", title_justify="left")
    table.add_column("site", overflow="fold")
    for heading in ("loss", "gradient", "λ max", "λ max / λ 5", "trace"):
        table.add_column(heading, justify="right", no_wrap=True)
    for place in analysis.curvature:
        row = curvature_row(place)
        table.add_row(row.place, row.loss, row.gradient, row.largest, row.ratio, row.trace)
    return table


def _similarity_table(analysis: Analysis) -> Table:
    """A column per model, a row per layer that both have."""
    table = Table(title="Similarity of the same layers (linear CKA)", title_justify="left")
    table.add_column("layer", overflow="fold")
    known = []
    for pair in analysis.similarity:
        table.add_column(pair.other, justify="right", overflow="fold")
        known.append(dict(zip(pair.layers, pair.same_layer, strict=True)))
    for layer in dict.fromkeys(layer for pair in analysis.similarity for layer in pair.layers):
        table.add_row(layer, *(number(values.get(layer), 3) for values in known))
    return table


def _summary(run: Run, analysis: Analysis, figures: Sequence[str], report: Path) -> dict[str, Any]:
    """The figures that papers quote, and the paths of the rest."""
    tables = sorted(path.name for path in run.analysis_folder.glob("*.csv"))
    return {
        "run": str(run.path),
        "analysis": str(run.analysis_file),
        "files": [str(run.analysis_folder / name) for name in (*tables, *figures)],
        "report": str(report),
        "curvature": {
            place.place: {
                "loss": _defined(place.loss),
                "eigenvalues": place.eigenvalues,
                "largest_over_fifth": _defined(place.ratio),
                "trace": _defined(place.trace),
                "trace_standard_error": _defined(place.trace_standard_error),
            }
            for place in analysis.curvature
        },
        "similarity": {
            pair.other: {layer: _defined(value) for layer, value in zip(pair.layers, pair.same_layer, strict=True)}
            for pair in analysis.similarity
        },
    }


def _defined(value: float) -> float | None:
    return value if math.isfinite(value) else None
