"""The coordinator's view of a federation: one picture for `status` and `start`, plain lines for logs."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from panorgan.cli.console import Console
from panorgan.cli.view import duration, joined_in_words, mean_validation
from panorgan.deployment.site_status import SiteStatus
from panorgan.deployment.status import FederationStatus, Trouble
from panorgan.federation.events import Event
from panorgan.federation.failures import MEANING

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
_SITE_WORDS = {"absent": "not connected", "unknown": "–", "done": "has the model"}
_WORK_WORDS = {"train": "training", "evaluate": "validating", "join": "joining", "deliver": "taking the model"}
_QUESTIONS = {"train": "sites train", "evaluate": "sites validate", "join": "sites join", "deliver": "model goes out"}
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


def event_line(event: Event) -> str:
    """One line for a log; empty if the event is not worth one."""
    tell = _LINES.get(event.kind)
    return tell(event.facts) if tell else ""


def _headline(status: FederationStatus) -> Text:
    what = " · ".join(part for part in (status.experiment, status.method) if part)
    return Text.assemble(
        (status.federation, "bold"), (f"  {what}", "dim"), "  ", (_state_words(status), _RUN_STYLES[status.state])
    )


def _state_words(status: FederationStatus) -> str:
    """`waiting for south`, `interrupted: the driver is not running (last heard of 3 min ago)`."""
    why = status.why
    if status.state in ("interrupted", "silent") and status.updated:
        why += f" (last heard of {_ago(status.time - status.updated)})"
    if not why:
        return status.state
    return f"{status.state} {why}" if why.startswith("for ") else f"{status.state}: {why}"


def _progress(status: FederationStatus, width: int) -> RenderableType:
    total = status.total or 0
    if status.state == "finished" or (total and status.rounds_done >= total):
        where = f"all {status.rounds_done} rounds done"
    else:
        stage = f"stage {status.stage}, " if status.stage else ""
        where = f"{stage}round {status.number} of {total or '?'}"
    asked = _QUESTIONS.get(status.task, status.task)
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
        return "no time estimate before the first round" if status.state == "running" else ""
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
            site_words(site),
            _seconds(site.seconds) if site.seconds is not None else "",
            _ago(status.time - site.last_seen) if site.last_seen else "–",
            "" if site.train_cases is None else str(site.train_cases),
            Text(", ".join(site.annotated).replace("_", " ") or ("" if site.joined else "not joined"), style="dim"),
        )
    return table


def site_words(site: SiteStatus) -> Text:
    """`training`, `failed: memory: the site ran out of memory`, `not connected: joins later`."""
    style = _SITE_STYLES[site.state]
    if site.state == "working":
        return Text(_WORK_WORDS.get(site.detail, "working"), style=style)
    words = _SITE_WORDS.get(site.state, site.state)
    return Text(f"{words}: {site.detail}" if site.detail else words, style=style)


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
        lines.append((trouble.time, f"{what} {trouble.site}, {_round(trouble.number)}: {trouble.reason}{why}"))
    for at, words in _merge_repeated(lines)[-_SHOWN_TROUBLES:]:
        table.add_row(f"  {_clock(at)}", Text(words, style="red"))
    return Group(Text.assemble(("troubles", "bold"), f"  {counts}"), table)


def _merge_repeated(lines: Iterable[tuple[float, str]]) -> list[tuple[float, str]]:
    """Repeated lines, merged: `4 × …`, at the last time."""
    groups = [list(group) for _, group in itertools.groupby(lines, key=lambda line: line[1])]
    return [(group[-1][0], f"{len(group)} × " * (len(group) > 1) + group[0][1]) for group in groups]


# -- plain lines ---------------------------------------------------------------------------------------------------


def _round_line(facts: dict[str, Any]) -> str:
    losses = ", ".join(f"{site} {own['loss']:.3f}" for site, own in facts["sites"].items() if "loss" in own)
    score = mean_validation(facts)
    parts = [
        f"round {facts['number']}/{facts['total']} ({facts['stage']})",
        _seconds(sum((facts.get("seconds") or {}).values())),
        f"validation Dice {score:.3f}" if score is not None else "",
        f"loss {losses}" if losses else "",
    ]
    return "  ".join(part for part in parts if part)


def _failure_line(facts: dict[str, Any]) -> str:
    code = facts["code"]
    return f"{facts['site']} failed, {_round(facts['number'])}: {code} ({MEANING.get(code, 'unknown reason')})"


def _late_join_line(facts: dict[str, Any]) -> str:
    return f"joins late: {joined_in_words({'sites': {facts['site']: facts}})}, from round {facts['number']}"


def _driver_line(facts: dict[str, Any]) -> str:
    if facts.get("state") == "running":
        return f"segment {facts.get('segment')} {facts['why']}".rstrip() if facts.get("why") else ""
    if facts.get("state") == "waiting" and not facts.get("why"):  # between two segments: the next line says more
        return ""
    return f"{facts.get('state', '')} {facts.get('why', '')}".rstrip()


_LINES: dict[str, Callable[[dict[str, Any]], str]] = {
    "started": lambda facts: "a new run",
    "resumed": lambda facts: "the run continues",
    "joined": lambda facts: f"joined: {joined_in_words(facts)}",
    "late_join": _late_join_line,
    "round": _round_line,
    "refused": lambda f: (
        f"refused {f['site']}, {_round(f['number'])}: {f['reason']} {f.get('why') or ''} {f.get('fix') or ''}".rstrip()
    ),
    "failed": _failure_line,
    "notice": lambda facts: f"{_round(facts['number'])}: {facts['text']}",
    "start_from": lambda facts: str(facts["text"]),
    "missing": lambda facts: f"missing, {_round(facts['number'])}: {', '.join(facts['sites'])}",
    "segment": lambda facts: f"segment {facts['number']} runs as job {str(facts.get('job', ''))[:8]}",
    "driver": _driver_line,
    "finished": lambda facts: "finished",
}


def _round(number: int) -> str:
    return f"round {number}" if number else "when joining"


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 10 else f"{value:.0f} s" if value < 120 else duration(value)


def _ago(seconds: float) -> str:
    if seconds < 1.5:
        return "now"
    if seconds < 100:
        return f"{seconds:.0f} s ago"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min ago"
    return f"{seconds / 3600:.0f} h ago" if seconds < 48 * 3600 else f"{seconds / 86400:.0f} days ago"


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
