"""What a comparison will run, what is refused before it does, and that one failure does not lose the rest."""

from __future__ import annotations

import re
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
from panorgan.workflows import compare, train_comparison
from panorgan.workflows.compare import ComparisonPlan, Failure, Planned, check_comparison, plan_comparison, run_missing
from panorgan.workflows.compare_entries import parse_methods, parse_seeds
from panorgan.workflows.run import Run
from panorgan.workflows.train_comparison import ComparisonObserver

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
    ("methods", "code", "names"),
    [
        ("fedavg,fedavg", "same-folder", ("'fedavg'",)),
        ("a=fedavg,A=solo", "same-folder", ("'a'", "'A'")),
        ("fedavg,fedprox+mu=0.01,x=fedprox", "same-experiment", ("'fedprox+mu=0.01'", "'x'")),
        ("multihead,multihead+network.organs=heads", "same-experiment", ()),  # it has heads, said or not
        ("multihead,multihead+network.organs=channels", "same-experiment", ()),
        ("fedprox+mu", "setting-not-understood", ("'mu'",)),
        ("a/b=fedavg", "method-not-understood", ("'a/b=fedavg'",)),
        ("x=", "method-not-understood", ("'x='",)),
        ("fedprox+mu=[1", "invalid-yaml", ("'[1'",)),
        (" , ", "no-method", ()),
    ],
)
def test_what_is_refused(tiny: Tiny, tmp_path: Path, methods: str, code: str, names: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        plan_comparison(tiny(), methods, "0", folder=tmp_path / "new")
    assert error.value.code == code
    assert all(name in error.value.what for name in names)
    assert "--methods" in error.value.where
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("methods", "hint"),
    [
        ("fedavg,fedproxy", "'fedprox'"),
        ("fedprox+wieghting=uniform", "'weighting'"),
        ("fedavg+training.roundz=3", "'rounds'"),
        ("multihead,multihead+network.organs=decoders", "organs: decoders"),
        ("segviz,segviz+network.organs=heads", "network.organs"),
    ],
)
def test_settings_that_a_method_does_not_take(tiny: Tiny, tmp_path: Path, methods: str, hint: str) -> None:
    with pytest.raises(ConfigError) as error:
        plan_comparison(tiny(), methods, "0", folder=tmp_path / "new")
    assert hint in str(error.value)
    assert "--methods" in error.value.where
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("seeds", ["", "0,x", "-1", "1,1", "0,01,1", "1.5"])
def test_seeds_that_are_none(seeds: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_seeds(seeds)
    assert caught.value.code == "seeds-not-understood"


def test_the_plan(tiny: Tiny) -> None:
    plan = plan_comparison(tiny(), "solo,fedavg", "1,0")
    assert plan.reference == "fedavg"
    assert [run.title for run in plan.runs] == ["solo · seed 1", "fedavg · seed 1", "solo · seed 0", "fedavg · seed 0"]
    assert plan.runs[0].folder.path == Path("runs/tiny-compare/solo/seed-1")
    first, last = plan.runs[0].experiment, plan.runs[-1].experiment
    assert (first.seed, last.seed) == (1, 0)
    assert first.phantom == last.phantom  # other seeds, the same patients
    assert plan_comparison(tiny(), "solo,central_full", "0").reference == "solo"
    with pytest.raises(ConfigError) as error:
        plan_comparison(tiny(), "solo,fedavg", "0", "fedavgg")
    assert error.value.code == "unknown-reference"
    assert "'fedavg'" in error.value.why


@pytest.fixture
def plan(tiny: Tiny, tmp_path: Path) -> ComparisonPlan:
    return plan_comparison(tiny(), "solo,fedavg,fedprox", "0,1", folder=tmp_path / "compared")


def test_one_failure_does_not_lose_the_others(plan: ComparisonPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    finish(plan.runs[0])
    asked: list[tuple[str, Run | None]] = []

    def train(experiment: Experiment, folder: Path, resume: bool, *_: Any, compared_with: Run | None = None) -> None:
        assert resume
        run = next(run for run in plan.runs if run.folder.path == folder)
        asked.append((run.title, compared_with))
        if run.title == "fedavg · seed 0":
            raise RunError("Out of luck.")
        finish(run)

    monkeypatch.setattr(compare, "train", train)
    failures = run_missing(plan, unwatched)
    assert [failure.run.title for failure in failures] == ["fedavg · seed 0"]
    assert [title for title, _ in asked] == [run.title for run in plan.runs[1:]]  # what is finished is not touched
    assert [other for _, other in asked] == [
        plan.runs[0].folder,
        plan.runs[0].folder,
        None,
        plan.runs[3].folder,
        plan.runs[3].folder,
    ]
    assert [run.title for run in plan.missing] == ["fedavg · seed 0"]


@pytest.mark.parametrize(
    ("raised", "code", "name"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to\nallocate"),
            "out-of-memory",
            "OutOfMemoryError: CUDA out",
        ),
        (KeyError("liver"), "unexpected-error", "KeyError: 'liver'"),
        (AssertionError(), "unexpected-error", "AssertionError."),
    ],
)
def test_a_crash_does_not_lose_the_others_either(
    plan: ComparisonPlan, monkeypatch: pytest.MonkeyPatch, raised: Exception, code: str, name: str
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
    assert failure.error.code == code
    assert failure.error.what.startswith(name)
    assert "\n" not in failure.error.what
    assert failure.error.fix
    assert failure.error.__traceback__ is None  # it would keep the tensors of the run alive
    reported = plan.runs[0].traceback.read_text()
    assert str(plan.runs[0].traceback) in failure.error.where
    assert "Traceback" in reported
    assert "in train" in reported
    assert not plan.runs[0].folder.path.exists()  # or it could not be begun again
    monkeypatch.setattr(compare, "train", lambda *_, **__: None)
    run_missing(plan, unwatched)
    assert not plan.runs[0].traceback.exists()


def test_ctrl_c_stops_all(plan: ComparisonPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []

    def train(experiment: Experiment, folder: Path, *_: Any, **__: Any) -> None:
        asked.append(folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(compare, "train", train)
    with pytest.raises(KeyboardInterrupt):
        run_missing(plan, unwatched)
    assert len(asked) == 1


def test_a_run_goes_on_with_the_threads_it_began_with(plan: ComparisonPlan, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_other_threads_for_a_begun_run_are_refused(tiny: Tiny, plan: ComparisonPlan) -> None:
    begin(plan.runs[1], threads=3)
    check_comparison(plan)
    for threads, refused in ((3, False), (2, True)):
        wished = tiny(hardware={"threads": threads})
        again = plan_comparison(wished, "solo,fedavg,fedprox", "0,1", folder=plan.folder)
        if refused:
            with pytest.raises(RunError) as caught:
                check_comparison(again)
            assert caught.value.code == "other-threads"
            assert {"3", "2"} <= set(re.findall(r"\d+", caught.value.what))
        else:
            check_comparison(again)


def test_other_test_cases_are_named(plan: ComparisonPlan) -> None:
    for run in plan.runs:
        finish(run, test_fingerprint="other" if run.title == "fedprox · seed 1" else f"of seed {run.seed}")
    with pytest.raises(RunError) as caught:
        check_comparison(plan)
    assert caught.value.code == "other-test-cases"
    assert "fedprox · seed 1" in caught.value.what


def test_another_experiment_in_a_folder_is_refused(plan: ComparisonPlan, tiny: Tiny) -> None:
    finish(plan.runs[1])
    longer = plan_comparison(tiny(training={"rounds": 9}), "solo,fedavg", "0", folder=plan.folder)
    with pytest.raises(RunError) as error:
        check_comparison(longer)
    assert error.value.code == "other-experiment"
    assert "training.rounds" in error.value.why


def test_the_folder_of_a_single_run_is_refused(plan: ComparisonPlan, tiny: Tiny) -> None:
    finish(plan.runs[0])
    with pytest.raises(RunError) as error:
        plan_comparison(tiny(), "solo,fedavg", "0", folder=plan.runs[0].folder.path)
    assert error.value.code == "folder-is-a-run"
    assert error.value.fix


def test_a_watcher_is_told_which_run(plan: ComparisonPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[tuple[str, int, int]] = []

    @contextmanager
    def watch(run: Planned, number: int, total: int) -> Iterator[Listener]:
        reported.append((run.title, number, total))
        yield lambda event: None

    def train(experiment: Experiment, folder: Path, resume: bool, listeners: Any, *_: Any, **__: Any) -> None:
        listeners[0](Event("started"))

    monkeypatch.setattr(compare, "train", train)
    finish(plan.runs[0])
    run_missing(plan, watch)
    assert reported[0] == ("fedavg · seed 0", 2, 6)
    assert reported[-1] == ("fedprox · seed 1", 6, 6)


def test_an_observer_hears_how_the_runs_go_on(plan: ComparisonPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []

    class Observer(ComparisonObserver):
        @contextmanager
        def begin(self, plan: ComparisonPlan, at_once: int) -> Iterator[None]:
            heard.append(f"{len(plan.missing)} to train, {at_once} at once")
            yield
            heard.append("all ended")

        @contextmanager
        def watch(self, run: Planned, number: int, total: int) -> Iterator[Listener]:
            heard.append(f"{number} of {total}: {run.title}")
            yield lambda event: heard.append(event.kind)

        def failed(self, failure: Failure) -> None:
            heard.append(f"{failure.run.title} failed: {failure.error.code}")

    def train(experiment: Experiment, folder: Path, resume: bool, listeners: Any, *_: Any, **__: Any) -> None:
        listeners[0](Event("round"))
        raise RunError("It cannot be done.", code="impossible")

    for run in plan.runs[1:]:
        finish(run)
    monkeypatch.setattr(compare, "train", train)
    monkeypatch.setattr(train_comparison, "check_comparison", lambda *_, **__: None)
    (failure,) = train_comparison.train_missing(plan, observer=Observer())
    assert failure.run is plan.runs[0]
    title = plan.runs[0].title
    assert heard == ["1 to train, 1 at once", f"1 of 6: {title}", "round", "all ended", f"{title} failed: impossible"]
    assert train_comparison.train_missing(plan, observer=Observer(), report_only=True) == []
    assert len(heard) == 5
