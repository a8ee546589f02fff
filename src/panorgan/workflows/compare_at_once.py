"""Several runs of a comparison at the same time, each in its own process."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from panorgan.errors import PanorganError, RunError
from panorgan.federation.events import Event
from panorgan.federation.files import write_atomically
from panorgan.workflows.compare import ComparisonPlan, Failure, Planned, finished_of_seed
from panorgan.workflows.execute import train
from panorgan.workflows.gpu_sharing import shared_gpu
from panorgan.workflows.prepare import prepare
from panorgan.workflows.run import Run

_SHARED_MARK = "shared_machine.json"
_SECONDS_TO_END = 10.0

OnStart = Callable[[Planned], None]
"""Called when a run starts."""
OnEnd = Callable[[Planned, PanorganError | None], None]
"""Called when a run ends, with the error if it failed."""


def shared_machine(folder: Run) -> bool:
    """Whether a run, or a part of it, was trained in parallel with others: its times are then not comparable."""
    return (folder.path / _SHARED_MARK).is_file()


def run_missing_at_once(
    plan: ComparisonPlan, at_once: int, on_start: OnStart, on_end: OnEnd, cache: Path | None = None
) -> list[Failure]:
    """Train what is not finished, `at_once` runs at a time. A run that fails or dies is skipped and reported.

    Cases are prepared first, once for each seed, so that the processes find them ready. However this function ends, no
    process is left behind.
    """
    for run in {run.seed: run for run in plan.missing}.values():
        with suppress(Exception):  # a run whose cases cannot be prepared reports it itself
            prepare(run.experiment, cache)
    with shared_gpu(at_once):
        return _run_all(plan, at_once, on_start, on_end, cache)


def _run_all(plan: ComparisonPlan, at_once: int, on_start: OnStart, on_end: OnEnd, cache: Path | None) -> list[Failure]:
    waiting = deque(plan.missing)
    under_way: dict[Any, _Child] = {}
    failures: list[Failure] = []
    try:
        while waiting or under_way:
            while waiting and len(under_way) < at_once:
                run = waiting.popleft()
                try:
                    child = _Child.start(plan, run, at_once, cache)
                except OSError as error:  # the system cannot start another process
                    failures.append(Failure.of(run, error))
                    on_end(run, failures[-1].error)
                    continue
                under_way[child.answers] = child
                on_start(run)
            for answers in wait(list(under_way)):
                child = under_way.pop(answers)
                failure = child.outcome()
                failures += [failure] if failure else []
                on_end(child.run, failure.error if failure else None)
    finally:
        _end(child.process for child in under_way.values())
    return failures


@dataclass(frozen=True)
class _Child:
    """A process that trains one run. Every run has its own, so that a crash costs that run alone."""

    run: Planned
    process: BaseProcess
    answers: Connection

    @classmethod
    def start(cls, plan: ComparisonPlan, run: Planned, at_once: int, cache: Path | None) -> _Child:
        context = multiprocessing.get_context("spawn")  # a forked process could not use CUDA
        run.traceback.unlink(missing_ok=True)
        answers, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_train_alone, args=(theirs, run, at_once, cache, finished_of_seed(plan, run)))
        with _ignoring_interrupts():
            process.start()
        theirs.close()  # otherwise its end would never be noticed
        return cls(run, process, answers)

    def outcome(self) -> Failure | None:
        """The last message of the process, or how it ended without one."""
        with self.answers:
            try:
                error: RunError | None = self.answers.recv()
            except EOFError:
                self.process.join()
                error = _died(self.run, self.process.exitcode or 0)
        self.process.join()
        return Failure(self.run, error) if error else None


def _died(run: Planned, code: int) -> RunError:
    killed = code < 0
    return RunError(
        f"The process of this run was killed ({_signal_name(-code)})."
        if killed
        else f"The process of this run ended with code {code}.",
        code="process-killed" if killed else "process-failed",
        where=str(run.folder.path),
        why="often the system does that when memory runs out" if killed else "its last output may say more",
        fix="Give the same command again, perhaps with fewer runs --at-once: the run continues where it stopped.",
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    """Ctrl-C goes to all processes of a terminal. A child started in here ignores it: its parent ends it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)


def _end(processes: Iterable[BaseProcess]) -> None:
    """Terminate running processes; their runs can be resumed from any point."""
    ended = list(processes)
    for process in ended:
        process.terminate()
    for process in ended:
        process.join(_SECONDS_TO_END)
        if process.is_alive():
            process.kill()
            process.join()


def _train_alone(answers: Connection, run: Planned, at_once: int, cache: Path | None, other: Run | None) -> None:
    """The main function of a child. It shares the machine: one thread, unless the experiment says otherwise."""
    threading.Thread(target=_end_with_the_parent, daemon=True).start()

    def mark(event: Event) -> None:
        if event.kind in ("started", "resumed"):
            write_atomically(run.folder.path / _SHARED_MARK, json.dumps({"at_once": at_once}))

    try:
        train(run.with_threads(otherwise=1), run.folder.path, True, (mark,), cache, other)
    except Exception as error:
        answers.send(Failure.of(run, error).error)
    else:
        answers.send(None)


def _end_with_the_parent() -> None:
    """A parent that was killed cannot end its children."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
