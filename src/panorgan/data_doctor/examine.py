"""The whole check-up: every source, every case in parallel, then comparisons between cases."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from panorgan.anatomy.catalogue import add_organs, added
from panorgan.data_doctor.cross_case import compare_cases
from panorgan.data_doctor.findings import CaseFacts, Checkup, Finding, Source
from panorgan.data_doctor.folders import open_source
from panorgan.data_doctor.memory import fitting_workers
from panorgan.data_doctor.read_case import CaseTask, read_case
from panorgan.errors import DataError


def examine(
    sources: Sequence[Source],
    workers: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Checkup:
    """Read everything, change nothing.

    Parameters
    ----------
    workers : processes, each with one case in memory; 1 reads in this process, None takes the cores up to eight, and
        no more than the free memory has room for.
    on_progress : hears (cases read, cases in all).
    """
    opened = [open_source(source) for source in sources]
    tasks = [task for one in opened for task in one.tasks]
    findings: list[Finding] = [found for one in opened for found in one.findings]
    shown: list[CaseFacts] = []
    extra: list[CaseFacts] = []
    for done, (task, (facts, found)) in enumerate(zip(tasks, _read_all(tasks, workers), strict=True), start=1):
        (extra if task.image_only else shown).append(facts)
        findings += found
        if on_progress is not None:
            on_progress(done, len(tasks))
    findings += compare_cases(shown, extra, sources, {(task.site, task.case): task for task in tasks})
    layouts = {one.source.site: one.layout for one in opened if one.layout}
    return Checkup(tuple(sources), layouts, tuple(shown), tuple(sorted(findings, key=_worst_first)))


def _worst_first(found: Finding) -> tuple[int, str, str, str, str, str]:
    return -found.severity, found.site, found.case, found.code, found.structure, found.what


def _read_all(tasks: Sequence[CaseTask], workers: int | None) -> Iterator[tuple[CaseFacts, list[Finding]]]:
    """Results in the order of the tasks, whichever is ready first."""
    wanted = min(workers or fitting_workers(tasks, os.cpu_count() or 1), max(len(tasks), 1))
    if wanted <= 1:
        yield from map(read_case, tasks)
        return
    # Fresh processes: a fork would copy the threads' locks of torch and ITK in whatever state they are.
    pool = ProcessPoolExecutor(
        wanted, multiprocessing.get_context("spawn"), initializer=add_organs, initargs=(dict(added()),)
    )
    try:
        yield from pool.map(read_case, tasks)
    except BrokenProcessPool as error:
        raise DataError(
            "A process that reads cases was ended from outside.",
            code="worker-killed",
            why="most likely there was not enough memory for several scans at once",
            fix="Try again with one worker.",
        ) from error
    finally:
        # After Ctrl-C only the cases in hand are finished, not the whole queue.
        pool.shutdown(wait=True, cancel_futures=True)
