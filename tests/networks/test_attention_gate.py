"""Attention re-weights skip connections: its mean, its gate and the interpolation, by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from panorgan.networks.attention_gate import mean_attention, reweighted, token_weights

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
FIRST = torch.tensor([[1 / 2, 1 / 4, 1 / 4], [1 / 5, 2 / 5, 2 / 5], [1 / 5, 2 / 5, 2 / 5]])
MEAN = (FIRST + 1 / 3) / 2  # its columns sum to 0.95, 1.025 and 1.025


def test_mean_attention_over_layers_and_heads():
    one = torch.stack([FIRST, torch.full((3, 3), 1 / 3)])[None]
    two = torch.eye(3).expand(1, 2, 3, 3)
    torch.testing.assert_close(mean_attention([one]), MEAN[None])
    torch.testing.assert_close(mean_attention([one, two]), (MEAN + torch.eye(3))[None] / 2)


def test_softmax_of_column_sums_scaled_to_mean_one():
    weights = token_weights(MEAN[None], "softmax")[0]
    total = math.exp(0.95) + 2 * math.exp(1.025)
    expected = torch.tensor([3 * math.exp(0.95) / total, *[3 * math.exp(1.025) / total] * 2])
    torch.testing.assert_close(weights, expected)
    assert float(weights.mean()) == pytest.approx(1)


def test_sigmoid_of_column_sums():
    weights = token_weights(MEAN[None], "sigmoid")[0]
    torch.testing.assert_close(weights, torch.tensor([2 / (1 + math.exp(0.05)), *[2 / (1 + math.exp(-0.025))] * 2]))


@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
def test_even_attention_weighs_nothing(gate):
    torch.testing.assert_close(token_weights(torch.full((2, 9, 9), 1 / 9), gate), torch.ones(2, 9))


def test_reweighting_by_hand():
    """Between the centres of two coarse cells with 1 and 3 lie 1.5 and 2.5; x·W' + x of x = 2."""
    out = reweighted(torch.full((1, 3, 1, 4), 2.0), torch.tensor([[[1.0, 3]]]))
    torch.testing.assert_close(out, torch.tensor([4.0, 5, 7, 8]).expand(1, 3, 1, 4))


@pytest.mark.parametrize(("grid", "space"), [((3, 2), (12, 16)), ((3, 2, 2), (6, 8, 2)), ((4, 4), (4, 4))])
def test_interpolation_keeps_the_mean_and_is_torchs(grid, space):
    weights = torch.rand(2, *grid, generator=torch.Generator().manual_seed(0)).double().requires_grad_()
    finer = reweighted(torch.ones(2, 1, *space).double(), weights)[:, 0] - 1
    mode = {2: "bilinear", 3: "trilinear"}[len(grid)]
    torch.testing.assert_close(finer, nn.functional.interpolate(weights[:, None], space, mode=mode)[:, 0])
    torch.testing.assert_close(finer.flatten(1).mean(1), weights.flatten(1).mean(1))
    assert torch.autograd.gradcheck(lambda w: reweighted(torch.ones(2, 2, *space).double(), w), weights)


@needs_gpu
def test_on_a_gpu_reweighting_gives_the_same_bits_every_time():
    weights = torch.rand(4, 16, 16, device="cuda").requires_grad_()
    features = torch.randn(4, 16, 256, 256, device="cuda")
    gradients = [torch.autograd.grad(reweighted(features, weights).sin().sum(), weights)[0] for _ in range(5)]
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)


def test_what_is_kept_from_inference_serves_training():
    weights = torch.rand(1, 11, 1)  # a grid of which nothing is kept yet
    with torch.inference_mode():
        reweighted(torch.ones(1, 1, 13, 3), weights)
    reweighted(torch.ones(1, 1, 13, 3), weights.requires_grad_()).sum().backward()
    assert weights.grad is not None
