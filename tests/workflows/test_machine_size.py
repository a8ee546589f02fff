"""What `panorgan plan` proposes, for machines and data of several sizes."""

from __future__ import annotations

import math

import pytest
import torch

from panorgan.anatomy import Vocabulary
from panorgan.config import parse_experiment
from panorgan.methods.protocol import Federation, SiteInfo
from panorgan.networks import UNetSettings
from panorgan.workflows import machine_size
from panorgan.workflows.machine_size import Data, propose
from panorgan.workflows.memory import training_memory
from panorgan.workflows.rehearsal import Speed

CPU = torch.device("cpu")
SITES = {"north": SiteInfo("north", 10, {"liver": 10}), "south": SiteInfo("south", 5, {"spleen": 5})}
CT = Data((250.0, 200.0, 100.0), (1.5, 1.5, 3.0), SITES, 4, 6)
HEART = Data((150.0, 150.0, 10.0), (1.5, 1.5, 10.0), SITES, 4, 6)
FEW_SLICES = Data((150.0, 150.0, 6.0), (1.5, 1.5, 10.0), SITES, 4, 6)
SMALL = Data((35.0, 50.0, 35.0), (1.0, 1.0, 1.0), SITES, 4, 6)


def experiment(**changes):
    content = {"vocabulary": ["liver", "spleen"], "sites": {name: {"folder": "/nowhere"} for name in SITES}}
    return parse_experiment({**content, **changes})


@pytest.fixture
def machine(monkeypatch):
    """A machine on which a voxel of a patch costs so many seconds at a width of 8, and the square of that wider."""

    def make(seconds_per_voxel: float) -> None:
        def rehearsed(experiment, data, device):
            sampling, width = experiment.training.sampling, experiment.network.features[0]
            voxels = math.prod(sampling.patch_size) * sampling.batch_size
            step = seconds_per_voxel * voxels * (width / 8) ** 2
            return Speed(step, step / 6)

        monkeypatch.setattr(machine_size, "_rehearsed", rehearsed)

    return make


def proposal(found, data=CT, given=(), minutes=480.0, free=64e9):
    return propose(found, lambda name: name in given, data, CPU, minutes, free)


def test_a_fast_machine_gets_the_large_network(machine):
    machine(1e-10)
    found = proposal(experiment())
    assert found.settings["network.features"][:2] == [32, 64]
    assert math.prod(found.settings["training.sampling.patch_size"]) > 100**3
    assert found.settings["training.rounds"] == 200
    assert found.fits


def test_a_slow_machine_gets_a_smaller_one_that_takes_no_longer(machine):
    machine(1e-7)
    long, short = proposal(experiment()), proposal(experiment(), minutes=60)
    for found in (long, short):
        assert found.fits
        assert found.settings["training.rounds"] >= 60
    costs = [
        math.prod(found.settings["training.sampling.patch_size"]) * found.settings["network.features"][0] ** 2
        for found in (long, short)
    ]
    assert costs[0] > costs[1]


def test_where_nothing_is_quick_enough_it_says_so(machine):
    machine(1e-3)
    found = proposal(experiment(), minutes=10)
    assert not found.fits
    assert found.settings["network.features"][0] == 8
    assert any("longer than asked" in note for note in found.notes)


def test_rounds_that_the_file_sets_are_named_where_they_take_too_long(machine):
    machine(1e-3)
    free = proposal(experiment(), minutes=10)
    given = proposal(experiment(), given=("training.rounds",), minutes=10)
    assert not any("training.rounds" in note for note in free.notes)
    assert any("training.rounds" in note for note in given.notes)


@pytest.mark.parametrize(("data", "longer"), [(HEART, True), (Data((46.0, 40.0, 24.0), (8.0, 8.0, 8.0), SITES), False)])
def test_only_unequal_voxels_are_called_so(machine, data, longer):
    machine(1e-10)
    found = proposal(experiment(), data)
    assert found.settings["network.strides"] is not None
    assert any("longer along one axis" in note for note in found.notes) == longer


def test_memory_limits_the_patch(machine):
    machine(1e-10)
    large, small = proposal(experiment(), free=64e9), proposal(experiment(), free=4e9)
    assert small.memory <= 0.8 * 4e9 < large.memory
    patches = [math.prod(found.settings["training.sampling.patch_size"]) for found in (large, small)]
    assert patches[0] > patches[1]
    assert any("memory" in note for note in proposal(experiment(), free=0.5e9).notes)


def test_what_the_file_sets_stays(machine):
    machine(1e-9)
    network, training = {"features": [4, 8, 16]}, {"rounds": 7, "sampling": {"batch_size": 3}}
    given = ("network.features", "training.rounds", "training.sampling.batch_size")
    found = proposal(experiment(network=network, training=training), given=given)
    assert not set(given) & found.settings.keys()
    assert found.estimate.rounds == 7
    strides = found.settings["network.strides"]  # voxels are twice as long across the slices
    assert strides == [[1, 1, 1], [2, 2, 1], [2, 2, 2]]
    assert [size % 4 for size in found.settings["training.sampling.patch_size"][:2]] == [0, 0]


def test_a_given_patch_gets_strides_that_fit(machine):
    machine(1e-9)
    training = {"sampling": {"patch_size": [96, 96, 8]}}
    network = {"features": [4, 8], "strides": [[1, 1, 1], [2, 2, 1]]}
    found = proposal(experiment(training=training, network=network), HEART, given=("training.sampling.patch_size",))
    strides = found.settings["network.strides"]
    assert math.prod(level[2] for level in strides) <= 4
    assert len(found.settings["network.features"]) == len(strides)


def test_thick_slices(machine):
    machine(1e-9)
    heart, few = proposal(experiment(), HEART), proposal(experiment(), FEW_SLICES)
    assert heart.settings["network.strides"][1] == [2, 2, 1]
    assert heart.settings["network.dimensions"] == 3
    assert few.settings["network.dimensions"] == 2
    assert few.settings["training.sampling.patch_size"][2] == 1


def test_small_scans_get_larger_batches(machine):
    machine(1e-10)
    assert proposal(experiment(), SMALL).settings["training.sampling.batch_size"] > 2
    assert proposal(experiment(), CT).settings["training.sampling.batch_size"] == 2


def test_epochs_of_the_file_stay(machine):
    machine(1e-9)
    found = proposal(experiment(training={"local_epochs": 2}))
    assert "training.local_steps" not in found.settings


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fediod", "multihead"])
def test_a_proposal_is_measured_with_the_method_itself(method):
    """Without a pretended machine: the steps are real, on made-up patches."""
    found = propose(experiment(method={"name": method}), lambda name: False, SMALL, CPU, 1.0, 8e9)
    assert found.estimate.speed.step > 0


def test_memory_grows_with_patch_batch_and_sites():
    method = experiment().build_method()
    federation = Federation(Vocabulary(["liver", "spleen"]), SITES)
    network = UNetSettings(features=(8, 16))

    def needed(edge=32, batch=1, sites=1):
        return training_memory(method, network, federation, (edge,) * 3, batch, sites)

    activations = needed(batch=2) - needed(batch=1)
    assert needed(edge=64) - needed(edge=32) == pytest.approx(7 * activations)
    assert needed(sites=3) > needed()
