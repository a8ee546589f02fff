"""A federation that starts from another run's model: the server has it, the sites receive it, the bits are the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from panorgan.config import Experiment
from panorgan.federation.start_settings import weights_hash
from panorgan.workflows.execute import train
from panorgan.workflows.run import Run

OLD = ["spleen", "kidney_left", "kidney_right"]


@pytest.fixture(scope="module")
def first(experiment_with, tmp_path_factory) -> Run:
    """Of the organs of the new federation it knows three, in other rows."""
    content = experiment_with(training={"rounds": 1, "validate_every": 1}).model_dump()
    sites = {name: site for name, site in content["sites"].items() if name != "north"}
    old = experiment_with().model_validate({**content, "sites": sites, "vocabulary": OLD})
    return train(old, tmp_path_factory.mktemp("first"))


@pytest.fixture(scope="module")
def agreed(first, experiment_with) -> dict[str, Experiment]:
    start = {"rounds": 1, "validate_every": 1, "start_from": str(first.path)}
    return {name: experiment_with(method={"name": name}, training=start) for name in ("fedavg", "ufps")}


@pytest.fixture(scope="module")
def networked_runs(loopback, agreed) -> dict[str, Path]:
    return loopback.run_all({f"run-start-{name}": experiment for name, experiment in agreed.items()})


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "ufps"])
def test_it_starts_from_another_runs_model(method, first, agreed, networked_runs, loopback, tmp_path):
    run = networked_runs[f"run-start-{method}"]
    simulated = train(agreed[method], tmp_path / "simulated")

    networked = load_file(run / "model" / "model.safetensors")
    alone = load_file(simulated.model_folder / "model.safetensors")
    assert networked.keys() == alone.keys()
    assert all(torch.equal(networked[key], alone[key]) for key in alone)
    for folder in (run, simulated.path):
        event = next(event for event in Run(folder).events if event["event"] == "start_from")
        assert event["sha256"] == weights_hash(first.model_folder)
        assert (event["organs"], event["fresh_organs"]) == (OLD, ["liver"])
    for kit in loopback.site_kits.values():  # the hospital reads the hash in what it approves, and no folder
        approved = yaml.safe_load(kit.experiment.read_text())["training"]["start_from"]
        assert approved["sha256"] == weights_hash(first.model_folder)
        assert "folder" not in approved
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["experiment"]["training"]["start_from"]["sha256"] == weights_hash(first.model_folder)
