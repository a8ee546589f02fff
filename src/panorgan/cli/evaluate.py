"""`panorgan evaluate`: score a finished run again."""

from __future__ import annotations

from pathlib import Path

from panorgan import evaluate, write_report
from panorgan.cli.train import show_scores
from panorgan.cli.view import watch


def evaluate_run(run: Path, as_json: bool) -> None:
    """Score it, rewrite the report, show the scores."""
    with watch(f"scoring {run}", as_json) as listener:
        scored = evaluate(run, (listener,))
    show_scores(scored, write_report(scored), as_json)
