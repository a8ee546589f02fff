"""ConDist: conditional probabilities and their Dice by hand, who is asked, the ramp; the server's momentum by hand."""

from __future__ import annotations

import math

import pytest
import torch
from answers import Answers
from torch import nn

from panorgan.anatomy import Vocabulary
from panorgan.methods.base import Payload, SiteTools
from panorgan.methods.condist import conditional_distillation
from panorgan.methods.protocol import Federation, RoundInfo, SiteInfo
from panorgan.methods.registry import find_method
from panorgan.networks import SegmentationNetwork
from panorgan.preparation.batch import Batch

ORGANS = Vocabulary(["liver", "spleen"])


def logits_of(*voxels: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor([[math.log(p) for p in voxel] for voxel in voxels]).T.unsqueeze(0)


def liver_batch(*liver: int, annotated: bool = True) -> Batch:
    masks = torch.tensor([[liver]], dtype=torch.bool)
    return Batch(torch.zeros(1, 1, len(liver)), masks, torch.tensor([[annotated]]), ("liver",), ("case",))


def test_the_loss_by_hand():
    """Voxel 2 is not liver: student (0.2, 0.6, 0.2) gives (0.5, 0.5), teacher (0.6, 0.2, 0.2) gives (0.75, 0.25)."""
    student, teacher = logits_of((0.1, 0.1, 0.8), (0.2, 0.6, 0.2)), logits_of((0.4, 0.3, 0.3), (0.6, 0.2, 0.2))
    background = (2 * 0.5 * 0.75 + 1) / (0.5 + 0.75 + 1)
    spleen = (2 * 0.5 * 0.25 + 1) / (0.5 + 0.25 + 1)
    found = conditional_distillation(student, teacher, liver_batch(1, 0), ORGANS, 1.0)
    assert found.item() == pytest.approx(1 - (background + spleen) / 2)


def test_the_temperature_divides_both_logits():
    student, teacher = logits_of((0.2, 0.6, 0.2)), logits_of((0.64, 0.2, 0.16))
    given = 0.8 / (0.8 + 0.4)  # √0.64 : √0.16
    background = (2 * 0.5 * given + 1) / (0.5 + given + 1)
    spleen = (2 * 0.5 * (1 - given) + 1) / (0.5 + 1 - given + 1)
    found = conditional_distillation(student, teacher, liver_batch(0), ORGANS, 2.0)
    assert found.item() == pytest.approx(1 - (background + spleen) / 2)


def test_what_is_labelled_liver_plays_no_part():
    teacher = logits_of((0.4, 0.3, 0.3), (0.6, 0.2, 0.2))
    first, second = (logits_of(voxel, (0.2, 0.6, 0.2)) for voxel in ((0.1, 0.1, 0.8), (0.8, 0.1, 0.1)))
    losses = [conditional_distillation(s, teacher, liver_batch(1, 0), ORGANS, 1.0).item() for s in (first, second)]
    assert losses[0] == losses[1]
    assert conditional_distillation(first[..., :1], teacher[..., :1], liver_batch(1), ORGANS, 1.0).item() == 0


def test_without_any_label_the_liver_counts_too():
    student, teacher = logits_of((0.2, 0.6, 0.2)), logits_of((0.6, 0.2, 0.2))
    dice = [(2 * p * q + 1) / (p + q + 1) for p, q in ((0.2, 0.6), (0.6, 0.2), (0.2, 0.2))]
    found = conditional_distillation(student, teacher, liver_batch(0, annotated=False), ORGANS, 1.0)
    assert found.item() == pytest.approx(1 - sum(dice) / 3)


def test_filtered_it_leaves_out_what_the_received_model_takes_for_a_labelled_organ():
    """The annotation denies the liver at both voxels; the teacher sees it at the first."""
    student, teacher = logits_of((0.3, 0.1, 0.6), (0.2, 0.6, 0.2)), logits_of((0.3, 0.4, 0.3), (0.6, 0.2, 0.2))
    second = conditional_distillation(student[..., 1:], teacher[..., 1:], liver_batch(0), ORGANS, 1.0)
    plain, filtered = (
        conditional_distillation(student, teacher, liver_batch(0, 0), ORGANS, 1.0, on) for on in (False, True)
    )
    assert filtered.item() == second.item() != plain.item()
    nowhere = conditional_distillation(student[..., :1], teacher[..., :1], liver_batch(0), ORGANS, 1.0, True)
    assert nowhere.item() == 0


@pytest.mark.parametrize(("number", "weight"), [(1, 0.01), (3, 0.505), (5, 1.0)])
def test_the_weight_rises_from_first_to_last_round(number, weight):
    method = find_method("condist")
    site = object.__new__(method.Site)
    site.config, site.round_info = method.Config(), RoundInfo("train", number, 5)
    assert site.weight() == pytest.approx(weight)


class Bias(SegmentationNetwork):
    """The same logits everywhere."""

    def __init__(self) -> None:
        super().__init__(ORGANS, "softmax")
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.bias.view(1, 3, 1).expand(len(image), -1, image.shape[-1])


@pytest.mark.parametrize("filtered", [False, True])
def test_a_site_adds_the_distillation_of_the_received_model_by_its_weight(filtered):
    """In round 3 of 5, at T = 2. The received model takes everything for liver, so that the filter leaves nothing."""
    method, model = find_method("condist"), Bias()
    here, there = SiteInfo("here", 1, {"liver": 1}), SiteInfo("there", 1, {"spleen": 1})
    tools = SiteTools(model, torch.optim.SGD(model.parameters(), 0.1))
    config = method.Config(foreground_filter=filtered)
    rule = method.Site(config, here, Federation(ORGANS, {"here": here, "there": there}), tools)
    rule.round_info, rule.received = RoundInfo("train", 3, 5), Payload({"bias": torch.tensor([0.0, 1.0, -1.0])})
    rule.before_round()
    with torch.no_grad():
        model.bias.copy_(torch.tensor([0.5, 0.2, 0.9]))
    batch = liver_batch(1, 0, 0)
    student, teacher = model(batch.image), torch.tensor([0.0, 1.0, -1.0]).view(1, 3, 1).expand(1, 3, 3)
    distilled = conditional_distillation(student, teacher, batch, ORGANS, 2.0).item()
    plain = rule.supervised(student, ORGANS, batch).mean().item()
    assert distilled > 0.05
    assert rule.loss(batch).item() == pytest.approx(plain + 0.505 * distilled * (not filtered), rel=1e-6)


@pytest.mark.parametrize("name", ["condist", "fedavgm"])
def test_momentum_by_hand_and_after_a_restart(name):
    """Updates of +1 and +1 with β = 0.6: w = 1, then the sites add 1 again: v = 0.6 + 1, w = 2.6."""
    method, sites = find_method(name), {"a": SiteInfo("a", 1, {"liver": 1})}

    def server():
        rule = method.Server(method.Config(), Federation(ORGANS, sites), {"encoder.w": torch.zeros(1)})
        rule.round_info = RoundInfo("train", 1, 2)
        return rule

    first, second = server(), server()
    first.aggregate(Answers({"a": {"encoder.w": torch.tensor([1.0])}}))
    assert first.weights["encoder.w"].item() == 1.0
    second.weights = dict(first.weights)
    second.load_state(first.state())
    second.aggregate(Answers({"a": {"encoder.w": torch.tensor([2.0])}}))
    assert second.weights["encoder.w"].item() == pytest.approx(2.6)
