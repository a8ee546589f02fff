"""A few steps are measured before training begins, and nothing of the run notices."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from panorgan.federation.events import Event
from panorgan.methods.registry import methods
from panorgan.networks import UNetSettings
from panorgan.workflows import rehearsal
from panorgan.workflows.duration import Work, count_windows, estimate
from panorgan.workflows.execute import train
from panorgan.workflows.rehearsal import Speed, smaller_patches


def estimated(experiment, folder, **how) -> dict:
    """The facts of the estimate; training itself is left out."""
    found: list[dict] = []

    def hear(event: Event) -> None:
        if event.kind == "estimate":
            found.append(event.facts)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(experiment, folder, listeners=(hear,), estimate=True, **how)
    return found[0]


def test_the_bits_and_the_random_state_stay(tiny, tmp_path):
    experiment = tiny(training={"rounds": 1, "validate_every": 1})
    runs, states, heard = [], [], []
    for name in ("plain", "measured"):
        torch.manual_seed(7)
        np.random.seed(7)
        random.seed(7)
        runs.append(train(experiment, tmp_path / name, listeners=(heard.append,), estimate=name == "measured"))
        states.append((torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()))
    assert [event.kind for event in heard].count("estimate") == 1
    assert states[0] == states[1]
    for name in ("model/model.safetensors", "metrics.csv"):
        assert (runs[0].path / name).read_bytes() == (runs[1].path / name).read_bytes(), name
    assert "estimate" not in {event["event"] for event in runs[1].events}, "a duration is no part of the record"


@pytest.mark.parametrize("method", sorted(methods()))
def test_every_method_is_measured(method, tiny, tmp_path):
    experiment = tiny(method={"name": method}, training={"rounds": 2})
    facts = estimated(experiment, tmp_path / "run")
    stages = experiment.build_method().stages(2)
    assert facts["rounds"] == sum(stage.rounds for stage in stages)
    # Two sites with two steps each per round, or one that does the work of both.
    assert facts["steps"] == sum(4 * stage.rounds for stage in stages if stage.local_steps != 0)
    assert facts["step_seconds"] > 0
    assert facts["seconds"] > facts["training"] > 0


def test_slices_are_measured(tiny, tmp_path):
    experiment = tiny(network={"dimensions": 2}, training={"sampling": {"patch_size": [16, 16, 1]}})
    assert estimated(experiment, tmp_path / "run")["step_seconds"] > 0


def test_only_what_is_left_counts(tiny, tmp_path):
    experiment = tiny()
    whole = estimated(experiment, tmp_path / "new")

    def stop(event: Event) -> None:
        if event.kind == "round":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(experiment, tmp_path / "run", listeners=(stop,))
    left = estimated(experiment, tmp_path / "run", resume=True)
    assert (whole["rounds"], left["rounds"]) == (3, 2)
    assert left["steps"] == whole["steps"] * 2 // 3


def test_slow_steps_are_computed_from_smaller_patches(tiny, tmp_path, monkeypatch):
    measured = []

    def step_of(setup, federation, site, data, patch, folder):
        measured.append(patch)
        return Speed(math.prod(patch) / 10_000, math.prod(patch) / 100_000)

    monkeypatch.setattr(rehearsal, "_measure", step_of)
    experiment = tiny(training={"sampling": {"patch_size": [64, 64, 64]}})
    facts = estimated(experiment, tmp_path / "run")
    assert measured == [(8, 8, 8), (16, 16, 16)]  # 32³ would take 3.3 seconds
    assert facts["step_seconds"] == pytest.approx(64**3 / 10_000)


def test_smaller_patches_fit_the_network():
    network = UNetSettings(features=(4, 8, 8))
    assert list(smaller_patches((64, 32, 16), network)) == [(64, 32, 16), (32, 16, 8), (16, 8, 8), (8, 8, 8)]
    flat = UNetSettings(features=(4, 8), dimensions=2)
    assert list(smaller_patches((8, 8, 1), flat)) == [(8, 8, 1), (4, 4, 1)]


# -- counting ----------------------------------------------------------------------------------------------------------


def test_windows_are_counted_as_inference_lays_them():
    assert count_windows((64, 64, 64), (64, 64, 64), 0.5) == 1
    assert count_windows((65, 64, 10), (64, 64, 64), 0.5) == 2
    assert count_windows((128, 128, 64), (64, 64, 64), 0.5) == 9
    assert count_windows((128, 128, 9), (64, 64, 1), 0.0) == 36


def test_an_estimate_adds_up(tiny):
    experiment = tiny(training={"rounds": 10, "validate_every": 4})  # validated after 4, 8 and 10
    work = Work(sites=2, steps_per_round=40, validation_windows=30, scoring_windows=50, scored_cases=0)
    found = estimate(experiment, work, Speed(0.5, 0.1))
    assert (found.training, found.validation, found.scoring) == (200, pytest.approx(9), pytest.approx(5))
    assert (found.steps, found.rounds, found.is_long) == (400, 10, False)
    assert estimate(experiment, work, Speed(0.5, 0.1), rounds_done=8).validation == pytest.approx(3)
    assert estimate(experiment, work, Speed(50, 0.1)).is_long
