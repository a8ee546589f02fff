"""What the log of a run becomes: rounds and learning curves, against numbers worked out by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from panorgan.errors import RunError
from panorgan.workflows.run import Run


def round_event(number: int, losses: dict[str, float], validation: dict[str, dict[str, float]] | None) -> dict:
    return {
        "time": float(number),
        "event": "round",
        "number": number,
        "stage": "train",
        "sites": {site: {"loss": loss} for site, loss in losses.items()},
        "validation": validation,
        "seconds": {"train": 1.0},
        "bytes_sent": 10,
        "bytes_received": 20,
    }


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Two rounds of which the first happened twice, because of a kill; south was away in the second."""
    events = [
        {"time": 0.0, "event": "started", "run": "x"},
        round_event(1, {"north": 9.0, "south": 9.0}, None),
        round_event(1, {"north": 2.0, "south": 4.0}, None),
        {"time": 1.5, "event": "refused", "number": 2, "site": "south", "reason": "late", "why": ""},
        round_event(2, {"north": 1.0}, {"north": {"liver": 0.5, "spleen": 0.75}, "south": {"liver": 0.25}}),
    ]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return Run(str(tmp_path))


def test_curves_have_one_row_per_round_and_site(run: Run) -> None:
    rows = [{name: value for name, value in row.items() if value == value} for row in run.curves]  # without NaN
    assert rows == [
        {"round": 1, "stage": "train", "site": "north", "loss": 2.0},
        {"round": 1, "stage": "train", "site": "south", "loss": 4.0},
        {
            "round": 2,
            "stage": "train",
            "site": "north",
            "loss": 1.0,
            "dice": 0.625,
            "dice_liver": 0.5,
            "dice_spleen": 0.75,
        },
        {"round": 2, "stage": "train", "site": "south", "dice": 0.25, "dice_liver": 0.25},
    ]


def test_rounds_have_the_means_that_select_them(run: Run) -> None:
    first, second = run.rounds
    assert math.isnan(first.mean_dice)
    assert second.mean_dice == (0.625 + 0.25) / 2
    assert second.organ_dice("liver") == 0.375
    assert second.organ_dice("spleen") == 0.75
    assert math.isnan(second.organ_dice("aorta"))


def test_events_are_rows_and_the_unusual_ones_stand_out(run: Run) -> None:
    assert run.events.column("event") == ["started", "round", "round", "refused", "round"]
    assert run.events.where(event="refused").column("site") == ["south"]
    assert [event.kind for event in run.notable_events] == ["refused"]


def test_a_round_of_another_shape_is_refused(run: Run) -> None:
    run.events_file.write_text('{"time": 0, "event": "round", "number": 1}\n')
    with pytest.raises(RunError) as caught:
        _ = run.rounds
    assert caught.value.code == "run-not-understood"


def test_a_folder_without_anything_is_no_run(tmp_path: Path) -> None:
    run = Run(tmp_path / "nothing")
    assert not run.started
    assert not run.complete
    for read, code in ((lambda: run.manifest, "not-a-run"), (lambda: run.scores, "no-scores")):
        with pytest.raises(RunError) as caught:
            read()
        assert caught.value.code == code
    assert run.events == []
