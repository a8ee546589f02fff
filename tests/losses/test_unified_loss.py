"""Dice and binary cross-entropy on unified labels, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from panorgan.losses.unified_label import UnifiedLabel
from panorgan.losses.unified_loss import softmax_bce, unified_dice_bce

# Two voxels; softmax over three channels = (.5, .3, .2) and (.1, .6, .3).
P = [[0.5, 0.1], [0.3, 0.6], [0.2, 0.3]]
LOGITS = torch.tensor([P]).log()
SURE = torch.eye(3, dtype=torch.bool).unsqueeze(0)


def bce(p: float, y: bool) -> float:
    return -math.log(p) if y else -math.log(1 - p)


def test_sure_labels_by_hand():
    label = UnifiedLabel(torch.tensor([[0, 1]], dtype=torch.uint8), SURE)
    expected = sum(bce(P[c][v], c == v) for c in range(3) for v in range(2)) / 6
    assert unified_dice_bce(LOGITS, label, 0, 1).tolist() == pytest.approx([expected], rel=1e-6)
    dice = [(2 * 0.5 + 1) / (0.6 + 1 + 1), (2 * 0.6 + 1) / (0.9 + 1 + 1), 1 / (0.5 + 0 + 1)]
    by_hand = sum(1 - d for d in dice) / 3
    assert unified_dice_bce(LOGITS, label, 1, 0).tolist() == pytest.approx([by_hand], rel=1e-6)
    both = unified_dice_bce(LOGITS, label)
    assert both.tolist() == pytest.approx([0.5 * expected + 0.5 * by_hand], rel=1e-6)


def test_over_the_batch_dice_leaves_out_organs_that_no_sample_shows():
    """Channel 1 is in the second sample only, channel 2 in neither: per sample both would be pushed to 0."""
    label = UnifiedLabel(torch.tensor([[0, 0], [0, 1]], dtype=torch.uint8), SURE.repeat(2, 1, 1))
    logits = LOGITS.repeat(2, 1, 1)
    background = (2 * (0.5 + 0.1 + 0.5) + 1) / (1.2 + 3 + 1)
    organ = (2 * 0.6 + 1) / (1.8 + 1 + 1)
    expected = (1 - background + 1 - organ) / 2
    losses = unified_dice_bce(logits, label, 1, 0, "batch")
    assert losses.tolist() == pytest.approx([expected] * 2, rel=1e-6)
    assert unified_dice_bce(logits, label, 1, 0, "sample").tolist() != pytest.approx(losses.tolist(), rel=1e-3)


def test_several_possible_channels_do_not_count_by_hand():
    """Value 1 stands for channels 1 and 2: at voxel 2 only the background counts, as absent."""
    table = torch.tensor([[[True, False, False], [False, True, True], [False, False, True]]])
    label = UnifiedLabel(torch.tensor([[0, 1]], dtype=torch.uint8), table)
    counted = [bce(0.5, True), bce(0.3, False), bce(0.2, False), bce(0.1, False)]
    assert unified_dice_bce(LOGITS, label, 0, 1).tolist() == pytest.approx([sum(counted) / 4], rel=1e-6)
    dice = [(2 * 0.5 + 1) / (0.6 + 1 + 1), 1 / (0.3 + 1), 1 / (0.2 + 1)]
    assert unified_dice_bce(LOGITS, label, 1, 0).tolist() == pytest.approx([sum(1 - d for d in dice) / 3], rel=1e-6)


def test_an_undecided_union_gains_as_a_sum_and_keeps_its_ratio():
    table = torch.tensor([[[True, False, False], [False, True, True]]])
    logits = torch.tensor([[[0.4], [0.3], [-0.6]]], requires_grad=True)
    label = UnifiedLabel(torch.tensor([[1]], dtype=torch.uint8), table)
    unified_dice_bce(logits, label).sum().backward()
    background, first, second = logits.grad.flatten().tolist()
    assert background > 0
    p = logits.detach().softmax(1).flatten().tolist()
    assert first / p[1] == pytest.approx(second / p[2], rel=1e-5)


def test_a_sample_that_says_nothing_has_no_loss():
    label = UnifiedLabel(torch.zeros(1, 2, dtype=torch.uint8), torch.ones(1, 1, 3, dtype=torch.bool))
    logits = LOGITS.clone().requires_grad_()
    loss = unified_dice_bce(logits, label)
    loss.sum().backward()
    assert loss.tolist() == [0.0]
    assert torch.equal(logits.grad, torch.zeros_like(LOGITS))


def test_utterly_wrong_logits_keep_their_gradient():
    """p = 1 − e^{−60}: 1 − p is 0 in any float, and log(1 − p) is −60 all the same. Further out it stays finite."""
    logits = torch.tensor([[[30.0], [-30.0]]], requires_grad=True)
    target = torch.tensor([[[False], [True]]])
    loss = softmax_bce(logits, target, torch.ones_like(target))
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([60.0])
    assert logits.grad.flatten().tolist() == pytest.approx([1.0, -1.0])
    beyond = softmax_bce(logits.detach() * 100, target, torch.ones_like(target))
    assert torch.isfinite(beyond).all()
    assert beyond > 60


def test_against_binary_cross_entropy_of_the_probabilities():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 4, 3, 5, generator=generator, dtype=torch.float32).requires_grad_()
    target = torch.nn.functional.one_hot(torch.randint(0, 4, (2, 3, 5), generator=generator), 4).movedim(-1, 1).bool()
    found = softmax_bce(logits, target, torch.ones_like(target))
    exact = logits.detach().double().requires_grad_()
    reference = torch.nn.functional.binary_cross_entropy(exact.softmax(1), target.double(), reduction="none")
    reference = reference.flatten(1).mean(1)
    torch.testing.assert_close(found, reference.float())
    gradients = torch.autograd.grad(found.sum(), logits)[0], torch.autograd.grad(reference.sum(), exact)[0].float()
    torch.testing.assert_close(*gradients)


def test_lower_precision_around_the_loss_does_not_lower_it():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 3, 400, generator=generator)
    label = UnifiedLabel(torch.randint(0, 3, (2, 400), generator=generator).to(torch.uint8), SURE.repeat(2, 1, 1))
    plain = unified_dice_bce(logits, label)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(unified_dice_bce(logits, label), plain)
