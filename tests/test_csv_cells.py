"""Names cannot become formulas, numbers stay numbers, and what is written is read back as it was."""

from __future__ import annotations

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from panorgan.csv_cells import escape_cell, unescape_cell
from panorgan.evaluation.metrics import METRICS
from panorgan.report.table_text import csv_text
from panorgan.workflows.tables import read_metrics, write_metrics

FORMULA = '=HYPERLINK("http://example.org","open me")'


@pytest.mark.parametrize("text", [FORMULA, "+1+1", "-2+3", "@SUM(A1)", "\t=1", "\r=1", "＝1+1", "-", "-case"])
def test_what_a_spreadsheet_would_compute_becomes_text(text):
    assert escape_cell(text) == "'" + text


@pytest.mark.parametrize("value", [-0.5, "-0.5", "+3", "-1e-05", "-inf", 7, "liver", "a=b", "north-1", "", None])
def test_numbers_and_ordinary_names_stay(value):
    assert escape_cell(value) == value
    assert type(escape_cell(value)) is type(value)


@given(st.text(alphabet="'=+-@ab1.\t") | st.text())
def test_what_is_written_is_read_back(text):
    cell = escape_cell(text)
    assert unescape_cell(cell) == text
    if cell[:1] in ("=", "+", "-", "@"):
        float(cell)


def test_metrics_keep_names_and_numbers(tmp_path):
    scores = dict.fromkeys(METRICS, -0.5)
    rows = [{"split": "test", "site": "north", "case": case, "organ": "liver", **scores} for case in (FORMULA, "-7x")]
    write_metrics(tmp_path / "metrics.csv", rows)
    with (tmp_path / "metrics.csv").open(newline="") as file:
        written = list(csv.DictReader(file))
    assert [row["case"] for row in written] == ["'" + FORMULA, "'-7x"]
    assert written[0]["dice"] == "-0.5"
    assert read_metrics(tmp_path / "metrics.csv") == rows


def test_tables_of_comparisons_are_escaped_too():
    text = csv_text([{"method": "=1+1", "difference": -0.25, "p": float("nan")}])
    assert list(csv.DictReader(io.StringIO(text))) == [{"method": "'=1+1", "difference": "-0.25", "p": ""}]
