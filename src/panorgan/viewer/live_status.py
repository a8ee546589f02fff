"""What a run is doing just now, for its live page: from the folder of a simulation, or the kit of a server."""

from __future__ import annotations

import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from panorgan.errors import PanorganError
from panorgan.federation.events import Event, read_events
from panorgan.viewer.live_log import clean
from panorgan.workflows.lock import is_locked
from panorgan.workflows.pace import Pace, time_left
from panorgan.workflows.run import Run

if TYPE_CHECKING:  # a simulation needs none of a federation's libraries
    from panorgan.deployment.folders import ServerKit
    from panorgan.deployment.site_status import SiteStatus
    from panorgan.deployment.status import FederationStatus

_LOOK_SECONDS = 1.0
_SILENT_SECONDS = 600.0
"""Where locks are unknown: a run that has written nothing for so long counts as ended."""
_WAITED_FOR = ("working", "absent", "missing", "failed", "refused")


@dataclass(frozen=True)
class LiveSite:
    """One site: its state as a word for the style, and in words."""

    name: str
    state: str
    words: str
    seconds: float | None = None
    last_seen: float | None = None


@dataclass(frozen=True)
class Wait:
    """Who the run waits for, and why."""

    site: str
    why: str
    since: float | None = None


@dataclass(frozen=True)
class LiveStatus:
    """The head of the page. `eta_seconds` counts from `time`; `number` is the current round, or the next one."""

    title: str
    detail: str
    folder: str
    time: float
    state: str
    words: str
    advice: str = ""
    doing: str = ""
    since: float | None = None
    stage: str = ""
    number: int = 1
    rounds_done: int = 0
    total: int | None = None
    round_seconds: float | None = None
    eta_seconds: float | None = None
    waits: tuple[Wait, ...] = ()
    sites: tuple[LiveSite, ...] = ()
    warnings: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        content: dict[str, Any] = clean(asdict(self))
        return content


class LiveSource(Protocol):
    """Something that a live page can follow."""

    @property
    def events_file(self) -> Path:
        """The log, which may not exist yet."""

    def look(self, now: float) -> LiveStatus:
        """The state at this moment; reads files and asks no other process."""


class LatestStatus:
    """The status for all browsers together, read again at most once a second."""

    def __init__(self, source: LiveSource) -> None:
        self.source = source
        self._lock = threading.Lock()
        self._status: LiveStatus | None = None

    def __call__(self) -> LiveStatus:
        """At most a second old."""
        now = time.time()
        with self._lock:
            if self._status is None or not 0 <= now - self._status.time < _LOOK_SECONDS:
                self._status = self.source.look(now)
            return self._status


# -- a simulation --------------------------------------------------------------------------------------------------


class SimulatedRun:
    """The run folder of `panorgan train`; it may not exist yet."""

    def __init__(self, folder: Path) -> None:
        self.run = Run(folder)

    @property
    def events_file(self) -> Path:
        """The log, which may not exist yet."""
        return self.run.events_file

    def look(self, now: float) -> LiveStatus:
        """The state at this moment."""
        run = Run(self.run.path)
        title, detail, planned = _experiment_of(run)
        events = list(read_events(run.events_file))
        rounds = {int(event.facts["number"]): event for event in events if event.kind == "round"}
        done = max(rounds, default=0)
        total = rounds[done].facts.get("total", planned) if rounds else planned
        last = events[-1] if events else None
        state, words, advice = _state_of(run, last, now)
        running = state == "running"
        pace = Pace.of(events)
        left = None if total is None or (running and done >= total) else total - done
        passed = now - rounds[done].time if running and done else None
        doing, since = _doing(events, done, total) if running else ("", None)
        return LiveStatus(
            title=title,
            detail=detail,
            folder=str(run.path),
            time=now,
            state=state,
            words=words,
            advice=advice,
            doing=doing,
            since=since,
            stage=str(rounds[done].facts.get("stage", "")) if rounds else "",
            number=min(done + 1, total or done + 1),
            rounds_done=done,
            total=total,
            round_seconds=pace.round,
            eta_seconds=None if left is None else time_left(pace, left, max(left, 1), passed),
            sites=tuple(LiveSite(site, state, "") for site in _sites_of(events)),
        )


