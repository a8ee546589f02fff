"""A run's log for its live page: every event in words, with the numbers that the page draws."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from panorgan.federation.events import DAMAGED, Event, parse_event
from panorgan.printable import printable
from panorgan.workflows.event_words import event_line

_TROUBLES = ("refused", "failed", "missing", DAMAGED)
_KEPT = ("number", "total", "stage", "site", "code")


class LogReader:
    """Gives the events of an `events.jsonl` that another process writes, each once; every browser has its own."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place = self._lines = 0
        self._first = b""

    def new(self) -> tuple[bool, list[dict[str, Any]]]:
        """Events since the last call, and whether they are those of another run that began in the same folder."""
        try:
            with self._path.open("rb") as file:
                begun_again = self._is_another(file.readline(), file.seek(0, 2))
                if begun_again:
                    self._place = self._lines = 0
                file.seek(self._place)
                content = file.read()
        except OSError:
            return False, []
        whole = content[: content.rfind(b"\n") + 1]  # half a line is left for the next call
        self._place += len(whole)
        return begun_again, [event for line in whole.splitlines() if (event := self._read(line))]

    def _is_another(self, first: bytes, size: int) -> bool:
        """The first line has the time at which the run began; a log never becomes shorter than what was read."""
        known, self._first = self._first, first if first.endswith(b"\n") else b""
        return size < self._place or bool(known and known != self._first)

    def _read(self, line: bytes) -> dict[str, Any] | None:
        self._lines += 1
        try:
            return describe_event(parse_event(line))
        except ValueError:
            return describe_event(Event(DAMAGED, {"line": self._lines}))


def describe_event(event: Event) -> dict[str, Any]:
    """What the page shows of an event."""
    facts = event.facts
    try:
        line = event_line(event)
    except (KeyError, TypeError, AttributeError, ValueError):  # of another version: the rest of the log is still true
        line = event.kind
    content: dict[str, Any] = {"time": event.time, "event": event.kind, "line": line}
    content |= {key: facts[key] for key in _KEPT if key in facts}
    if event.kind in _TROUBLES:
        content["level"] = "trouble"
    elif event.kind in ("notice", "shared_scans"):
        content["level"] = "notice"
    if event.kind == "round":
        content |= _numbers(facts)
    elif event.kind == "joined":
        content["sites"] = {site: own.get("annotated", {}) for site, own in facts.get("sites", {}).items()}
    elif event.kind == "late_join":
        content["sites"] = {str(facts.get("site")): facts.get("annotated", {})}
    cleaned: dict[str, Any] = clean(content)
    return cleaned


def _numbers(facts: Mapping[str, Any]) -> dict[str, Any]:
    sites = facts.get("sites") or {}
    return {
        "losses": {site: own["loss"] for site, own in sites.items() if "loss" in own},
        "validation": facts.get("validation"),
        "best": facts.get("best"),
        "bytes_sent": facts.get("bytes_sent", 0),
        "bytes_received": facts.get("bytes_received", 0),
        "seconds": sum((facts.get("seconds") or {}).values()),
    }


def clean(content: Any) -> Any:
    """Plain JSON for a page: no control characters in names from elsewhere, no number that JSON does not have."""
    if isinstance(content, str):
        return printable(content)
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, Mapping):
        return {printable(str(key)): clean(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [clean(value) for value in content]
    return content
