"""The output during a run: a quiet live view, plain lines, or JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from panorgan.cli.console import Console, say
from panorgan.cli.estimate_words import estimate_lines
from panorgan.federation.events import Event, Listener
from panorgan.workflows.event_words import (
    duration,
    joined_in_words,
    mean_per_structure,
    mean_validation,
    refused_in_words,
    shared_in_words,
    split_in_words,
)


@contextmanager
def watch(title: str, as_json: bool = False) -> Iterator[Listener]:
    """A listener that shows events in a form that suits the output."""
    if as_json:
        yield _json_line
        return
    console = Console()
    if not console.is_terminal:
        yield PlainView(title)
        return
    view = LiveView(title)
    try:
        with Live(get_renderable=view.render, console=console, refresh_per_second=4, transient=True):
            yield view
    finally:  # what was said goes with the live display
        for note in view.notes:
            console.print(note)
    console.print(view.closing_line())


def _json_line(event: Event) -> None:
    if event.kind not in ("step", "validate"):
        print(json.dumps({"time": round(event.time, 3), "event": event.kind, **event.facts}), flush=True)


class PlainView:
    """One line per relevant event; for logs."""

    def __init__(self, title: str) -> None:
        self.title = title
        self._clock = _Clock()

    def __call__(self, event: Event) -> None:
        facts = event.facts
        if event.kind in ("prepare", "score", "analyze") and facts["done"] == facts["total"]:
            what = facts.get("what", "scoring test cases")
            self._line(f"{what}: {facts['total']} done")
        elif event.kind == "refused":
            self._line(f"refused an update of {facts['site']}: {refused_in_words(facts)}")
        elif event.kind == "estimate":
            for line in estimate_lines(facts):
                self._line(line)
        elif event.kind in ("notice", "start_from"):
            self._line(facts["text"])
        elif event.kind in ("resumed", "started"):
            self._line(_beginning(event))
        elif event.kind == "split":
            self._line(f"split {split_in_words(facts)}")
        elif event.kind == "shared_scans":
            self._line(shared_in_words(facts))
        elif event.kind == "joined":
            self._line(f"training on {joined_in_words(facts)}")
        elif event.kind == "late_join":
            self._line(f"joins in round {facts['number']}: {joined_in_words({'sites': {facts['site']: facts}})}")
        elif event.kind == "round_started":
            self._clock.round_started()
        elif event.kind == "round":
            self._clock.round_done(facts["number"], facts["total"])
            sites = facts["sites"].items()
            losses = ", ".join(f"{site} {numbers['loss']:.3f}" for site, numbers in sites if "loss" in numbers)
            losses = f"  loss {losses}" if losses else ""  # a round may be an exchange without a step
            score = mean_validation(facts)
            validated = f"  validation Dice {score:.3f}" if score is not None else ""
            left = self._clock.left()
            self._line(f"round {facts['number']}/{facts['total']} ({facts['stage']}){losses}{validated}  {left}")

    def _line(self, text: str) -> None:
        say(f"{self.title}: {text}")


class LiveView:
    """Round, site, organ Dice and the time left, redrawn in place."""

    def __init__(self, title: str) -> None:
        self.title = title
        self._clock = _Clock()
        self._sites = self._split = ""
        self._organs: dict[str, float] = {}
        self._notes: list[str] = []
        self._said: list[str] = []
        self._began = time.monotonic()
        self._finished = ""
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=40),
            MofNCompleteColumn(),
            TextColumn("{task.fields[eta]}"),
        )
        self._rounds = self._progress.add_task("rounds", total=None, eta="")
        self._work = self._progress.add_task("", total=None, eta="", visible=False)

    def __call__(self, event: Event) -> None:
        facts = event.facts
        if event.kind in ("prepare", "analyze"):
            self._show_work(facts["what"], facts["done"], facts["total"])
        elif event.kind == "score":
            self._show_work(f"scoring {facts['site']}", facts["done"], facts["total"])
        elif event.kind == "round_started":
            self._clock.round_started()
            stage = "rounds" if facts["stage"] == "train" else f"rounds ({facts['stage']})"
            self._progress.update(self._rounds, description=stage, completed=facts["number"] - 1, total=facts["total"])
        elif event.kind == "step":
            self._show_work(f"{facts['site']} trains", facts["step"], facts["steps"])
        elif event.kind == "validate":
            self._show_work(f"{facts['site']} validates", facts["done"], facts["total"])
        elif event.kind == "split":
            self._split = split_in_words(facts)
        elif event.kind == "shared_scans":
            self._notes.append(shared_in_words(facts))
        elif event.kind == "joined":
            self._sites = joined_in_words(facts)
        elif event.kind == "late_join":
            newcomer = joined_in_words({"sites": {facts["site"]: facts}})
            self._sites = f"{self._sites}, {newcomer}" if self._sites else newcomer
        elif event.kind == "refused":
            self._notes.append(f"refused {facts['site']}: {refused_in_words(facts)}")
        elif event.kind == "estimate":
            self._said += estimate_lines(facts)
        elif event.kind in ("notice", "start_from"):
            self._notes.append(facts["text"])
        elif event.kind == "round":
            self._round(facts)

    def _round(self, facts: dict[str, Any]) -> None:
        self._clock.round_done(facts["number"], facts["total"])
        self._progress.update(self._rounds, completed=facts["number"], total=facts["total"])
        self._organs.update(mean_per_structure(facts["validation"] or {}))
        if facts["best"]:
            self._finished = f"best validation Dice {facts['best']['dice']:.3f} in round {int(facts['best']['round'])}"

    def _show_work(self, what: str, done: int, total: int) -> None:
        self._progress.update(self._work, description=what, completed=done, total=total, visible=True)

    def render(self) -> Group:
        """The current picture."""
        self._progress.update(self._rounds, eta=self._clock.left())
        parts: list[Any] = [Text(self.title, style="bold"), self._progress]
        for line in (self._split, self._sites):
            if line:
                parts.insert(1, Text(line, style="dim", no_wrap=True, overflow="ellipsis"))
        if self._organs:
            scores = "  ".join(f"{organ} {value:.2f}" for organ, value in sorted(self._organs.items()))
            parts.append(Text(f"validation Dice  {scores}", style="dim"))
        parts += [Text(line, style="dim") for line in self._said]
        parts += [Text(note, style="yellow") for note in self._notes[-3:]]
        return Group(*parts)

    @property
    def notes(self) -> list[Text]:
        """What people should know, each once."""
        return [Text(note, style="yellow") for note in dict.fromkeys(self._notes)]

    def closing_line(self) -> Text:
        """What stays on the screen afterwards."""
        spent = duration(time.monotonic() - self._began)
        return Text.assemble((self.title, "bold"), f": {self._finished or 'done'}, {spent}")


class _Clock:
    """Time left, from the rounds seen in this process (preparation and earlier sessions do not count)."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._began: float | None = None
        self._last = 0.0  # when the last round ended
        self._done = self._remaining = 0

    def round_started(self) -> None:
        if self._began is None:
            self._began = self._now()

    def round_done(self, number: int, total: int) -> None:
        self._last, self._remaining = self._now(), total - number
        self._done += 1

    def left(self) -> str:
        """Runs on within a round; empty before the first has ended."""
        if self._began is None or not self._done:
            return ""
        per_round = (self._last - self._began) / self._done
        # A round that takes longer than the others, such as one with a validation, does not count below their rest.
        of_this_round = min(self._now() - self._last, per_round) if self._remaining else 0.0
        left = self._remaining * per_round - of_this_round
        return f"{duration(self._now() - self._began)} spent, {duration(left)} left"


def _beginning(event: Event) -> str:
    if event.kind == "started":
        return "a new run"
    return "continuing with more rounds" if event.facts.get("extended") else "resuming"
