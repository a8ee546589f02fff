"""`panorgan doctor`: check data before anything is trained on it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from panorgan.cases.doctor import Checkup, Finding, Severity, Source
from panorgan.cli.console import Console, say
from panorgan.errors import DataError

CLEAN, WARNED, FAILED = 0, 1, DataError.exit_code
PAGE = Path("doctor.html")
_EXPERIMENT_ENDINGS = (".yaml", ".yml")


@dataclass(frozen=True)
class DoctorRequest:
    """What the user asked for. `html` None: no page; `fix_headers` None: no corrected copies."""

    paths: tuple[Path, ...]
    layout: str = "auto"
    workers: int | None = None
    html: Path | None = PAGE
    fix_headers: Path | None = None
    strict: bool = False
    as_json: bool = False


def run_doctor(request: DoctorRequest) -> int:
    """Check everything, tell it, and return the exit code."""
    from panorgan.cases.doctor.examine import examine
    from panorgan.cases.doctor.headers import check_place, fix_headers
    from panorgan.cli import doctor_view

    page = _page_path(request.html)
    with reading() as show:
        sources = find_sources(request.paths, request.layout, show)
        if request.fix_headers is not None:
            check_place(request.fix_headers, sources)
        checkup = examine(sources, request.workers, lambda done, total: show("reading cases", done, total))
        if checkup.worst != Severity.error:  # else the errors in the data say more
            checkup = replace(checkup, findings=(*_refusals(request.paths), *checkup.findings))
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
    return exit_code(checkup, request.strict)


def exit_code(checkup: Checkup, strict: bool) -> int:
    """0: nothing worse than a warning. 1: warnings, when they count. That of a data error: errors."""
    if checkup.worst is None or checkup.worst == Severity.note:
        return CLEAN
    if checkup.worst == Severity.error:
        return FAILED
    return WARNED if strict else CLEAN


def find_sources(
    paths: Sequence[Path], layout: str = "auto", on_progress: Callable[[str, int, int], None] | None = None
) -> tuple[Source, ...]:
    """What the paths hold: data folders, tables of cases, and all sites of experiment files."""
    found: list[Source] = []
    for path in paths:
        if not path.exists():
            raise DataError(
                "There is no such file or folder.", code="path-missing", where=str(path), fix="Check the path."
            )
        if path.is_file() and path.suffix in _EXPERIMENT_ENDINGS:
            from panorgan.config import load_experiment
            from panorgan.runs.sources import sources_of

            found += sources_of(load_experiment(path), progress=on_progress)
        elif path.is_dir() or path.suffix == ".csv":
            found.append(folder_source(path, layout))
        else:
            raise DataError(
                "This is not something the doctor can look at.",
                code="not-examinable",
                where=str(path),
                why="it takes a data folder, a table of cases (.csv) or an experiment file (.yaml)",
                fix="Give the folder that holds the scans and labels.",
            )
    return told_apart(found)


def _refusals(paths: Sequence[Path]) -> Iterator[Finding]:
    """What training would refuse although every folder is fine: an organ that nobody labels, a misspelled case."""
    for path in paths:
        if path.is_file() and path.suffix in _EXPERIMENT_ENDINGS:
            from panorgan.config import load_experiment
            from panorgan.runs.sources import refusal_of

            if refusal := refusal_of(load_experiment(path)):
                yield refusal


def folder_source(path: Path, layout: str = "auto") -> Source:
    """A data folder, or the CSV file that lists its cases, named after the folder."""
    place = path.resolve()
    return Source(site=(place.parent if place.suffix == ".csv" else place).name or "data", folder=path, layout=layout)


def told_apart(sources: Sequence[Source]) -> tuple[Source, ...]:
    """The same sources under different names: a name that is taken gets a number, `liver`, `liver-2`."""
    taken: set[str] = set()
    found = []
    for source in sources:
        name, number = source.site, 1
        while name in taken:
            number += 1
            name = f"{source.site}-{number}"
        taken.add(name)
        found.append(replace(source, site=name))
    return tuple(found)


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
            fix="Choose another place with --html FILE, or leave the page out with --no-html.",
        )
    return path


@contextmanager
def reading() -> Iterator[Callable[[str, int, int], None]]:
    """Shows how far the reading is: a bar in a terminal, a few plain lines in a log. Never on standard output."""
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
