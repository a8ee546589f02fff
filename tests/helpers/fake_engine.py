"""An engine without processes or network: its server is an object whose state a test sets and reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from panorgan.federation.engine import (
    EngineProcess,
    NotConnectedError,
    Participants,
    Role,
    Segment,
    SegmentStatus,
    ServerState,
    SiteFiles,
    StartupKits,
)

Phase = Literal["waiting", "running", "ended"]


class FakeServer:
    """An `AdminSession`, and the server behind it. Segments are called job-1, job-2 and so on.

    A new segment waits until the test sets its `phases`; `on_submit` is called for each.
    """

    def __init__(self, sites: tuple[str, ...]) -> None:
        self.connected = set(sites)
        self.reachable = True
        self.started = "since noon"
        self.segments: list[Segment] = []
        self.phases: dict[str, Phase] = {}
        self.inside: dict[str, set[str]] = {}
        self.aborted: list[str] = []
        self.kept: list[int] = []
        self.on_submit: Callable[[str], None] = lambda id: None

    @property
    def invited(self) -> list[list[str]]:
        """The sites of each segment."""
        return [list(segment.sites) for segment in self.segments]

    @property
    def required(self) -> list[list[str]]:
        """The sites without which each segment must not begin."""
        return [list(segment.required) for segment in self.segments]

    def restart(self) -> None:
        """All its segments are gone, and the engine still reports them as they were."""
        self.started += ", again"

    def look(self) -> ServerState:
        self._answer()
        return ServerState(self.started, dict.fromkeys(self.connected, 0.0), frozenset(self._in("running")))

    def submit(self, segment: Segment, folder: Path) -> str:
        self._answer()
        self.segments.append(segment)
        id = f"job-{len(self.segments)}"
        self.phases[id] = "waiting"
        self.on_submit(id)
        return id

    def status(self, segment: str) -> SegmentStatus:
        self._answer()
        return SegmentStatus(self.phases[segment], "SUBMITTED")

    def unfinished(self) -> set[str]:
        self._answer()
        return self._in("running", "waiting")

    def sites_in_segments(self) -> dict[str, set[str]] | None:
        self._answer()
        running = self._in("running")
        return {site: {id for id in running if site in self.inside.get(id, set())} for site in self.connected}

    def abort(self, segment: str) -> bool:
        if not self.reachable:
            return False
        self.aborted.append(segment)
        self.phases[segment] = "ended"
        return True

    def forget_finished(self, keep: int) -> int:
        self._answer()
        self.kept.append(keep)
        return 0

    def close(self) -> None:
        """Nothing is open."""

    def _answer(self) -> None:
        if not self.reachable:
            raise NotConnectedError("The server does not answer.", why="it is down")

    def _in(self, *phases: Phase) -> set[str]:
        return {id for id, phase in self.phases.items() if phase in phases}


class FakeEngine:
    """An `Engine` with one server. Its kits hold no keys, and its processes end at once."""

    package = "panorgan"

    def __init__(self, sites: tuple[str, ...] = ()) -> None:
        self.server = FakeServer(sites)

    def provision(self, participants: Participants, days: int, authority: Path, scratch: Path) -> StartupKits:
        kits = StartupKits(scratch / "server", scratch / "admin", {name: scratch / name for name in participants.sites})
        for kit in (kits.server, kits.admin, *kits.sites.values()):
            for folder in ("startup", "local"):
                (kit / folder).mkdir(parents=True)
        return kits

    def site_files(self) -> SiteFiles:
        return SiteFiles({}, ())

    def check_kit(self, kit: Path, role: Role) -> None:
        """Every kit is fine."""

    def add_message_filter(self, kit: Path) -> bool:
        return False

    def server_address(self, kit: Path, role: Role) -> str:
        return ""

    def process(self, kit: Path, role: Role) -> EngineProcess:
        return EngineProcess("timeit", ("-n", "1", "-r", "1", "pass"))

    def open_session(self, kit: Path, user: str) -> FakeServer:
        return self.server
