"""A run between processes over mTLS gives the very bits of the same run in one process, for every kind of message.

Starting the processes takes most of the time, so one job does all runs, one after the other. Of methods whose messages
hold the same things one goes over the network; `PANORGAN_PARITY=all` sends all of them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from panorgan.checksums import read_json
from panorgan.config import Experiment
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
    "pipofan": "fedavg",
    "c2fnas": "fedavg",
    "conddec": "fedavg",
    "med3d": "solo",
    "condenc": "fedavg",
    "meloss": "fedavg",
    "leafdice": "fedavg",
    "fedyogi": "fedadam",
    "fedavgm": "condist",
    "moon_pl": "ufps",
    "fedalign_pl": "ufps",
    "multidecoder": "multihead",
    "multiencoder": "multihead",
    "fedasam": "fedasam_pl",
    "fedavg_pl": "ufps",
    "fedprox_pl": "ufps",
    "dodnet_pl": "ufps",
    "fedadam_pl": "ufps",
    "fedavgm_pl": "ufps",
    "feddyn_pl": "ufps",
    "fedexp_pl": "ufps",
    "fedyogi_pl": "ufps",
    "mskd": "ufps",
}
SENT = [name for name in METHODS if name not in SENDS_THE_SAME_AS or os.environ.get("PANORGAN_PARITY") == "all"]
SENT.append("everything")


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


@pytest.fixture(scope="module")
def agreed(request, experiment_with) -> dict[str, Experiment]:
    """By run, the experiment that all sites agreed on; of the methods that were chosen on the command line."""
    asking = [i for i in request.session.items if i.module is request.module and "networked_runs" in i.fixturenames]
    chosen = {item.callspec.params["method"] for item in asking}

    def experiment(method: str) -> Experiment:
        rounds = 3 if method == "ufps" else 2  # its masks go up in the second and come down in the third
        training = {"rounds": rounds, "validate_every": 2, "optimizer": {"keep_state": True}}
        return experiment_with(method={"name": method}, training=training)

    return {f"run-{method}": experiment(method) for method in SENT if method in chosen}


@pytest.fixture(scope="module")
def networked_runs(loopback, agreed) -> dict[str, Path]:
    """The folders of all runs over the network."""
    return loopback.run_all(agreed)


@pytest.mark.slow
@pytest.mark.parametrize("method", SENT)
def test_the_network_gives_the_bits_of_the_simulation(method, loopback, agreed, networked_runs, tmp_path):
    run = networked_runs[f"run-{method}"]
    assert "what" not in read_json((run / "control" / "outcome.json").read_bytes())
    simulated = train(agreed[run.name], tmp_path / "simulated")

    networked, local = (Checkpoints(folder / "checkpoints").load_latest() for folder in (run, simulated.path))
    assert networked.rounds_done == local.rounds_done >= 2
    assert networked.plan == local.plan
    assert networked.scores == local.scores
    assert networked.best == local.best
    _same_bits(networked.weights, local.weights)
    _same_bits(networked.rule.tensors, local.rule.tensors)
    _same_bits(load_file(run / "model" / "model.safetensors"), load_file(simulated.model_folder / "model.safetensors"))
    for site in loopback.site_kits:  # every hospital has the model
        model = loopback.kept_model(run.name, site)
        _same_bits(load_file(model / "model.safetensors"), load_file(run / "model" / "model.safetensors"))
        assert read_json((model / "model.json").read_bytes())["run"] == networked_run(run)


def _same_bits(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for key in first:
        assert first[key].dtype == second[key].dtype
        assert torch.equal(first[key], second[key]), key


def networked_run(run) -> str:
    return str(json.loads((run / "manifest.json").read_text())["run"])
