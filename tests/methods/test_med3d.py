"""Med3D: a branch by hand, branches merged, who sends what, one branch alone."""

from __future__ import annotations

import pytest
import torch
from answers import Answers
from torch import nn

from panorgan.anatomy import Vocabulary
from panorgan.methods.med3d import Branch, BranchedNetwork, Med3D, Med3DConfig
from panorgan.methods.protocol import Federation, SiteInfo
from panorgan.networks import UNet, UNetSettings

ORGANS = Vocabulary(["liver", "spleen"])
SITES = {"a": ("liver",), "b": ("liver", "spleen")}
WHO = Federation(ORGANS, {s: SiteInfo(s, n, dict.fromkeys(o, n)) for n, (s, o) in enumerate(SITES.items(), start=1)})
METHOD = Med3D(Med3DConfig(server_step=1))


def settings(dimensions: int = 2, **more: object) -> UNetSettings:
    return UNetSettings(dimensions=dimensions, features=(4, 8, 16), **more)


def built(site: str | None = None, dimensions: int = 2, **more: object) -> BranchedNetwork:
    torch.manual_seed(0)
    return METHOD.build_network(settings(dimensions, **more), WHO, site)


def size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("dimensions", [2, 3])
@pytest.mark.parametrize(("activation", "channels"), [("softmax", 2), ("sigmoid", 1)])
def test_a_branch_is_light(dimensions, activation, channels):
    """16 → 4 by 2^d taps, 4 → 4 by 3^d, each with scale and shift; a 1×1 convolution with biases to its channels."""
    net = built("a", dimensions, activation=activation)
    branch = 16 * 4 * 2**dimensions + 2 * 4 + 4 * 4 * 3**dimensions + 2 * 4 + (4 + 1) * channels
    plain = UNet(ORGANS, settings(dimensions))
    assert size(net.members) == branch
    assert size(net) == branch + size(plain.encoder) + size(plain.bottleneck)


@pytest.mark.parametrize("strides", [None, ((1, 1, 1), (2, 2, 1), (2, 2, 2))])
def test_a_branch_reaches_the_images_resolution(strides):
    net = built(dimensions=3, strides=strides)
    assert net(torch.randn(2, 1, 16, 8, 8)).shape == (2, 3, 16, 8, 8)


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_an_organ_gets_the_mean_log_odds_of_its_branches(activation):
    net, image = built(activation=activation), torch.randn(1, 1, 8, 8)
    deepest = net.shared(image)
    a, b = (net.members[f"site-{name}"](deepest) for name in SITES)
    merged = net(image)
    if activation == "softmax":
        assert not merged[:, 0].any()
        a, b, merged = a[:, 1:] - a[:, :1], b[:, 1:] - b[:, :1], merged[:, 1:]
    torch.testing.assert_close(merged, torch.stack([(a[:, 0] + b[:, 0]) / 2, b[:, 1]], dim=1))


def test_the_encoder_runs_once():
    net, seen = built(), []
    net.bottleneck.register_forward_hook(lambda *_: seen.append(1))
    net(torch.randn(1, 1, 8, 8))
    assert len(seen) == 1


def test_at_a_site_the_merged_output_is_its_branch():
    net, image = built("b"), torch.randn(1, 1, 8, 8)
    branch = net.members["site-b"]
    torch.testing.assert_close(net(image).softmax(1), branch(net.shared(image)).softmax(1))


def test_a_branch_alone_is_the_sites_own_model():
    delivered, image = built(), torch.randn(1, 1, 8, 8)
    alone = METHOD.own_models(delivered)
    assert {name: net.vocabulary.organs for name, net in alone.items()} == SITES
    expected = delivered.members["site-b"](delivered.shared(image)).softmax(1)
    torch.testing.assert_close(alone["b"](image).softmax(1), expected)


def test_a_site_gets_and_sends_the_encoder_and_its_own_branch():
    weights = built().state_dict()
    rule = Med3D.Server(METHOD.config, WHO, weights)
    for name in SITES:
        own = set(built(name).state_dict())
        assert set(rule.expects(name)) == set(rule.broadcast(name).tensors) == own
    shared = "encoder.0.conv1.conv.weight"
    branches = [f"members.site-{name}.layers.2.conv.conv.bias" for name in SITES]
    sent = {"a": {shared: 3.0, branches[0]: 1.0}, "b": {shared: 6.0, branches[1]: 2.0}}
    rule.aggregate(
        Answers({s: {k: torch.full_like(weights[k], v) for k, v in keys.items()} for s, keys in sent.items()})
    )
    assert rule.weights[shared].unique().tolist() == [5]  # 1 and 2 cases
    assert [rule.weights[key].unique().tolist() for key in branches] == [[1], [2]]


def test_an_organ_begins_at_the_prior():
    branch = built("a", organ_prior=0.05, activation="sigmoid").members["site-a"]
    assert isinstance(branch, Branch)
    with torch.no_grad():
        branch.layers[-1].conv.conv.weight.zero_()
    torch.testing.assert_close(branch(torch.randn(1, 16, 2, 2)).sigmoid(), torch.full((1, 1, 8, 8), 0.05))
