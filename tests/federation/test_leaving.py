"""Sites that leave for good, and what a late joiner does to the best round."""

from __future__ import annotations

import torch
from federations import make_coordinator, make_workers

from panorgan.federation.settings import Patience
from panorgan.federation.transports.local import LocalTransport

WAIT = Patience(on_missing="wait")


def test_a_site_that_left_is_not_waited_for_and_what_it_taught_stays(tiny, tmp_path):
    """The operator takes it off the list; with `wait` the run goes on without it."""
    experiment = tiny(method={"name": "solo"}, training={"rounds": 3, "validate_every": 1})
    workers = make_workers(experiment, tmp_path)
    first = make_coordinator(experiment, tmp_path / "server", LocalTransport(workers), patience=WAIT)
    first.run(2)
    learned = {key: value.clone() for key, value in first.state.weights.items() if "site-north" in key}

    rest = LocalTransport({"south": workers["south"]})
    again = make_coordinator(experiment, tmp_path / "server", rest, patience=WAIT, listed=frozenset({"south"}))
    assert again.members == ["south"]
    again.run()
    assert again.finished
    assert learned
    assert all(torch.equal(again.state.weights[key], value) for key, value in learned.items())
    assert set(again.federation.sites) == {"north", "south"}


def test_a_round_from_before_a_late_join_is_not_the_best(tiny, tmp_path):
    """Its weights lack the newcomer's part: it could not be delivered."""
    experiment = tiny(method={"name": "solo"}, training={"rounds": 3, "validate_every": 1})
    workers = make_workers(experiment, tmp_path)
    transport = LocalTransport({"north": workers["north"]})
    coordinator = make_coordinator(experiment, tmp_path / "server", transport, awaited=("south",))
    coordinator.run(1)
    assert coordinator.state.best["round"] == 1
    coordinator.transport._workers["south"] = workers["south"]
    coordinator.run(1)
    assert coordinator.state.best["round"] == 2
    number, weights = coordinator.delivered_weights()
    assert number == 2
    assert any("site-south" in key for key in weights)
