"""DoDNet: 162 weights per scan and organ, the head by hand, who gets a gradient."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from panorgan.anatomy import Vocabulary
from panorgan.methods.dodnet import HEAD_WEIGHTS, LAYERS, DynamicHeads
from panorgan.networks import UNetSettings
from panorgan.networks.organ_parts import MultiHead

ORGANS = Vocabulary(["liver", "liver_tumour", "spleen"])


def network(dimensions: int = 2, **settings: object) -> DynamicHeads:
    torch.manual_seed(0)
    return DynamicHeads(ORGANS, UNetSettings(dimensions=dimensions, features=(4, 8), **settings))


def test_a_head_has_162_weights():
    """8·8 + 8, 8·8 + 8, 8·2 + 2."""
    assert HEAD_WEIGHTS == 72 + 72 + 18 == 162
    assert network().head_weights(torch.zeros(3, 8), "liver").shape == (3, 162)


def test_the_published_controller_has_42768_parameters():
    """256 features and a code of seven, each with 162 weights, and 162 biases."""
    seven = Vocabulary(["liver", "spleen", "pancreas", "colon_tumour", "lung_tumour", "hepatic_vessel", "aorta"])
    with torch.device("meta"):
        controller = DynamicHeads(seven, UNetSettings(features=(32, 64, 128, 256, 256))).controller
    assert sum(parameter.numel() for parameter in controller.parameters()) == (256 + 7 + 1) * 162 == 42_768


@pytest.mark.parametrize("dimensions", [2, 3])
def test_a_controller_that_reads_nothing_gives_every_organ_the_same_plain_head(dimensions):
    """Its biases alone: a multi-head network whose heads have these weights."""
    net = network(dimensions)
    with torch.no_grad():
        net.controller.weight.zero_()
        net.controller.bias.normal_()
    plain = MultiHead(ORGANS, UNetSettings(dimensions=dimensions, features=(4, 8)), tuple(ORGANS))
    weights = {key: value for key, value in net.state_dict().items() if not key.startswith("controller.")}
    begin = 0
    for layer, (inputs, outputs) in zip((0, 2, 4), LAYERS, strict=True):
        for kind, shape in (("weight", (outputs, inputs, *(1,) * dimensions)), ("bias", (outputs,))):
            end = begin + torch.Size(shape).numel()
            weights |= {f"heads.{g}.{layer}.{kind}": net.controller.bias[begin:end].view(shape) for g in net.groups}
            begin = end
    plain.load_state_dict(weights)
    image = torch.randn(2, 1, *(8,) * dimensions)
    torch.testing.assert_close(net(image), plain(image))


def test_the_head_is_three_convolutions_with_each_samples_own_weights():
    features, weights = torch.randn(2, 8, 5, 4), torch.randn(2, 162)
    found = DynamicHeads.run_head(features, weights)
    for sample in range(2):
        x, w = features[sample : sample + 1], weights[sample]
        x = F.leaky_relu(F.conv2d(x, w[:64].view(8, 8, 1, 1), w[64:72]), 0.01)
        x = F.leaky_relu(F.conv2d(x, w[72:136].view(8, 8, 1, 1), w[136:144]), 0.01)
        x = F.conv2d(x, w[144:160].view(2, 8, 1, 1), w[160:])
        torch.testing.assert_close(found[sample : sample + 1], x)


def test_the_code_of_the_organ_and_the_scan_both_count():
    net, described = network(), torch.randn(1, 8)
    liver, spleen = (net.head_weights(described, group) for group in ("liver", "spleen"))
    torch.testing.assert_close(spleen - liver, (net.controller.weight[:, 9] - net.controller.weight[:, 8]).unsqueeze(0))
    assert not torch.equal(net.head_weights(described + 1, "liver"), liver)


def test_the_controller_reads_the_mean_of_the_deepest_features_and_the_code():
    net, seen = network(), {}
    net.bottleneck.register_forward_hook(lambda module, inputs, out: seen.update(deepest=out))
    net.controller.register_forward_hook(lambda module, inputs, out: seen.setdefault("read", []).append(inputs[0]))
    net(torch.randn(2, 1, 8, 8))
    described = seen["deepest"].mean((2, 3))
    for read, code in zip(seen["read"], torch.eye(2), strict=True):
        torch.testing.assert_close(read, torch.cat([described, code.expand(2, -1)], dim=1))


@pytest.mark.parametrize("dimensions", [2, 3])
def test_an_organ_and_its_tumour_share_a_head(dimensions):
    net = network(dimensions)
    image = torch.randn(2, 1, *(8,) * dimensions)
    whole = net(image)
    assert whole.shape == (2, 3, *(8,) * dimensions)
    some, vocabulary = net.channels_for(image, {"spleen", "liver_tumour"})
    assert vocabulary.organs == ("liver_tumour", "spleen")
    torch.testing.assert_close(some, whole[:, [1, 2]])
    assert net.groups == ("liver", "spleen")


def test_an_organ_begins_at_the_prior():
    net = network(organ_prior=0.05)
    with torch.no_grad():
        net.controller.weight.zero_()
    assert net(torch.randn(1, 1, 8, 8)).sigmoid().mean().item() == pytest.approx(0.05)
    assert net.controller.bias[:-2].abs().max() < math.inf
