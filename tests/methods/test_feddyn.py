"""FedDyn: the regularised loss and h_i at a site, h and the next model at the server, by hand."""

from __future__ import annotations

import pytest
import torch
from answers import Answers
from torch import nn

from panorgan.anatomy import Vocabulary
from panorgan.methods.base import Payload, SiteTools
from panorgan.methods.protocol import Federation, RoundInfo, SiteInfo
from panorgan.methods.registry import find_method
from panorgan.networks import SegmentationNetwork, UNet, UNetSettings
from panorgan.networks.unet import OUTPUT_KEYS
from panorgan.preparation.batch import Batch

ORGANS = Vocabulary(["liver"])
SITES = {name: SiteInfo(name, 1, {"liver": 1}) for name in ("a", "b", "c")}
FEDERATION = Federation(ORGANS, SITES)
FEDDYN = find_method("feddyn")


class Scale(SegmentationNetwork):
    """Logits are the image times one weight."""

    def __init__(self) -> None:
        super().__init__(ORGANS, "softmax")
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


def test_the_loss_by_hand():
    """At w = 1.4 with w₀ = 1, h = 0.3, α = 0.5: − 0.3·1.4 + 0.25·0.4²."""
    rule = site()
    with torch.no_grad():
        rule.model.w.fill_(1.4)
    rule.h = {"w": torch.tensor([0.3])}
    plain = rule.supervision(batch()).mean().item()
    assert rule.loss(batch()).item() == pytest.approx(plain - 0.3 * 1.4 + 0.25 * 0.4**2, rel=1e-6)


def end_round(rule, number: int, end: float, heard: int) -> None:
    """A round that ends at w = `end`; the server has the answer of round `heard`."""
    rule.round_info = RoundInfo("train", number, 9)
    rule.received = Payload({"w": torch.tensor([1.0])}, {"heard": float(heard)})
    rule.before_round()
    with torch.no_grad():
        rule.model.w.fill_(end)
    rule.after_round()


def test_h_follows_the_distance_and_survives():
    """h ← 0 − 0.5·(1.4 − 1), then ← −0.2 − 0.5·(0.8 − 1)."""
    rule = site()
    end_round(rule, 1, 1.4, heard=0)
    again = site()
    again.load_state(rule.state())
    for one in (rule, again):
        end_round(one, 2, 0.8, heard=1)
        end_round(one, 3, 1.0, heard=2)
        assert one.h["w"].item() == pytest.approx(-0.1)
        assert set(one.update().tensors) == {"w"}, "h stays at the site"


def test_an_answer_that_never_arrived_leaves_h_as_it_was():
    """The server has no part of the second change, −0.5·(0.8 − 1); the third is made from −0.2 again."""
    rule = site()
    end_round(rule, 1, 1.4, heard=0)
    end_round(rule, 2, 0.8, heard=1)
    end_round(rule, 3, 1.2, heard=1)
    assert rule.h["w"].item() == pytest.approx(-0.2)
    end_round(rule, 4, 1.0, heard=3)
    assert rule.h["w"].item() == pytest.approx(-0.3)


def test_rows_of_the_output_layer_have_no_h():
    """The server averages them without h: at a site too, or their h_i would add up to the whole way from the start."""
    model = UNet(ORGANS, UNetSettings(dimensions=2, features=(2, 4)))
    tools = SiteTools(model, torch.optim.SGD(model.parameters(), 0.1))
    rule = FEDDYN.Site(FEDDYN.Config(), SITES["a"], FEDERATION, tools)
    rule.round_info = RoundInfo("train", 1, 3)
    rule.received = Payload({key: value.clone() for key, value in model.state_dict().items()})
    rule.before_round()
    rule.after_round()
    assert rule.next_h.keys() == {name for name, _ in model.named_parameters()} - set(OUTPUT_KEYS)


def server(names: str = "abc"):
    federation = Federation(ORGANS, {name: SITES[name] for name in names})
    rule = FEDDYN.Server(FEDDYN.Config(alpha=0.5), federation, {"w": torch.tensor([1.0])})
    rule.round_info = RoundInfo("train", 1, 3)
    return rule


def test_two_rounds_at_the_server_by_hand():
    """Round 1: all move by 0.3: h = −0.5·0.3, w = 1.3 + 0.3. Round 2: one of three moves by 0.6: h −= 0.5·0.2."""
    rule = server()
    rule.aggregate(Answers({name: {"w": torch.tensor([1.3])} for name in SITES}))
    assert rule.weights["w"].item() == pytest.approx(1.6)
    assert rule.total["w"].item() == pytest.approx(3 * -0.15)
    assert [rule.broadcast(name).scalars["heard"] for name in SITES] == [1.0] * 3
    resumed = server()
    resumed.weights = dict(rule.weights)
    resumed.load_state(rule.state())
    resumed.aggregate(Answers({"a": {"w": torch.tensor([2.2])}}))
    assert resumed.total["w"].item() == pytest.approx(3 * -0.25)
    assert resumed.weights["w"].item() == pytest.approx(2.2 + 0.5)


def test_a_site_that_joins_late_adds_zero_to_the_sum():
    """Two sites move by 0.3: Σh_i = −0.3. With a third, h is a third of that: after a round in which no site moves,
    w = 1.6 + (0.3/3)/0.5."""
    rule = server(names="ab")
    rule.aggregate(Answers({name: {"w": torch.tensor([1.3])} for name in "ab"}))
    assert rule.weights["w"].item() == pytest.approx(1.6)
    joined = server()
    joined.weights = dict(rule.weights)
    joined.load_state(rule.state())
    joined.aggregate(Answers({name: {"w": joined.weights["w"].clone()} for name in "abc"}))
    assert joined.weights["w"].item() == pytest.approx(1.8)


def test_the_model_settles_where_the_gradients_of_all_sites_cancel():
    """Sites pull at w with ½(w − b)², b = 0, 3 and 6. One answer of b is lost, and c joins in the fourth round."""
    targets, alpha = {"a": 0.0, "b": 3.0, "c": 6.0}, 0.5
    rule, sites = server(names="ab"), {name: site() for name in targets}
    for number in range(1, 80):
        if number == 4:
            state, weights = rule.state(), rule.weights
            rule = server()
            rule.weights = weights
            rule.load_state(state)
        rule.round_info, answers = RoundInfo("train", number, 99), {}
        for name in rule.federation.sites:
            one = sites[name]
            one.round_info, one.received = rule.round_info, rule.broadcast(name)
            one.before_round()
            h, received = one.h.get("w", torch.zeros(1)), rule.weights["w"]
            with torch.no_grad():  # the optimum of ½(w − b)² − h·w + α/2·(w − w₀)²
                one.model.w.copy_((targets[name] + h + alpha * received) / (1 + alpha))
            one.after_round()
            answers[name] = {"w": one.model.w.detach().clone()}
        if number == 2:
            del answers["b"]
        rule.aggregate(Answers(answers))
    assert rule.weights["w"].item() == pytest.approx(3.0, abs=1e-4)
