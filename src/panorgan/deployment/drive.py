"""Drive a run: a chain of segments, each starting from the coordinator's checkpoint.

A segment (a job of the network engine) does not survive a failure; a run must. So this process finds the connected
sites, submits the next segment, watches it, and submits another one until the checkpoint shows that all rounds are
done. It trusts the checkpoint and never the segment's status. It may be killed and started again at any moment.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

from panorgan.checksums import sealed_json
from panorgan.config import load_agreement
from panorgan.deployment.addresses import refuse_another_address
from panorgan.deployment.control import Control, read_json
from panorgan.deployment.disk_space import disk_full_message, is_disk_full, low_disk_message
from panorgan.deployment.engine import network_engine
from panorgan.deployment.events_tail import EventsTail
from panorgan.deployment.folders import ServerKit
from panorgan.deployment.kit_files import load_coordinator_file
from panorgan.deployment.refusals import NewRefusals
from panorgan.deployment.revoking import revoked_words
from panorgan.deployment.watched_segment import Backoff, WatchedSegment
from panorgan.errors import PanorganError, RunError
from panorgan.federation.checkpoint import Checkpoints
from panorgan.federation.engine import Engine, NotConnectedError, Segment, ServerState
from panorgan.federation.events import Event, EventLog
from panorgan.federation.files import write_atomically
from panorgan.workflows.lock import only_one_process
from panorgan.workflows.run import Run

_LOOK_EVERY = 1.0
_GRACE = 20.0
"""Seconds that a later segment waits for an absent site before it begins without it (on_missing: proceed)."""
_LONGEST_PAUSE = 60.0
KEPT_SEGMENTS = 5
"""Number of finished segments to keep in the server's store, for finding out why one failed."""

OnEvent = Callable[[Event], None]


def drive(kit: ServerKit, on_event: OnEvent = lambda event: None, engine: Engine | None = None) -> None:
    """Submit segments until the run is done or stopped."""
    refuse_another_address(kit)
    settings = load_coordinator_file(kit)
    folder = kit.control(settings)
    folder.mkdir(parents=True, exist_ok=True)
    with only_one_process(folder):
        driver = Driver(kit, engine or network_engine(), on_event)
        try:
            driver.run()
        finally:
            driver.close()


def request_stop(
    kit: ServerKit, now: bool = False, engine: Engine | None = None
) -> Literal["finished", "stopped"] | None:
    """End the run after the current round, or immediately. Nothing is lost: `start` continues from there.

    Returns the reason if there is nothing to stop, else None.
    """
    settings = load_coordinator_file(kit)
    control = Control(kit.control(settings))
    if control.finished.exists():
        return "finished"
    driver = read_json(control.driver)
    job = driver.get("job")
    if driver.get("state") == "stopped" and not job:
        return "stopped"
    control.request_stop()
    if now and job:
        session = (engine or network_engine()).open_session(kit.admin, settings.coordinator)
        try:
            if not session.abort(str(job)):
                raise NotConnectedError(
                    "The running round could not be ended: the server does not answer.",
                    code="round-not-ended",
                    why="the run stops after it, or when the server is back",
                    fix="Try again, or stop the server.",
                )
        finally:
            session.close()
    return None


