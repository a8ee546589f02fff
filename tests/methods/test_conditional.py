"""Conditional networks: numbers of organs, what a number changes, parameters by hand, passes of the encoder."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from panorgan.anatomy import Vocabulary
from panorgan.methods.conditional import Condition, ConditionalNetwork
from panorgan.networks import UNet, UNetSettings
from panorgan.networks.blocks import Blocks

ORGANS = Vocabulary(["liver", "liver_tumour", "spleen", "pancreas"])
WHERE = ("encoder", "decoder")


def network(where: str, dimensions: int = 2, organs: Vocabulary = ORGANS, **settings: object) -> ConditionalNetwork:
    torch.manual_seed(0)
    return ConditionalNetwork(organs, UNetSettings(dimensions=dimensions, features=(4, 8, 8), **settings), where)


def size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_numbers_are_spread_from_minus_one_to_one():
    assert [network("decoder").number(group) for group in ("liver", "pancreas", "spleen")] == [-1, 0, 1]
    assert network("decoder", organs=Vocabulary(["liver", "liver_tumour"])).number("liver") == -1


def test_the_number_is_one_more_channel_of_a_1x1_convolution():
    """Features (2, −3) mixed by [1, 0, 10; 0, 1, 10] and a bias of (0, 1); a leaky ReLU of slope 0.01."""
    condition = Condition(2, Blocks(UNetSettings(dimensions=2, features=(4, 8))))
    convolution = condition.mix.conv.conv
    with torch.no_grad():
        convolution.weight.copy_(torch.tensor([[1.0, 0, 10], [0, 1, 10]]).view(2, 3, 1, 1))
        convolution.bias.copy_(torch.tensor([0.0, 1]))
    features = torch.tensor([2.0, -3]).view(1, 2, 1, 1).expand(1, 2, 4, 3)
    assert condition(features, 0.5)[0, :, 1, 1].tolist() == pytest.approx([2 + 5, -3 + 5 + 1])
    assert condition(features, -0.5)[0, :, 1, 1].tolist() == pytest.approx([-3 * 0.01, -7 * 0.01])


@pytest.mark.parametrize("dimensions", [2, 3])
@pytest.mark.parametrize(("where", "widths"), [("encoder", (4, 8, 8)), ("decoder", (4, 8))])
def test_it_has_the_parameters_of_a_u_net_and_of_its_mixing_convolutions(where, widths, dimensions):
    """(width + 1)·width + width per conditioned block; a head for two outputs, whatever the number of organs."""
    pair = Vocabulary(["liver", "liver_tumour"])
    plain = UNet(pair, UNetSettings(dimensions=dimensions, features=(4, 8, 8), activation="sigmoid"))
    expected = size(plain) + sum((width + 1) * width + width for width in widths)
    assert size(network(where, dimensions)) == expected


@pytest.mark.parametrize("norm", ["instance", "batch", "group"])
@pytest.mark.parametrize("where", WHERE)
def test_the_number_changes_more_than_a_constant(where, norm):
    """Through normalisation, which takes constants away: what two organs get differs from place to place."""
    net = network(where, norm=norm, groups=4)
    liver, _, spleen, _ = net(torch.randn(1, 1, 16, 16))[0]
    assert (liver - spleen).std() > 0.01


@pytest.mark.parametrize("dimensions", [2, 3])
@pytest.mark.parametrize("where", WHERE)
def test_some_organs_are_channels_of_all(where, dimensions):
    net, image = network(where, dimensions), torch.randn(2, 1, *(8,) * dimensions)
    whole = net(image)
    assert whole.shape == (2, 4, *(8,) * dimensions)
    some, vocabulary = net.channels_for(image, {"spleen", "liver_tumour"})
    assert vocabulary.organs == ("liver_tumour", "spleen")
    torch.testing.assert_close(some, whole[:, [1, 2]])


@pytest.mark.parametrize(("where", "passes"), [("encoder", 3), ("decoder", 1)])
def test_the_encoder_runs_once_where_the_number_enters_behind_it(where, passes):
    net, seen = network(where), []
    net.bottleneck.register_forward_hook(lambda *_: seen.append(1))
    net(torch.randn(1, 1, 8, 8))
    assert len(seen) == passes


@pytest.mark.parametrize("where", WHERE)
def test_an_organ_begins_at_the_prior(where):
    net = network(where, organ_prior=0.05)
    with torch.no_grad():
        net.output.conv.conv.weight.zero_()
    torch.testing.assert_close(net(torch.randn(1, 1, 8, 8)).sigmoid(), torch.full((1, 4, 8, 8), 0.05))
