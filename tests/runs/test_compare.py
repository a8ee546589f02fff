"""What a comparison will run, what is refused before it does, and that one failure does not lose the rest."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from panorgan.config import Experiment
from panorgan.errors import ConfigError, RunError
from panorgan.federation.events import Event, EventLog, Listener
from panorgan.runs import compare
from panorgan.runs.compare import (
    Plan,
    Planned,
    check_comparison,
    parse_methods,
    parse_seeds,
    plan_comparison,
    run_missing,
    run_missing_at_once,
)
from panorgan.runs.compare_costs import measure_costs, time_inference
from panorgan.runs.folder import RunFolder

Tiny = Callable[..., Experiment]


def test_entries_as_written() -> None:
    plain, changed, named, brackets = parse_methods(
        "solo, fedprox+mu=1e+1 ,held=fedprox+mu=0.5,fedavg+network.strides=[[2, 2, 1], [2, 2, 2]]+training.rounds=3"
    )
    assert (plain.label, plain.method, plain.settings) == ("solo", "solo", {})
    assert (changed.label, changed.method) == ("fedprox+mu=1e+1", "fedprox")
    assert (named.label, named.method, named.settings) == ("held", "fedprox", {"mu": 0.5})
    assert brackets.settings == {"network.strides": [[2, 2, 1], [2, 2, 2]], "training.rounds": 3}
    assert "/" not in parse_methods("a=fedavg+x=a/b")[0].folder
    assert parse_methods("fedavg+x=a/b")[0].folder == "fedavg+x=a_b"


def test_settings_go_where_they_belong(tiny: Tiny) -> None:
    experiment = tiny(method={"name": "fedprox", "mu": 0.3})
    text = "fedprox+weighting=uniform,fedavg+network.features=[4, 8]+training.optimizer.learning_rate=0.5"
    prox, avg = (entry.applied_to(experiment) for entry in parse_methods(text))
    assert (prox.method["mu"], prox.method["weighting"]) == (0.3, "uniform")  # the file's own settings hold
    assert avg.network.features == (4, 8)
    assert avg.training.optimizer.learning_rate == 0.5
    assert avg.training.sampling == experiment.training.sampling
    assert avg.phantom == experiment.phantom


@pytest.mark.parametrize(
    ("methods", "says"),
    [
        ("fedavg,fedproxy", "did you mean 'fedprox'"),
        ("fedprox+wieghting=uniform", "did you mean 'weighting'"),
        ("fedavg+training.roundz=3", "did you mean 'rounds'"),
        ("fedavg,fedavg", "Two methods are called 'fedavg'"),
        ("fedavg,fedprox+mu=0.01,x=fedprox", "'fedprox+mu=0.01' and 'x' are the same"),
        ("a=fedavg,A=solo", "share a folder"),
        ("fedprox+mu", "name=value"),
        ("a/b=fedavg", "cannot be written"),
        ("x=", "cannot be written"),
        ("fedprox+mu=[1", "not valid YAML"),
        (" , ", "No method"),
    ],
)
def test_what_is_refused(tiny: Tiny, tmp_path: Path, methods: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        plan_comparison(tiny(), methods, "0", folder=tmp_path / "new")
    assert says in str(error.value)
    assert "--methods" in error.value.where
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("seeds", ["", "0,x", "-1", "1,1", "0,01,1", "1.5"])
def test_seeds_that_are_none(seeds: str) -> None:
    with pytest.raises(ConfigError, match="Seeds"):
        parse_seeds(seeds)


def test_the_plan(tiny: Tiny) -> None:
    plan = plan_comparison(tiny(), "solo,fedavg", "1,0")
    assert plan.reference == "fedavg"
    assert [run.title for run in plan.runs] == ["solo · seed 1", "fedavg · seed 1", "solo · seed 0", "fedavg · seed 0"]
    assert plan.runs[0].folder.path == Path("runs/tiny-compare/solo/seed-1")
    first, last = plan.runs[0].experiment, plan.runs[-1].experiment
    assert (first.seed, last.seed) == (1, 0)
    assert first.phantom == last.phantom  # other seeds, the same patients
    assert plan_comparison(tiny(), "solo,central_full", "0").reference == "solo"
    with pytest.raises(ConfigError, match="not among the methods") as error:
        plan_comparison(tiny(), "solo,fedavg", "0", "fedavgg")
    assert "did you mean 'fedavg'" in error.value.why


@contextmanager
def unwatched(run: Planned, number: int, total: int) -> Iterator[Listener]:
    yield lambda event: None


def finish(run: Planned, tested: str | None = "same") -> None:
    """Make a folder look like a finished run."""
    run.folder.path.mkdir(parents=True)
    manifest = {"experiment": run.experiment.as_json(), "test_fingerprint": tested, "run": run.title}
    run.folder.manifest.write_text(json.dumps(manifest))
    run.folder.metrics.write_text("split,site,case,organ,dice\n")


@pytest.fixture
def plan(tiny: Tiny, tmp_path: Path) -> Plan:
    return plan_comparison(tiny(), "solo,fedavg,fedprox", "0,1", folder=tmp_path / "compared")


def test_one_failure_does_not_lose_the_others(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    finish(plan.runs[0])
    asked: list[tuple[str, RunFolder | None]] = []

    def train(experiment: Experiment, folder: Path, resume: bool, *_: Any, beside: RunFolder | None = None) -> None:
        assert resume
        run = next(run for run in plan.runs if run.folder.path == folder)
        asked.append((run.title, beside))
        if run.title == "fedavg · seed 0":
            raise RunError("Out of luck.")
        finish(run)

    monkeypatch.setattr(compare, "train", train)
    failures = run_missing(plan, unwatched)
    assert [failure.run.title for failure in failures] == ["fedavg · seed 0"]
    assert [title for title, _ in asked] == [run.title for run in plan.runs[1:]]  # what is finished is not touched
    assert [beside for _, beside in asked] == [
        plan.runs[0].folder,
        plan.runs[0].folder,
        None,
        plan.runs[3].folder,
        plan.runs[3].folder,
    ]
    assert [run.title for run in plan.missing] == ["fedavg · seed 0"]


def test_other_test_cases_are_named(plan: Plan) -> None:
    for run in plan.runs:
        finish(run, "other" if run.title == "fedprox · seed 1" else f"of seed {run.seed}")
    with pytest.raises(RunError, match="not scored on the same cases as the others: fedprox · seed 1"):
        check_comparison(plan)


def test_another_experiment_in_a_folder_is_refused(plan: Plan, tiny: Tiny) -> None:
    finish(plan.runs[1])
    longer = plan_comparison(tiny(training={"rounds": 9}), "solo,fedavg", "0", folder=plan.folder)
    with pytest.raises(RunError, match="another experiment") as error:
        check_comparison(longer)
    assert "training.rounds" in error.value.why


def write_rounds(run: Planned, seconds: float, sites: tuple[str, ...], stages: tuple[str, ...]) -> None:
    events = EventLog(run.folder.events)
    events.record("joined", sites={site: {"train_cases": 3, "annotated": {}} for site in sites})
    for number, stage in enumerate(stages, start=1):
        facts = {"number": number, "stage": stage, "sites": {site: {} for site in sites}}
        traffic = {"bytes_sent": 100 * number, "bytes_received": 50}
        events.record("round", **facts, **traffic, seconds={"sites": seconds, "validate": 9.0})


def test_costs_by_hand(plan: Plan) -> None:
    """Two local steps at two sites in two rounds: 8 steps. fedavg 2 · 4 s / 8 = 1 s, fedprox 2 · 6 s / 8 = 1.5 s."""
    for run in plan.runs:
        finish(run)
        manifest = json.loads(run.folder.manifest.read_text())
        manifest["sites"] = {name: {"external": name == "z"} for name in ("a", "b", "z")}
        run.folder.manifest.write_text(json.dumps(manifest))
        seconds = {"solo": 2.0, "fedavg": 4.0, "fedprox": 6.0}[run.entry.label]
        write_rounds(run, seconds, ("a", "b"), ("train", "train"))
    costs = measure_costs(plan)
    assert costs["fedavg"].steps == 8
    assert costs["fedavg"].step_seconds == pytest.approx(1.0)
    assert costs["fedprox"].step_ratio == pytest.approx(1.5)
    assert costs["solo"].bytes_per_round == pytest.approx((150 + 250) / 2)
    assert costs["solo"].parameters is None
    assert time_inference(plan) is None  # there is no model to time


def test_pooled_steps_and_other_stages(tiny: Tiny, tmp_path: Path) -> None:
    """A pooled site does the work of both: 2 · 2 steps per round. Traffic is that of the train stage."""
    plan = plan_comparison(tiny(), "central_partial", "0", folder=tmp_path)
    (run,) = plan.runs
    finish(run)
    manifest = json.loads(run.folder.manifest.read_text())
    manifest["sites"] = {name: {"external": False} for name in ("a", "b")}
    run.folder.manifest.write_text(json.dumps(manifest))
    write_rounds(run, 1.0, ("pooled",), ("pretrain", "train"))
    cost = measure_costs(plan)["central_partial"]
    assert (cost.steps, cost.bytes_per_round, cost.pooled) == (8, 250, True)


def test_a_watcher_is_told_which_run(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, int, int]] = []

    @contextmanager
    def watch(run: Planned, number: int, total: int) -> Iterator[Listener]:
        told.append((run.title, number, total))
        yield lambda event: None

    def train(experiment: Experiment, folder: Path, resume: bool, listeners: Any, *_: Any, **__: Any) -> None:
        listeners[0](Event("started"))

    monkeypatch.setattr(compare, "train", train)
    finish(plan.runs[0])
    run_missing(plan, watch)
    assert told[0] == ("fedavg · seed 0", 2, 6)
    assert told[-1] == ("fedprox · seed 1", 6, 6)


def test_runs_at_once_give_the_bits_of_runs_in_turn(tiny: Tiny, tmp_path: Path) -> None:
    """And what fails in another process comes back in words."""
    experiment = tiny(training={"rounds": 1, "local_steps": 1, "validate_every": 0})
    entries = "fedavg,broken=fedavg+training.min_sites=3"
    told: list[tuple[str, bool]] = []
    together = plan_comparison(experiment, entries, "0", folder=tmp_path / "together")
    failures = run_missing_at_once(together, 2, lambda run, error: told.append((run.entry.label, error is not None)))
    assert sorted(told) == [("broken", True), ("fedavg", False)]
    assert [failure.run.entry.label for failure in failures] == ["broken"]
    assert "3 are needed" in failures[0].error.what
    assert failures[0].error.fix
    alone = plan_comparison(experiment, entries, "0", folder=tmp_path / "alone")
    run_missing(alone, unwatched)
    metrics = [plan.runs[0].folder.metrics.read_bytes() for plan in (together, alone)]
    assert metrics[0] == metrics[1]
