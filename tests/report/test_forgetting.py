"""The section on what each site forgets: true to `local_models.csv`, and absent where there is none."""

from __future__ import annotations

import re

import pytest

from panorgan.evaluation.metrics import METRICS
from panorgan.report.forgetting import forgetting_table
from panorgan.report.page import render
from panorgan.report.tones import heat_tone
from panorgan.workflows.execute import train
from panorgan.workflows.run import Run
from panorgan.workflows.tables import write_metrics

DICE = {
    "north": {"liver": 0.9, "spleen": 0.0, "kidney_left": 0.1, "kidney_right": 0.2},
    "south": {"liver": 0.3, "spleen": 0.8, "kidney_left": 0.7, "kidney_right": 0.6},
    "global": {"liver": 0.8, "spleen": 0.5, "kidney_left": 0.4, "kidney_right": 0.6},
}


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory) -> Run:
    folder = Run(tmp_path_factory.mktemp("forgetting") / "run")
    train(tiny(training={"rounds": 1, "local_steps": 1, "validate_every": 0}, local_models=True), folder.path)
    metrics = dict.fromkeys(METRICS, 0.5)
    place = {"split": "test", "site": "north", "case": "a"}
    rows = [
        {"model": model, **place, "organ": organ, **metrics, "dice": dice}
        for model, organs in DICE.items()
        for organ, dice in organs.items()
    ]
    rows += [{**row, "split": "external", "dice": 1.0} for row in rows]  # must not count
    write_metrics(folder.local_models_file, rows, own_models=True)
    return folder


def test_the_table_by_hand(run):
    table = forgetting_table(Run(run.path))
    assert table is not None
    assert table.averaged is not None
    assert table.organs == ("liver", "spleen", "kidney_left", "kidney_right")
    texts = {row.name: [cell.text for cell in row.cells] for row in (*table.local, table.averaged)}
    assert texts == {
        "north": ["0.90", "0.00", "0.10", "0.20"],
        "south": ["0.30", "0.80", "0.70", "0.60"],
        "Global model": ["0.80", "0.50", "0.40", "0.60"],
    }
    means = {row.name: (row.on_owned.text, row.on_others.text) for row in (*table.local, table.averaged)}
    # Global: owned (0.8 + 0.5) / 2, others (0.5 + 0.8) / 2.
    assert means == {"north": ("0.90", "0.10"), "south": ("0.70", "0.30"), "Global model": ("0.65", "0.65")}
    owned = {row.name: [cell.own for cell in row.cells] for row in (*table.local, table.averaged)}
    # South labels both kidneys as one.
    assert owned == {
        "north": [True, False, False, False],
        "south": [False, True, True, True],
        "Global model": [False] * 4,
    }
    assert table.local[0].cells[1].tone == heat_tone(0.0)
    assert "Spleen: mean Dice 0.00" in table.local[0].cells[1].spoken


def test_the_page_has_the_section(run):
    page = render(Run(run.path), {})
    section = page[page.index('<section id="forgetting"') : page.index('<section id="cases"')]
    words = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", section))
    assert "What each site forgets" in words
    assert "labels Spleen, Left kidney, Right kidney" in words
    assert "they reach a mean Dice of 0.20; the global model of the same round reaches 0.65" in words
    assert '<a href="#forgetting">' in page


def test_a_run_without_local_models_has_no_section(run, tmp_path):
    kept = run.local_models_file.read_bytes()
    try:
        run.local_models_file.unlink()
        record = Run(run.path)
        assert forgetting_table(record) is None
        assert "forgets" not in render(record, {})
    finally:
        run.local_models_file.write_bytes(kept)
