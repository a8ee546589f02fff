"""Several runs at a time: the same bits, and no death or interruption costs more than it must."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from interrupts import hear_interrupts
from pretend_runs import begin, unwatched

from panorgan.config import Experiment
from panorgan.errors import PanorganError
from panorgan.federation.events import Event
from panorgan.workflows import compare_at_once
from panorgan.workflows.compare import Planned, plan_comparison, run_missing
from panorgan.workflows.compare_at_once import run_missing_at_once, shared_machine

Tiny = Callable[..., Experiment]
POSIX_ONLY = pytest.mark.skipif(os.name != "posix", reason="signals and process groups of POSIX")


@POSIX_ONLY
@pytest.mark.slow
def test_runs_at_once(tiny: Tiny, tmp_path: Path) -> None:
    """One fails in words, one is killed from outside, and the others end in the bits of runs in turn."""
    experiment = tiny(training={"rounds": 1, "local_steps": 1, "validate_every": 0}, hardware={"threads": 1})
    entries = "killed=fedprox,fedavg,broken=fedavg+training.min_sites=3"
    reported: list[str] = []

    def on_start(run: Planned) -> None:
        reported.append(f"{run.entry.label} started")
        if run.entry.label == "killed":
            (child,) = multiprocessing.active_children()
            assert child.pid is not None
            os.kill(child.pid, signal.SIGKILL)

    def on_end(run: Planned, error: PanorganError | None) -> None:
        reported.append(f"{run.entry.label} {'failed' if error else 'finished'}")

    together = plan_comparison(experiment, entries, "0", folder=tmp_path / "together")
    failures = {one.run.entry.label: one.error for one in run_missing_at_once(together, 2, on_start, on_end)}
    assert multiprocessing.active_children() == []
    assert reported[:4] == ["killed started", "fedavg started", "killed failed", "broken started"]
    assert sorted(reported[4:]) == ["broken failed", "fedavg finished"]
    assert failures.keys() == {"killed", "broken"}
    assert failures["killed"].code == "process-killed"
    assert "SIGKILL" in failures["killed"].what
    assert "3 are needed" in failures["broken"].what
    assert all(error.fix for error in failures.values())

    alone = plan_comparison(experiment, "fedavg", "0", folder=tmp_path / "alone")
    run_missing(alone, unwatched)
    finished = together.runs[1]
    assert finished.folder.scores_file.read_bytes() == alone.runs[0].folder.scores_file.read_bytes()
    assert shared_machine(finished.folder)
    assert not shared_machine(alone.runs[0].folder)


@pytest.fixture
def pipe() -> Any:
    ours, theirs = multiprocessing.Pipe(duplex=False)
    with ours, theirs:
        yield ours, theirs


def test_a_crash_in_a_child_comes_back_in_words(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pipe: Any
) -> None:
    def train(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(compare_at_once, "train", train)
    (run,) = plan_comparison(tiny(), "fedavg", "0", folder=tmp_path).runs
    compare_at_once._train_alone(pipe[1], run, 2, None, None)
    error = pipe[0].recv()
    assert error.code == "out-of-memory"
    assert "OutOfMemoryError" in error.what
    assert "--at-once" in error.fix
    assert "in train" in run.traceback.read_text()


@pytest.mark.parametrize(("begun", "said", "threads"), [(None, None, 1), (None, 2, 2), (3, None, 3)])
def test_threads_of_a_child(
    tiny: Tiny,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pipe: Any,
    begun: int | None,
    said: int | None,
    threads: int,
) -> None:
    """One, unless the experiment says otherwise; a run that was begun keeps its own."""
    asked: list[int | None] = []

    def train(experiment: Experiment, folder: Path, resume: bool, listeners: Any, *_: Any) -> None:
        asked.append(experiment.hardware.threads)
        listeners[0](Event("prepare"))
        assert not shared_machine(run.folder)  # nothing is written before a run has begun
        listeners[0](Event("started"))

    monkeypatch.setattr(compare_at_once, "train", train)
    (run,) = plan_comparison(tiny(hardware={"threads": said}), "fedavg", "0", folder=tmp_path).runs
    if begun:
        begin(run, begun)
    compare_at_once._train_alone(pipe[1], run, 2, None, None)
    assert pipe[0].recv() is None
    assert asked == [threads]
    assert shared_machine(run.folder)


@POSIX_ONLY
@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_child_outlives_the_command(tiny_content: Any, tmp_path: Path, how: signal.Signals) -> None:
    """Ctrl-C reaches everybody; a kill reaches the parent alone."""
    experiment = tmp_path / "endless.yaml"
    experiment.write_text(yaml.safe_dump(tiny_content(training={"rounds": 100_000})))
    options = ["--methods", "solo,fedavg,fedprox", "--seeds", "0", "--at-once", "2", "--run", str(tmp_path / "run")]
    command = [sys.executable, "-m", "panorgan", "compare", str(experiment), *options]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=hear_interrupts,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("fedavg · seed 0: started"):
                break
        if how == signal.SIGINT:
            os.killpg(process.pid, how)
            output, errors = process.communicate(timeout=120)
            assert process.returncode == 130, errors
            assert "Traceback" not in errors
            assert "Continue with the same command" in errors
            assert "fedprox" not in output  # nothing new is begun
        else:
            process.kill()
            process.wait()
        deadline = time.monotonic() + 120
        while group_lives(process.pid):
            assert time.monotonic() < deadline, "a child is still at work"
            time.sleep(0.2)
    finally:
        if group_lives(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
