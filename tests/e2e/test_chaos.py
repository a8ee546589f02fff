"""Kill -9 at random moments: the run finishes, and its weights are those of the undisturbed run, bit for bit."""

from __future__ import annotations

import pytest
import torch
from loopback import Loopback
from random_kills import Chaos

from panorgan.federation.audit import verify
from panorgan.federation.checkpoint import Checkpoints
from panorgan.federation.events import read_events
from panorgan.workflows.execute import train

ROUNDS = 6


@pytest.mark.slow
def test_kills_change_nothing(hospitals, experiment_with, tmp_path):
    """The short version; benchmarks/chaos.py kills at least twenty times."""
    experiment = experiment_with(
        method={"name": "everything"},
        training={"rounds": ROUNDS, "local_steps": 15, "optimizer": {"keep_state": True}},
    )
    undisturbed = Checkpoints(train(experiment, tmp_path / "undisturbed").path / "checkpoints").load_latest()
    with Loopback(tmp_path / "federation", experiment, hospitals, per_segment=3, on_missing="wait") as federation:
        run = federation.server_kit.path / "run"
        federation.start("driver")
        chaos = Chaos(federation, seed=3, pause=(1.0, 4.0))
        # Nothing is killed before the rounds have begun: starting up is the same for all.
        assert chaos.wait_for(run / "checkpoints", 180), federation.words()
        finished = chaos.run(run / "control" / "finished.json", 4, 600, ("site", "site's job", "server", "driver"))
        assert finished, federation.words()
    assert len(chaos.kills) >= 3, "the run was over before enough could be killed"
    survived = Checkpoints(run / "checkpoints").load_latest()
    assert survived.rounds_done == undisturbed.rounds_done == ROUNDS + 1
    assert all(torch.equal(survived.weights[key], value) for key, value in undisturbed.weights.items())
    assert survived.best == undisturbed.best
    numbers = [event.facts["number"] for event in read_events(run / "events.jsonl") if event.kind == "round"]
    assert numbers == list(range(1, ROUNDS + 2)), "every round stands in the log once"
    for kit in federation.site_kits.values():
        assert verify(kit.audit_log).ok
