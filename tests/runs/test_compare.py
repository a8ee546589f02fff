"""What a comparison will run, what is refused before it does, and that one failure does not lose the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from pretend_runs import begin, finish, unwatched

from panorgan.config import Experiment
from panorgan.errors import ConfigError, RunError
from panorgan.federation.events import Event, Listener
from panorgan.runs import compare
from panorgan.runs.compare import (
    Plan,
    Planned,
    check_comparison,
    parse_methods,
    parse_seeds,
    plan_comparison,
    run_missing,
)
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
        ("multihead,multihead+network.organs=heads", "are the same"),  # it has heads, said or not
        ("multihead,multihead+network.organs=channels", "are the same"),
        ("multihead,multihead+network.organs=decoders", "multihead cannot use a network with organs: decoders"),
        ("segviz,segviz+network.organs=heads", "Leave network.organs out"),
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


@pytest.mark.parametrize(
    ("raised", "says", "fix"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nmore"), "OutOfMemoryError: CUDA out", "memory"),
        (KeyError("liver"), "KeyError: 'liver'", "Mend the cause"),
        (AssertionError(), "AssertionError.", "same command again"),
    ],
)
def test_a_crash_does_not_lose_the_others_either(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, raised: Exception, says: str, fix: str
) -> None:
    asked: list[str] = []

    def train(experiment: Experiment, folder: Path, *_: Any, **__: Any) -> None:
        asked.append(folder.parent.name)
        if len(asked) == 1:
            raise raised

    monkeypatch.setattr(compare, "train", train)
    (failure,) = run_missing(plan, unwatched)
    assert len(asked) == 6
    assert failure.run is plan.runs[0]
    assert isinstance(failure.error, RunError)
    assert failure.error.what.startswith(says)
    assert "\n" not in failure.error.what
    assert fix in failure.error.fix
    assert failure.error.__traceback__ is None  # it would keep the tensors of the run alive
    told = plan.runs[0].traceback.read_text()
    assert str(plan.runs[0].traceback) in failure.error.where
    assert "Traceback" in told
    assert "in train" in told
    assert not plan.runs[0].folder.path.exists()  # or it could not be begun again
    monkeypatch.setattr(compare, "train", lambda *_, **__: None)
    run_missing(plan, unwatched)
    assert not plan.runs[0].traceback.exists()


def test_ctrl_c_stops_all(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []

    def train(experiment: Experiment, folder: Path, *_: Any, **__: Any) -> None:
        asked.append(folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(compare, "train", train)
    with pytest.raises(KeyboardInterrupt):
        run_missing(plan, unwatched)
    assert len(asked) == 1


def test_a_run_goes_on_with_the_threads_it_began_with(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(plan.runs[1], threads=3)
    before = torch.get_num_threads()
    asked: list[tuple[int | None, int]] = []

    def train(experiment: Experiment, *_: Any, **__: Any) -> None:
        asked.append((experiment.hardware.threads, torch.get_num_threads()))
        if experiment.hardware.threads:
            torch.set_num_threads(experiment.hardware.threads)

    monkeypatch.setattr(compare, "train", train)
    run_missing(plan, unwatched)
    # Neither before nor after does it change what the others get: all that the machine has.
    assert asked == [(None, before), (3, before), *[(None, before)] * 4]
    assert torch.get_num_threads() == before


def test_other_threads_for_a_begun_run_are_refused(tiny: Tiny, plan: Plan) -> None:
    begin(plan.runs[1], threads=3)
    check_comparison(plan)
    for threads, refused in ((3, False), (2, True)):
        wished = tiny(hardware={"threads": threads})
        again = plan_comparison(wished, "solo,fedavg,fedprox", "0,1", folder=plan.folder)
        if refused:
            with pytest.raises(RunError, match=r"begun with 3 CPU threads, hardware\.threads now says 2"):
                check_comparison(again)
        else:
            check_comparison(again)


def test_other_test_cases_are_named(plan: Plan) -> None:
    for run in plan.runs:
        finish(run, test_fingerprint="other" if run.title == "fedprox · seed 1" else f"of seed {run.seed}")
    with pytest.raises(RunError, match="not scored on the same cases as the others: fedprox · seed 1"):
        check_comparison(plan)


def test_another_experiment_in_a_folder_is_refused(plan: Plan, tiny: Tiny) -> None:
    finish(plan.runs[1])
    longer = plan_comparison(tiny(training={"rounds": 9}), "solo,fedavg", "0", folder=plan.folder)
    with pytest.raises(RunError, match="another experiment") as error:
        check_comparison(longer)
    assert "training.rounds" in error.value.why


def test_the_folder_of_a_single_run_is_refused(plan: Plan, tiny: Tiny) -> None:
    finish(plan.runs[0])
    with pytest.raises(RunError, match="folder of a single run") as error:
        plan_comparison(tiny(), "solo,fedavg", "0", folder=plan.runs[0].folder.path)
    assert error.value.fix


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
