"""One real federation for all tests in this folder: a server and three sites as processes, on loopback, with mTLS."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from loopback import PLUGIN, Loopback

from panorgan.config import Experiment, SiteSettings, parse_experiment
from panorgan.methods import registry
from panorgan.runs.site_cases import cache_folder, site_settings

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
    with Loopback(folder, experiment_with(), hospitals) as running:
        yield running
