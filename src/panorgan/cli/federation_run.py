"""The commands of a running federation, and their output."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any

from rich.console import RenderableType
from rich.live import Live
from rich.table import Table

from panorgan.cli import federation_view, preflight_view
from panorgan.cli.console import Console, say
from panorgan.cli.doctor import reading
from panorgan.deployment.events_tail import EventsTail
from panorgan.deployment.folders import ServerKit, SiteKit
from panorgan.deployment.kit_files import load_coordinator_file
from panorgan.deployment.status import FederationStatus, read_status, status_of
from panorgan.federation.events import Event, Listener
from panorgan.workflows.run import Run

_LOOK_SECONDS = 1.0
_ENDED = ("finished", "failed", "stopped")


def check_before_start(kit: ServerKit | SiteKit, data: bool, as_json: bool) -> bool:
    """Run preflight and show it; returns whether anything failed."""
    from panorgan.deployment.preflight import preflight, preflight_server

    if isinstance(kit, SiteKit):
        with reading() as show:
            checks = preflight(kit, data, show)
        ready = f"Take part with: panorgan federation site {kit.path}"
    else:
        checks = preflight_server(kit)
        ready = f"Start it with: panorgan federation server {kit.path}"
    failed = any(check.verdict == "failed" for check in checks)
    if as_json:
        print(json.dumps({"ready": not failed, "checks": [check.as_json() for check in checks]}), flush=True)
    else:
        preflight_view.show(Console(), checks, ready)
    return failed


def start_and_watch(kit: ServerKit, as_json: bool) -> None:
    """Drive the run to its end."""
    from panorgan.deployment.drive import drive

    # The engine logs every failed attempt to connect; without a handler Python would write it into the live view.
    logging.getLogger().addHandler(logging.NullHandler())
    try:
        with watching(kit, as_json) as listener:
            drive(kit, listener)
    except KeyboardInterrupt:
        again = f"Continue with: panorgan federation start {kit.path}"
        say(f"The rounds of the current segment continue at the server. {again}", file=sys.stderr)
        say(f"To end them too: panorgan federation stop {kit.path} --now", file=sys.stderr)
        raise
    if not as_json:
        say(federation_view.closing_line(read_status(kit)))


def show_status(kit: ServerKit, watch: bool, as_json: bool) -> str:
    """Show the state of the run, once or until it ends; returns it."""
    status = read_status(kit)
    if not watch:
        _show_once(status, as_json)
        return status.state
    if as_json:
        return _follow_json(kit)
    console = Console()
    if not console.is_terminal:
        return _follow_lines(kit, status)
    view = Picture(kit, console)
    with Live(get_renderable=view.render, console=console, refresh_per_second=2, transient=True):
        while view.status().state not in _ENDED:
            time.sleep(_LOOK_SECONDS)
    federation_view.show(console, view.status())
    return view.status().state


def _show_once(status: FederationStatus, as_json: bool) -> None:
    if as_json:
        print(json.dumps(status.as_json()), flush=True)
    else:
        federation_view.show(Console(), status)


def _follow_json(kit: ServerKit) -> str:
    """One object whenever something has changed (time alone does not count)."""
    last = None
    while True:
        status = read_status(kit)
        content = status.as_json()
        line = json.dumps(content)
        for site in content["sites"]:
            del site["last_seen"]
        changed = {key: value for key, value in content.items() if key not in ("time", "eta_seconds", "updated")}
        if changed != last:
            last = changed
            say(line)
        if status.state in _ENDED:
            return status.state
        time.sleep(_LOOK_SECONDS)


def _follow_lines(kit: ServerKit, status: FederationStatus) -> str:
    """The picture once, then a line per event and per change of state."""
    tail = EventsTail(Run(kit.run(load_coordinator_file(kit))).events_file)
    federation_view.show(Console(), status)
    state = status.state
    while status.state not in _ENDED:
        time.sleep(_LOOK_SECONDS)
        status = read_status(kit)
        for event in tail.new():
            _print_line(sys.stdout, event)
        if status.state != state:
            state = status.state
            say(" ".join(filter(None, (f"{_now()}  {state}:", status.why, status.advice))))
    return status.state


class Picture:
    """The status, read again at most once a second."""

    def __init__(self, kit: ServerKit, console: Console) -> None:
        self._kit, self._console = kit, console
        self._settings = load_coordinator_file(kit)
        self._status: FederationStatus | None = None

    def status(self) -> FederationStatus:
        """The status, at most a second old."""
        now = time.time()
        if self._status is None or now - self._status.time >= _LOOK_SECONDS:
            self._status = status_of(self._kit, self._settings, now)
        return self._status

    def render(self) -> RenderableType:
        """The content of the live view."""
        return federation_view.picture(self.status(), self._console.width)


@contextmanager
def watching(kit: ServerKit, as_json: bool) -> Iterator[Listener]:
    """A listener that shows the run in a form that suits the output.

    The network engine silences standard output while it handles a request, so the original stream is kept.
    """
    out = sys.stdout
    console = Console(file=out)
    if as_json or not console.is_terminal:
        yield _Lines(out, as_json)
        return
    view = Picture(kit, console)
    with Live(
        get_renderable=view.render,
        console=console,
        refresh_per_second=2,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    ):
        yield lambda event: None
    federation_view.show(console, read_status(kit))  # the last picture may be a second old


class _Lines:
    """A line per event. The driver reports every second: only news are shown."""

    def __init__(self, out: IO[str], as_json: bool) -> None:
        self._out, self._as_json = out, as_json
        self._driver: tuple[object, ...] = ()

    def __call__(self, event: Event) -> None:
        if event.kind == "driver":
            now = tuple(event.facts.get(key) for key in ("state", "why", "segment"))
            if now == self._driver:
                return
            self._driver = now
        if self._as_json:
            line = json.dumps({"time": round(event.time, 3), "event": event.kind, **event.facts})
            say(line, file=self._out)
        else:
            _print_line(self._out, event)


def _print_line(out: IO[str], event: Event) -> None:
    if line := federation_view.event_line(event):
        say(f"{time.strftime('%H:%M:%S', time.localtime(event.time))}  {line}", file=out)


def _now() -> str:
    return time.strftime("%H:%M:%S")


def score_and_show(kit: SiteKit, as_json: bool) -> None:
    """Score the delivered model at a site."""
    from panorgan.deployment.score import score_site

    with reading() as show:
        rows = score_site(kit, lambda done, total: show("scoring test cases", done, total))
    if as_json:
        print(json.dumps({"rows": rows, "scores": str(kit.scores / "metrics.csv")}), flush=True)
        return
    Console().print(own_scores(rows))
    say(f"Every case: {kit.scores / 'metrics.csv'}; predictions next to it. None of this has left the site.")
    say(f"With pictures: panorgan report {kit.path}")


def own_scores(rows: Sequence[dict[str, Any]]) -> Table:
    """Dice per organ at one site, which knows no other's scores."""
    from panorgan.cli.train import in_words
    from panorgan.evaluation.metrics import is_missed
    from panorgan.evaluation.statistics import organ_site_table

    scores = organ_site_table([{**row, "missed": is_missed(row)} for row in rows])
    table = Table("organ", "cases", "mean", "95 % interval", "missed", title_justify="left")
    table.title = "Dice on this site's test cases (mean over cases)"
    for organ, summary in scores.organs.items():
        interval = "–" if summary.low == summary.high else f"{summary.low:.3f}–{summary.high:.3f}"
        table.add_row(organ, str(summary.n), f"{summary.mean:.3f}", interval, str(summary.missed))
    table.caption = f"All organs: {in_words(scores.overall)}"
    table.caption_justify = "left"
    return table
