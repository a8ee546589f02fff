"""What methods cost, from logs whose numbers are chosen by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from pretend_runs import finish

from panorgan.config import Experiment
from panorgan.federation.events import EventLog
from panorgan.workflows.compare import ComparisonPlan, Planned, plan_comparison
from panorgan.workflows.compare_at_once import shared_machine
from panorgan.workflows.compare_costs import measure_costs, time_inference
from panorgan.workflows.run import Run

Tiny = Callable[..., Experiment]
SITES = {name: {"external": name == "z"} for name in ("a", "b", "z")}
HARDWARE = {"machine": "x", "device": "cpu", "cores": 8, "threads": 8}


def write_rounds(run: Planned, rounds: list[tuple[str, float]], sites: tuple[str, ...] = ("a", "b")) -> None:
    """A log with (stage, seconds at the sites) per round; every second round is validated with 1000 bytes more."""
    events = EventLog(run.folder.events_file)
    events.record("joined", sites={site: {"train_cases": 3, "annotated": {}} for site in sites})
    for number, (stage, seconds) in enumerate(rounds, start=1):
        facts = {"number": number, "stage": stage, "sites": {site: {} for site in sites}}
        validated = number % 2 == 0
        traffic = {
            "bytes_sent": 100 * number + 1000 * validated,
            "bytes_received": 50,
            "bytes_training": 100 * number + 50,
            "validation": {"a": {}} if validated else None,
        }
        events.record("round", **facts, **traffic, seconds={"sites": seconds, "validate": 9.0})


@pytest.fixture
def plan(tiny: Tiny, tmp_path: Path) -> ComparisonPlan:
    """Two local steps at two sites: 4 steps a round."""
    plan = plan_comparison(tiny(), "solo,fedavg,fedprox", "0,1", folder=tmp_path / "compared")
    for run in plan.runs:
        finish(run, sites=SITES, hardware=HARDWARE)
    return plan


def test_costs_by_hand(plan: ComparisonPlan) -> None:
    """Without the first round 4 s / 4 steps for fedavg, 6 s / 4 for fedprox; one round took long by chance."""
    usual = {"solo": 2.0, "fedavg": 4.0, "fedprox": 6.0}
    for run in plan.runs:
        seconds = usual[run.entry.label]
        write_rounds(run, [("train", 400.0), ("train", seconds), ("train", seconds), ("train", 90.0)])
    costs = measure_costs(plan)
    assert costs["fedavg"].steps == 16
    assert costs["fedavg"].step_seconds == pytest.approx(1.0)
    assert costs["fedavg"].step_ratio == 1.0
    assert costs["fedprox"].step_ratio == pytest.approx(1.5)
    assert costs["solo"].parameters is None
    assert time_inference(plan) is None  # there is no model to time


def test_one_round_is_better_than_none(plan: ComparisonPlan) -> None:
    for run in plan.runs:
        write_rounds(run, [("train", 8.0)])
    assert measure_costs(plan)["fedavg"].step_seconds == pytest.approx(2.0)


def test_cheap_steps_of_other_stages_do_not_make_a_method_fast(plan: ComparisonPlan) -> None:
    for run in plan.runs:
        write_rounds(run, [("pretrain", 0.4)] * 6 + [("exchange", 50.0), ("train", 40.0), ("train", 8.0)])
    cost = measure_costs(plan)["fedavg"]
    assert cost.step_seconds == pytest.approx(2.0)
    assert cost.steps == 4 * 9


def test_traffic_without_and_with_validation(plan: ComparisonPlan) -> None:
    """Rounds 1 to 3: 150, 250 and 350 bytes for training; round 2 also sends 1000 bytes to be validated."""
    for run in plan.runs:
        write_rounds(run, [("pretrain", 1.0), ("train", 1.0), ("train", 1.0)])
    cost = measure_costs(plan)["solo"]
    assert cost.bytes_per_round == pytest.approx((250 + 350) / 2)
    assert cost.bytes_per_run == pytest.approx(150 + 250 + 350 + 1000)


def test_traffic_of_an_older_log(plan: ComparisonPlan) -> None:
    """It does not tell training and validation apart: the rounds that were not validated speak."""
    for run in plan.runs:
        write_rounds(run, [("train", 1.0)] * (2 if run.entry.label == "solo" else 3))
        lines = [json.loads(line) for line in run.folder.events_file.read_text().splitlines()]
        for line in lines:
            del line["crc32"]
            line.pop("bytes_training", None)
        run.folder.events_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    costs = measure_costs(plan)
    assert costs["fedavg"].bytes_per_round == pytest.approx((150 + 350) / 2)
    assert costs["solo"].bytes_per_round == pytest.approx(150)
    assert costs["solo"].bytes_per_run == pytest.approx(150 + 1250)


def mark_as_shared(folder: Run) -> None:
    (folder.path / "shared_machine.json").write_text('{"at_once": 2}')
    assert shared_machine(folder)


def test_times_of_runs_at_once_are_not_compared(plan: ComparisonPlan) -> None:
    for run in plan.runs:
        write_rounds(run, [("train", 4.0 + 4.0 * run.seed)] * 2)
        if run.entry.label == "fedprox" or run.seed == 1:
            mark_as_shared(run.folder)
    costs = measure_costs(plan)
    assert costs["fedprox"].shared
    assert math.isnan(costs["fedprox"].step_ratio)
    assert costs["fedprox"].step_seconds == pytest.approx(1.5)  # of all seeds, for want of better ones
    # One seed had the machine to itself, and its times count.
    assert (costs["solo"].shared, costs["solo"].step_seconds, costs["solo"].step_ratio) == (False, 1.0, 1.0)
    for run in plan.runs:
        mark_as_shared(run.folder)
    assert all(cost.shared and math.isnan(cost.step_ratio) for cost in measure_costs(plan).values())


def test_times_of_different_machines_are_not_compared(plan: ComparisonPlan) -> None:
    for run in plan.runs:
        write_rounds(run, [("train", 4.0)] * 2)
        if run.entry.label == "solo":
            manifest = run.folder.manifest
            manifest["hardware"]["threads"] = 1
            run.folder.manifest_file.write_text(json.dumps(manifest))
    costs = measure_costs(plan)
    assert math.isnan(costs["solo"].step_ratio)
    assert costs["fedprox"].step_ratio == 1.0


def test_pooled_steps(tiny: Tiny, tmp_path: Path) -> None:
    """A pooled site does the work of both: 2 · 2 steps per round."""
    plan = plan_comparison(tiny(), "central_partial", "0", folder=tmp_path)
    (run,) = plan.runs
    finish(run, sites=SITES, hardware=HARDWARE)
    write_rounds(run, [("pretrain", 1.0), ("train", 1.0)], ("pooled",))
    cost = measure_costs(plan)["central_partial"]
    assert (cost.steps, cost.bytes_per_round, cost.pooled) == (8, 250, True)
