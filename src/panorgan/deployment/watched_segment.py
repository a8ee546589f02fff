"""What the driver knows of a running segment, and of sites that fail. No input, no output."""

from __future__ import annotations

import time

from panorgan.federation.engine import SegmentStatus, ServerState

_ASK_SITES_EVERY = 4.0
_SETTLE = 15.0
"""Seconds after which a connected site that is not in the running job is more than slow to start."""
_FIRST_PAUSE = 30.0
_LONGEST_PAUSE = 3600.0


class WatchedSegment:
    """A segment under way. An engine may report it as running after the server that ran it has gone."""

    def __init__(self, id: str) -> None:
        self.id = id
        self.seen: set[str] = set()
        self.gone: set[str] = set()
        self._server: str | None = None
        self._running_since: float | None = None
        self._absent_since: float | None = None
        self._asked = 0.0

    def over(self, status: SegmentStatus, server: ServerState) -> bool:
        """Whether it has ended, or is lost: the server was restarted, or no longer runs it."""
        return status.phase == "ended" or self._lost(status.phase == "running", server)

    def _lost(self, running: bool, server: ServerState) -> bool:
        now = time.monotonic()
        self._server = self._server or server.started
        if running and self._running_since is None:
            self._running_since = now
        if not running or self.id in server.running:
            self._absent_since = None
        elif self._absent_since is None:
            self._absent_since = now
        absent = self._absent_since is not None and now - self._absent_since > _SETTLE
        return absent or self._server != server.started

    def time_to_ask(self) -> bool:
        """Whether to ask the sites what they run."""
        if self._running_since is None or time.monotonic() - self._asked < _ASK_SITES_EVERY:
            return False
        self._asked = time.monotonic()
        return True

    @property
    def settled(self) -> bool:
        """Whether every site had time to start."""
        return self._running_since is not None and time.monotonic() - self._running_since > _SETTLE


class Backoff:
    """Exponential backoff per site: every further attempt comes after twice the time."""

    def __init__(self) -> None:
        self._attempts: dict[str, tuple[int, float]] = {}

    def ready(self, site: str) -> bool:
        """Whether it is time for another attempt. The first is at once."""
        if site not in self._attempts:
            return True
        count, last = self._attempts[site]
        return time.monotonic() - last > min(_FIRST_PAUSE * 2.0 ** (count - 1), _LONGEST_PAUSE)

    def tried(self, site: str) -> None:
        """An attempt was made."""
        count, _ = self._attempts.get(site, (0, 0.0))
        self._attempts[site] = (count + 1, time.monotonic())

    def reset(self, site: str) -> None:
        """It worked: the next failure counts as the first."""
        self._attempts.pop(site, None)
