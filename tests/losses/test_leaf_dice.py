"""Leaf-Dice by hand; what has no class of its own; the plain Dice loss where every voxel has one."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from panorgan.anatomy import Vocabulary
from panorgan.losses.leaf_dice import leaf_dice
from panorgan.preparation.batch import Batch

ORGANS = Vocabulary(["liver", "spleen"])
LOGITS = torch.tensor([[math.log(p) for p in voxel] for voxel in ((0.2, 0.5, 0.3), (0.6, 0.3, 0.1))]).T.unsqueeze(0)


def batch(organs: dict[str, tuple[int, ...]], unknown: tuple[str, ...] = ()) -> Batch:
    masks = torch.tensor([list(organs.values())], dtype=torch.bool)
    annotated = torch.tensor([[organ not in unknown for organ in organs]])
    return Batch(torch.zeros(1, 1, masks.shape[2]), masks, annotated, tuple(organs), ("case",))


@pytest.mark.parametrize(
    ("exponent", "expected"),
    [(1, 1 - 2 * 0.5 / (0.5 + 0.3 + 1 + 1e-5) / 3), (2, 1 - 2 * 0.5 / (0.25 + 0.09 + 1 + 1e-5) / 3)],
)
def test_by_hand_where_one_organ_is_labelled(exponent, expected):
    """The first voxel is liver; the second background or spleen, so that two of three classes have no overlap."""
    assert leaf_dice(LOGITS, batch({"liver": (1, 0)}), ORGANS, exponent).tolist() == pytest.approx([expected])


def test_what_is_unlabelled_gets_no_gradient_from_dice_but_through_the_softmax():
    """Spleen and background lose to the liver in equal shares of their probability: the loss knows one of them not."""
    logits = LOGITS.clone().requires_grad_()
    leaf_dice(logits, batch({"liver": (1, 0), "spleen": (0, 1)}, unknown=("spleen",)), ORGANS).sum().backward()
    background, liver, spleen = logits.grad[0]
    assert liver[0] < 0 < liver[1]
    torch.testing.assert_close(background / spleen, torch.tensor([0.2 / 0.3, 0.6 / 0.1]))


def test_a_union_has_no_leaf():
    """A voxel of a kidney is left or right; outside there is background alone."""
    kidneys = Vocabulary(["kidney_left", "kidney_right"])
    expected = 1 - 2 * 0.6 / (0.04 + 0.36 + 1 + 1e-5) / 3
    assert leaf_dice(LOGITS, batch({"kidney": (1, 0)}), kidneys).tolist() == pytest.approx([expected])


@pytest.mark.parametrize("dimensions", [2, 3])
def test_with_all_labels_it_is_the_mean_dice_loss_of_all_classes_bit_for_bit(dimensions):
    generator = torch.Generator().manual_seed(0)
    space = (4,) * dimensions
    logits = torch.randn(2, 3, *space, generator=generator)
    label = torch.randint(3, (2, *space), generator=generator)
    whole = Batch(
        torch.zeros(2, 1, *space),
        torch.stack([label == 1, label == 2], dim=1),
        torch.ones(2, 2, dtype=torch.bool),
        ("liver", "spleen"),
        ("a", "b"),
    )
    p, g = logits.softmax(1).flatten(2), F.one_hot(label.flatten(1), 3).mT.float()
    dice = 2 * (p * g).sum(2) / (p.square().sum(2) + g.sum(2) + 1e-5)
    assert torch.equal(leaf_dice(logits, whole, ORGANS), 1 - dice.mean(1))


def test_nothing_annotated_has_no_gradient():
    logits = LOGITS.clone().requires_grad_()
    loss = leaf_dice(logits, batch({"liver": (0, 0)}, unknown=("liver",)), ORGANS)
    loss.sum().backward()
    assert loss.item() == 1
    assert logits.grad.abs().max() == 0
