"""`panorgan train`: an experiment, and the same with other methods as baselines."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from panorgan import Experiment, Run, load_experiment, train, write_report
from panorgan.cli.console import Console, say
from panorgan.cli.view import watch
from panorgan.errors import ConfigError
from panorgan.evaluation.statistics import Summary, organ_site_table
from panorgan.report.baselines import BaselineModel, baseline_models
from panorgan.report.delivered_rounds import delivered_as_json, delivered_words
from panorgan.workflows.execute import check_run
from panorgan.workflows.mlflow_log import mlflow_listener


def train_and_report(
    path: Path,
    run: Path | None,
    resume: bool,
    overrides: Sequence[str],
    baselines: Sequence[str],
    as_json: bool,
    mlflow: Path | None = None,
) -> None:
    """Train an experiment (and the same with other methods as baselines), show the scores, write the report."""
    experiment = load_experiment(path, overrides)
    others = [experiment.with_method(method) for method in dict.fromkeys(baselines)]
    if any(other.method["name"] == experiment.method["name"] for other in others):
        raise ConfigError(
            f"The method {experiment.method['name']!r} cannot be its own baseline.",
            code="beside-itself",
            where="--baselines",
            fix="Name other methods only; 'panorgan methods' lists them.",
        )
    place = Run(run or Path("runs") / experiment.name)
    if resume and not place.started:
        say(f"There is no run to resume in {place.path}; starting a new one.", sys.stderr)
    for other in others:  # their errors should show before hours of training
        check_run(other, place.baseline(other.method["name"]).path, resume, may_extend=True)
    trained = _train_one(experiment, place, resume, as_json, mlflow)
    report = write_report(trained)
    for other in others:
        _train_one(other, trained.baseline(other.method["name"]), resume, as_json, mlflow, compared_with=trained)
    if others:
        write_report(trained)
    show_scores(trained, report, as_json)


def _train_one(
    experiment: Experiment,
    run: Run,
    resume: bool,
    as_json: bool,
    mlflow: Path | None = None,
    compared_with: Run | None = None,
) -> Run:
    others = () if mlflow is None else (mlflow_listener(mlflow, run),)
    with watch(f"{experiment.name} · {experiment.method['name']}", as_json) as listener:
        return train(experiment, run.path, resume, (listener, *others), compared_with=compared_with, estimate=True)


def show_scores(run: Run, report: Path, as_json: bool) -> None:
    """The scores of a finished run, and of its baselines."""
    table = organ_site_table(run.scores)
    models = baseline_models(run)
    if as_json:
        summary: dict[str, Any] = {"run": str(run.path), "report": str(report), **delivered_as_json(run)}
        summary["dice"] = _numbers(table.overall)
        summary["external_dice"] = _numbers(table.external)
        if models:
            summary["beside"] = {model.name: _numbers(model.overall) for model in models if not model.is_this_run}
        print(json.dumps({"result": summary}), flush=True)
        return
    console = Console()
    console.print(score_table(run.scores, "Dice on test cases (mean over cases)"))
    console.print(f"In the federation {in_words(table.overall)}")
    if table.external is not None and table.external.n:
        console.print(f"At external sites {in_words(table.external)}")
    console.print(f"Delivered: round {delivered_words([run])}", highlight=False)
    if models:
        console.print(baseline_table(models))
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


def baseline_table(models: Sequence[BaselineModel]) -> Table:
    """Organ × model."""
    table = Table(title="Dice of this run and its baselines (test cases of all sites)", title_justify="left")
    table.add_column("organ", overflow="fold")
    for model in models:
        table.add_column(model.name, justify="right", style="bold" if model.is_this_run else "")
    for organ in sorted({organ for model in models for organ in model.organs}):
        known = [model.organs.get(organ) for model in models]
        # Spaces, so that a long name wraps between words.
        table.add_row(organ.replace("_", " "), *(f"{summary.mean:.2f}" if summary else "unknown" for summary in known))
    table.add_section()
    table.add_row("all it knows", *(f"{model.overall.mean:.2f}" for model in models))
    table.add_row("delivered round", *(model.delivered for model in models))
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
