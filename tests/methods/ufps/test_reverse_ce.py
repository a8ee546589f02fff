"""Reverse cross-entropy against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from panorgan.losses.unified_label import UnifiedLabel
from panorgan.methods.ufps.reverse_ce import adaptive_rce, growing_factor, reverse_cross_entropy

# Two voxels; softmax over three channels = (.5, .3, .2) and (.1, .6, .3).
LOGITS = torch.tensor([[[0.5, 0.1], [0.3, 0.6], [0.2, 0.3]]]).log()
LABEL = torch.tensor([[[True, False], [False, True], [False, False]]])


def test_value_by_hand():
    """−Σ q log p: 4·(.3 + .2) at the first voxel, 4·(.1 + .3) at the second."""
    assert reverse_cross_entropy(LOGITS, LABEL).tolist() == pytest.approx([(4 * 0.5 + 4 * 0.4) / 2], rel=1e-6)
    assert reverse_cross_entropy(LOGITS, LABEL, log_zero=-2).tolist() == pytest.approx([0.9], rel=1e-6)


def test_gradient_by_hand():
    """4·q_k·([k excluded] − Σ excluded q)/voxels."""
    logits = LOGITS.clone().requires_grad_()
    reverse_cross_entropy(logits, LABEL).sum().backward()
    q = [[0.5, 0.1], [0.3, 0.6], [0.2, 0.3]]
    excluded = [[0, 1], [1, 0], [1, 1]]
    rest = [0.5, 0.4]
    expected = [[4 * q[k][v] * (excluded[k][v] - rest[v]) / 2 for v in range(2)] for k in range(3)]
    torch.testing.assert_close(logits.grad[0], torch.tensor(expected))


def test_a_label_of_several_channels_excludes_the_others_only():
    either = torch.tensor([[[True, True], [False, True], [True, True]]])
    # first voxel: only the second channel is excluded; the second voxel teaches nothing
    assert reverse_cross_entropy(LOGITS, either).tolist() == pytest.approx([4 * 0.3 / 2], rel=1e-6)


def test_it_grows_with_the_rounds():
    assert growing_factor(500, 500) == 1.0
    assert growing_factor(250, 500) == pytest.approx(math.exp(-10))
    assert growing_factor(475, 500) == pytest.approx(math.exp(-1))
    label = UnifiedLabel(torch.tensor([[0, 1]], dtype=torch.uint8), torch.eye(3, dtype=torch.bool)[None, :2])
    assert torch.equal(label.channels(), LABEL)
    found = adaptive_rce(LOGITS, label, 475, 500)
    assert found.tolist() == pytest.approx([1.8 * math.exp(-1)], rel=1e-6)


def test_per_sample_and_in_full_precision():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 4, 5, generator=generator)
    label = torch.nn.functional.one_hot(torch.randint(0, 3, (2, 4, 5), generator=generator), 3).movedim(-1, 1).bool()
    both = reverse_cross_entropy(logits, label)
    assert torch.equal(both[1:], reverse_cross_entropy(logits[1:], label[1:]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(reverse_cross_entropy(logits, label), both)


def test_a_certain_prediction_hardly_learns_from_a_wrong_label():
    """What it is for: cross-entropy pulls hardest where the prediction is certain and the label disagrees."""
    logits = torch.tensor([[[10.0], [-10.0]]], requires_grad=True)
    reverse_cross_entropy(logits, torch.tensor([[[False], [True]]])).sum().backward()
    assert logits.grad.abs().max() < 1e-6
