"""Exclusion Dice and cross-entropy by hand; what counts."""

from __future__ import annotations

import math

import pytest
import torch

from panorgan.anatomy import Vocabulary
from panorgan.losses.exclusion import exclusion
from panorgan.preparation.batch import Batch

ORGANS = Vocabulary(["liver", "spleen"])


def logits_of(*voxels: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor([[math.log(p) for p in voxel] for voxel in voxels]).T.unsqueeze(0)


def batch(*masks: tuple[int, ...], annotated: tuple[bool, ...] = (True,)) -> Batch:
    names = ("liver", "spleen")[: len(masks)]
    return Batch(
        torch.zeros(1, 1, len(masks[0])),
        torch.tensor([masks], dtype=torch.bool),
        torch.tensor([annotated]),
        names,
        ("case",),
    )


LOGITS = logits_of((0.2, 0.5, 0.3), (0.5, 0.4, 0.1))


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ((1.0, 0.0), (2 * 0.3 + 1) / (0.4 + 1 + 1)),
        ((0.0, 1.0), math.log(1.3) / 2),
        ((2.0, 3.0), 2 * 1.6 / 2.4 + 3 * math.log(1.3) / 2),
    ],
)
def test_by_hand(weights, expected):
    """The liver fills the first voxel; there the spleen has probability 0.3, and 0.1 at the other."""
    assert exclusion(LOGITS, batch((1, 0)), ORGANS, *weights).tolist() == pytest.approx([expected])


def test_a_labelled_organ_and_an_absent_one_exclude_nothing():
    assert exclusion(LOGITS, batch((0, 0)), ORGANS).item() == 0
    assert exclusion(LOGITS, batch((1, 0), (0, 1), annotated=(True, True)), ORGANS).item() == 0


def test_a_tumour_may_be_inside_its_organ_and_nowhere_else():
    """Where the liver is, its tumour may be: only the second voxel excludes it, where it has probability 0.1."""
    organs = Vocabulary(["liver", "liver_tumour"])
    expected = (2 * 0.1 + 1) / (0.4 + 1 + 1) + math.log(1.1) / 2
    assert exclusion(LOGITS, batch((1, 0)), organs).item() == pytest.approx(expected)


def test_the_gradient_pushes_the_organ_out():
    logits = LOGITS.clone().requires_grad_()
    exclusion(logits, batch((1, 0)), ORGANS).sum().backward()
    assert logits.grad[0, 2, 0] > 0
