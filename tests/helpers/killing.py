"""Functions that die on the way, as a process does that is killed there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


class Killed(BaseException):
    """The process dies here."""


def deadly(original: Callable[..., Any], call: int, works: bool) -> Callable[..., Any]:
    """A version of a function that kills at its call number `call`, counted from 1; after its work if it `works`."""
    calls: Iterator[int] = iter(range(1, 10**6))

    def dies(*arguments: Any, **named: Any) -> Any:
        if next(calls) < call:
            return original(*arguments, **named)
        if works:
            original(*arguments, **named)
        raise Killed

    return dies
