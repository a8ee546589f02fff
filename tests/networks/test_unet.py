"""The U-Net: channels, parts, options."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from panorgan.anatomy import Vocabulary
from panorgan.networks import UNet, UNetSettings, organ_probabilities

VOCABULARY = Vocabulary(["spleen", "liver", "kidney"])
SMALL = (8, 16, 24)


def build(seed: int = 0, **options: object) -> UNet:
    torch.manual_seed(seed)
    return UNet(VOCABULARY, UNetSettings(**{"features": SMALL, **options}))


VARIANTS = [
    {"dimensions": dimensions, "norm": norm, "residual": residual}
    for dimensions in (2, 3)
    for norm in ("instance", "batch", "group")
    for residual in (False, True)
]


@pytest.mark.parametrize("options", VARIANTS)
@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_logits_have_a_channel_per_name_and_the_images_space(options, activation) -> None:
    network = build(activation=activation, **options)
    space = (16, 8, 12)[: options["dimensions"]]
    expected = ("background", "spleen", "liver", "kidney") if activation == "softmax" else tuple(VOCABULARY)
    assert network.channels == expected
    assert network(torch.randn(2, 1, *space)).shape == (2, len(expected), *space)


@pytest.mark.parametrize(("features", "divisor"), [((8, 8), 2), (SMALL, 4), ((8, 8, 8, 8, 8), 16)])
def test_divisor_is_what_sizes_must_be_a_multiple_of(features, divisor) -> None:
    network = build(features=features, dimensions=2)
    assert network.divisor == (divisor, divisor)
    size = 2 * divisor
    assert network(torch.zeros(1, 1, size, size)).shape[2:] == (size, size)
    with pytest.raises(RuntimeError):
        network(torch.zeros(1, 1, size + 1, size + 1))


THICK = ((1, 1, 1), (2, 2, 1), (2, 2, 2))


@pytest.mark.parametrize("residual", [False, True])
def test_strides_leave_thick_slices_alone_until_pixels_have_caught_up(residual) -> None:
    """16 × 24 × 6 voxels: 16 × 24 × 6 → 8 × 12 × 6 → 4 × 6 × 3, and back."""
    network = build(strides=THICK, residual=residual)
    assert network.divisor == (4, 4, 2)
    seen = []
    for level in (*network.encoder, network.bottleneck):
        level.register_forward_hook(lambda module, inputs, output: seen.append(tuple(output.shape[2:])))
    assert network(torch.zeros(1, 1, 16, 24, 6)).shape[2:] == (16, 24, 6)
    assert seen == [(16, 24, 6), (8, 12, 6), (4, 6, 3)]
    with pytest.raises(RuntimeError):
        network(torch.zeros(1, 1, 16, 24, 7))


@pytest.mark.parametrize(
    ("strides", "kernels"),
    [
        (None, [(3, 3, 3)] * 4),
        # The third axis joins in once the others are halved as often as it is longer.
        (((1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 2)), [(3, 3, 1), (3, 3, 3), (3, 3, 3), (3, 3, 3)]),
        (((1, 1, 1), (1, 2, 2), (1, 2, 2), (2, 2, 2)), [(1, 3, 3), (1, 3, 3), (3, 3, 3), (3, 3, 3)]),
        # Halved before, then left alone because it is short: that is no thick axis.
        (((1, 1, 1), (2, 2, 2), (2, 2, 1), (2, 2, 1)), [(3, 3, 3)] * 4),
        # Never halved: the deepest level alone looks across slices.
        (((1, 1, 1), (2, 2, 1), (2, 2, 1), (2, 2, 1)), [(3, 3, 1), (3, 3, 1), (3, 3, 1), (3, 3, 3)]),
    ],
)
def test_kernels_see_one_voxel_along_an_axis_that_is_still_too_coarse(strides, kernels) -> None:
    settings = UNetSettings(features=(4, 8, 8, 8), strides=strides)
    assert list(settings.level_kernels) == kernels
    network = UNet(VOCABULARY, settings)
    levels = [*network.encoder, network.bottleneck]
    assert [level.conv2.conv.kernel_size for level in levels] == kernels
    assert [level.conv_block.conv1.conv.kernel_size for level in reversed(network.decoder)] == kernels[:-1]


def test_the_usual_strides_written_out_give_the_same_network() -> None:
    written, usual = build(strides=((1, 1, 1), (2, 2, 2), (2, 2, 2))), build()
    image = torch.randn(1, 1, 8, 8, 8)
    assert list(written.state_dict()) == list(usual.state_dict())
    assert torch.equal(written(image), usual(image))


@pytest.mark.parametrize("options", VARIANTS)
def test_structural_parts_partition_the_state(options) -> None:
    network = build(**options)
    parts = dict(network.parts())
    norm = parts.pop("norm")
    assert set(parts) == {"encoder", "bottleneck", "decoder", "head"}
    keys = [key for part in parts.values() for key in part]
    assert sorted(keys) == sorted(network.state_dict())
    for part, keys in parts.items():
        assert all(key.startswith(f"{part}.") for key in keys)
    assert len(set(norm)) == len(norm)
    assert set(norm) < set(network.state_dict())


@pytest.mark.parametrize(
    ("norm", "kinds", "per_layer"),
    [
        ("instance", (nn.modules.instancenorm._InstanceNorm,), 2),  # weight, bias
        ("group", (nn.GroupNorm,), 2),
        ("batch", (nn.BatchNorm2d, nn.BatchNorm3d), 5),  # and running mean, running variance, batches seen
    ],
)
@pytest.mark.parametrize(("residual", "layers"), [(False, 10), (True, 13)])
@pytest.mark.parametrize("dimensions", [2, 3])
def test_norm_names_exactly_the_normalisation_layers(norm, kinds, per_layer, residual, layers, dimensions) -> None:
    """Three levels are five blocks of two layers; each residual encoder block has one more on its shortcut."""
    network = build(norm=norm, residual=residual, dimensions=dimensions)
    expected = {
        f"{name}.{key}"
        for name, module in network.named_modules()
        if isinstance(module, kinds)
        for key in module.state_dict()
    }
    assert len(expected) == layers * per_layer
    assert set(network.parts()["norm"]) == expected


def test_running_statistics_belong_to_norm() -> None:
    norm = build(norm="batch").parts()["norm"]
    endings = {key.rpartition(".")[2] for key in norm}
    assert endings == {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}


@pytest.mark.parametrize("options", VARIANTS)
def test_the_gradient_reaches_every_parameter(options) -> None:
    network = build(**options)
    image = torch.randn(2, 1, *(16,) * options["dimensions"])
    (network(image).softmax(1) ** 2).sum().backward()
    unreached = [n for n, p in network.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]
    assert unreached == []


def test_the_seed_decides_the_start() -> None:
    first, again, other = build(1).state_dict(), build(1).state_dict(), build(2).state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first["head.conv.conv.weight"], other["head.conv.conv.weight"])


def test_the_start_suits_leaky_rectifiers() -> None:
    network = build(features=(32, 64), organ_prior=None)
    weight = network.encoder[0].conv2.conv.weight  # 32 inputs × 27 taps
    assert float(weight.detach().std()) == pytest.approx(math.sqrt(2 / (1 + 0.01**2) / (32 * 27)), rel=0.03)
    assert (network.head.conv.conv.bias == 0).all()


def test_equal_settings_give_equal_keys_whatever_the_seed() -> None:
    network = build(2)
    network.load_state_dict(build(1).state_dict())
    image = torch.randn(1, 1, 8, 8, 8)
    assert torch.equal(network.eval()(image), build(1).eval()(image))


def test_dropout_acts_in_training_only() -> None:
    network = build(dropout=0.5, dimensions=2)
    image = torch.randn(1, 1, 16, 16)
    assert not torch.equal(network(image), network(image))
    network.eval()
    assert torch.equal(network(image), network(image))


@pytest.mark.parametrize(
    "wrong",
    [
        {"features": (8,)},
        {"features": (8, 0)},
        {"features": (8, 12), "norm": "group"},
        {"dimensions": 4},
        {"norm": "layer"},
        {"dropout": 1.0},
        {"features": (8, 8, 8), "strides": ((1, 1, 1), (2, 2, 1))},
        {"features": (8, 8), "strides": ((1, 1), (2, 2))},
        {"features": (8, 8), "strides": ((2, 2, 2), (2, 2, 2))},
        {"features": (8, 8), "strides": ((1, 1, 1), (3, 2, 2))},
    ],
)
def test_impossible_settings_are_refused(wrong) -> None:
    with pytest.raises(ValidationError):
        UNetSettings(**wrong)


def test_organ_probabilities_by_hand() -> None:
    logits = torch.tensor([0.0, math.log(3), math.log(4)]).view(1, 3, 1, 1)
    softmax = organ_probabilities(logits, "softmax")
    torch.testing.assert_close(softmax.flatten(), torch.tensor([3 / 8, 4 / 8]))
    assert softmax.shape == (1, 2, 1, 1)
    sigmoid = organ_probabilities(logits, "sigmoid")
    torch.testing.assert_close(sigmoid.flatten(), torch.tensor([1 / 2, 3 / 4, 4 / 5]))
