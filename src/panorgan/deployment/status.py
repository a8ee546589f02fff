"""The state of a federation, read from the run folder: what happened, and what is running.

Three sources, each of which may be missing or old. `events.jsonl` is the history and always true. `control/job.json`
is the current round, rewritten by the job that runs it. `control/driver.json` is the driver's (`start`) report: its own
state and the connected sites.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from panorgan.config import load_agreement
from panorgan.deployment.control import Control, read_json
from panorgan.deployment.folders import ServerKit
from panorgan.deployment.settings import CoordinatorFile
from panorgan.deployment.site_status import Driver, Known, SiteStatus, read_job, sites_now
from panorgan.deployment.status_warnings import status_warnings
from panorgan.errors import PanorganError
from panorgan.federation.events import Event, read_events
from panorgan.federation.failures import MEANING
from panorgan.workflows.pace import Pace, time_left
from panorgan.workflows.run import Run

RunState = Literal["new", "waiting", "running", "silent", "interrupted", "stopped", "failed", "finished"]

_LAST_TROUBLES = 50
_RECENT_EVENTS = 12


@dataclass(frozen=True)
class Trouble:
    """A refused answer, or a failure that a site reported. In older logs a refusal has no code."""

    time: float
    number: int
    site: str
    reason: str
    why: str = ""
    code: str = ""


@dataclass(frozen=True)
class Validation:
    """The newest scores: mean Dice per structure over the sites that annotate it."""

    number: int
    mean: float
    structures: Mapping[str, float]
    best: float | None = None
    best_round: int | None = None


@dataclass(frozen=True)
class FederationStatus:
    """Everything `panorgan federation status` shows.

    `number` is the current round, or the next one, counted over all stages; `task` the current request to the sites
    (empty between rounds). `eta_seconds` counts from `time`. `bytes_*` are messages of the whole run, `last_bytes_*`
    of the last round. `refusals` and `failures` are the newest ones, the counts those of the whole run. `warnings` are
    about upcoming problems.
    """

    federation: str
    experiment: str
    method: str
    time: float
    state: RunState
    why: str
    advice: str
    stage: str = ""
    task: str = ""
    number: int = 1
    rounds_done: int = 0
    total: int | None = None
    since: float | None = None
    round_seconds: float | None = None
    eta_seconds: float | None = None
    segment: int | None = None
    job: str = ""
    updated: float | None = None
    sites: tuple[SiteStatus, ...] = ()
    validation: Validation | None = None
    bytes_sent: int = 0
    bytes_received: int = 0
    last_bytes_sent: int = 0
    last_bytes_received: int = 0
    refusals: tuple[Trouble, ...] = ()
    refusal_count: int = 0
    failures: tuple[Trouble, ...] = ()
    failure_count: int = 0
    recent: tuple[Event, ...] = ()
    warnings: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        content = asdict(self)
        content["recent"] = [{"time": event.time, "event": event.kind, **_short(event.facts)} for event in self.recent]
        return content


def read_status(kit: ServerKit, now: float | None = None) -> FederationStatus:
    """Read the run folder. Starts nothing, asks no other process, and works while others write."""
    from panorgan.deployment.kit_files import load_coordinator_file

    return status_of(kit, load_coordinator_file(kit), time.time() if now is None else now)


def status_of(kit: ServerKit, settings: CoordinatorFile, now: float) -> FederationStatus:
    """The same with settings that are already loaded."""
    events = list(read_events(Run(kit.run(settings)).events_file))
    control = Control(kit.control(settings))
    driver = Driver.read(control, now)
    done = _rounds(events)
    last = done[max(done)].facts if done else {}
    number = max(done, default=0) + 1
    ended = any(event.kind == "finished" for event in events)
    state, why, advice = _run_state(kit, driver, bool(events), ended)
    if state == "finished":
        advice = f"The model is in {Run(kit.run(settings)).model_folder}"
    job = read_job(control, driver, events, number) if state in ("running", "silent") else {}
    delivered = frozenset(read_json(control.delivered).get("sites", ()))
    name, method, planned = _plan(kit)
    total = last.get("total") or job.get("total") or planned
    pace = Pace.of(events)
    refusals, failures = _troubles(events, "refused"), _troubles(events, "failed")
    running = now - done[number - 1].time if state == "running" and done else None
    return FederationStatus(
        federation=settings.federation,
        experiment=name,
        method=method,
        time=now,
        state=state,
        why=why,
        advice=advice,
        stage=str(job.get("stage") or last.get("stage", "")),
        task=str(job.get("kind", "")),
        number=min(number, total) if total else number,
        rounds_done=number - 1,
        total=total,
        since=job.get("since"),
        round_seconds=pace.round,
        eta_seconds=time_left(pace, max(total - number + 1, 0), settings.rounds.per_segment, running)
        if total
        else None,
        segment=driver.segment,
        job=driver.job,
        updated=driver.updated,
        sites=sites_now(settings, Known(events, driver, job, number, delivered)),
        validation=_validation(done),
        bytes_sent=sum(event.facts.get("bytes_sent", 0) for event in done.values()),
        bytes_received=sum(event.facts.get("bytes_received", 0) for event in done.values()),
        last_bytes_sent=last.get("bytes_sent", 0),
        last_bytes_received=last.get("bytes_received", 0),
        refusals=tuple(refusals[-_LAST_TROUBLES:]),
        refusal_count=len(refusals),
        failures=tuple(failures[-_LAST_TROUBLES:]),
        failure_count=len(failures),
        recent=tuple(events[-_RECENT_EVENTS:]),
        warnings=status_warnings(kit, settings, now),
    )


# -- the files -----------------------------------------------------------------------------------------------------


def _plan(kit: ServerKit) -> tuple[str, str, int | None]:
    """Name, method and number of rounds of the experiment; a damaged file does not prevent the status."""
    try:
        agreement = load_agreement(kit.experiment)
    except PanorganError:
        return "", "", None
    stages = agreement.build_method().stages(agreement.training.rounds)
    return agreement.name, str(agreement.method["name"]), sum(stage.rounds for stage in stages)


def _rounds(events: Sequence[Event]) -> dict[int, Event]:
    """Finished rounds by number; a round repeated after a kill counts once."""
    return {int(event.facts["number"]): event for event in events if event.kind == "round"}


# -- derived -------------------------------------------------------------------------------------------------------


def _run_state(kit: ServerKit, driver: Driver, begun: bool, ended: bool) -> tuple[RunState, str, str]:
    """State of the run, why, and what to do about it."""
    start = f"panorgan federation start {kit.path}"
    if ended:
        return "finished", "", ""
    if not driver.state:
        if begun:
            return "interrupted", "the driver is not running", f"Continue with: {start}"
        return "new", "nothing has been started", f"Start it with: {start}"
    if driver.state == "stopped":
        return "stopped", driver.why, f"Continue with: {start}"
    if driver.state == "failed":
        return "failed", driver.why, f"Fix that, then continue with: {start}"
    if driver.state == "finished":
        return "finished", driver.why, ""
    if not driver.alive:
        return "interrupted", "the driver is not running", f"Continue with: {start}"
    if not driver.fresh:
        look = "It may be stuck: check its output, or stop it with Ctrl-C and start it again."
        return "silent", "the driver has not reported for a while", look
    return ("waiting" if driver.state == "waiting" else "running"), driver.why, ""


def _validation(done: Mapping[int, Event]) -> Validation | None:
    for number in sorted(done, reverse=True):
        scores = done[number].facts.get("validation") or {}
        means = [statistics.fmean(own.values()) for own in scores.values() if own]
        if not means:
            continue
        found: dict[str, list[float]] = {}
        for own in scores.values():
            for structure, value in own.items():
                found.setdefault(structure, []).append(value)
        best = done[max(done)].facts.get("best") or {}
        return Validation(
            number=number,
            mean=statistics.fmean(means),
            structures={structure: statistics.fmean(values) for structure, values in sorted(found.items())},
            best=best.get("dice"),
            best_round=int(best["round"]) if "round" in best else None,
        )
    return None


def _troubles(events: Sequence[Event], kind: str) -> list[Trouble]:
    found = []
    for event in events:
        if event.kind == kind:
            facts, code = event.facts, str(event.facts.get("code", ""))
            reason, why = facts.get("reason") or code, facts.get("why") or MEANING.get(code, "")
            number, site = int(facts.get("number") or 0), str(facts.get("site", ""))
            found.append(Trouble(event.time, number, site, reason, why, code))
    return found


def _short(facts: Mapping[str, Any]) -> dict[str, Any]:
    """An event without its long parts, which are in the file: the plan, and each site's numbers."""
    kept = {key: value for key, value in facts.items() if key not in ("plan", "validation")}
    return {key: sorted(value) if key == "sites" else value for key, value in kept.items()}
