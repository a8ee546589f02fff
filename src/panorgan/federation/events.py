"""One line per thing that happened, in `events.jsonl`, and to whoever listens."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Listener = Callable[["Event"], None]


@dataclass(frozen=True)
class Event:
    """`kind` says what happened; `facts` are JSON types."""

    kind: str
    facts: dict[str, Any] = field(default_factory=dict)
    time: float = 0.0


class EventLog:
    """Appends events to a file and passes them on.

    `transient` events (a step was made) reach listeners only: the file keeps what is worth keeping.
    """

    def __init__(self, path: Path | None = None, listeners: tuple[Listener, ...] = ()) -> None:
        self.path = path
        self.listeners = listeners

    def record(self, kind: str, **facts: Any) -> None:
        """Write an event down and tell the listeners."""
        event = Event(kind, facts, time.time())
        if self.path is not None:
            line = json.dumps({"time": round(event.time, 3), "event": kind, **facts})
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        self._tell(event)

    def transient(self, kind: str, **facts: Any) -> None:
        """Tell the listeners only."""
        self._tell(Event(kind, facts, time.time()))

    def _tell(self, event: Event) -> None:
        for listener in self.listeners:
            listener(event)


def mend_tail(path: Path) -> None:
    """End a line that a killed process left unfinished, so that the next event starts on its own line."""
    if path.is_file() and (content := path.read_bytes()) and not content.endswith(b"\n"):
        with path.open("ab") as file:
            file.write(b"\n")


def read_events(path: Path) -> Iterator[Event]:
    """All events in a file; a line torn by a kill, or damaged, is passed over."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            if (event := parse_event(line)) is not None:
                yield event


def parse_event(line: bytes) -> Event | None:
    """One line of a file; None where it is no event: torn, of other bytes than text, or something else altogether."""
    try:
        content = json.loads(line)
        kind, when = content.pop("event"), content.pop("time")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # bytes that are no text: a ValueError
        return None
    return Event(kind, content, when) if isinstance(kind, str) and isinstance(when, int | float) else None
