"""Soft labels: the annotation wins, the teacher shares out the rest; Dice by hand. Cross-entropy: test_expected."""

from __future__ import annotations

import math

import pytest
import torch

from panorgan.anatomy import Vocabulary
from panorgan.losses.soft_label import SoftLabel, soft_cross_entropy, soft_dice, soft_label
from panorgan.preparation.batch import Batch

ABDOMEN = Vocabulary(["liver", "spleen"])
BOTH = torch.tensor([[True, True]])


def liver_batch(*liver: int) -> Batch:
    masks = torch.tensor([[liver]], dtype=torch.bool)
    return Batch(torch.zeros(1, 1, len(liver)), masks, torch.tensor([[True]]), ("liver",), ("case",))


def logits_of(*voxels: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor([[math.log(p) for p in voxel] for voxel in voxels]).T.unsqueeze(0)


def test_the_annotation_wins_and_the_teacher_shares_out_the_rest():
    teacher = logits_of((0.1, 0.1, 0.8), (0.2, 0.5, 0.3))
    label = soft_label(liver_batch(1, 0), ABDOMEN, teacher)
    assert label.shares[0].T.flatten().tolist() == pytest.approx([0, 1, 0, 0.4, 0, 0.6])
    assert label.counted.all()


def test_contradicting_masks_count_nowhere():
    masks = torch.tensor([[[1, 0], [1, 1]]], dtype=torch.bool)
    batch = Batch(torch.zeros(1, 1, 2), masks, torch.tensor([[True, True]]), ("liver", "spleen"), ("case",))
    label = soft_label(batch, ABDOMEN, None)
    assert label.counted.tolist() == [[False, True]]
    losses = [
        soft_cross_entropy(logits_of(overlap, (0.5, 0.2, 0.3)), label).item()
        for overlap in ((0.1, 0.1, 0.8), (0.8, 0.1, 0.1))
    ]
    assert losses == pytest.approx([-math.log(0.3)] * 2)
    dice = [soft_dice(logits_of(o, (0.5, 0.2, 0.3)), label, BOTH)[0].item() for o in ((0.1, 0.1, 0.8), (0.8, 0.1, 0.1))]
    assert dice[0] == pytest.approx(dice[1])


def test_dice_by_hand_counts_an_organ_by_how_sure_its_label_is():
    shares = torch.tensor([[[0.0, 0.5, 0.5], [1.0, 0.0, 0.0], [0.0, 0.5, 0.5]]])
    label = SoftLabel(shares, torch.ones(1, 3, dtype=torch.bool))
    logits = logits_of((0.2, 0.6, 0.2), (0.5, 0.3, 0.2), (0.2, 0.2, 0.6))
    liver = 1 - (2 * 0.6 + 1) / ((0.6 + 0.3 + 0.2) + 1 + 1)
    spleen = 1 - (2 * (0.5 * 0.2 + 0.5 * 0.6) + 1) / ((0.2 + 0.2 + 0.6) + 1 + 1)
    for taught, total, weight in (
        (BOTH, liver + 0.5 * spleen, 1.5),
        (~BOTH, 0.0, 0.0),
        (torch.tensor([[False, True]]), 0.5 * spleen, 0.5),
    ):
        found = soft_dice(logits, label, taught)
        assert (found[0].item(), found[1].item()) == pytest.approx((total, weight))


def test_an_organ_of_less_than_a_voxel_is_absent():
    shares = torch.tensor([[[0.9, 0.8], [0.0, 0.0], [0.1, 0.2]]])
    label = SoftLabel(shares, torch.ones(1, 2, dtype=torch.bool))
    assert soft_dice(logits_of((0.2, 0.6, 0.2), (0.5, 0.3, 0.2)), label, BOTH)[1].item() == 0.0
