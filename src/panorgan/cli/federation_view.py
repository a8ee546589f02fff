"""The coordinator's view of a federation: one picture for `status` and `start`, plain lines for logs."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable

from rich import box
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from panorgan.cli.console import Console
from panorgan.deployment.site_status import SiteStatus
from panorgan.deployment.status import FederationStatus, Trouble
from panorgan.deployment.status_words import QUESTIONS, ago, site_in_words, state_in_words
from panorgan.workflows.event_words import duration, event_line, round_in_words, seconds_in_words

_RUN_STYLES = {
    "running": "bold green",
    "finished": "bold green",
    "waiting": "bold yellow",
    "stopped": "bold yellow",
    "silent": "bold yellow",
    "new": "bold cyan",
    "interrupted": "bold red",
    "failed": "bold red",
}
_SITE_STYLES = {
    "answered": "green",
    "working": "cyan",
    "connected": "",
    "unknown": "dim",
    "done": "green",
    "absent": "yellow",
    "missing": "yellow",
    "failed": "red",
    "refused": "red",
}
_WIDTH = 120
_BAR = 30
_SHOWN_EVENTS, _SHOWN_TROUBLES = 6, 4


def picture(status: FederationStatus, width: int) -> RenderableType:
    """The whole state, for a terminal of this many columns."""
    parts: list[RenderableType] = [_headline(status)]
    if status.advice:
        parts.append(Text(status.advice))
    parts += [Text(warning, style="yellow") for warning in status.warnings]
    parts += [_progress(status, width), Text(""), _site_table(status), Text("")]
    parts += _facts(status)
    troubles = sorted((*status.refusals, *status.failures), key=lambda trouble: trouble.time)
    if troubles:
        parts += [Text(""), _troubles(status, troubles)]
    lines = _merge_repeated((event.time, line) for event in status.recent if (line := event_line(event)))
    if lines:
        parts += [Text(""), Text("recent", style="bold")]
        parts += [
            Text(f"  {_clock(at)}  {line}", no_wrap=True, overflow="ellipsis") for at, line in lines[-_SHOWN_EVENTS:]
        ]
    return Group(*parts)


def show(console: Console, status: FederationStatus) -> None:
    """Print the picture once."""
    width = min(console.width, _WIDTH)
    console.print(picture(status, width), width=width, highlight=False)


def closing_line(status: FederationStatus) -> str:
    """The last line of a watch."""
    words = f"{status.federation}: {status.state}, {status.rounds_done} of {status.total or '?'} rounds"
    score = status.validation
    if score and score.best is not None:
        words += f", best validation Dice {score.best:.3f} in round {score.best_round}"
    return words


def _headline(status: FederationStatus) -> Text:
    what = " · ".join(part for part in (status.experiment, status.method) if part)
    return Text.assemble(
        (status.federation, "bold"), (f"  {what}", "dim"), "  ", (state_in_words(status), _RUN_STYLES[status.state])
    )


def _progress(status: FederationStatus, width: int) -> RenderableType:
    total = status.total or 0
    if status.state == "finished" or (total and status.rounds_done >= total):
        where = f"all {status.rounds_done} rounds done"
    else:
        stage = f"stage {status.stage}, " if status.stage else ""
        where = f"{stage}round {status.number} of {total or '?'}"
    asked = QUESTIONS.get(status.task, status.task)
    if asked:
        where += f": {asked}" + (f" ({duration(status.time - status.since)})" if status.since else "")
    elif status.state == "running":
        where += ": the next job starts"
    row = Table.grid(padding=(0, 2))
    row.add_row(ProgressBar(total or 1, status.rounds_done, width=min(_BAR, width // 3)), Text(where))
    if (timing := _timing(status)) and status.state != "finished":
        row.add_row("", Text(timing, style="dim"))
    return row


def _timing(status: FederationStatus) -> str:
    if status.round_seconds is None:
        return "time estimate after the first round" if status.state == "running" else ""
    words = f"{duration(status.round_seconds)} per round"
    if status.eta_seconds is None:
        return words
    left = duration(status.eta_seconds)
    if status.state == "running":
        return f"{words}, {left} left, until {_clock(status.time + status.eta_seconds, status.time)}"
    return f"{words}, {left} left once it goes on"


def _site_table(status: FederationStatus) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False, header_style="dim")
    table.add_column("site", overflow="fold")
    table.add_column("state", ratio=1, overflow="fold")
    table.add_column("answer", justify="right", no_wrap=True)
    table.add_column("last seen", justify="right", no_wrap=True)
    table.add_column("cases", justify="right", no_wrap=True)
    table.add_column("labels", overflow="fold", max_width=36)
    for site in status.sites:
        table.add_row(
            Text(site.name, style="bold"),
            _site_words(site),
            seconds_in_words(site.seconds) if site.seconds is not None else "",
            ago(status.time - site.last_seen) if site.last_seen else "–",
            "" if site.train_cases is None else str(site.train_cases),
            Text(", ".join(site.annotated).replace("_", " ") or ("" if site.joined else "not joined"), style="dim"),
        )
    return table


def _site_words(site: SiteStatus) -> Text:
    return Text(site_in_words(site), style=_SITE_STYLES[site.state])


def _facts(status: FederationStatus) -> list[RenderableType]:
    """Validation and traffic, one line each (or more where there are many organs)."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    score = status.validation
    if score is not None:
        best = f", best {score.best:.3f} in round {score.best_round}" if score.best is not None else ""
        organs = "   ".join(f"{name.replace('_', ' ')} {value:.2f}" for name, value in score.structures.items())
        table.add_row("Dice", Text(f"{score.mean:.3f} in round {score.number}{best}"))
        table.add_row("", Text(organs, style="dim"))
    if status.bytes_sent or status.bytes_received:
        last = f"{_size(status.last_bytes_sent)} to the sites, {_size(status.last_bytes_received)} back"
        whole = f"{_size(status.bytes_sent)} and {_size(status.bytes_received)}"
        table.add_row("traffic", Text(f"last round {last}; in all {whole}"))
    return [table] if table.row_count else [Text("no round is finished yet", style="dim")]


def _troubles(status: FederationStatus, troubles: list[Trouble]) -> RenderableType:
    counts = f"{status.refusal_count} refused, {status.failure_count} failed"
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    lines = []
    for trouble in troubles:
        what = "refused" if trouble in status.refusals else "failed"
        why = f" ({trouble.why})" if trouble.why else ""
        lines.append((trouble.time, f"{what} {trouble.site}, {round_in_words(trouble.number)}: {trouble.reason}{why}"))
    for at, words in _merge_repeated(lines)[-_SHOWN_TROUBLES:]:
        table.add_row(f"  {_clock(at)}", Text(words, style="red"))
    return Group(Text.assemble(("troubles", "bold"), f"  {counts}"), table)


def _merge_repeated(lines: Iterable[tuple[float, str]]) -> list[tuple[float, str]]:
    """Repeated lines, merged: `4 × …`, at the last time."""
    groups = [list(group) for _, group in itertools.groupby(lines, key=lambda line: line[1])]
    return [(group[-1][0], f"{len(group)} × " * (len(group) > 1) + group[0][1]) for group in groups]


def _clock(moment: float, now: float | None = None) -> str:
    """`16:40:02`; with the day if it is not the day of `now`."""
    at = time.localtime(moment)
    if now is None:
        return time.strftime("%H:%M:%S", at)
    same_day = time.strftime("%x", at) == time.strftime("%x", time.localtime(now))
    return time.strftime("%H:%M" if same_day else "%a %d %b %H:%M", at)


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.1f} {unit}" if count < 10 and unit != "B" else f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
