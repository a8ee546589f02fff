"""What panorgan needs from a network engine, and nothing else.

- `Engine` makes start-up kits and says how the processes of a kit start.
- `AdminSession` is the coordinator's connection to the server: which sites are connected, submit a segment, watch it.
- `NetworkTransport` is the server's side of a running segment: ask sites, collect answers.
- At a site the engine hands each request to a `RequestHandler` and sends its answer back.

An engine authenticates both sides with the certificates of their kits, encrypts, and delivers bytes. It starts
installed code only: a segment names classes that the receiver's own kit allows, and carries no code, arguments or
files. At the server it passes every message through `site_identity.IdentityCheck`.

`docs/architecture.md` ("A second engine") lists what an implementation has to provide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from panorgan.errors import RunError
from panorgan.federation.transports.base import Transport

Role = Literal["server", "site"]

# -- files that a running engine keeps in a kit ----------------------------------------------------------------------

REFUSALS = "door.json"
"""Server: the newest refusal of each participant, as {name: {code, why, time}}."""
CERTIFICATES = "certificates.json"
"""Server: the end of each certificate that a site has shown, as {name: seconds since 1970}."""
REFUSED = "refused.txt"
"""Site: why the server refused it (`Refusal.to_text`); removed with the next start."""
CLOCK = "clock.json"
"""Site: by how many seconds the server's clock was ahead (negative: behind), and when the site saw that."""
CLOCK_OFF_SECONDS = 60.0
"""Few messages travel for so long; certificates and logs tolerate less."""


# -- errors ----------------------------------------------------------------------------------------------------------


class NotConnectedError(RunError):
    """The server cannot be reached just now."""

    code = "not-connected"


class SegmentAbortedError(RunError):
    """The engine ends the segment; the rounds that were finished are saved."""

    code = "segment-aborted"


class TaskAbortedError(Exception):
    """The coordinator no longer wants the answer."""


# -- kits ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Participants:
    """The members of a federation. `sites` holds each site's organisation."""

    federation: str
    host: str
    port: int
    organization: str
    coordinator: str
    sites: Mapping[str, str]
    heartbeat_seconds: int = 45
    """After this time without a message from a site, the server counts it as gone."""


@dataclass(frozen=True)
class StartupKits:
    """Folders with `startup/` and `local/`, which hold all files of the engine."""

    server: Path
    admin: Path
    sites: Mapping[str, Path]


@dataclass(frozen=True)
class SiteFiles:
    """The engine's files in a site's kit; paths are relative to the kit."""

    policies: Mapping[str, str]
    """What the engine may do, as this installation writes it: path and text."""
    provisioned: tuple[str, ...]
    """Keys, certificates and connection settings, from the federation's authority."""
    obsolete: tuple[str, ...] = ()
    """Files in kits of older versions that nothing uses any more."""


# -- processes -------------------------------------------------------------------------------------------------------

OnRefused = Callable[[str, str], None]
"""Takes an address or a name, and why its connection failed."""
KeepLine = Callable[[str], bool]
"""Takes a line of the engine's output; returns whether it belongs in the log."""


@dataclass(frozen=True)
class EngineProcess:
    """How an engine's process starts: `python -P -m module arguments…`, with the kit as working folder."""

    module: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment that `deployment/processes.py` gives to every engine."""
    folders: tuple[str, ...] = ()
    """Folders in the kit that must exist when it starts."""
    logs: tuple[str, ...] = ()
    """Files in the kit that the engine only appends to; panorgan keeps them small."""
    read_output: Callable[[OnRefused], KeepLine] | None = None
    """Where the process reports failed connections in its output: makes a reader for its lines."""


# -- segments --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Segment:
    """The next rounds of a run, for the engine to start at the server and at `sites`."""

    name: str
    sites: tuple[str, ...]
    min_sites: int
    required: tuple[str, ...] = ()
    """Sites without which it must not begin."""


@dataclass(frozen=True)
class SegmentStatus:
    """The engine's report on a segment. How it ended means little: the checkpoint holds what was done."""

    phase: Literal["waiting", "running", "ended"]
    detail: str = ""
    """The engine's own word."""


@dataclass(frozen=True)
class ServerState:
    """The state of the server. `started` changes when the server restarts; all its segments are gone then."""

    started: str
    connected: Mapping[str, float]
    """Connected sites, and the time of each one's last message."""
    running: frozenset[str]
    """Ids of the segments that run."""


class AdminSession(Protocol):
    """The coordinator's connection to the server; opened when it is first used, and again after a failure.

    All methods but `abort` and `close` raise `NotConnectedError` if the server does not answer.
    """

    def look(self) -> ServerState:
        """Which sites are connected, and what runs."""

    def submit(self, segment: Segment, folder: Path) -> str:
        """Hand a segment over; returns its id. `folder` is scratch space for what the engine sends."""

    def status(self, segment: str) -> SegmentStatus:
        """How a segment is doing. One that the server does not know (any more) has ended."""

    def unfinished(self) -> set[str]:
        """Ids of all segments that run or wait for their start."""

    def sites_in_segments(self) -> Mapping[str, set[str]] | None:
        """Ids of the segments that run at each connected site; None if the sites could not be asked."""

    def abort(self, segment: str) -> bool:
        """End a segment now; True if it has ended, also if it had before. False if the server could not be reached."""

    def forget_finished(self, keep: int) -> int:
        """Remove ended segments from the server's store, except the newest; returns how many were removed."""

    def close(self) -> None:
        """Release the connection."""


class NetworkTransport(Transport, Protocol):
    """The server's side of one running segment. `exchange` raises `SegmentAbortedError` when the engine ends it."""

    gone: Callable[[], set[str]]
    """Sites that will not answer this segment any more; `exchange` stops waiting for them."""


class Engine(Protocol):
    """A network engine. `kit` is the folder of the server, of a site, or of the coordinator as a person."""

    package: str
    """The distribution whose version participants compare."""

    def provision(self, participants: Participants, days: int, authority: Path, scratch: Path) -> StartupKits:
        """Make kits with new keys and certificates in `scratch`: server, coordinator and all sites named.

        The authority in `authority` signs them for `days`; it is made if there is none, and replaced in one step.
        """

    def site_files(self) -> SiteFiles:
        """The files that a hospital approves as the engine's."""

    def check_kit(self, kit: Path, role: Role) -> None:
        """Raise `ConfigError` if the engine's files in a kit permit more than a run needs."""

    def add_message_filter(self, kit: Path) -> bool:
        """Put the message filter into a server's kit of an older version; returns whether it was missing."""

    def server_address(self, kit: Path, role: Role) -> str:
        """`host:port` at which a server listens, or to which a site connects; empty if the kit does not say it."""

    def process(self, kit: Path, role: Role) -> EngineProcess:
        """How the process of a server or a site starts from its kit."""

    def open_session(self, kit: Path, user: str) -> AdminSession:
        """The connection of `user`, the coordinator as a person, whose own kit this is."""
