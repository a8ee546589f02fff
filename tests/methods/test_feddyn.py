"""FedDyn: the bent loss and h_i at a site, h and the next model at the server, by hand."""

from __future__ import annotations

import pytest
import torch
from answers import Answers
from torch import nn

from panorgan.anatomy import Vocabulary
from panorgan.methods.base import Payload, SiteTools
from panorgan.methods.protocol import Federation, RoundInfo, SiteInfo
from panorgan.methods.registry import find_method
from panorgan.networks import SegmentationNetwork
from panorgan.preparation.batch import Batch

SITES = {name: SiteInfo(name, 1, {"liver": 1}) for name in ("a", "b", "c")}
FEDERATION = Federation(Vocabulary(["liver"]), SITES)
FEDDYN = find_method("feddyn")


class Scale(SegmentationNetwork):
    """Logits are the image times one weight."""

    def __init__(self) -> None:
        super().__init__(Vocabulary(["liver"]), "softmax")
        self.w = nn.Parameter(torch.tensor([2.0]))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.zeros_like(image), self.w * image], dim=1)


def site(alpha: float = 0.5):
    model = Scale()
    tools = SiteTools(model, torch.optim.SGD(model.parameters(), 0.1))
    rule = FEDDYN.Site(FEDDYN.Config(alpha=alpha), SITES["a"], FEDERATION, tools)
    rule.round_info, rule.received = RoundInfo("train", 1, 3), Payload({"w": torch.tensor([1.0])})
    rule.before_round()
    return rule


def batch() -> Batch:
    image = torch.linspace(-1, 1, 8).reshape(1, 1, 8)
    return Batch(image, image > 0, torch.tensor([[True]]), ("liver",), ("case",))


def test_the_loss_is_bent_by_hand():
    """At w = 1.4 with w₀ = 1, h = 0.3, α = 0.5: − 0.3·1.4 + 0.25·0.4²."""
    rule = site()
    with torch.no_grad():
        rule.model.w.fill_(1.4)
    rule.h = {"w": torch.tensor([0.3])}
    plain = rule.supervision(batch()).mean().item()
    assert rule.loss(batch()).item() == pytest.approx(plain - 0.3 * 1.4 + 0.25 * 0.4**2, rel=1e-6)


def test_h_follows_the_distance_and_survives():
    """h ← 0 − 0.5·(1.4 − 1), then ← −0.2 − 0.5·(0.8 − 1)."""
    rule = site()
    for end, h in ((1.4, -0.2), (0.8, -0.1)):
        rule.before_round()
        with torch.no_grad():
            rule.model.w.fill_(end)
        rule.after_round()
        assert rule.h["w"].item() == pytest.approx(h)
    again = site()
    again.load_state(rule.state())
    assert torch.equal(again.h["w"], rule.h["w"])
    assert set(rule.update().tensors) == {"w"}, "h stays at the site"


def server():
    rule = FEDDYN.Server(FEDDYN.Config(alpha=0.5), FEDERATION, {"w": torch.tensor([1.0])})
    rule.round_info = RoundInfo("train", 1, 3)
    return rule


def test_two_rounds_at_the_server_by_hand():
    """Round 1: all move by 0.3: h = −0.5·0.3, w = 1.3 + 0.3. Round 2: one of three moves by 0.6: h −= 0.5·0.2."""
    rule = server()
    rule.aggregate(Answers({name: {"w": torch.tensor([1.3])} for name in SITES}))
    assert rule.weights["w"].item() == pytest.approx(1.6)
    assert rule.h["w"].item() == pytest.approx(-0.15)
    resumed = server()
    resumed.weights = dict(rule.weights)
    resumed.load_state(rule.state())
    resumed.aggregate(Answers({"a": {"w": torch.tensor([2.2])}}))
    assert resumed.h["w"].item() == pytest.approx(-0.25)
    assert resumed.weights["w"].item() == pytest.approx(2.2 + 0.5)
