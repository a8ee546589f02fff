"""Mean teacher: the teacher over rounds and the loss by hand, what stays at the site."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from panorgan.anatomy import Vocabulary
from panorgan.methods.base import Payload, SiteTools
from panorgan.methods.protocol import Federation, RoundInfo, SiteInfo
from panorgan.methods.registry import find_method
from panorgan.networks import SegmentationNetwork
from panorgan.preparation.batch import Batch

ORGANS = Vocabulary(["liver", "spleen"])
METHOD = find_method("mean_teacher")


class Bias(SegmentationNetwork):
    """The same logits everywhere, and a little of the image."""

    def __init__(self) -> None:
        super().__init__(ORGANS, "softmax")
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.bias.view(1, 3, 1) + image * torch.tensor([0.0, 0.5, -0.5]).view(1, 3, 1)


def site(annotated: tuple[str, ...] = ("liver",), **config: object):
    here, there = SiteInfo("here", 2, dict.fromkeys(annotated, 2)), SiteInfo("there", 1, {"liver": 1, "spleen": 1})
    model = Bias()
    tools = SiteTools(model, torch.optim.SGD(model.parameters(), 0.1))
    return METHOD.Site(METHOD.Config(**config), here, Federation(ORGANS, {"here": here, "there": there}), tools)


def begin(rule, number: int, *bias: float) -> None:
    rule.round_info, rule.received = RoundInfo("train", number, 10), Payload({"bias": torch.tensor(bias)})
    rule.before_round()


def batch() -> Batch:
    image = torch.linspace(-1, 1, 6).reshape(1, 1, 6)
    return Batch(image, image > 0.5, torch.tensor([[True]]), ("liver",), ("case",))


def test_the_teacher_is_an_exponential_mean_over_rounds():
    rule = site(decay=0.75)
    begin(rule, 1, 1.0, 0.0, 0.0)
    begin(rule, 2, 0.0, 2.0, 0.0)
    expected = torch.tensor([0.75, 0.5, 0.0])
    assert torch.equal(rule.received_model.bias, expected)
    assert torch.equal(rule.model.bias, torch.tensor([0.0, 2.0, 0.0])), "training goes on from the received model"
    again = site(decay=0.75)
    again.load_state(rule.state())
    assert torch.equal(again.teacher["bias"], expected)
    assert set(rule.update().tensors) == {"bias"}


def test_the_loss_by_hand():
    """Without noise: w·mean (student − teacher)² of the spleen, w = 10·exp(−5·(1 − 0.2/0.4)²) in round 2 of 10."""
    rule = site(noise=0)
    begin(rule, 2, 0.0, 0.0, 0.0)
    with torch.no_grad():
        rule.model.bias.copy_(torch.tensor([0.0, 0.3, 0.9]))
    student, teacher = (net(batch().image).softmax(1)[0, 2] for net in (rule.model, rule.received_model))
    consistency = (student - teacher).square().mean().item()
    plain = rule.supervised(rule.model(batch().image), ORGANS, batch()).mean().item()
    expected = plain + 10 * math.exp(-5 * 0.25) * consistency
    assert rule.loss(batch()).item() == pytest.approx(expected, rel=1e-6)


def test_the_student_sees_noise_the_same_in_the_same_round_and_other_noise_in_another():
    """A worker seeds every round."""
    losses = []
    for noise, seed in ((0.0, 3), (0.5, 3), (0.5, 3), (0.5, 4)):
        rule = site(noise=noise)
        torch.manual_seed(seed)
        begin(rule, 2, 0.1, 0.2, 0.3)
        losses.append(rule.loss(batch()).item())
    assert losses[1] == losses[2]
    assert len(set(losses)) == 3


def test_the_teacher_sees_the_patch_without_noise():
    rule, seen = site(noise=0.5), {}
    begin(rule, 2, 0.1, 0.2, 0.3)
    rule.received_model.register_forward_pre_hook(lambda module, inputs: seen.update(teacher=inputs[0]))
    rule.model.register_forward_pre_hook(lambda module, inputs: seen.update(student=inputs[0]))
    rule.loss(batch())
    assert torch.equal(seen["teacher"], batch().image)
    assert not torch.equal(seen["student"], batch().image)


def test_where_everything_is_labelled_it_is_plain_training():
    rule = site(("liver", "spleen"))
    begin(rule, 2, 0.1, 0.2, 0.3)
    assert rule.received_model is None
    assert not rule.state().tensors
