"""Gap closed, worst site and worst organ in a comparison's rows, Markdown, JSON and terminal table."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from made_comparison import results_of
from rich.console import Console

from panorgan.cli.compare import gain_table
from panorgan.evaluation.comparison import Score
from panorgan.report.comparison_results import Results, gains_over_alone
from panorgan.report.comparison_tables import as_json, markdown
from panorgan.report.gap_table import gain_headings, gain_rows, gap_note
from panorgan.workflows.compare import ComparisonPlan
from panorgan.workflows.compare_entries import Entry

DICE = {"solo": 0.5, "fedavg": 0.7, "central_full": 0.9}


def results(*methods: str, settings: dict[str, object] | None = None) -> Results:
    """Three patients of the site north and one outside; every method has one Dice everywhere."""
    entries = tuple(Entry(name, name, (settings or {}) if name == "solo" else {}) for name in methods)
    scores = {
        name: [
            Score(0, split, site, case, case, "kidney_left", {"dice": DICE[name], "assd": 1.0}, split == "test")
            for split, site, cases in (("test", "north", "abc"), ("external", "island", "d"))
            for case in cases
        ]
        for name in methods
    }
    plan = ComparisonPlan("made", Path("nowhere"), entries, (0,), methods[0], ())
    made = results_of(plan, scores, ["kidney_left"])
    object.__setattr__(made, "gains", gains_over_alone(plan, scores))
    return made


def test_rows_say_what_is_closed_and_who_gains_least():
    made = results("solo", "fedavg", "central_full")
    assert gain_headings(made) == ["gap closed", "at external sites", "worst site", "worst organ"]
    rows = dict(gain_rows(made))
    assert rows["fedavg"] == ["50 % [50, 50]", "50 % [50, 50]", "north +0.200", "kidney left 1.40 × (seed 0)"]
    assert rows["central_full"][0] == "100 % [100, 100]"
    assert "solo" not in rows


def test_without_all_labels_there_is_no_gap_but_a_worst_site():
    made = results("solo", "fedavg")
    assert gain_headings(made) == ["worst site", "worst organ"]
    assert "Gap closed" not in gap_note(made)
    assert "Gap closed" in gap_note(results("solo", "fedavg", "central_full"))
    assert dict(gain_rows(made))["fedavg"][0] == "north +0.200"


@pytest.mark.parametrize(("methods", "settings"), [(("fedavg", "central_full"), None), (("solo", "fedavg"), {"a": 1})])
def test_alone_is_solo_as_the_experiment_has_it(methods, settings):
    assert results(*methods, settings=settings).gains == {}


def test_every_form_of_the_comparison_has_them():
    made = results("solo", "fedavg", "central_full")
    assert "| fedavg | 50 % \\[50, 50\\] |" in markdown(made)
    kept = json.loads(json.dumps(as_json(made)["gains"], allow_nan=False))
    assert kept["fedavg"]["inside"]["closed"] == pytest.approx(0.5)
    text = io.StringIO()
    Console(file=text, width=120).print(gain_table(made))
    assert "50 % [50, 50]" in text.getvalue()
