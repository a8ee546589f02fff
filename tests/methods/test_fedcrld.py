"""FedCRLD: attention and divergence by hand, what is a site's own, and the memory."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from panorgan.anatomy import Vocabulary
from panorgan.methods.base import Payload, SiteTools
from panorgan.methods.fedcrld import Attention, divergence
from panorgan.methods.protocol import Federation, RoundInfo, SiteInfo
from panorgan.methods.registry import find_method
from panorgan.networks import UNet, UNetSettings
from panorgan.preparation.batch import Batch

ORGANS = Vocabulary(["liver", "spleen"])
FEDERATION = Federation(ORGANS, {"a": SiteInfo("a", 2, {"liver": 2}), "b": SiteInfo("b", 2, {"spleen": 2})})
FEDCRLD = find_method("fedcrld")
OFF = {"relocalisation": 0, "history": 0, "history_features": 0}


def network(site: str | None = "a", **settings: object):
    torch.manual_seed(0)
    settings = {"dimensions": 2, "features": (2, 4), **settings}
    return FEDCRLD(FEDCRLD.Config()).build_network(UNetSettings(**settings), FEDERATION, site)


def site(**config: object):
    model = network()
    tools = SiteTools(model, torch.optim.SGD(model.parameters(), 0.1))
    rule = FEDCRLD.Site(FEDCRLD.Config(**config), FEDERATION.sites["a"], FEDERATION, tools)
    begin(rule, 1)
    return rule


def begin(rule, number: int) -> None:
    rule.received = Payload({key: value.clone() for key, value in network().state_dict().items()})
    rule.round_info = RoundInfo("train", number, 3)
    rule.before_round()
    rule.model.train()


def batch() -> Batch:
    image = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    return Batch(image, image > 0.3, torch.ones(2, 1, dtype=torch.bool), ("liver",), ("a", "b"))


def test_attention_by_hand():
    """d = 1. From x = 1 to others 0 and 2 with keys and values as they are: a mean with weights e⁰ and e²."""
    attention = Attention(2, 2)
    with torch.no_grad():
        for layer in (attention.queries, attention.keys, attention.values):
            layer.weight.copy_(torch.tensor([1.0, 0.0]).view(1, 2, 1, 1))
            layer.bias.zero_()
        attention.out.weight.copy_(torch.tensor([0.0, 1.0]).view(2, 1, 1, 1))
        attention.out.bias.zero_()
    attention.norm = torch.nn.Identity()
    features = torch.tensor([[1.0, -1.0], [5.0, 5.0]]).view(1, 2, 1, 2)
    others = torch.tensor([[0.0, 2.0], [9.0, 9.0]]).view(1, 2, 1, 2)
    found = attention(features, others)[0, :, 0].tolist()
    first = 2 * math.exp(2) / (1 + math.exp(2))
    second = 2 * math.exp(-2) / (1 + math.exp(-2))
    assert found[0] == [1.0, -1.0]
    assert found[1] == pytest.approx([5 + first, 5 + second], rel=1e-5)


def test_the_divergence_by_hand():
    """p = (½, ½), q = (¾, ¼) at one voxel, equal at the other."""
    p, q = (torch.tensor(values).log() for values in ([[0.5, 0.5], [0.5, 0.5]], [[0.75, 0.5], [0.25, 0.5]]))
    one_way, other_way = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(2), 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    found = divergence(p.view(1, 2, 1, 2) + 3.0, q.view(1, 2, 1, 2))
    assert found.item() == pytest.approx((one_way + other_way) / 2 / 2, rel=1e-5)


def test_own_features_ask_themselves_then_the_common_ones_and_both_answers_are_fused():
    net, seen = network("a"), {}
    for module in (net.to_itself, net.to_global, net.fusion):
        module.register_forward_hook(lambda module, inputs, out: seen.update({module: (inputs, out)}))
    _, common, own = net.compute(batch().image)
    asked, refined = seen[net.to_itself]
    assert [x is own for x in asked] == [True, True]
    asked, located = seen[net.to_global]
    assert asked[0] is refined
    assert asked[1] is common
    assert torch.equal(seen[net.fusion][0][0], torch.cat([refined, located], dim=1))


@pytest.mark.parametrize("settings", [{}, {"dimensions": 3, "norm": "batch"}, {"norm": "group", "groups": 2}])
def test_the_encoders_alone_are_a_sites_own(settings):
    whole, own = network(None, **settings), network("b", **settings)
    usual = UNet(ORGANS, UNetSettings(**{"dimensions": 2, "features": (2, 4), **settings}))
    encoder = {key for key in usual.state_dict() if key.startswith(("encoder.", "bottleneck."))}
    for letter in "ab":
        keys = {key.replace(f".site-{letter}", "") for key in whole.state_dict() if f".site-{letter}." in key}
        assert keys == {f"own_{key}" for key in encoder}
    assert set(own.state_dict()) == {key for key in whole.state_dict() if ".site-a." not in key}
    assert usual.state_dict().keys() <= own.state_dict().keys()


def test_without_its_weights_the_loss_is_the_partial_loss():
    rule = site(**OFF)
    assert rule.loss(batch()).item() == rule.supervision(batch()).mean().item()


def test_the_loss_adds_what_the_weights_say():
    """On a model that has moved away from its history."""
    weights = {"relocalisation": 0.5, "history": 0.3, "history_features": 0.7}
    rule, plain = site(**weights), site(**OFF)
    with torch.no_grad():
        for model in (rule.model, plain.model):
            for parameter in model.own_bottleneck.parameters():
                parameter.mul_(1.3).add_(0.1)
    (logits, common, own), past = rule.model.compute(batch().image), rule.past.compute(batch().image)
    expected = plain.loss(batch())
    expected = expected + 0.5 * divergence(common, own) + 0.3 * F.mse_loss(logits.softmax(1), past[0].softmax(1))
    expected = expected + 0.7 * (F.mse_loss(common, past[1]) + F.mse_loss(own, past[2]))
    assert expected.item() > plain.loss(batch()).item() + 1e-3
    loss = rule.loss(batch())
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()
    assert all(value.grad is not None for value in rule.model.parameters())
    assert all(value.grad is None for value in rule.past.parameters())


def test_the_momentum_model_follows_stays_and_survives():
    """0.75 of the past and a quarter of the model, after a step; the next round begins with it."""
    rule, key = site(momentum=0.75), "head.conv.conv.bias"
    before = {key: value.clone() for key, value in rule.past.state_dict().items()}
    rule.step(batch())
    moved = rule.model.state_dict()[key] - before[key]
    assert moved.abs().max() > 1e-2
    torch.testing.assert_close(rule.past.state_dict()[key], before[key] + 0.25 * moved)
    rule.after_round()
    again = site(momentum=0.75)
    again.load_state(rule.state())
    for one in (rule, again):
        begin(one, 2)
        assert torch.equal(one.past.state_dict()[key], rule.history[key])
        assert torch.equal(one.model.state_dict()[key], before[key])
    assert set(rule.update().tensors) == set(rule.model.state_dict())
