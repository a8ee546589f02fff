"""Sites that leave for good, and what leaving and joining do to the best round."""

from __future__ import annotations

import pytest
import torch
from federations import THREE, Meddling, make_coordinator, make_workers

from panorgan.federation.message import Message
from panorgan.federation.settings import Patience
from panorgan.federation.transports.local import LocalTransport

WAIT = Patience(on_missing="wait")
SCORED = {"rounds": 2, "validate_every": 1, "local_steps": 1}


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
    transport._workers["south"] = workers["south"]
    coordinator.run(1)
    assert coordinator.state.best["round"] == 2
    number, weights = coordinator.delivered_weights()
    assert number == 2
    assert any("site-south" in key for key in weights)


class Scores:
    """Sites say these mean Dice scores, one after the other."""

    def __init__(self, **reported: list[float]) -> None:
        self.reported = reported

    def __call__(self, site: str, kind: str, answer: bytes):
        if kind == "evaluate":
            meta = Message.from_bytes(answer).meta
            answer = Message(scalars={"dice/liver": self.reported[site].pop(0)}, meta=meta).to_bytes()
        return [(site, answer)]


def test_a_site_that_leaves_takes_its_score_out_of_the_best_round(tiny, tmp_path):
    """(0.9 + 0.5 + 0.7) / 3 = 0.7 with north, (0.6 + 0.6) / 2 = 0.6 without: not worse, but another mean."""
    experiment = tiny(phantom=THREE, training=SCORED)
    meddle = Scores(north=[0.9], south=[0.5, 0.6], west=[0.7, 0.6])
    transport = Meddling(make_workers(experiment, tmp_path), meddle)
    first = make_coordinator(experiment, tmp_path, transport)
    first.run(rounds=1)
    assert first.state.best == {"round": 1.0, "dice": pytest.approx(0.7)}

    again = make_coordinator(experiment, tmp_path, transport, listed=frozenset({"south", "west"}))
    again.run()
    assert again.state.best == {"round": 2.0, "dice": pytest.approx(0.6)}
    assert again.delivered_weights()[0] == 2


def test_the_best_round_outlives_a_restart_with_the_same_sites(tiny, tmp_path):
    """The control: who scored is part of the checkpoint."""
    experiment = tiny(phantom=THREE, training=SCORED)
    meddle = Scores(north=[0.9, 0.6], south=[0.5, 0.6], west=[0.7, 0.6])
    transport = Meddling(make_workers(experiment, tmp_path), meddle)
    make_coordinator(experiment, tmp_path, transport).run(rounds=1)
    again = make_coordinator(experiment, tmp_path, transport)
    again.run()
    assert again.state.rounds_done == 2
    assert again.state.best == {"round": 1.0, "dice": pytest.approx(0.7)}
