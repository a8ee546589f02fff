"""One real federation for all tests in this folder: a server and three sites as processes, on loopback, with mTLS."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from capture import Capture, listening, streams, why_not
from intruders import Knock, foreign_kit, knock, member_kit, posing_as, running, text_of, wait_for
from loopback import PLUGIN, Loopback, drive_to_its_end

from panorgan.config import Experiment, SiteSettings, parse_experiment
from panorgan.deployment.folders import SiteKit
from panorgan.federation.certificates import Credentials
from panorgan.federation.events import Event
from panorgan.methods import registry
from panorgan.workflows.site_cases import cache_folder, site_settings

SITES = [
    {"name": "east", "annotated": ["spleen"], "cases": 4, "spacing_mm": [12, 12, 12]},
    {"name": "north", "annotated": ["liver"], "cases": 5, "spacing_mm": [12, 12, 12]},
    {"name": "south", "annotated": ["kidney"], "cases": 4, "spacing_mm": [11, 11, 13]},
]
# A pooled plan: what the sites measure crosses the network, and everybody must come to the same plan.
PLAN = {"spacing_mm": "pooled", "window_hu": "pooled"}


@pytest.fixture(scope="session")
def everything_method() -> Iterator[None]:
    """The test method, as an installed package; forgotten afterwards, so that no other test meets it."""
    sys.path.insert(0, str(PLUGIN))
    registry.methods()
    __import__("everything_method")
    yield
    registry._registered.pop("everything")
    sys.modules.pop("everything_method")
    sys.path.remove(str(PLUGIN))


@pytest.fixture(scope="session")
def hospitals(tiny_content: Callable[..., dict[str, Any]]) -> dict[str, SiteSettings]:
    """Three folders with data, as hospitals have them."""
    generated = parse_experiment(tiny_content(phantom={"sites": SITES}))
    settings = site_settings(generated, cache_folder(), lambda what, done, total: None)
    return {name: site.model_copy(update={"withheld": None}) for name, site in settings.items()}


@pytest.fixture(scope="session")
def experiment_with(
    tiny_content: Callable[..., dict[str, Any]], hospitals: dict[str, SiteSettings], everything_method: None
) -> Callable[..., Experiment]:
    """The experiment on the hospitals' folders, with changes."""
    sites = {name: site.as_json() for name, site in hospitals.items()}

    def make(**changes: Any) -> Experiment:
        content = tiny_content(**{"plan": PLAN, "hardware": {"device": "cpu", "threads": 1}, **changes})
        del content["phantom"]
        return parse_experiment({**content, "sites": sites})

    return make


@pytest.fixture(scope="session")
def loopback(
    tmp_path_factory: pytest.TempPathFactory,
    hospitals: dict[str, SiteSettings],
    experiment_with: Callable[..., Experiment],
) -> Iterator[Loopback]:
    """Server and sites, running."""
    folder: Path = tmp_path_factory.mktemp("federation")
    with Loopback(folder, experiment_with(), hospitals, queues=True) as running:
        yield running


@dataclass(frozen=True)
class DisturbedRun:
    """A run during which everybody who should not came and tried.

    `captured`: what went over loopback meanwhile, by ports. `ports`: those that anybody of the federation listened on.
    """

    experiment: Experiment
    folder: Path
    knocks: dict[str, Knock]
    members_connected: set[str]
    intruders: dict[str, SiteKit]
    captured: dict[tuple[int, int], bytes] | None
    ports: set[int]
    capture: Capture | None


@pytest.fixture(scope="session")
def disturbed_run(
    tmp_path_factory: pytest.TempPathFactory, loopback: Loopback, experiment_with: Callable[..., Experiment]
) -> DisturbedRun:
    """One whole run, with intruders at the door and an eavesdropper."""
    folder = tmp_path_factory.mktemp("intruders")
    training = {"rounds": 2, "validate_every": 2, "optimizer": {"keep_state": True}}
    experiment = experiment_with(method={"name": "fedavg"}, training=training)
    run = loopback.agree_on(experiment, "run-disturbed")
    intruders = _intruders(loopback, experiment, folder)
    foreign = Credentials.of_site(intruders["foreign"].startup)
    port = loopback.settings.server.port
    knocks: dict[str, Knock] = {}
    connected: set[str] = set()

    def on_event(event: Event) -> None:
        if event.kind == "joined":  # in the middle of the run
            knocks["plain text"] = knock(port, encrypted=False)
            knocks["no certificate"] = knock(port)
            knocks["foreign certificate"] = knock(port, foreign)
            ports.update(listening(own))
        connected.update(event.facts.get("connected", {}))

    for kit in (loopback.server_kit, *loopback.site_kits.values()):
        wait_for(lambda log=kit.path / "log.txt": "created backbone internal listener" in text_of(log))
    own = [process.pid for process in loopback.processes.values()]
    ports = listening(own)
    capture = None if why_not() else Capture(folder / "loopback.pcap", ports)
    with capture or nullcontext(), running(*intruders.values()):
        # They are there before the run begins, and stay until it has ended.
        wait_for(lambda: "turned away mallory" in text_of(loopback.server_kit.turned_away))
        wait_for(lambda: "New client mallory" in text_of(loopback.server_kit.path / "log.txt"))
        drive_to_its_end(loopback.server_kit, on_event)
    captured = streams(capture.path) if capture else None
    return DisturbedRun(experiment, run, knocks, connected, intruders, captured, ports, capture)


def _intruders(loopback: Loopback, experiment: Experiment, folder: Path) -> dict[str, SiteKit]:
    """Sites that run NVFlare from kits that another authority made, or that are not theirs."""
    foreign = foreign_kit(loopback, experiment.agreement(), "north", folder / "foreign")
    member = member_kit(loopback, "mallory", folder / "member")
    posing = posing_as(member, "mallory", "north", folder / "posing")
    return {"foreign": foreign, "member": member, "posing": posing}
