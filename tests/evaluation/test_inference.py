"""From probabilities to label maps, and what prediction leaves behind."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from monai.inferers.utils import sliding_window_inference

from panorgan.anatomy import Vocabulary
from panorgan.data.volume import Volume
from panorgan.evaluation import inference
from panorgan.evaluation.inference import (
    InferenceSettings,
    clean_labels,
    decide,
    label_ids,
    predict_probabilities,
    predict_volume,
)
from panorgan.networks import UNet, UNetSettings
from panorgan.networks.base import SegmentationNetwork
from panorgan.preparation.plan import Plan

SETTINGS = InferenceSettings(patch_size=(8, 8, 8), overlap=0.0)


def network(organs: list[str], activation: str) -> SegmentationNetwork:
    return SegmentationNetwork(Vocabulary(organs), activation)


@pytest.mark.parametrize("training", [True, False])
def test_prediction_leaves_the_network_in_its_mode(training):
    """A rule that predicts with its own model in the middle of a round goes on training it."""
    model = UNet(Vocabulary(["liver"]), UNetSettings(features=(4, 8), norm="batch")).train(training)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    probabilities = predict_probabilities(model, torch.zeros(9, 8, 8), SETTINGS)
    assert probabilities.shape == (2, 9, 8, 8)
    assert model.training is training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("norm", ["instance", "batch"])
def test_slices_as_a_batch_equal_a_loop_over_slices(axis, norm):
    """Every slice is larger than the window along one of its axes and smaller along the other."""
    torch.manual_seed(0)
    model = UNet(Vocabulary(["liver", "spleen"]), UNetSettings(dimensions=2, features=(4, 8), norm=norm)).eval()
    patch = [8, 8, 8]
    patch[axis] = 1
    image = torch.randn(13, 6, 11)
    whole = predict_probabilities(model, image, InferenceSettings(patch_size=tuple(patch), windows_at_once=3))
    assert whole.shape == (3, 13, 6, 11)
    for index in range(image.shape[axis]):
        one = image.select(axis, index)
        single = sliding_window_inference(
            one[None, None], (8, 8), 1, lambda x: model(x).softmax(1), 0.5, mode="gaussian", cval=-1.0
        )
        torch.testing.assert_close(whole.select(1 + axis, index), single[0].detach(), atol=1e-5, rtol=1e-5)


def test_a_network_of_slices_predicts_on_the_scans_own_grid():
    model = UNet(Vocabulary(["liver"]), UNetSettings(dimensions=2, features=(4, 8)))
    affine = np.array([[0.0, 0, 6, 1], [-2, 0, 0, 2], [0, 2, 0, 3], [0, 0, 0, 1]])
    volume = Volume(np.random.default_rng(0).normal(size=(11, 12, 5)).astype(np.float32), affine)
    labels = predict_volume(
        model, volume, Plan(spacing_mm=(6, 3, 3), intensity="zscore"), InferenceSettings(patch_size=(1, 8, 8))
    )
    assert labels.shape == (11, 12, 5)


def test_exclusive_channels_by_hand():
    channels = torch.tensor([[0.5, 0.2, 0.4], [0.3, 0.7, 0.2], [0.2, 0.1, 0.4]])
    labels = decide(list(channels), network(["liver", "spleen"], "softmax"))
    assert labels.tolist() == [0, 1, 0]  # a tie stays with the earlier channel


def test_independent_channels_by_hand():
    """Inner over outer, whatever their probabilities; among others the more probable; below one half nothing."""
    organs = ["liver_tumour", "liver", "spleen"]
    channels = torch.tensor([[0.6, 0.4, 0.9, 0.6], [0.9, 0.9, 0.2, 0.4], [0.1, 0.95, 0.6, 0.7]])
    assert decide(list(channels), network(organs, "sigmoid")).tolist() == [1, 3, 1, 3]


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_a_large_scan_never_needs_all_channels_at_once(activation, monkeypatch):
    """At full resolution two channels at a time: the one that is looked at, and the best so far."""
    import weakref

    model = UNet(
        Vocabulary(["liver", "spleen", "pancreas", "aorta"]), UNetSettings(features=(4, 8), activation=activation)
    )
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0
    original = inference.to_scan_grid

    def watched(channel, grid):
        nonlocal most
        full = original(channel, grid)
        alive.append(weakref.ref(full))
        most = max(most, sum(ref() is not None for ref in alive))
        return full

    monkeypatch.setattr(inference, "to_scan_grid", watched)
    volume = Volume(np.zeros((12, 12, 12), np.float32), np.diag([2.0, 2.0, 2.0, 1.0]))
    labels = predict_volume(model, volume, Plan(spacing_mm=(3, 3, 3)), SETTINGS)
    assert labels.shape == (12, 12, 12)
    assert len(alive) == len(model.channels)
    assert most <= 2


def test_a_preset_cleans_a_label_map_and_keeps_the_tumour_in_its_organ():
    """Speck of liver dropped, hole filled, tumour kept: worked out on a line of 20 voxels by hand (ufps: 20 % rule)."""
    vocabulary = Vocabulary(["liver", "liver_tumour"])
    labels = np.zeros((20, 3, 3), dtype=np.uint8)
    labels[2:12] = 1
    labels[5, 1, 1] = 0  # a hole
    labels[8:10, 1, 1] = 2  # a tumour inside
    labels[17, 1, 1] = 1  # a speck, under 20 % of the rest
    expected = labels.copy()
    expected[5, 1, 1] = 1
    expected[17, 1, 1] = 0
    np.testing.assert_array_equal(clean_labels(labels, vocabulary, "ufps"), expected)
    assert clean_labels(labels, vocabulary, "none") is labels
    assert label_ids(vocabulary) == {"liver": 1, "liver_tumour": 2}