def _experiment_of(run: Run) -> tuple[str, str, int | None]:
    """Name, method and number of rounds; a manifest that cannot be read does not prevent the page."""
    try:
        experiment = run.experiment
        stages = experiment.build_method().stages(experiment.training.rounds)
    except PanorganError:
        return run.path.name, "", None
    return experiment.name, str(experiment.method["name"]), sum(stage.rounds for stage in stages)


def _state_of(run: Run, last: Event | None, now: float) -> tuple[str, str, str]:
    """State, in words, and what to do about it."""
    if not run.started:
        return "new", "not begun", "The page shows the run as soon as it begins: first its data is prepared."
    locked = is_locked(run.path)
    if locked is None:
        locked = last is None or (last.kind != "finished" and now - last.time < _SILENT_SECONDS)
    if locked:
        return "running", "running", ""
    if run.complete:
        return "finished", "finished", f"The report: panorgan report {run.path}"
    again = f"Continue with: panorgan train EXPERIMENT.yaml --run {run.path} --resume"
    return "interrupted", "interrupted: no process works on it", again


def _doing(events: list[Event], done: int, total: int | None) -> tuple[str, float | None]:
    """What a running simulation does, and since when: all that its log can say within a round."""
    began = events[-1].time if events else None
    if total is not None and done >= total:
        return "test cases are scored", began
    return ("sites train" if events else "prepares"), began


def _sites_of(events: list[Event]) -> list[str]:
    found: set[str] = set()
    for event in events:
        if event.kind == "joined":
            found |= event.facts.get("sites", {}).keys()
        elif event.kind == "late_join":
            found.add(str(event.facts.get("site")))
    return sorted(found)


# -- a federation --------------------------------------------------------------------------------------------------


class DrivenRun:
    """The run of a server's kit."""

    def __init__(self, kit: ServerKit) -> None:
        self.kit = kit

    @property
    def events_file(self) -> Path:
        """The log, which may not exist yet; the operator may choose another run folder at any time."""
        from panorgan.deployment.kit_files import load_coordinator_file

        try:
            self._folder = self.kit.run(load_coordinator_file(self.kit))
        except PanorganError:  # being edited
            self._folder = getattr(self, "_folder", self.kit.path / "run")
        return Run(self._folder).events_file

    def look(self, now: float) -> LiveStatus:
        """The state at this moment."""
        from panorgan.deployment.status import read_status
        from panorgan.deployment.status_words import QUESTIONS, site_in_words, state_in_words

        try:
            status = read_status(self.kit, now)
        except PanorganError as error:  # coordinator.yaml is being edited
            why = " ".join(part for part in (error.what, error.where, error.why) if part)
            return LiveStatus(self.kit.path.name, "", str(self.kit.path), now, "silent", why, error.fix)
        return LiveStatus(
            title=status.federation,
            detail=" · ".join(part for part in (status.experiment, status.method) if part),
            folder=str(self.kit.path),
            time=now,
            state=status.state,
            words=state_in_words(status),
            advice=status.advice,
            doing=QUESTIONS.get(status.task, status.task) or ("the next job starts" * (status.state == "running")),
            since=status.since,
            stage=status.stage,
            number=status.number,
            rounds_done=status.rounds_done,
            total=status.total,
            round_seconds=status.round_seconds,
            eta_seconds=status.eta_seconds,
            waits=_waits(status),
            sites=tuple(
                LiveSite(site.name, site.state, site_in_words(site), site.seconds, site.last_seen)
                for site in status.sites
            ),
            warnings=status.warnings,
        )


def _waits(status: FederationStatus) -> tuple[Wait, ...]:
    """Sites that the current round, or the next one, still needs."""
    from panorgan.deployment.status_words import site_in_words

    def needed(site: SiteStatus) -> bool:
        if site.state not in _WAITED_FOR or (site.state == "absent" and site.detail == "joins later"):
            return False
        return bool(status.task) or status.state == "waiting"

    if status.state not in ("running", "waiting", "silent"):
        return ()
    return tuple(Wait(site.name, site_in_words(site), status.since) for site in status.sites if needed(site))
