"""Scores that were written down once stay as they are, to the last digit of every file that shows them."""

from __future__ import annotations

from pathlib import Path

from made_ablation import made_ablation
from made_comparison import made_results
from recorded_masks import recorded_masks

from panorgan.evaluation.metrics import METRICS, score
from panorgan.report import ablation, comparison_tables
from panorgan.report.comparison_metrics import metric_csv
from panorgan.workflows.tables import write_metrics

RECORDED = Path(__file__).parent / "recorded"


def recorded(name: str) -> str:
    return (RECORDED / name).read_text()


def test_metrics_csv(tmp_path: Path) -> None:
    rows = []
    for name, prediction, truth, spacing in recorded_masks():
        row = {"split": "test", "site": "north", "case": name, "organ": "liver"}
        rows.append(row | score(prediction, truth, spacing))
    write_metrics(tmp_path / "metrics.csv", rows)
    assert (tmp_path / "metrics.csv").read_text() == recorded("metrics.csv")


def test_comparison_files() -> None:
    results = made_results()
    assert comparison_tables.scores_csv(results.comparison) == recorded("comparison.csv")
    assert metric_csv(results, METRICS["assd"]) == recorded("comparison_distances.csv")
    assert tables_of(comparison_tables.markdown(results)) == recorded("comparison.md")


def test_module_table() -> None:
    lines = ablation.markdown_lines(*made_ablation())
    assert tables_of("\n".join(lines)) == recorded("ablation.md")


def tables_of(markdown: str) -> str:
    """Headings and tables, without the sentences around them."""
    return "".join(f"{line}\n" for line in markdown.splitlines() if line.startswith(("#", "|")))
