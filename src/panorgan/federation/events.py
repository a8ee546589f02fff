"""One line per event in `events.jsonl`, also passed to listeners. Every line has its checksum."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from panorgan.checksums import read_json, sealed_json

Listener = Callable[["Event"], None]

DAMAGED = "damaged"
"""Kind of an event that stands for an unreadable line; `line` is its number."""


@dataclass(frozen=True)
class Event:
    """`kind` says what happened; `facts` are JSON types."""

    kind: str
    facts: dict[str, Any] = field(default_factory=dict)
    time: float = 0.0


class EventLog:
    """Appends events to a file and passes them on.

    `transient` events (a step was made) reach listeners only and are not kept in the file.
    """

    def __init__(self, path: Path | None = None, listeners: tuple[Listener, ...] = ()) -> None:
        self.path = path
        self.listeners = listeners

    def record(self, kind: str, **facts: Any) -> None:
        """Write an event and notify the listeners."""
        event = Event(kind, facts, _now())
        if self.path is not None:
            line = sealed_json({"time": event.time, "event": kind, **facts})
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        self._tell(event)

    def transient(self, kind: str, **facts: Any) -> None:
        """Notify the listeners only."""
        self._tell(Event(kind, facts, _now()))

    def _tell(self, event: Event) -> None:
        for listener in self.listeners:
            listener(event)


def _now() -> float:
    """In whole milliseconds, the same in the file and for listeners; never later than the clock."""
    return math.floor(time.time() * 1000) / 1000


def mend_tail(path: Path) -> None:
    """Remove a line that a killed process left unfinished, so that the next event starts on its own line."""
    if path.is_file() and (content := path.read_bytes()) and not content.endswith(b"\n"):
        whole = content.rfind(b"\n") + 1
        with path.open("r+b") as file:
            if _is_event(content[whole:]):
                file.seek(0, os.SEEK_END)
                file.write(b"\n")
            else:
                file.truncate(whole)


def read_events(path: Path) -> Iterator[Event]:
    """All events in a file; a line torn by a kill is skipped, a damaged one is an event of its own kind."""
    if not path.is_file():
        return
    last = 0.0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                event = parse_event(line)
            except ValueError:
                if not _is_torn(line):
                    yield Event(DAMAGED, {"line": number}, last)
                continue
            last = event.time
            yield event


def parse_event(line: bytes) -> Event:
    """One line; raises ValueError for a line that is damaged, torn, or not an event."""
    try:
        content = read_json(line)
        kind, when = content.pop("event"), content.pop("time")
    except (KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError("not an event") from error
    if not (isinstance(kind, str) and isinstance(when, int | float)):
        raise ValueError("not an event")
    return Event(kind, content, when)


def _is_event(line: bytes) -> bool:
    try:
        parse_event(line)
    except ValueError:
        return False
    return True


def _is_torn(line: bytes) -> bool:
    """Whether an unreadable line was never finished: it is being written, or an older version left it."""
    if not line.endswith(b"\n"):
        return True
    return not (line.startswith(b'{"crc32"') or line.rstrip().endswith(b"}"))
