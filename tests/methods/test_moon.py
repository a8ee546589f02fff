"""MOON: the contrastive loss by hand, which models it compares with, what stays at the site."""

from __future__ import annotations

import math

import pytest
import torch

from panorgan.anatomy import Vocabulary
from panorgan.methods.base import Payload, SiteTools
from panorgan.methods.moon import contrastive
from panorgan.methods.protocol import Federation, RoundInfo, SiteInfo
from panorgan.methods.registry import find_method
from panorgan.networks import UNet, UNetSettings
from panorgan.preparation.batch import Batch

ORGANS = Vocabulary(["liver"])
HERE = SiteInfo("here", 2, {"liver": 2})
SETTINGS = UNetSettings(dimensions=2, features=(2, 4))


def site(name: str = "moon", **config: object):
    torch.manual_seed(0)
    method, model = find_method(name), UNet(ORGANS, SETTINGS)
    tools = SiteTools(model, torch.optim.SGD(model.parameters(), 0.1))
    rule = method.Site(method.Config(**config), HERE, Federation(ORGANS, {"here": HERE}), tools)
    rule.received = Payload({key: value.clone() for key, value in model.state_dict().items()})
    return rule


def begin(rule, number: int) -> None:
    rule.round_info = RoundInfo("train", number, 3)
    rule.before_round()


def batch() -> Batch:
    image = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    return Batch(image, image > 0.3, torch.ones(2, 1, dtype=torch.bool), ("liver",), ("a", "b"))


def test_the_contrastive_loss_by_hand():
    """Cosines 0.6 and −1 at τ = 0.5, then 0 and 0."""
    z = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    received, last = torch.tensor([[3.0, 4.0], [1.0, 0.0]]), torch.tensor([[-2.0, 0.0], [-5.0, 0.0]])
    near, far = math.exp(0.6 / 0.5), math.exp(-1 / 0.5)
    assert contrastive(z, received, last, 0.5).tolist() == pytest.approx([-math.log(near / (near + far)), math.log(2)])


def test_features_are_the_mean_of_the_deepest_level():
    network = UNet(ORGANS, SETTINGS)
    seen = {}
    network.bottleneck.register_forward_hook(lambda module, inputs, output: seen.update(deepest=output))
    network(batch().image)
    assert torch.allclose(network.bottleneck_features(batch().image), seen["deepest"].mean((2, 3)))


def test_the_first_round_and_a_weight_of_zero_are_fedavg():
    plain = site("fedavg")
    begin(plain, 1)
    first, without = site(), site(mu=0)
    begin(first, 1)
    without.last = dict(without.model.state_dict())
    begin(without, 2)
    assert first.loss(batch()).item() == without.loss(batch()).item() == plain.loss(batch()).item()


def test_the_loss_compares_with_the_received_and_the_last_model():
    rule, plain = site(mu=2.0), site("fedavg")
    begin(rule, 1)
    with torch.no_grad():
        for parameter in rule.model.parameters():
            parameter.add_(0.3)
    rule.after_round()
    last = {key: value.clone() for key, value in rule.last.items()}
    begin(rule, 2)
    begin(plain, 2)
    with torch.no_grad():
        for trained in (rule.model, plain.model):
            trained.encoder[0].conv1.conv.weight.mul_(1.5)
    models = [site().model for _ in range(3)]
    models[0].load_state_dict(rule.model.state_dict())
    models[2].load_state_dict(last)
    z, received, before = (model.bottleneck_features(batch().image) for model in models)
    expected = plain.loss(batch()) + 2.0 * contrastive(z, received, before, 0.5).mean()
    assert rule.loss(batch()).item() == pytest.approx(expected.item(), rel=1e-6)


def test_the_last_model_survives_and_stays_at_the_site():
    rule, again = site(), site()
    begin(rule, 1)
    rule.after_round()
    again.load_state(rule.state())
    assert again.last.keys() == rule.last.keys() == rule.model.state_dict().keys()
    assert set(rule.update().tensors) == set(rule.model.state_dict())
    begin(again, 2)
    assert again.others is not None
