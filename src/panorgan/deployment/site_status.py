"""What each site is doing: connections from the driver, answers from the running job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from panorgan.deployment.control import Control, read_json
from panorgan.deployment.settings import CoordinatorFile
from panorgan.federation.events import Event
from panorgan.federation.failures import MEANING
from panorgan.workflows.lock import is_locked

SiteState = Literal["unknown", "absent", "connected", "working", "answered", "missing", "failed", "refused", "done"]

STALE_SECONDS = 120.0
"""The driver rewrites its file every few seconds, and after a pause of a minute at most; later means that it hangs."""


@dataclass(frozen=True)
class SiteStatus:
    """One site. `last_seen` in seconds since 1970; `seconds` is how long its answer of this round took.

    `code` says why it was refused or failed.
    """

    name: str
    state: SiteState
    detail: str = ""
    seconds: float | None = None
    last_seen: float | None = None
    joined: bool = False
    train_cases: int | None = None
    annotated: tuple[str, ...] = ()
    code: str = ""


@dataclass(frozen=True)
class Driver:
    """The driver's last report. `fresh`: recent; `alive`: it holds its lock."""

    state: str = ""
    why: str = ""
    segment: int | None = None
    job: str = ""
    connected: Mapping[str, float] = field(default_factory=dict)
    updated: float | None = None
    fresh: bool = False
    alive: bool = False

    @classmethod
    def read(cls, control: Control, now: float) -> Driver:
        """Read its file; empty if there is none."""
        content = read_json(control.driver)
        updated = content.get("updated")
        fresh = updated is not None and now - updated < STALE_SECONDS
        locked = is_locked(control.folder)
        return cls(
            state=str(content.get("state", "")),
            why=str(content.get("why") or ""),
            segment=content.get("segment"),
            job=str(content.get("job") or ""),
            connected=dict(content.get("connected") or {}),
            updated=updated,
            fresh=fresh,
            alive=fresh if locked is None else locked,
        )


def read_job(control: Control, driver: Driver, events: Sequence[Event], number: int) -> dict[str, Any]:
    """The current request; empty if the file is about an earlier job, or a finished round.

    Every job begins with an event that names it; anything written before belongs to an earlier job.
    """
    begun = next((event for event in reversed(events) if event.kind in ("started", "resumed")), None)
    content = read_json(control.job)
    if begun is None or begun.facts.get("job") != driver.job or float(content.get("since") or 0.0) < begun.time:
        return {}
    over = content.get("kind") in ("train", "evaluate") and int(content.get("round") or 0) < number
    return {} if over else content


@dataclass(frozen=True)
class Known:
    """The input of `sites_now`: `number` is the current round, `job` the job's report about it."""

    events: Sequence[Event]
    driver: Driver
    job: Mapping[str, Any]
    number: int
    delivered: frozenset[str] = frozenset()


def sites_now(settings: CoordinatorFile, known: Known) -> tuple[SiteStatus, ...]:
    """Every site that has a kit, and every one that has joined."""
    joined: dict[str, Mapping[str, Any]] = {}
    for event in known.events:
        if event.kind == "joined":
            joined.update(event.facts.get("sites", {}))
        elif event.kind == "late_join":
            joined[str(event.facts["site"])] = event.facts
    found = []
    for name in sorted({*settings.sites, *joined}):
        state, detail, seconds, code = _state(name, known)
        if state == "absent" and name in settings.sites and settings.sites[name].joins_later and name not in joined:
            detail = "joins later"
        own = joined.get(name, {})
        found.append(
            SiteStatus(
                name=name,
                state=state,
                detail=detail,
                seconds=seconds,
                last_seen=known.driver.connected.get(name),
                joined=name in joined,
                train_cases=own.get("train_cases"),
                annotated=tuple(sorted(own.get("annotated", ()))),
                code=code,
            )
        )
    return tuple(found)


def _state(name: str, known: Known) -> tuple[SiteState, str, float | None, str]:
    """The state of a site in the current round: its answer, else its last trouble, else its connection.

    State, detail, seconds and code.
    """
    driver, job = known.driver, known.job
    if name in known.delivered:
        return "done", "", None, ""
    answered = job.get("answered") or {}
    if name in answered:
        return "answered", "", float(answered[name]), ""
    connection: SiteState = "unknown"
    if driver.alive:
        connection = "connected" if name in driver.connected else "absent"
    heard = _last_trouble(name, known.events, known.number, float(job.get("since") or 0.0))
    if heard is not None and connection != "absent":
        return heard[0], heard[1], None, heard[2]
    if name in (job.get("asked") or ()) and connection != "absent":
        return "working", str(job.get("kind", "")), None, ""
    _, detail, code = heard or ("", "", "")
    return connection, detail, None, code


def _last_trouble(
    name: str, events: Sequence[Event], number: int, since: float
) -> tuple[Literal["missing", "failed", "refused"], str, str] | None:
    """The last thing that went wrong with a site in the current round, after it was last asked.

    State, detail and code. Introductions have the number 0. A refused one counts until the site has joined, or
    answered a round.
    """
    missing = False
    for event in reversed(events):
        facts = event.facts
        if (event.kind in ("joined", "round") and name in facts.get("sites", ())) or (
            event.kind == "late_join" and facts.get("site") == name
        ):
            break
        if facts.get("number") not in (number, 0) or event.time < since:
            continue
        if event.kind == "refused" and facts.get("site") == name:
            return "refused", str(facts.get("reason", "")), str(facts.get("code", ""))
        if event.kind == "failed" and facts.get("site") == name:
            code = str(facts.get("code", ""))
            return "failed", f"{code}: {MEANING.get(code, 'unknown reason')}", code
        # A site that failed is missing as well; the failure says more.
        missing = missing or (event.kind == "missing" and name in facts.get("sites", ()))
    return ("missing", "did not answer in time", "no-answer") if missing else None
