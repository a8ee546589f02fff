"""Train the unfinished runs of a comparison, one after the other or several at once, and report progress."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from panorgan.errors import PanorganError
from panorgan.federation.events import Event, Listener
from panorgan.workflows.compare import ComparisonPlan, Failure, Planned, check_comparison, run_missing
from panorgan.workflows.compare_at_once import run_missing_at_once


class ComparisonObserver:
    """Observes a comparison. Does nothing by itself: subclass it and override the methods of interest."""

    def begin(self, plan: ComparisonPlan, at_once: int) -> AbstractContextManager[object]:
        """Everything is checked, and training begins; the context ends with it."""
        return nullcontext()

    def watch(self, run: Planned, number: int, total: int) -> AbstractContextManager[Listener]:
        """A listener for one run, the `number`-th of `total`; runs trained at once are not observed."""
        return nullcontext(_ignore)

    def started(self, run: Planned) -> None:
        """A run has begun, among several at once."""

    def ended(self, run: Planned, error: PanorganError | None) -> None:
        """A run has ended, among several at once; `error` says why it failed."""

    def failed(self, failure: Failure) -> None:
        """After all training: a run that could not be finished, and why."""


def train_missing(
    plan: ComparisonPlan,
    at_once: int = 1,
    observer: ComparisonObserver | None = None,
    cache: Path | None = None,
    report_only: bool = False,
) -> list[Failure]:
    """Check a plan and train what is not finished, `at_once` runs at a time; returns the failures."""
    check_comparison(plan, cache, data=not report_only)
    if report_only:
        return []
    observer = observer or ComparisonObserver()
    with observer.begin(plan, at_once):
        if at_once > 1:
            failures = run_missing_at_once(plan, at_once, observer.started, observer.ended, cache)
        else:
            failures = run_missing(plan, observer.watch, cache)
    for failure in failures:
        observer.failed(failure)
    return failures


def _ignore(event: Event) -> None:
    pass
