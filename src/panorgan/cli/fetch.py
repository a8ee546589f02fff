"""`panorgan fetch`: public data sets, with their licence, into the data folder."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from panorgan.cli.console import Console, say, say_lines
from panorgan.data.places import data_folder
from panorgan.errors import ConfigError
from panorgan.fetching.catalogue import DataSet, data_sets, find_data_set
from panorgan.fetching.fetch import Fetched, Watch, by_hand, fetch


@dataclass(frozen=True)
class FetchRequest:
    """The options of the command."""

    name: str | None
    to: Path | None
    source: str
    accept_licence: bool
    keep_archive: bool
    as_json: bool


def run_fetch(request: FetchRequest) -> None:
    """List the sets, or fetch one."""
    place = (request.to or data_folder()).expanduser().absolute()
    if request.name is None:
        _list(place, request.as_json)
        return
    data_set = find_data_set(request.name)
    if not (place / data_set.folder).is_dir():
        if not data_set.url:
            raise by_hand(data_set, place / data_set.folder)
        _agree(data_set, place, request.accept_licence)
    with _watching() as watch:
        fetched = fetch(data_set, request.to, request.source, request.keep_archive, watch)
    _show(data_set, fetched, request.as_json)


def licence_words(data_set: DataSet) -> str:
    """What is fetched, and under which licence."""
    return (
        f"{data_set.title} ({data_set.modality}; {data_set.annotates}), about {data_set.size}\n"
        f"  page     {data_set.page}\n"
        f"  licence  {data_set.licence}: {data_set.licence_url}\n"
        f"           {data_set.terms}\n"
        f"  cite     {data_set.cite}\n"
    )


def _agree(data_set: DataSet, place: Path, accepted: bool) -> None:
    """Show the licence and ask for consent; a program gives it with an option."""
    say_lines(licence_words(data_set), sys.stderr)
    if accepted:
        return
    if sys.stdin.isatty():
        say_lines(f"Fetch it into {place} under this licence? [y/N] ", sys.stderr)
        if sys.stdin.readline().strip().lower() in ("y", "yes"):
            return
    raise ConfigError(
        "The licence was not accepted.",
        code="licence-not-accepted",
        where=data_set.name,
        why=f"{data_set.licence}: {data_set.licence_url}",
        fix="Read it, and add --accept-licence if you agree.",
    )


def _list(place: Path, as_json: bool) -> None:
    there = {name: (place / data_set.folder).is_dir() for name, data_set in data_sets().items()}
    if as_json:
        rows = [
            {**one.as_json(), "licence_url": one.licence_url, "there": there[name]} for name, one in data_sets().items()
        ]
        print(json.dumps({"folder": str(place), "data_sets": rows}), flush=True)
        return
    console = Console(highlight=False)
    table = Table("name", "what", "size", "licence", "here", title="Public data sets", title_justify="left")
    for name, one in data_sets().items():
        what = f"{one.title} ({one.modality}; {one.annotates})"
        table.add_row(name, what, one.size or "by hand", one.licence, "yes" if there[name] else "")
    console.print(table)
    console.print(f"Data folder: {place} (PANORGAN_DATA, or --to)", soft_wrap=True, markup=False)
    console.print("Sets 'by hand' need a form, a login or a conversion; 'panorgan fetch NAME' gives instructions.")


@contextmanager
def _watching() -> Iterator[Watch]:
    """A bar in a terminal, a few lines in a log; never on standard output."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines()
        return
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=40), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=None)

        def watch(what: str, done: int, total: int | None) -> None:
            if what == "unpacking":  # files, where the bar counts bytes
                what, done = f"unpacking: {done} files", 0
            progress.update(task, description=what, completed=done, total=total)

        yield watch


class _Lines:
    """A line for every step, and for every tenth of it."""

    def __init__(self) -> None:
        self._last: tuple[str, int] = ("", -1)

    def __call__(self, what: str, done: int, total: int | None) -> None:
        """Say so if it is new."""
        tenth = done * 10 // total if total else 0
        if (what, tenth) != self._last:
            self._last = (what, tenth)
            say(f"{what}: {done / 1e6:.0f} of {total / 1e6:.0f} MB" if total else what, file=sys.stderr)


def _show(data_set: DataSet, fetched: Fetched, as_json: bool) -> None:
    if as_json:
        facts = {
            "name": data_set.name,
            "folder": str(fetched.folder),
            "scans": fetched.scans,
            "checked": fetched.checked,
            "licence": data_set.licence,
            "was_there": fetched.was_there,
        }
        print(json.dumps({"fetched": facts}), flush=True)
        return
    words = "is there already" if fetched.was_there else "is there"
    say(f"{data_set.title} {words}: {fetched.scans} scans in {fetched.folder}")
    say(f"Checked by: {fetched.checked}")
    if not fetched.was_there:
        say(f"Licence and source: {fetched.licence_file}")
