"""Checkpoints: the newest readable one wins, the best one stays, a torn write is never seen."""

from __future__ import annotations

import os

import pytest
import torch
from refusing import refused

from panorgan.errors import RunError
from panorgan.federation import files
from panorgan.federation.checkpoint import Checkpoints, CoordinatorState
from panorgan.methods.protocol import Payload


def state(rounds: int, best: dict | None = None) -> CoordinatorState:
    rule = Payload({"momentum": torch.full((2,), float(rounds))}, {"temperature": rounds / 10})
    sites = {"north": {"train_cases": 3, "annotated": {"liver": 3}}}
    return CoordinatorState({"w": torch.full((3,), float(rounds))}, rule, rounds, sites, best)


def test_round_trip(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.load_latest() is None
    checkpoints.save(state(4, {"round": 4.0, "dice": 0.5}))
    back = checkpoints.load_latest()
    assert back.rounds_done == 4
    assert torch.equal(back.weights["w"], torch.full((3,), 4.0))
    assert torch.equal(back.rule.tensors["momentum"], torch.full((2,), 4.0))
    assert back.rule.scalars == {"temperature": 0.4}
    assert back.sites == {"north": {"train_cases": 3, "annotated": {"liver": 3}}}
    assert back.best == {"round": 4.0, "dice": 0.5}


def test_keeps_two_and_the_best(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    best = None
    for rounds in range(7):
        best = {"round": float(rounds), "dice": 0.1 * rounds} if rounds in (1, 3) else best
        checkpoints.save(state(rounds, best))
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "best-00003.safetensors",
        "round-00005.safetensors",
        "round-00006.safetensors",
    ]
    latest = checkpoints.load_latest()
    assert torch.equal(checkpoints.load_best(latest).weights["w"], torch.full((3,), 3.0))


def test_the_best_is_the_latest_when_nothing_was_validated(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state(2))
    assert torch.equal(checkpoints.load_best(checkpoints.load_latest()).weights["w"], torch.full((3,), 2.0))


@pytest.mark.parametrize("best", [None, {"round": 2.0, "dice": 0.5}])
def test_an_interrupted_save_leaves_the_old_state(tmp_path, monkeypatch, best):
    """Whichever rename or link is the last to happen, the folder stays readable and its best can be loaded."""
    operations = ("replace", "link")
    for stop_at in range(4):
        folder = tmp_path / f"{stop_at}"
        checkpoints = Checkpoints(folder)
        checkpoints.save(state(1, {"round": 1.0, "dice": 0.4}))
        done = 0
        with monkeypatch.context() as patch:
            for name in operations:
                original = getattr(os, name)

                def interrupted(*arguments, original=original, stop_at=stop_at):
                    nonlocal done
                    if done == stop_at:
                        raise KeyboardInterrupt
                    done += 1
                    return original(*arguments)

                patch.setattr(files.os, name, interrupted)
            try:
                checkpoints.save(state(2, best or {"round": 1.0, "dice": 0.4}))
                finished = True
            except KeyboardInterrupt:
                finished = False
        latest = checkpoints.load_latest()
        assert latest.rounds_done == (2 if finished else 1)
        expected = latest.best["round"]
        assert torch.equal(checkpoints.load_best(latest).weights["w"], torch.full((3,), expected))
        checkpoints.save(state(2, best or {"round": 1.0, "dice": 0.4}))
        assert checkpoints.load_latest().rounds_done == 2


def test_a_damaged_newest_checkpoint_falls_back(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state(1))
    checkpoints.save(state(2))
    path = tmp_path / "round-00002.safetensors"
    path.write_bytes(path.read_bytes()[:40])
    assert checkpoints.load_latest().rounds_done == 1
    (tmp_path / "round-00001.safetensors").write_bytes(b"")
    with refused("no-readable-checkpoint", RunError) as caught:
        checkpoints.load_latest()
    assert caught.value.fix
