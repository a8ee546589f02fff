"""Linear CKA: its invariances, a value by hand, and the features it is computed from."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from panorgan.anatomy import Vocabulary
from panorgan.evaluation.similarity import cka_matrix, layer_features, layers_of, linear_cka
from panorgan.methods.fediod.inter_organ import InterOrganNetwork, InterOrganSettings
from panorgan.methods.protocol import Federation, SiteInfo
from panorgan.methods.solo import Solo, SoloConfig
from panorgan.networks import UNet, UNetSettings, organ_network

VOCABULARY = Vocabulary(["liver", "spleen"])
SMALL = UNetSettings(features=(4, 8))


def features(seed: int, examples: int = 2000, channels: int = 5) -> torch.Tensor:
    return torch.randn(examples, channels, generator=torch.Generator().manual_seed(seed))


def test_the_same_features_have_one():
    assert linear_cka(features(0), features(0)) == pytest.approx(1.0)


def test_rotation_scale_and_shift_change_nothing():
    x = features(0) * torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0])
    rotation, _ = torch.linalg.qr(features(1, 5, 5))
    assert linear_cka(x, 0.3 * x @ rotation + 7) == pytest.approx(1.0, abs=1e-6)


def test_stretching_changes_it():
    x = features(0)
    assert linear_cka(x, x * torch.tensor([10.0, 1.0, 1.0, 1.0, 1.0])) < 0.6


def test_independent_features_have_next_to_nothing():
    assert linear_cka(features(0), features(1)) < 0.02


def test_a_value_by_hand():
    """Centred, x is (−1, 0, 1) and y is (−1, −1, 2): (xᵀy)² = 9, xᵀx = 2, yᵀy = 6, so 9 / 12."""
    x = torch.tensor([[1.0], [2.0], [3.0]])
    y = torch.tensor([[0.0], [0.0], [3.0]])
    assert linear_cka(x, y) == pytest.approx(0.75)


def test_two_columns_by_hand():
    """x = (1, −1, 0, 0), y = [(1, −1, 0, 0), (0, 0, 1, −1)]: 4 / (2 · √8)."""
    x = torch.tensor([[1.0], [-1.0], [0.0], [0.0]])
    y = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    assert linear_cka(x, y) == pytest.approx(4 / (2 * math.sqrt(8)))


def test_features_that_do_not_vary_have_none():
    assert math.isnan(linear_cka(torch.full((100, 3), 0.1), features(0, 100)))


def test_the_matrix_has_our_layers_in_rows():
    ours = {"a": features(0), "b": features(1)}
    others = {"b": features(1), "c": features(2), "a": features(0)}
    matrix = cka_matrix(ours, others)
    assert matrix.shape == (2, 3)
    np.testing.assert_allclose([matrix[0, 2], matrix[1, 0]], 1.0)
    assert matrix[0, 0] == pytest.approx(linear_cka(features(0), features(1)))


# -- layers ------------------------------------------------------------------------------------------------------


def test_layers_are_blocks_in_their_order():
    network = UNet(VOCABULARY, UNetSettings(features=(4, 8, 8)))
    assert list(layers_of(network)) == ["encoder.0", "encoder.1", "bottleneck", "decoder.0", "decoder.1", "head"]


def test_members_of_a_merged_model_are_looked_into():
    facts = {"north": SiteInfo("north", 1, {"liver": 1}), "south": SiteInfo("south", 1, {"spleen": 1})}
    network = Solo(SoloConfig()).build_network(SMALL, Federation(VOCABULARY, facts))
    assert "members.site-north.encoder.0" in layers_of(network)
    assert "members.site-south.head" in layers_of(network)
    assert "members.site-south.head" in layer_features(network, [torch.zeros(1, 1, 8, 8, 8)], 4, seed=0)


def test_features_are_those_of_the_voxel_at_the_place():
    """The head's features are the logits: every example must be one voxel's logits, drawn from the right image."""
    network = UNet(VOCABULARY, SMALL).eval()
    images = torch.randn(2, 1, 8, 8, 8)
    found = layer_features(network, [images], places=6, seed=0)
    assert found["head"].shape == (12, 3)
    assert found["bottleneck"].shape == (12, 8)
    with torch.no_grad():
        logits = network(images).flatten(2)
    for example, values in enumerate(found["head"]):
        distance = (logits[example // 6] - values[:, None]).abs().amax(0).min()
        assert distance == 0
    again = layer_features(network, [images], places=6, seed=0)
    assert all(torch.equal(found[layer], again[layer]) for layer in found)
    assert not torch.equal(layer_features(network, [images], places=6, seed=1)["head"], found["head"])


def test_slices_have_features_too():
    network = UNet(VOCABULARY, UNetSettings(features=(4, 8), dimensions=2)).eval()
    assert layer_features(network, [torch.zeros(3, 1, 8, 8)], places=5, seed=0)["encoder.0"].shape == (15, 4)


def test_a_block_that_runs_for_every_organ_gives_its_features_side_by_side():
    network = organ_network(VOCABULARY, UNetSettings(features=(4, 8), organs="encoders")).eval()
    found = layer_features(network, [torch.randn(1, 1, 8, 8, 8)], places=5, seed=0)
    assert found["encoders.liver.down.0"].shape == (5, 4)
    assert found["decoder.0"].shape == (5, 8), "four channels for each of two organs"
    assert list(found)[-2:] == ["decoder.0", "head"], "after the encoders of all organs"


def test_a_transformer_gives_its_features_and_not_its_attention():
    small = InterOrganSettings(layers=1, heads=2, head_width=4, mlp_width=8)
    network = InterOrganNetwork(VOCABULARY, SMALL, inter_organ=small).eval()
    found = layer_features(network, [torch.randn(2, 1, 8, 8, 8)], places=3, seed=0)
    assert found["transformer"].shape == (2 * 3, 8), "as many channels as the deepest level has"
    layers = list(found)
    assert layers.index("transformer") == layers.index("bottleneck") + 1, "it reads the bottleneck, decoders read it"
    assert all(layer.startswith("decoders.") for layer in layers[layers.index("transformer") + 1 :])


def test_blocks_that_do_not_run_are_left_out():
    network = organ_network(VOCABULARY, UNetSettings(features=(4, 8), organs="heads")).eval()
    found = layer_features(network, [torch.randn(1, 1, 8, 8, 8)], places=5, seed=0)
    assert list(found) == ["encoder.0", "bottleneck", "decoder.0", "embedding"]


def test_hooks_are_taken_away():
    network = UNet(VOCABULARY, SMALL)
    layer_features(network, [torch.zeros(1, 1, 8, 8, 8)], 2, seed=0)
    assert not any(module._forward_hooks for module in network.modules())
