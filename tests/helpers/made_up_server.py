"""A server's kit whose server is made up, and a clock that moves with every sleep: for tests of the driver."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from kit_making import EXPERIMENT

from panorgan.deployment.control import Control
from panorgan.deployment.drive import Driver
from panorgan.deployment.folders import ServerKit
from panorgan.federation.checkpoint import Checkpoints, CoordinatorState
from panorgan.federation.transports.nvflare.session import JobState, NotConnectedError, SystemState

SITES = ("east", "north", "west")


class Clock:
    """Time passes with every sleep. `then` is called after every sleep; too many of them end the test."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.then: Callable[[], None] = lambda: None
        self._sleeps = 0

    def monotonic(self) -> float:
        return self.now

    time = monotonic

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self._sleeps += 1
        assert self._sleeps < 500, "the driver goes on for ever"
        self.then()


class MadeUpServer:
    """Stands where the connection to the server stands. A test sets what is connected and how jobs are doing."""

    def __init__(self) -> None:
        self.connected = set(SITES)
        self.reachable = True
        self.status: dict[str, str] = {}
        self.inside: dict[str, set[str]] = {}
        self.invited: list[list[str]] = []
        self.mandatory: list[list[str]] = []
        self.aborted: list[str] = []
        self.kept_jobs: list[int] = []
        self.on_submit: Callable[[str], None] = lambda job: None

    def _answer(self) -> None:
        if not self.reachable:
            raise NotConnectedError("The server does not answer.", why="it is down")

    def look(self) -> SystemState:
        self._answer()
        running = frozenset(job for job, status in self.status.items() if status == "RUNNING")
        return SystemState("since noon", dict.fromkeys(self.connected, 0.0), running)

    def queued_jobs(self) -> list[str]:
        self._answer()
        return [job for job, status in self.status.items() if status == "SUBMITTED"]

    def job(self, job: str) -> JobState:
        self._answer()
        return JobState(self.status[job])

    def submit(self, folder: Path) -> str:
        self._answer()
        meta = json.loads((folder / "meta.json").read_text())
        self.invited.append(meta["deploy_map"]["app"][1:])
        self.mandatory.append(meta["mandatory_clients"])
        job = f"job-{len(self.invited)}"
        self.status[job] = "SUBMITTED"
        self.on_submit(job)
        return job

    def forget_jobs(self, keep: int) -> int:
        self._answer()
        self.kept_jobs.append(keep)
        return 0

    def abort(self, job: str) -> bool:
        self.aborted.append(job)
        self.status[job] = "FINISHED:ABORTED"
        return True

    def sites_in_jobs(self) -> dict[str, set[str]]:
        self._answer()
        running = {job for job, status in self.status.items() if status == "RUNNING"}
        return {site: {job for job in running if site in self.inside.get(job, set())} for site in self.connected}

    def close(self) -> None:
        """Nothing is open."""


class Federation:
    """A server's kit on disk, its made-up server, and the driver's time."""

    def __init__(self, folder: Path, clock: Clock, server: MadeUpServer) -> None:
        self.kit, self.clock, self.server = ServerKit(folder), clock, server
        self.control = Control(folder / "run" / "control")
        self.checkpoints = Checkpoints(folder / "run" / "checkpoints")
        self.reported: list[dict[str, Any]] = []
        self.kit.local.mkdir(parents=True)
        content = EXPERIMENT.model_dump(mode="json", exclude={"hardware"})
        self.kit.experiment.write_text(yaml.safe_dump(content))
        self.write_settings()

    def write_settings(self, on_missing: str = "wait", **changes: Any) -> None:
        content = {
            "federation": "pilot",
            "coordinator": "ada@example.org",
            "host": "localhost",
            "port": 8443,
            "sites": {name: {} for name in SITES},
            "rounds": {"on_missing": on_missing},
            "experiment_fingerprint": EXPERIMENT.fingerprint(),
        }
        self.kit.settings.write_text(yaml.safe_dump({**content, **changes}))

    def save_round(self, number: int, sites: tuple[str, ...] = SITES) -> None:
        """The coordinator has done so many rounds."""
        facts = {site: {"train_cases": 1, "annotated": {}} for site in sites}
        self.checkpoints.save(CoordinatorState({}, rounds_done=number, sites=facts))

    def finish(self, without: tuple[str, ...] = ()) -> None:
        self.control.folder.mkdir(parents=True, exist_ok=True)
        self.control.finished.write_text(json.dumps({"rounds": 1, "sites": [], "without": list(without)}))

    def drive(self) -> None:
        self.control.folder.mkdir(parents=True, exist_ok=True)
        Driver(self.kit, lambda event: self.reported.append(dict(event.facts))).run()

    def said(self, state: str) -> list[str]:
        """Why the driver was in a state, each reason once."""
        return list(dict.fromkeys(facts["why"] for facts in self.reported if facts.get("state") == state))


def at(clock: Clock, *steps: Callable[[], None]) -> None:
    """One step after every sleep, in this order, and nothing any more after the last."""
    left = list(steps)
    clock.then = lambda: left.pop(0)() if left else None
