"""PIPO-FAN: equally many blocks on every way, parameters by hand, weights of scales by hand, one scale alone."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from panorgan.anatomy import Vocabulary
from panorgan.losses import partial_dice_ce
from panorgan.methods.base import SiteTools
from panorgan.methods.pipofan import PIPOFAN, PIPOFANConfig, PyramidNetwork
from panorgan.methods.protocol import Federation, SiteInfo
from panorgan.networks import UNet, UNetSettings
from panorgan.preparation.batch import Batch

ORGANS = Vocabulary(["liver", "spleen"])
FEATURES = (4, 6, 8, 8)


def network(dimensions: int = 2, **more: object) -> PyramidNetwork:
    torch.manual_seed(0)
    return PyramidNetwork(ORGANS, UNetSettings(dimensions=dimensions, features=FEATURES, **more))


def size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_what_is_merged_or_weighed_has_passed_equally_many_blocks():
    """Level l merges after l blocks: the stem and l − 1, of the image or of features. Outputs have passed 3 more."""
    net = network()
    assert [1 + len(own) for own in net.images] == [1 + level for level in range(3)] == [1, 2, 3]
    coarse_to_fine = range(len(FEATURES))  # blocks of the decoder before an output, and behind it
    assert [decoded + len(own) for decoded, own in zip(coarse_to_fine, reversed(net.narrow), strict=True)] == [3] * 4


@pytest.mark.parametrize("dimensions", [2, 3])
def test_parameters_by_hand(dimensions):
    """A block a → b: 3^d·(a·b + b·b) and scale and shift twice. 1×1 convolutions have biases."""
    taps = 3**dimensions

    def block(a: int, b: int) -> int:
        return taps * (a * b + b * b) + 4 * b

    expected = block(1, 4)  # the stem, shared by all images
    expected += block(4, 6) + block(4, 6) + block(6, 8)  # images: level 2, level 3
    expected += block(8, 6) + block(12, 8) + block(16, 8)  # down
    expected += block(6, 4) + block(8, 6) + block(6, 4) + block(8, 8) + block(8, 6) + block(6, 4)  # narrow
    expected += 4 * (4 + 1) * 3  # outputs: background and two organs
    expected += 3 + 1 + taps + 1  # attention
    decoder = size(UNet(ORGANS, UNetSettings(dimensions=dimensions, features=FEATURES)).decoder)
    assert size(network(dimensions)) == expected + decoder


@pytest.mark.parametrize("strides", [None, ((1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 2))])
def test_every_scale_has_the_images_resolution(strides):
    net, image = network(3, strides=strides), torch.randn(2, 1, 16, 16, 16)
    fused, *scales = net.with_scales(image)
    assert [tuple(scale.shape) for scale in (fused, *scales)] == [(2, 3, 16, 16, 16)] * 5
    torch.testing.assert_close(fused, net(image))


def test_a_level_merges_the_largest_of_finer_features_and_the_mean_of_the_image():
    net, image, seen = network(), torch.randn(1, 1, 16, 16), []
    for down in net.down:
        down.register_forward_hook(lambda module, inputs, out: seen.append((inputs[0], out)))
    net(image)
    finer = net.stem(image)
    for level, (merged, out) in enumerate(seen, start=1):
        own = net.images[level - 1](net.stem(F.avg_pool2d(image, 2**level)))
        assert torch.equal(merged[:, : finer.shape[1]], F.max_pool2d(finer, 2))
        torch.testing.assert_close(merged[:, finer.shape[1] :], own)
        finer = out


def test_scales_are_weighed_by_the_softmax_of_mean_and_largest_attention():
    """Attention that copies the first channel: (1 + 3)/2 + 3 = 5 and (0 + 4)/2 + 4 = 6."""
    net = network()
    net.attention = nn.Sequential(nn.Conv2d(3, 1, 1, bias=False))
    with torch.no_grad():
        net.attention[0].weight.copy_(torch.tensor([1.0, 0, 0]).view(1, 3, 1, 1))
    scales = [torch.tensor([[1.0, 3], [0, 0], [2, 0]]), torch.tensor([[0.0, 4], [1, 1], [0, 0]])]
    fused = net.fuse([scale.view(1, 3, 1, 2) for scale in scales])
    share = 1 / (1 + math.exp(6 - 5))
    torch.testing.assert_close(fused.view(3, 2), share * scales[0] + (1 - share) * scales[1])


def test_the_loss_is_the_target_adaptive_one_of_the_prediction_and_of_the_scales():
    model = network()
    who = Federation(ORGANS, {"a": SiteInfo("a", 1, {"liver": 1})})
    image = torch.randn(1, 1, 16, 16, generator=torch.Generator().manual_seed(1))
    batch = Batch(image, image > 0, torch.tensor([[True]]), ("liver",), ("case",))

    def loss_of(weight: float) -> torch.Tensor:
        tools = SiteTools(model, torch.optim.SGD(model.parameters(), 0.1))
        return PIPOFAN.Site(PIPOFANConfig(scales_weight=weight), who.sites["a"], who, tools).loss(batch)

    fused, *scales = (partial_dice_ce(s, batch, ORGANS, "softmax", dice_over="batch") for s in model.with_scales(image))
    assert torch.equal(loss_of(0), fused.mean())
    torch.testing.assert_close(loss_of(2), (fused + 2 * sum(scales) / 4).mean())
