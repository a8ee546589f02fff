"""A server's kit with a fake engine, and a clock that moves when the driver sleeps: for tests of the driver."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from fake_engine import FakeEngine
from kit_making import EXPERIMENT

from panorgan.deployment.control import Control
from panorgan.deployment.drive import Driver, request_stop
from panorgan.deployment.folders import ServerKit
from panorgan.federation.checkpoint import Checkpoints, CoordinatorState

SITES = ("east", "north", "west")


class Clock:
    """Time passes when the driver sleeps. `then` is called after every sleep; too many of them end the test."""

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


class Federation:
    """A server's kit on disk, its fake engine, and the driver's time."""

    def __init__(self, folder: Path, clock: Clock, engine: FakeEngine) -> None:
        self.kit, self.clock, self.engine, self.server = ServerKit(folder), clock, engine, engine.server
        self.control = Control(folder / "run" / "control")
        self.checkpoints = Checkpoints(folder / "run" / "checkpoints")
        self.events: list[dict[str, Any]] = []
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

    def driver(self) -> Driver:
        self.control.folder.mkdir(parents=True, exist_ok=True)
        return Driver(self.kit, self.engine, lambda event: self.events.append(dict(event.facts)))

    def drive(self) -> None:
        self.driver().run()

    def stop(self, now: bool = False) -> str | None:
        return request_stop(self.kit, now, self.engine)

    def said(self, state: str) -> list[str]:
        """Why the driver was in a state, each reason once."""
        return list(dict.fromkeys(facts["why"] for facts in self.events if facts.get("state") == state))


def at(clock: Clock, *steps: Callable[[], None]) -> None:
    """One step after every sleep, in this order, and nothing after the last."""
    left = list(steps)
    clock.then = lambda: left.pop(0)() if left else None
