"""A progress bar on a terminal's error output; results on standard output stay as they are."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from panorgan.cli.console import Console


@contextmanager
def progress_bar(what: str, total: int, quiet: bool = False) -> Iterator[Callable[[], None]]:
    """A function to call for each one that is done; nothing is shown without a terminal, or for a single one."""
    console = Console(stderr=True)
    if quiet or total < 2 or not console.is_terminal:
        yield lambda: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # What is printed meanwhile goes above the bar; not so where standard output is a file or a pipe.
    with Progress(*columns, console=console, transient=True, redirect_stdout=sys.stdout.isatty()) as progress:
        task = progress.add_task(what, total=total)
        yield lambda: progress.advance(task)
