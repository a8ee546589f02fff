"""Attention re-weights skip connections: its mean, its gate and the interpolation, by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from panorgan.methods.fediod.attention_gate import attention_entropy, mean_attention, reweight, token_weights

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
FIRST = torch.tensor([[1 / 2, 1 / 4, 1 / 4], [1 / 5, 2 / 5, 2 / 5], [1 / 5, 2 / 5, 2 / 5]])
MEAN = (FIRST + 1 / 3) / 2  # its columns sum to 0.95, 1.025 and 1.025


def test_mean_attention_over_layers_and_heads():
    one = torch.stack([FIRST, torch.full((3, 3), 1 / 3)])[None]
    two = torch.eye(3).expand(1, 2, 3, 3)
    torch.testing.assert_close(mean_attention([one]), MEAN[None])
    torch.testing.assert_close(mean_attention([one, two]), (MEAN + torch.eye(3))[None] / 2)


def test_softmax_of_column_sums_as_printed():
    weights = token_weights(MEAN[None], "softmax")[0]
    total = math.exp(0.95) + 2 * math.exp(1.025)
    torch.testing.assert_close(weights, torch.tensor([math.exp(0.95) / total, *[math.exp(1.025) / total] * 2]))
    assert float(weights.sum()) == pytest.approx(1)


def test_sigmoid_of_column_sums():
    weights = token_weights(MEAN[None], "sigmoid")[0]
    torch.testing.assert_close(weights, torch.tensor([2 / (1 + math.exp(0.05)), *[2 / (1 + math.exp(-0.025))] * 2]))


@pytest.mark.parametrize(("gate", "weight"), [("softmax", 1 / 9), ("sigmoid", 1.0)])
def test_even_attention_weighs_all_alike(gate, weight):
    torch.testing.assert_close(token_weights(torch.full((2, 9, 9), 1 / 9), gate), torch.full((2, 9), weight))


@pytest.mark.parametrize(("gate", "most"), [("softmax", 1.0), ("sigmoid", 2.0)])
def test_a_place_that_all_others_look_at_is_not_blown_up(gate, most):
    """A hundred tokens, all of which look at the first one alone: the largest weight that there can be."""
    attention = torch.zeros(1, 100, 100)
    attention[:, :, 0] = 1
    assert float(token_weights(attention, gate).max()) == pytest.approx(most)


def test_entropy_of_attention_is_a_share_of_that_of_even_attention():
    """One head looks at two of four places alike, log 2 / log 4 = ½; one at a single place; a layer at all alike."""
    two = torch.tensor([0.5, 0.5, 0, 0]).expand(4, 4)
    first = torch.stack([two, torch.eye(4)])[None]
    even = torch.full((1, 2, 4, 4), 0.25)
    assert float(attention_entropy([first])) == pytest.approx(0.25)
    assert float(attention_entropy([first, even])) == pytest.approx(0.625)
    assert float(attention_entropy([torch.ones(1, 1, 1, 1)])) == 0, "a single place"


def test_reweighting_by_hand():
    """Between the centres of two coarse cells with 1 and 3 lie 1.5 and 2.5; x + x·W of x = 2."""
    out = reweight(torch.full((1, 3, 1, 4), 2.0), torch.tensor([[[1.0, 3]]]))
    torch.testing.assert_close(out, torch.tensor([4.0, 5, 7, 8]).expand(1, 3, 1, 4))


@pytest.mark.parametrize(("grid", "space"), [((3, 2), (12, 16)), ((3, 2, 2), (6, 8, 2)), ((4, 4), (4, 4))])
def test_interpolation_keeps_the_mean_and_is_torchs(grid, space):
    weights = torch.rand(2, *grid, generator=torch.Generator().manual_seed(0)).double().requires_grad_()
    finer = reweight(torch.ones(2, 1, *space).double(), weights)[:, 0] - 1
    mode = {2: "bilinear", 3: "trilinear"}[len(grid)]
    torch.testing.assert_close(finer, nn.functional.interpolate(weights[:, None], space, mode=mode)[:, 0])
    torch.testing.assert_close(finer.flatten(1).mean(1), weights.flatten(1).mean(1))
    assert torch.autograd.gradcheck(lambda w: reweight(torch.ones(2, 2, *space).double(), w), weights)


@needs_gpu
def test_on_a_gpu_reweighting_gives_the_same_bits_every_time():
    weights = torch.rand(4, 16, 16, device="cuda").requires_grad_()
    features = torch.randn(4, 16, 256, 256, device="cuda")
    gradients = [torch.autograd.grad(reweight(features, weights).sin().sum(), weights)[0] for _ in range(5)]
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)


def test_what_is_kept_from_inference_serves_training():
    weights = torch.rand(1, 11, 1)  # a grid of which nothing is kept yet
    with torch.inference_mode():
        reweight(torch.ones(1, 1, 13, 3), weights)
    reweight(torch.ones(1, 1, 13, 3), weights.requires_grad_()).sum().backward()
    assert weights.grad is not None
