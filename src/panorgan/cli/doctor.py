"""`panorgan doctor`: check data before training on it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import panorgan
from panorgan.cli.console import Console, say
from panorgan.data_doctor import Checkup, Severity
from panorgan.errors import DataError

CLEAN, WARNED, FAILED = 0, 1, DataError.exit_code
PAGE = Path("doctor.html")
# The title of a page stands within its first bytes.
_HEAD = 4096


@dataclass(frozen=True)
class DoctorRequest:
    """The options of the command line. `html` None: no page; `fix_headers` None: no corrected copies."""

    paths: tuple[Path, ...]
    layout: str = "auto"
    workers: int | None = None
    html: Path | None = PAGE
    fix_headers: Path | None = None
    strict: bool = False
    as_json: bool = False


def run_doctor(request: DoctorRequest) -> int:
    """Check everything, print the findings, and return the exit code."""
    from panorgan.cli import doctor_view
    from panorgan.data_doctor.headers import check_place, fix_headers
    from panorgan.workflows.doctor import find_sources

    page = _page_path(request.html)
    replaced = page is not None and page.exists()
    with reading() as show:
        if request.fix_headers is not None:  # before the long reading, not after it
            check_place(request.fix_headers, find_sources(request.paths, request.layout, show))
        checkup = panorgan.doctor(*request.paths, layout=request.layout, workers=request.workers, on_progress=show)
        fixed = None
        if request.fix_headers is not None:
            fixed = fix_headers(checkup, request.fix_headers, lambda done, total: show("writing files", done, total))
    if page is not None:
        from panorgan.report.doctor_page import write_doctor_page

        write_doctor_page(checkup, page)
    if request.as_json:
        print(doctor_view.as_json(checkup, page, fixed), flush=True)
    else:
        doctor_view.show(Console(), checkup, request, page, fixed)
    if replaced:
        say(f"{page} replaces the page of an earlier check; use --html FILE to keep both.", file=sys.stderr)
    return exit_code(checkup, request.strict)


def exit_code(checkup: Checkup, strict: bool) -> int:
    """0: nothing worse than a warning. 1: warnings, when they count. That of a data error: errors."""
    if checkup.worst is None or checkup.worst == Severity.note:
        return CLEAN
    if checkup.worst == Severity.error:
        return FAILED
    return WARNED if strict else CLEAN


def _page_path(html: Path | None) -> Path | None:
    """Where the page goes, checked before the long reading and not after it."""
    if html is None:
        return None
    path = html / PAGE.name if html.is_dir() else html
    path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path.parent, os.W_OK):
        raise DataError(
            "The page cannot be written there.",
            code="page-not-writable",
            where=str(path),
            why="you may not write into this folder",
            fix="Choose another path with --html FILE, or omit the page with --no-html.",
        )
    if path.exists() and not _is_page(path):
        raise DataError(
            "The page would overwrite another file.",
            code="page-overwrites",
            where=str(path),
            why="the file is there, and the doctor did not write it",
            fix="Choose another path with --html FILE, or omit the page with --no-html.",
        )
    return path


def _is_page(path: Path) -> bool:
    """Whether a file is a page of the doctor, by its title."""
    with path.open("rb") as file:
        return b"panorgan doctor</title>" in file.read(_HEAD)


@contextmanager
def reading() -> Iterator[Callable[[str, int, int], None]]:
    """Shows the progress of reading: a bar in a terminal, a few plain lines in a log. Never on standard output."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _plain_line
        return
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=40), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("looking for cases", total=None)
        yield lambda what, done, total: progress.update(task, description=what, completed=done, total=total)


def _plain_line(what: str, done: int, total: int) -> None:
    """A line after every quarter; small folders get one at the end."""
    steps = 4 if total >= 40 else 1
    if done and done * steps // total > (done - 1) * steps // total:
        say(f"{what}: {done} of {total}", file=sys.stderr)
