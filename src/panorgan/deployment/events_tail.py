"""Follow an `events.jsonl` that another process writes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from panorgan.federation.events import Event, parse_event


class EventsTail:
    """Returns every event once, beginning with those written after its creation."""

    def __init__(self, path: Path, from_start: bool = False) -> None:
        self._path = path
        self._place = 0 if from_start or not path.is_file() else path.stat().st_size

    def new(self) -> Iterator[Event]:
        """Events written since the last call; an incomplete line is left for the next call."""
        if not self._path.is_file():
            return
        with self._path.open("rb") as file:
            file.seek(self._place)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._place += len(line)
                try:
                    yield parse_event(line)
                except ValueError:
                    continue
