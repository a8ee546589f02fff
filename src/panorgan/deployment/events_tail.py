"""Follow an `events.jsonl` that another process writes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from panorgan.federation.events import Event, parse_event


class EventsTail:
    """Gives every event once, from the moment it is created on."""

    def __init__(self, path: Path, from_start: bool = False) -> None:
        self._path = path
        self._place = 0 if from_start or not path.is_file() else path.stat().st_size

    def new(self) -> Iterator[Event]:
        """Events that were written since the last call; half a line is left for the next."""
        if not self._path.is_file():
            return
        with self._path.open("rb") as file:
            file.seek(self._place)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._place += len(line)
                if (event := parse_event(line)) is not None:
                    yield event
