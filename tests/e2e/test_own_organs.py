"""Organs that the catalogue does not know go over the network: in the agreement, the messages and the model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from loopback import drive_to_its_end
from safetensors.torch import load_file

from panorgan.anatomy.catalogue import remove_added
from panorgan.checksums import read_json
from panorgan.config import parse_experiment
from panorgan.workflows.execute import train
from panorgan.workflows.model_bundle import load_model

NAMES = {"north": {"liver": "zorbium"}, "east": {"spleen": "glimmer"}}


@pytest.fixture
def named_otherwise(loopback, hospitals) -> Iterator[dict]:
    """The hospitals call two organs by names of their own, for as long as a test takes."""
    sites = {name: site.model_copy(update={"labels": NAMES.get(name, {})}) for name, site in hospitals.items()}
    for name in NAMES:
        loopback.fill_in(name, data=sites[name].as_json())
    yield {name: site.as_json() for name, site in sites.items()}
    for name in NAMES:
        loopback.fill_in(name, data=hospitals[name].as_json())
    remove_added()


@pytest.mark.slow
def test_own_organs_reach_every_hospital(loopback, experiment_with, named_otherwise, tmp_path):
    content = experiment_with(method={"name": "multihead"}, training={"rounds": 1, "validate_every": 1}).model_dump()
    organs = {"zorbium": {"title": "The zorbium"}, "glimmer": {"parent": "kidney", "kind": "tumour"}}
    vocabulary = ["zorbium", "glimmer", "kidney_left", "kidney_right"]
    content |= {"organs": organs, "vocabulary": vocabulary, "sites": named_otherwise}
    experiment = parse_experiment(content)
    run = loopback.agree_on(experiment, "run-own-organs")
    drive_to_its_end(loopback.server_kit)
    simulated = train(experiment, tmp_path / "simulated")

    networked = load_file(run / "model" / "model.safetensors")
    alone = load_file(simulated.model_folder / "model.safetensors")
    assert networked.keys() == alone.keys()
    assert all(torch.equal(networked[key], alone[key]) for key in alone)
    assert any(key.startswith("heads.zorbium.") for key in alone)
    remove_added()
    for kit in loopback.site_kits.values():
        assert list(read_json((kit.model / "model.json").read_bytes())["own_organs"]) == ["glimmer", "zorbium"]
        assert tuple(load_model(kit.model, "cpu").vocabulary) == experiment.vocabulary
