"""tal, meloss and leafdice: a site's whole loss by hand, and the plain mean of everything."""

from __future__ import annotations

import math

import pytest
import torch
from answers import Answers
from torch import nn

from panorgan.anatomy import Vocabulary
from panorgan.methods.base import SiteTools
from panorgan.methods.protocol import Federation, SiteInfo
from panorgan.methods.registry import find_method
from panorgan.networks import SegmentationNetwork
from panorgan.preparation.batch import Batch

ORGANS = Vocabulary(["liver", "spleen"])
HERE = SiteInfo("here", 1, {"liver": 1})
WHO = Federation(ORGANS, {"here": HERE, "there": SiteInfo("there", 3, {"spleen": 3})})
VOXELS = ((0.2, 0.5, 0.3), (0.5, 0.4, 0.1))
"""Probabilities of background, liver and spleen; the first voxel is liver, the second is not."""
DICE = 1 - (2 * 0.5 + 1) / (0.5 + 0.4 + 1 + 1)
ENTROPY = (-math.log(0.5) - math.log(0.5 + 0.1)) / 2
EXCLUSION_DICE, EXCLUSION_ENTROPY = (2 * 0.3 + 1) / (0.3 + 0.1 + 1 + 1), math.log(1.3) / 2
LEAF_DICE = 1 - 2 * 0.5 / (0.5**2 + 0.4**2 + 1 + 1e-5) / 3
LEAF_DICE_1 = 1 - 2 * 0.5 / (0.5 + 0.4 + 1 + 1e-5) / 3


class Says(SegmentationNetwork):
    """The probabilities of `VOXELS`, whatever the image."""

    def __init__(self) -> None:
        super().__init__(ORGANS, "softmax")
        self.logits = nn.Parameter(torch.tensor(VOXELS).log().T)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.logits.unsqueeze(0)


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("tal", {}, DICE + ENTROPY),
        ("tal", {"dice_weight": 2, "ce_weight": 3}, 2 * DICE + 3 * ENTROPY),
        ("meloss", {"exclusion_weight": 0.5}, DICE + ENTROPY + 0.5 * (EXCLUSION_DICE + EXCLUSION_ENTROPY)),
        ("meloss", {"dice_weight": 2, "ce_weight": 0}, 2 * (DICE + EXCLUSION_DICE)),
        ("leafdice", {}, LEAF_DICE + ENTROPY),
        ("leafdice", {"dice_weight": 2, "ce_weight": 3, "leaf_exponent": 1}, 2 * LEAF_DICE_1 + 3 * ENTROPY),
    ],
)
def test_the_loss_by_hand(name, settings, expected):
    method, model = find_method(name), Says()
    rule = method.Site(method.Config(**settings), HERE, WHO, SiteTools(model, torch.optim.SGD(model.parameters(), 0.1)))
    liver = torch.tensor([[[True, False]]])
    batch = Batch(torch.zeros(1, 1, 2), liver, torch.tensor([[True]]), ("liver",), ("case",))
    assert rule.loss(batch).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["tal", "meloss", "leafdice"])
def test_every_site_averages_every_row_by_its_cases(name):
    """(1·1 + 3·5)/4, also in the rows of organs that a site does not annotate."""
    method, key = find_method(name), "head.conv.conv.bias"
    rule = method.Server(method.Config(), WHO, {key: torch.zeros(3)})
    rule.aggregate(Answers({"here": {key: torch.full((3,), 1.0)}, "there": {key: torch.full((3,), 5.0)}}))
    assert rule.weights[key].tolist() == [4, 4, 4]