class Driver:
    """Holds what is known about the run while it is driven."""

    def __init__(self, kit: ServerKit, engine: Engine, on_event: OnEvent) -> None:
        self.kit, self._on_event = kit, on_event
        self.settings = load_coordinator_file(kit)
        self.control = Control(kit.control(self.settings))
        self.run_folder = Run(kit.run(self.settings))
        self.min_sites = load_agreement(kit.experiment).training.min_sites
        self._session = engine.open_session(kit.admin, self.settings.coordinator)
        self._tail = EventsTail(self.run_folder.events_file)
        self._state: dict[str, Any] = {
            "segment": int(read_json(self.control.driver).get("segment", 0)),
            "pid": os.getpid(),
        }
        self._waiting_since = time.monotonic()
        self._idle_segments = 0
        self._rounds_before: int | None = None
        self._invited: set[str] = set()
        self._left_out = Backoff()
        self._waited = Backoff()
        self._uninvited: set[str] = set()
        self._refusals = NewRefusals(kit)

    def close(self) -> None:
        """Release the connection."""
        self._session.close()

    def run(self) -> None:
        """Drive the run until it is done, stopped, or cannot continue."""
        self.control.forget_stop()
        self._reopen_to_deliver()
        last = read_json(self.control.driver).get("job")
        while not self.control.finished.exists():
            if self.control.stop_requested():
                self._say("stopped", "asked to stop")
                return
            try:
                job = self._unfinished(last) or self._next_segment()
                last = None
                if job is not None:
                    self._judge(self._watch(job))
                    self._session.forget_finished(KEPT_SEGMENTS)
                else:
                    time.sleep(_LOOK_EVERY)
            except NotConnectedError as error:
                self._say("waiting", self._why_unreached(error), connected={})
                time.sleep(_LOOK_EVERY)
            except OSError as error:
                self._say("waiting", self._why_unwritten(error))
                time.sleep(_LOOK_EVERY)
        self._pass_on_events()
        self._say("finished", "")

    def _reopen_to_deliver(self) -> None:
        """Let a finished run that could not deliver the model to every site try again."""
        finished = read_json(self.control.finished)
        without = set(finished.get("without", []))
        if not finished:  # absent, or damaged: one more segment finds out which sites have the model
            self.control.finished.unlink(missing_ok=True)
        if not without:
            return
        try:
            there = self._session.look().connected.keys() & self.settings.sites.keys()
        except NotConnectedError:
            return
        waits = self.settings.rounds.on_missing == "wait"
        if without & there and len(there) >= self.min_sites and (not waits or self._needed()[1] <= there):
            self.control.finished.unlink()

    # -- what comes next -----------------------------------------------------------------------------------

    def _unfinished(self, last: str | None) -> str | None:
        """The running segment of an earlier driver that was killed; any other running segment is ended."""
        found = None
        for job in self._session.unfinished():
            if job == last:
                found = job
            else:
                self._session.abort(job)
        return found

    def _needed(self) -> tuple[int, set[str]]:
        """Rounds done, and the sites that take part: joined and still listed, or first those to begin."""
        known = Checkpoints(self.run_folder.path / "checkpoints").peek()
        if known is not None:
            return known[0], set(known[1]) & self.settings.sites.keys()
        return -1, {name for name, site in self.settings.sites.items() if not site.joins_later}

    def _members(self, connected: Mapping[str, float]) -> dict[str, float]:
        """The connected members. A former member may still have a valid certificate: it gets no segment."""
        listed = self.settings.sites.keys()
        events = EventLog(self.run_folder.events_file)
        for name, code, why in self._refusals.new():
            events.record("refused", number=0, site=name, code=code, reason=why, why="")
        for name in sorted(connected.keys() - listed - self._uninvited):
            self._uninvited.add(name)
            reason, why = f"Site {name} is not in this federation.", f"it is not listed in {self.kit.settings.name}"
            events.record("refused", number=0, site=name, code="site-not-listed", reason=reason, why=why)
        return {name: heard for name, heard in connected.items() if name in listed}

    def _next_segment(self) -> str | None:
        """Submit the next segment if enough sites are there."""
        if not self._read_settings():
            return None
        rounds_done, needed = self._needed()
        connected = self._members(self._session.look().connected)
        absent = sorted(needed - connected.keys())
        waits = self.settings.rounds.on_missing == "wait"
        if absent:
            patience = self.settings.rounds.first_wait_minutes * 60 if rounds_done < 0 else _GRACE
            patient = time.monotonic() - self._waiting_since < patience
            if waits or patient or len(connected) < self.min_sites:
                why = f"for {', '.join(absent)}{revoked_words(self.kit, absent)}"
                self._say("waiting", why, connected=connected, job=None)
                return None
        if len(connected) < self.min_sites:
            self._say("waiting", f"for {self.min_sites} sites", connected=connected, job=None)
            return None
        self._invited = {site for site in connected if (waits and site in needed) or self._left_out.ready(site)}
        if len(self._invited) < self.min_sites:
            self._invited = set(connected)  # better without the absent sites than not at all
        self._state["segment"] += 1
        folder = self.control.folder / "jobs" / f"segment-{self._state['segment']:05d}"
        shutil.rmtree(folder.parent, ignore_errors=True)
        segment = Segment(
            f"{self.settings.federation}-{self._state['segment']}",
            sites=tuple(sorted(self._invited)),
            min_sites=len(needed) if waits else self.min_sites,
            required=tuple(sorted(needed)) if waits else (),
        )
        self.control.begin_segment()
        job = self._session.submit(segment, folder)
        self._rounds_before = rounds_done
        self._say("running", "", job=job, connected=connected)
        return job

    def _read_settings(self) -> bool:
        """Read `coordinator.yaml` again: the operator may edit it at any time. Waits while it cannot be read."""
        try:
            settings = load_coordinator_file(self.kit)
            agreement = load_agreement(self.kit.experiment)
        except PanorganError as error:
            self._say("waiting", f"{error.what} {error.where}: {error.why}", job=None)
            return False
        if settings.run != self.settings.run:
            raise RunError(
                "The run folder was changed while the run is driven.",
                code="run-folder-changed",
                where=str(self.kit.settings),
                why=f"it was {self.settings.run}, it is {settings.run}",
                fix="Start again with: panorgan federation start",
            )
        self.settings, self.min_sites = settings, agreement.training.min_sites
        return True

    # -- while it runs -------------------------------------------------------------------------------------

    def _watch(self, job: str) -> WatchedSegment:
        """Watch a segment until it ends: pass its events on, and name the sites that will not answer it any more."""
        watched = WatchedSegment(job)
        while True:
            self._pass_on_events()
            try:
                server, status = self._session.look(), self._session.status(job)
                self._state["connected"] = self._members(server.connected)
                if watched.over(status, server):
                    break
                if status.phase == "waiting" and self._pointless(server):
                    self._session.abort(job)
                    break
                if watched.time_to_ask():
                    self._look_at_sites(watched, server)
                self._say("running", "" if status.phase == "running" else status.detail.lower(), job=job)
            except NotConnectedError as error:
                self._say("waiting", self._why_unreached(error), connected={})
                if self.control.stop_requested():
                    break
            except OSError as error:  # writing is tried again
                self._say("waiting", self._why_unwritten(error))
            time.sleep(_LOOK_EVERY)
        self._pass_on_events()
        return watched

    def _pointless(self, server: ServerState) -> bool:
        """Whether a segment that has not begun should not: the user asked to stop, or a site that it needs has gone.

        The engine tries again after ever longer pauses; a new segment begins as soon as the site is back.
        """
        _, needed = self._needed()
        waits = self.settings.rounds.on_missing == "wait"
        return self.control.stop_requested() or (waits and not needed <= server.connected.keys())

    def _look_at_sites(self, watched: WatchedSegment, server: ServerState) -> None:
        """Name sites that the segment should not wait for, and end it early when another site waits to join."""
        segments = self._session.sites_in_segments()
        if segments is None:
            return
        inside = {site for site, running in segments.items() if watched.id in running}
        left = {site for site in watched.seen - inside if site in segments or site not in server.connected}
        if left - watched.gone:
            self.control.say_gone(watched.id, watched.gone | left)
            watched.gone |= left
        watched.seen |= inside
        outside = (segments.keys() & self.settings.sites.keys()) - inside
        joining = {site for site in outside if self._left_out.ready(site) and self._waited.ready(site)}
        if watched.settled and joining:
            for site in joining:
                self._waited.tried(site)
            self.control.request_segment_end()

    def _pass_on_events(self) -> None:
        for event in self._tail.new():
            self._show(event)

    def _show(self, event: Event) -> None:
        """Pass an event on, ignoring a full disk: the view may write to it."""
        try:
            self._on_event(event)
        except OSError as error:
            if not is_disk_full(error):
                raise

    def _why_unwritten(self, error: OSError) -> str:
        return disk_full_message(error, self.run_folder.path) if is_disk_full(error) else str(error)

    def _why_unreached(self, error: NotConnectedError) -> str:
        """Why the server cannot be reached: it is on this machine, whose disk may be full."""
        if is_disk_full(error):
            return disk_full_message(error, self.run_folder.path)
        return f"the server cannot be reached: {error.why}"

    def _judge(self, watched: WatchedSegment) -> None:
        """Decide after a segment: a permanent error ends the run; segments without progress lengthen the pauses."""
        outcome = read_json(self.control.outcome)
        outcome = outcome if outcome.get("job") == watched.id else {}
        if outcome.get("kind") == "error":
            self._say("failed", str(outcome["what"]), job=None)
            error = RunError(
                str(outcome["what"]),
                code="segment-failed",
                where=str(outcome.get("where", "")),
                why=str(outcome.get("why", "")),
                fix=str(outcome.get("fix", "")) or "See the log of the job at the server.",
            )
            error.code = str(outcome.get("code") or error.code)  # that of the job's own error
            raise error
        rounds_done, _ = self._needed()
        progressed = self._rounds_before is None or rounds_done > self._rounds_before
        self._idle_segments = 0 if progressed else self._idle_segments + 1
        self._waiting_since = time.monotonic()
        why = str(outcome.get("what", ""))
        if not outcome and not progressed:
            why = self._suspect(watched)
        elif progressed:
            for site in watched.seen - watched.gone:
                self._left_out.reset(site)
                self._waited.reset(site)
        self._say("waiting", why, job=None)
        if self._idle_segments > 1 and not self.control.finished.exists():
            time.sleep(min(2.0 ** (self._idle_segments - 1), _LONGEST_PAUSE))

    def _suspect(self, watched: WatchedSegment) -> str:
        """The engine ended the segment: one site that cannot start its process is enough for that."""
        ended = "the last segment ended before a round was done"
        if short := low_disk_message(self.run_folder.path):  # the segment itself could not record it
            return f"{ended}: {short}"
        absent = sorted(self._invited - watched.seen)
        if not absent or not watched.seen:  # no site was seen: it ended before the sites could be asked
            return ended
        for site in absent:
            self._left_out.tried(site)
        return f"{ended}; {', '.join(absent)} never came into it"

    def _say(self, state: str, why: str, **facts: Any) -> None:
        """Keep `driver.json` current."""
        self._state |= {"state": state, "why": why, "updated": time.time(), **facts}
        with contextlib.suppress(OSError):  # a full disk must not end the driver
            write_atomically(self.control.driver, sealed_json(self._state))
        self._show(Event("driver", dict(self._state), time.time()))
