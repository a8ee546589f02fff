"""Hospitals with four MR sequences per case, in three layouts: one run in this process and over the network."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from channel_folders import SEQUENCES, sequences_of, write_sequences
from loopback import drive_to_its_end
from safetensors.torch import load_file

from panorgan.checksums import read_json
from panorgan.config import parse_experiment
from panorgan.workflows.execute import train
from panorgan.workflows.model_bundle import load_model

LAYOUTS = {"north": "nnunet", "east": "msd", "south": "csv"}
DECATHLON = {"T1w": "t1", "t1gd": "t1ce", "T2w": "t2"}  # FLAIR is called so, in capitals


@pytest.fixture
def with_sequences(loopback, hospitals, tmp_path) -> Iterator[dict]:
    """The hospitals have four sequences per case, for as long as a test takes."""
    sites = {}
    for name, layout in LAYOUTS.items():
        folder = write_sequences(hospitals[name].folder, tmp_path / name, layout)
        channels = DECATHLON if layout == "msd" else {}
        sites[name] = hospitals[name].model_copy(update={"folder": folder, "channels": channels})
        loopback.fill_in(name, data=sites[name].as_json())
    yield {name: site.as_json() for name, site in sites.items()}
    for name in LAYOUTS:
        loopback.fill_in(name, data=hospitals[name].as_json())


@pytest.mark.slow
def test_four_channels_train_the_same_model_over_the_network(loopback, experiment_with, with_sequences, tmp_path):
    content = experiment_with(training={"rounds": 1, "validate_every": 1}).model_dump()
    content |= {"sites": with_sequences, "channels": SEQUENCES}
    content["network"]["input_channels"] = 4
    content["plan"]["intensity"] = "pooled"
    experiment = parse_experiment(content)
    run = loopback.agree_on(experiment, "run-channels")
    drive_to_its_end(loopback.server_kit)
    simulated = train(experiment, tmp_path / "simulated")

    networked = load_file(run / "model" / "model.safetensors")
    alone = load_file(simulated.model_folder / "model.safetensors")
    assert networked.keys() == alone.keys()
    assert all(torch.equal(networked[key], alone[key]) for key in alone)
    assert {value.shape[1] for key, value in alone.items() if key.startswith("encoder.0.conv1")} == {4}
    for kit in loopback.site_kits.values():
        assert read_json((kit.model / "model.json").read_bytes())["input_channels"] == list(SEQUENCES)
        model = load_model(kit.model, "cpu")
        scan = np.stack(sequences_of(np.random.default_rng(0).integers(-200, 300, (20, 18, 16))))
        assert model.predict(scan, np.diag([12.0, 12, 12, 1])).labels.shape == (20, 18, 16)
