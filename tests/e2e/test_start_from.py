"""A federation that starts from another run's model: the server has it, the sites receive it, the bits are the same."""

from __future__ import annotations

import json

import pytest
import torch
import yaml
from loopback import drive_to_its_end
from safetensors.torch import load_file

from panorgan.federation.start_settings import weights_hash
from panorgan.workflows.execute import train
from panorgan.workflows.run import Run


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "ufps"])
def test_it_starts_from_another_runs_model(method, loopback, experiment_with, hospitals, tmp_path):
    """Of the organs of the new federation, the first one knew two, in other rows."""
    content = experiment_with(training={"rounds": 1, "validate_every": 1}).model_dump()
    old = experiment_with().model_validate({**content, "sites": _without(content["sites"], "north"), "vocabulary": OLD})
    first = train(old, tmp_path / "first")
    start = {"rounds": 1, "validate_every": 1, "start_from": str(first.path)}
    experiment = experiment_with(method={"name": method}, training=start)
    run = loopback.agree_on(experiment, f"run-start-{method}")
    drive_to_its_end(loopback.server_kit)
    simulated = train(experiment, tmp_path / "simulated")

    networked = load_file(run / "model" / "model.safetensors")
    alone = load_file(simulated.model_folder / "model.safetensors")
    assert networked.keys() == alone.keys()
    assert all(torch.equal(networked[key], alone[key]) for key in alone)
    for folder in (run, simulated.path):
        event = next(event for event in Run(folder).events if event["event"] == "start_from")
        assert event["sha256"] == weights_hash(first.model_folder)
        assert (event["organs"], event["fresh_organs"]) == (OLD, ["liver"])
    for kit in loopback.site_kits.values():  # the hospital reads the hash in what it approves, and no folder
        agreed = yaml.safe_load(kit.experiment.read_text())["training"]["start_from"]
        assert agreed["sha256"] == weights_hash(first.model_folder)
        assert "folder" not in agreed
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["experiment"]["training"]["start_from"]["sha256"] == weights_hash(first.model_folder)


OLD = ["spleen", "kidney_left", "kidney_right"]


def _without(sites: dict, name: str) -> dict:
    return {key: site for key, site in sites.items() if key != name}
