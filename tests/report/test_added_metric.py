"""One more entry of the registry is all it takes: the metric is in every file, table and page."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from made_ablation import made_ablation
from made_comparison import made_scores, results_of

from panorgan.cli.ablate import module_tables
from panorgan.cli.compare import metric_tables
from panorgan.evaluation.comparison import Score
from panorgan.evaluation.metrics import METRICS, Metric, score
from panorgan.report import ablation as ablation_report
from panorgan.report import comparison_tables
from panorgan.report.comparison_metrics import metric_csv, note
from panorgan.report.comparison_results import Results
from panorgan.report.metrics_page import metrics_page
from panorgan.workflows.tables import columns, read_metrics, write_metrics


def with_precision(scores: Sequence[Score]) -> list[Score]:
    """Seed 0 has a precision of 0.25, seed 1 of 0.75; a missed organ has none."""
    values = [math.nan if s.missed else 0.25 + 0.5 * s.seed for s in scores]
    return [s._replace(values={**s.values, "precision": v}) for s, v in zip(scores, values, strict=True)]


@pytest.fixture
def results(added_metric: Metric) -> Results:
    scores = {method: with_precision(some) for method, some in made_scores(external=False).items()}
    plan = made_ablation()[1].plan
    return results_of(plan, {"PL": scores["care_ful"], "SOLO": scores["blind"]}, ["liver", "spleen"])


def test_values_by_hand(added_metric: Metric) -> None:
    """Four voxels predicted, two of them right."""
    prediction, truth = np.zeros((2, 4, 4), dtype=bool)
    prediction[1, :], truth[1, 2:] = True, True
    assert score(prediction, truth, (1.0, 1.0))["precision"] == 0.5
    assert math.isnan(score(truth & False, truth, (1.0, 1.0))["precision"])
    assert score(truth & False, truth & False, (1.0, 1.0))["precision"] == 1.0


def test_it_is_the_last_column_of_metrics_csv(added_metric: Metric, tmp_path: Path) -> None:
    mask = np.ones((2, 2), dtype=bool)
    row = {"split": "test", "site": "north", "case": "1", "organ": "liver", **score(mask, mask, (1.0, 1.0))}
    write_metrics(tmp_path / "metrics.csv", [row])
    assert columns()[-2:] == ("rve", "precision")
    assert (tmp_path / "metrics.csv").read_text().splitlines()[1].endswith(",0.0,1.0")
    assert read_metrics(tmp_path / "metrics.csv") == [row]


def test_a_comparison_has_a_table_of_it(results: Results, added_metric: Metric) -> None:
    """Over both seeds (0.25 + 0.75) / 2, with a spread of 0.5 / √2; all spleens of SOLO are missed."""
    text = comparison_tables.markdown(results)
    section = text.split("## Precision\n\n")[1].split("\n\n## ")[0].splitlines()
    assert section[2] == "| PL | 0.500 ± 0.354 | 0.500 ± 0.354 (1 not defined) | 0.500 ± 0.354 (1 not defined) |"
    assert section[3] == "| SOLO | 0.500 ± 0.354 | – (4 not defined) | 0.500 ± 0.354 (4 not defined) |"
    assert section[-1] == note(added_metric)
    assert "higher is better; not defined: prediction empty" in section[-1]
    rows = list(csv.DictReader(io.StringIO(metric_csv(results, added_metric))))
    assert {row["mean"] for row in rows if row["organ"] == "liver"} == {"0.5"}
    assert comparison_tables.as_json(results)["metric_precision"][0]["mean"] == 0.5
    assert results.files.metric("precision").name == "ablation_metric_precision.csv"


def test_an_ablation_has_a_column_of_it(results: Results) -> None:
    ablation, _ = made_ablation()
    header, _, solo, pl, *_ = ablation_report.markdown_lines(ablation, results)[2:]
    assert header.endswith("| p (Holm) | Precision | paper |")
    assert pl.endswith("| 0.500 ± 0.354 (1 not defined) | 73.07 |")
    assert solo.endswith("| 0.500 ± 0.354 (4 not defined) | 70.05 |")
    (table,) = module_tables(ablation, results, width=300)
    assert [str(column.header) for column in table.columns][-2:] == ["Precision", "paper"]


def test_the_terminal_shows_it(results: Results) -> None:
    titles = [str(table.title) for table in metric_tables(results, 200)]
    assert titles[1:] == ["Precision, federation (higher is better)"]


def test_the_page_of_all_metrics_has_it(added_metric: Metric) -> None:
    (line,) = [line for line in metrics_page().splitlines() if line.startswith("| `precision`")]
    assert line.endswith("| higher | 0 to 1 | prediction empty | report (2), comparison (3), ablation (3) |")


def test_runs_that_were_scored_before_are_shown_without_it(added_metric: Metric) -> None:
    old, new = made_scores()["care_ful"], with_precision(made_scores()["blind"])
    results = results_of(made_ablation()[1].plan, {"PL": old, "SOLO": new}, ["liver", "spleen"])
    assert list(results.means) == ["assd"]
    assert "Precision" not in comparison_tables.markdown(results)


def test_it_is_gone_afterwards() -> None:
    assert "precision" not in METRICS
