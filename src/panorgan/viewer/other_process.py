"""Work that takes much memory, in a process of its own: when it ends, all of it is given back."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from panorgan.errors import DataError

T = TypeVar("T")


def in_another_process(action: Callable[..., T], *args: Any) -> T:
    """The result of `action(*args)`, computed in a process that ends with it."""
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            return pool.submit(action, *args).result()
    except BrokenProcessPool as error:
        raise DataError(
            "The viewer could not read this.",
            code="viewer-process-killed",
            why="the process that read it was killed, most likely because memory ran out",
            fix="Close other programs, or convert the scan to NIfTI (.nii.gz): that is read piece by piece.",
        ) from error
