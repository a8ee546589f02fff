"""Transposed convolutions as matrix products: the same numbers, the same keys."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from panorgan.anatomy import Vocabulary
from panorgan.networks import UNet, UNetSettings
from panorgan.networks.upsampling import Upsampling2d, Upsampling3d, upsample


def test_by_hand():
    """One voxel of 3 with the kernel 1, 2 and a bias of 1 makes 4 and 7, one of 5 makes 6 and 11."""
    image = torch.tensor([[[[3.0], [5.0]]]])
    weight = torch.tensor([[[[1.0], [2.0]]]])
    assert upsample(image, weight, torch.ones(1)).flatten().tolist() == [4.0, 7.0, 6.0, 11.0]


@pytest.mark.parametrize("kernel", [(2, 2, 1), (2, 2, 2), (1, 2, 2), (2, 1), (2, 2), (3, 2)])
@pytest.mark.parametrize("bias", [False, True])
def test_it_is_the_transposed_convolution(kernel, bias):
    torch.manual_seed(0)
    image = torch.randn(2, 5, *(4, 3, 2)[: len(kernel)], dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 3, *kernel, dtype=torch.float64, requires_grad=True)
    shift = torch.randn(3, dtype=torch.float64) if bias else None
    convolution = F.conv_transpose3d if len(kernel) == 3 else F.conv_transpose2d
    expected, computed = convolution(image, weight, shift, stride=kernel), upsample(image, weight, shift)
    torch.testing.assert_close(computed, expected)
    push = torch.randn_like(expected)
    for ours, theirs in zip(
        torch.autograd.grad(computed, (image, weight), push),
        torch.autograd.grad(expected, (image, weight), push),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("dimensions", "kind"), [(2, Upsampling2d), (3, Upsampling3d)])
def test_every_network_uses_it_under_the_usual_keys(dimensions, kind):
    network = UNet(Vocabulary(["liver"]), UNetSettings(features=(4, 8, 8), dimensions=dimensions))
    layers = {name: module for name, module in network.named_modules() if isinstance(module, kind)}
    assert list(layers) == ["decoder.0.transp_conv.conv", "decoder.1.transp_conv.conv"]
    assert {f"{name}.weight" for name in layers} <= network.state_dict().keys()
