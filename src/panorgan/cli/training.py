"""`panorgan train` and `panorgan evaluate`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from panorgan.cli.view import watch
from panorgan.config import load_experiment
from panorgan.evaluation.statistics import Summary, organ_site_table
from panorgan.report import write_report
from panorgan.runs.execute import RunResult, evaluate, train


def train_and_report(path: Path, run: Path | None, resume: bool, overrides: Sequence[str], as_json: bool) -> None:
    """Train an experiment, show its scores, write its report."""
    experiment = load_experiment(path, overrides)
    folder = run or Path("runs") / experiment.name
    with watch(f"{experiment.name} · {experiment.method['name']}", as_json) as listener:
        result = train(experiment, folder, resume, (listener,))
    report = write_report(folder)
    _show(result, report, as_json)


def evaluate_run(run: Path, as_json: bool) -> None:
    """Score a finished run again."""
    with watch(f"scoring {run}", as_json) as listener:
        result = evaluate(run, (listener,))
    _show(result, write_report(run), as_json)


def _show(result: RunResult, report: Path, as_json: bool) -> None:
    table = organ_site_table(result.rows)
    if as_json:
        summary = {"run": str(result.folder.path), "report": str(report), "dice": _numbers(table.overall)}
        print(json.dumps({"result": summary | {"external_dice": _numbers(table.external)}}), flush=True)
        return
    console = Console()
    console.print(score_table(result.rows, "Dice on test cases (mean over cases)"))
    console.print(f"In the federation {in_words(table.overall)}")
    if table.external is not None and table.external.n:
        console.print(f"At external sites {in_words(table.external)}")
    console.print(f"Report: {report}", soft_wrap=True, markup=False, highlight=False)


def score_table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """Organ × site."""
    scores = organ_site_table(rows)
    sites = sorted({site for _, site in scores.cells})
    table = Table("organ", *sites, "federation", title=title, title_justify="left")
    for organ in sorted({organ for organ, _ in scores.cells}):
        cells = [f"{scores.cells[organ, site].mean:.2f}" if (organ, site) in scores.cells else "–" for site in sites]
        whole = scores.organs.get(organ)
        table.add_row(organ, *cells, f"{whole.mean:.2f}" if whole else "–")
    return table


def in_words(summary: Summary | None) -> str:
    """`0.810 (95 % interval 0.780–0.840)`; cases are resampled, so a single one gives no interval."""
    if summary is None or not summary.n:
        return "not scored"
    if summary.low == summary.high:
        return f"{summary.mean:.3f} (too few cases for an interval)"
    return f"{summary.mean:.3f} (95 % interval {summary.low:.3f}–{summary.high:.3f})"


def _numbers(summary: Summary | None) -> dict[str, float] | None:
    if summary is None or not summary.n:
        return None
    return {"mean": summary.mean, "sd": summary.sd, "n": summary.n, "low": summary.low, "high": summary.high}
