"""Processes many cases in parallel, and raises one error for all problems."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import torch

from panorgan.errors import DataError

OnProgress = Callable[[str, int, int], None]
"""What is being done, how many are done, how many there are."""

# Each worker holds one scan with its masks in memory.
_MOST_WORKERS = 8
# Files named in one message.
_NAMED = 10


class InParallel:
    """Runs independent work on several cases at a time and collects the errors.

    Threads suffice: decompressing, hashing and resampling release Python's lock.
    """

    def __init__(self, workers: int | None, progress: OnProgress) -> None:
        self.workers = workers or min(usable_cores(), _MOST_WORKERS)
        self.progress = progress

    def __call__(self, what: str, todo: Sequence[Callable[[], Any]]) -> list[Any]:
        """Return the results in the order of `todo`. Every case is tried, so that one error names all bad cases."""
        failures: dict[int, DataError] = {}
        results: list[Any] = [None] * len(todo)
        threads = torch.get_num_threads()
        # Each worker computes with one thread: they share the cores already.
        with ThreadPoolExecutor(self.workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            places = {pool.submit(action): place for place, action in enumerate(todo)}
            try:
                for done, future in enumerate(as_completed(places), start=1):
                    try:
                        results[places[future]] = future.result()
                    except DataError as error:
                        failures[places[future]] = error
                    self.progress(what, done, len(todo))
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
            finally:
                torch.set_num_threads(threads)  # new threads of this process use the last setting
        if failures:
            raise merge_errors([failures[place] for place in sorted(failures)], len(todo))
        return results


def usable_cores() -> int:
    """The cores that this process may use, as limited by containers and schedulers."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def merge_errors(failures: Sequence[DataError], total: int) -> DataError:
    """One error for several cases; equal errors are merged, with all their files."""
    if len(failures) == 1:
        return failures[0]
    complaints = list(dict.fromkeys(error.what for error in failures))
    alike = len({error.code for error in failures}) == 1
    files = [error.where for error in failures[:_NAMED]]
    if len(failures) > _NAMED:
        files.append(f"and {len(failures) - _NAMED} more")
    return DataError(
        complaints[0] if len(complaints) == 1 else f"{len(failures)} of {total} cases cannot be used.",
        code=failures[0].code if alike else "cases-unusable",
        where="\n".join(files),
        why=failures[0].why if len(complaints) == 1 else "\n".join(complaints[:_NAMED]),
        fix=f"{failures[0].fix} 'panorgan doctor' with the same experiment file shows every case.",
    )
