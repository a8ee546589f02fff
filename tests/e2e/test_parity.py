"""A run between processes over mTLS gives the very bits of the same run in one process, for every kind of message.

Starting the processes takes most of the time. So of methods whose messages hold the same things, one goes over the
network; `PANORGAN_PARITY=all` sends all of them.
"""

from __future__ import annotations

import json
import os

import pytest
import torch
from loopback import drive_to_its_end
from safetensors.torch import load_file

from panorgan.federation.checkpoint import Checkpoints
from panorgan.methods.registry import methods
from panorgan.workflows.execute import train

# Pooled methods put all data in one place, and no hospital has labels that a benchmark withholds: not on a network.
METHODS = sorted(name for name, one in methods().items() if not one.pooled and one.labels != "withheld")
SENDS_THE_SAME_AS = {
    "fedprox": "fedavg",
    "fedalign": "fedavg",
    "fedbn": "fedcrld",
    "tal": "fedavg",
    "dodnet": "fedavg",
    "meloss": "fedavg",
    "fedyogi": "fedadam",
    "fedavgm": "condist",
    "moon_pl": "ufps",
    "fedalign_pl": "ufps",
    "multidecoder": "multihead",
    "multiencoder": "multihead",
    "fedasam": "fedasam_pl",
    "fedavg_pl": "ufps",
    "fedprox_pl": "ufps",
}
CHOSEN = [name for name in METHODS if name not in SENDS_THE_SAME_AS or os.environ.get("PANORGAN_PARITY") == "all"]


@pytest.mark.parametrize(("method", "like"), SENDS_THE_SAME_AS.items())
def test_methods_that_stay_at_home_send_nothing_of_their_own(method, like):
    """Neither of their rules says what travels, but those that they inherit from; what they declare is declared."""
    own, other = methods()[method], methods()[like]
    for rule, hooks in (
        ("Site", ("update", "state", "load_state")),
        ("Server", ("broadcast", "aggregate", "expects", "state", "load_state", "delivered")),
    ):
        for hook in hooks:
            found = getattr(getattr(own, rule), hook)
            assert found.__module__ != own.__module__ or found is getattr(getattr(other, rule), hook)
    assert own.tensors.items() <= other.tensors.items()
    assert set(own.numbers) <= set(other.numbers)


@pytest.mark.slow
@pytest.mark.parametrize("method", [*CHOSEN, "everything"])
def test_the_network_gives_the_bits_of_the_simulation(method, loopback, experiment_with, tmp_path):
    rounds = 3 if method == "ufps" else 2  # its masks go up in the second and come down in the third
    experiment = experiment_with(
        method={"name": method}, training={"rounds": rounds, "validate_every": 2, "optimizer": {"keep_state": True}}
    )
    run = loopback.agree_on(experiment, f"run-{method}")
    drive_to_its_end(loopback.server_kit)
    simulated = train(experiment, tmp_path / "simulated")

    networked, local = (Checkpoints(folder / "checkpoints").load_latest() for folder in (run, simulated.path))
    assert networked.rounds_done == local.rounds_done >= 2
    assert networked.plan == local.plan
    assert networked.scores == local.scores
    assert networked.best == local.best
    _same_bits(networked.weights, local.weights)
    _same_bits(networked.rule.tensors, local.rule.tensors)
    _same_bits(load_file(run / "model" / "model.safetensors"), load_file(simulated.model_folder / "model.safetensors"))
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
