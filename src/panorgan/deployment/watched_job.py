"""The driver's view of a running job, and of failing sites. No input, no output."""

from __future__ import annotations

import time

from panorgan.deployment.nvflare_optional import SystemState

_ASK_SITES_EVERY = 4.0
_SETTLE = 15.0
"""Seconds after which a connected site that is not in the running job is more than slow to start."""
_FIRST_PAUSE = 30.0
_LONGEST_PAUSE = 3600.0


class WatchedJob:
    """A running job. The engine may still report it as running after the server restarted."""

    def __init__(self, job: str) -> None:
        self.job = job
        self.seen: set[str] = set()
        self.gone: set[str] = set()
        self._server: str | None = None
        self._running_since: float | None = None
        self._absent_since: float | None = None
        self._asked = 0.0

    def lost(self, running: bool, system: SystemState) -> bool:
        """Whether the server that ran it was restarted, or no longer runs it."""
        now = time.monotonic()
        self._server = self._server or system.server_started
        if running and self._running_since is None:
            self._running_since = now
        if not running or self.job in system.jobs:
            self._absent_since = None
        elif self._absent_since is None:
            self._absent_since = now
        absent = self._absent_since is not None and now - self._absent_since > _SETTLE
        return absent or self._server != system.server_started

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
    """Exponential backoff per site: the time to every further attempt doubles."""

    def __init__(self) -> None:
        self._chances: dict[str, tuple[int, float]] = {}

    def ready(self, site: str) -> bool:
        """Whether it is time for another attempt. The first is at once."""
        if site not in self._chances:
            return True
        count, last = self._chances[site]
        return time.monotonic() - last > min(_FIRST_PAUSE * 2.0 ** (count - 1), _LONGEST_PAUSE)

    def tried(self, site: str) -> None:
        """An attempt was made."""
        count, _ = self._chances.get(site, (0, 0.0))
        self._chances[site] = (count + 1, time.monotonic())

    def reset(self, site: str) -> None:
        """It succeeded: the next failure counts as the first."""
        self._chances.pop(site, None)
