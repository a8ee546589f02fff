"""Networks that methods for partial labels bring along: mixed precision, recorded passes, channels, thick slices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from panorgan.anatomy import Vocabulary
from panorgan.exporting.plain_network import PlainNetwork
from panorgan.methods.protocol import Federation, SiteInfo
from panorgan.methods.registry import find_method
from panorgan.networks import SegmentationNetwork, UNetSettings

NAMES = ("c2fnas", "conddec", "condenc", "dodnet", "fedmenu", "med3d", "pipofan")
ORGANS = Vocabulary(["liver", "liver_tumour", "spleen", "kidney_left", "kidney_right"])
SITES = {"a": ("liver", "liver_tumour"), "b": ("spleen", "kidney"), "c": ("liver", "kidney_left")}
WHO = Federation(ORGANS, {name: SiteInfo(name, 2, dict.fromkeys(organs, 2)) for name, organs in SITES.items()})


def network(name: str, site: str | None = None, **settings: Any) -> SegmentationNetwork:
    torch.manual_seed(0)
    kind = find_method(name)
    shape = {"dimensions": 2, "features": (4, 8, 8), **settings}
    return kind(kind.Config()).build_network(UNetSettings(**shape), WHO, site)


def image(dimensions: int = 2, channels: int = 1) -> torch.Tensor:
    return torch.randn(2, channels, *(16,) * dimensions, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", NAMES)
def test_in_mixed_precision_it_says_about_the_same(name):
    net = network(name)
    exact = net(image())
    with torch.autocast("cpu", torch.bfloat16):
        rough = net(image())
    assert (rough.float() - exact).abs().mean() < 0.05 * exact.std()
    rough.float().square().mean().backward()
    assert all(p.grad.isfinite().all() for p in net.parameters() if p.grad is not None)


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_pass_gives_the_same(name):
    net = PlainNetwork(network(name))
    traced = torch.jit.trace(net, image(), check_trace=False)
    torch.testing.assert_close(traced(2 * image()), net(2 * image()))


@pytest.mark.parametrize("name", NAMES)
def test_several_image_channels_and_thick_slices(name):
    strides = ((1, 1, 1), (2, 2, 1), (2, 2, 2))
    net = network(name, dimensions=3, input_channels=2, strides=strides)
    assert net(image(3, 2)).shape == (2, len(net.channels), 16, 16, 16)


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("name", NAMES)
def test_every_weight_is_in_one_part_and_norms_are_known(name, norm):
    net = network(name, norm=norm, groups=4, residual=True)
    parts = dict(net.parts())
    norms = parts.pop("norm")
    assert sorted(key for keys in parts.values() for key in keys) == sorted(net.state_dict())
    assert any("weight" in key for key in norms)


@pytest.mark.parametrize("name", NAMES)
def test_a_site_has_the_delivered_networks_weights_or_some_of_them(name):
    delivered = network(name).state_dict()
    for site in SITES:
        own = network(name, site).state_dict()
        assert {key: value.shape for key, value in own.items()}.items() <= {
            key: value.shape for key, value in delivered.items()
        }.items()
