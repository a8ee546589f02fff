"""A run between processes over mTLS gives the very bits of the same run in one process, for every method."""

from __future__ import annotations

import json

import pytest
import torch
from loopback import drive_to_its_end
from safetensors.torch import load_file

from panorgan.federation.checkpoint import Checkpoints
from panorgan.methods.registry import methods
from panorgan.runs.execute import train

# Pooled methods put all data in one place: on a network there is nothing to compare them with.
METHODS = sorted(name for name, method in methods().items() if not method.pooled)


@pytest.mark.slow
@pytest.mark.parametrize("method", [*METHODS, "everything"])
def test_the_network_gives_the_bits_of_the_simulation(method, loopback, experiment_with, tmp_path):
    experiment = experiment_with(
        method={"name": method}, training={"rounds": 2, "validate_every": 2, "optimizer": {"keep_state": True}}
    )
    run = loopback.agree_on(experiment, f"run-{method}")
    drive_to_its_end(loopback.server_kit)
    simulated = train(experiment, tmp_path / "simulated").folder

    networked, local = (Checkpoints(folder / "checkpoints").load_latest() for folder in (run, simulated.path))
    assert networked.rounds_done == local.rounds_done >= 2
    assert networked.plan == local.plan
    assert networked.scores == local.scores
    assert networked.best == local.best
    _same_bits(networked.weights, local.weights)
    _same_bits(networked.rule.arrays, local.rule.arrays)
    _same_bits(load_file(run / "model" / "model.safetensors"), load_file(simulated.model / "model.safetensors"))
    for kit in loopback.site_kits.values():  # every hospital has the model
        _same_bits(load_file(kit.model / "model.safetensors"), load_file(run / "model" / "model.safetensors"))
        assert json.loads((kit.model / "model.json").read_text())["run"] == networked_run(run)


def _same_bits(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for key in first:
        assert first[key].dtype == second[key].dtype
        assert torch.equal(first[key], second[key]), key


def networked_run(run) -> str:
    return str(json.loads((run / "manifest.json").read_text())["run"])
