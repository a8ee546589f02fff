"""Networks with parts of single organs: counts by hand, groups, one pass for all, gradients for the asked."""

from __future__ import annotations

import pytest
import torch
from refusing import refused
from torch import nn

from panorgan.anatomy import Vocabulary
from panorgan.errors import ConfigError
from panorgan.networks import OrganNetwork, UNet, UNetSettings, head_stack, organ_network
from panorgan.networks.blocks import Blocks, decode, encode, finish
from panorgan.networks.organ_parts import group_of, group_of_key, groups_of
from panorgan.settings import validated

KINDS = ("heads", "task_blocks", "decoders", "encoders")
TUMOURS = ("liver", "liver_tumour", "spleen")


def settings(**options: object) -> UNetSettings:
    return UNetSettings(**{"features": (8, 16), "organs": "heads", **options})


def build(names=TUMOURS, known=None, seed: int = 0, **options: object) -> OrganNetwork:
    torch.manual_seed(seed)
    return organ_network(Vocabulary(names), settings(**options), known)


def image(dimensions: int = 3, batch: int = 2, seed: int = 1) -> torch.Tensor:
    return torch.randn(batch, 1, *(8,) * dimensions, generator=torch.Generator().manual_seed(seed))


def size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


# -- counts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dimensions", [2, 3])
def test_a_head_has_162_parameters(dimensions):
    """(8 + 1)·8 + (8 + 1)·8 + (8 + 1)·2, as the paper counts."""
    network = build(dimensions=dimensions)
    assert set(network.heads) == {"liver", "spleen"}
    assert [size(head) for head in network.heads.values()] == [162, 162]
    assert size(network.embedding) == (8 + 1) * 8  # from 8 features to 8 channels, with a bias


def test_the_embedding_has_eight_channels_whatever_the_features():
    network = build(features=(12, 16), dimensions=2)
    assert size(network.embedding) == (12 + 1) * 8
    assert [size(head) for head in network.heads.values()] == [162, 162]


@pytest.mark.parametrize(("dimensions", "taps"), [(2, 9), (3, 27)])
def test_a_task_block_is_the_last_two_convolutions(dimensions, taps):
    """A 3×3(×3) convolution 8 → 8 with scale and shift of its normalisation, and a 1×1 to two outputs with biases."""
    network = build(["spleen", "liver"], organs="task_blocks", dimensions=dimensions)
    assert {name: size(part) for name, part in network.task_blocks.items()} == dict.fromkeys(
        ("liver", "spleen"), 8 * 8 * taps + 2 * 8 + (8 + 1) * 2
    )


def as_task_block(key: str, last: int) -> str:
    """Where a weight of the plain U-Net lies when its last two convolutions are liver's task block."""
    key = key.replace(f"decoder.{last}.conv_block.conv2.conv.", "task_blocks.liver.0.conv.")
    key = key.replace(f"decoder.{last}.conv_block.norm2.", "task_blocks.liver.0.adn.N.")
    key = key.replace(f"decoder.{last}.conv_block.", f"decoder.{last}.")
    return "task_blocks.liver.1." + key.removeprefix("head.") if key.startswith("head.") else key


@pytest.mark.parametrize("dimensions", [2, 3])
@pytest.mark.parametrize("options", [{}, {"norm": "batch", "residual": True}, {"norm": "group", "dropout": 0.3}])
def test_one_task_block_on_its_representation_is_the_plain_network(dimensions, options):
    """The same layers cut in another place: equal weights give equal logits, also with dropout's draws."""
    organs = Vocabulary(["liver", "liver_tumour"])
    shape = {"features": (8, 16, 16), "dimensions": dimensions, **options}
    plain = UNet(organs, UNetSettings(activation="sigmoid", **shape))
    cut = organ_network(organs, UNetSettings(organs="task_blocks", **shape))
    cut.load_state_dict({as_task_block(key, last=1): value for key, value in plain.state_dict().items()})
    assert size(cut) == size(plain)
    for training in (True, False):
        outcomes = []
        for network in (plain.train(training), cut.train(training)):
            torch.manual_seed(3)
            outcomes.append(network(image(dimensions)))
        assert torch.equal(*outcomes)


# -- groups ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("organ", "group"),
    [
        ("liver", ("liver", 0)),
        ("liver_tumour", ("liver", 1)),
        ("hepatic_vessel", ("hepatic_vessel", 0)),  # inside the liver, but no tumour: FLKD gives it a head of its own
        ("kidney_left", ("kidney_left", 0)),
        ("kidney_tumour", ("kidney", 1)),
        ("kidney_cyst", ("kidney_cyst", 0)),
    ],
)
def test_the_group_of_an_organ_follows_from_anatomy(organ, group):
    assert group_of(organ) == group


def test_groups_of_a_vocabulary():
    assert groups_of(["spleen", "liver_tumour", "liver"]) == ("liver", "spleen")
    assert groups_of(["liver_tumour"]) == ("liver",)  # its organ is not in the vocabulary
    sides = ["kidney_right", "kidney_left", "kidney_tumour"]
    assert groups_of(sides) == ("kidney", "kidney_left", "kidney_right")
    assert groups_of(["kidney", "kidney_tumour", "hepatic_vessel"]) == ("hepatic_vessel", "kidney")
    assert groups_of([]) == ()


def written_out(network: OrganNetwork, group: str, x: torch.Tensor) -> torch.Tensor:
    """Both outputs of a group, layer after layer as the networks' descriptions say."""
    if network.module == "encoders":
        own = network.encoders[group]
        return network.head(decode(network.decoder, encode(own["down"], own["bottleneck"], x)))
    levels = encode(network.encoder, network.bottleneck, x)
    if network.module == "decoders":
        own = network.decoders[group]
        return own["output"](decode(own["up"], levels))
    top = decode(network.decoder, levels)
    return (
        network.task_blocks[group](top)
        if network.module == "task_blocks"
        else network.heads[group](network.embedding(top))
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dimensions", [2, 3])
@pytest.mark.parametrize("block", [37, 1 << 13])
def test_an_organ_and_its_tumour_are_the_two_outputs_of_one_part(kind, dimensions, block, monkeypatch):
    """Values and all gradients, also where heads take voxels in several blocks of odd size."""
    monkeypatch.setitem(head_stack._BLOCK, "cpu", block)
    names = ("spleen", "liver_tumour", "pancreas", "liver")
    network = build(names, ("spleen", "liver", "liver_tumour"), organs=kind, dimensions=dimensions).double()
    x, weights = image(dimensions).double(), list(network.parameters())
    liver, spleen = written_out(network, "liver", x), written_out(network, "spleen", x)
    expected = torch.stack([spleen[:, 0], liver[:, 1], liver[:, 0]], dim=1)
    logits = network(x)
    assert (network.channels, network.activation) == (names, "sigmoid")
    assert (logits[:, 2] == -1e4).all()
    torch.testing.assert_close(logits[:, [0, 1, 3]], expected, rtol=1e-9, atol=1e-11)
    factor = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2)).double()
    ours = torch.autograd.grad((logits[:, [0, 1, 3]].sin() * factor).sum(), weights)
    plain = torch.autograd.grad((expected.sin() * factor).sum(), weights)
    for mine, wanted in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-8, atol=1e-10)


def test_a_tumour_alone_and_sides_with_a_common_tumour():
    alone = build(["liver_tumour"])
    torch.testing.assert_close(alone(image())[:, 0], written_out(alone, "liver", image())[:, 1])
    kidneys = build(["kidney_left", "kidney_right", "kidney_tumour"])
    logits = kidneys(image())
    torch.testing.assert_close(logits[:, 2], written_out(kidneys, "kidney", image())[:, 1])
    torch.testing.assert_close(logits[:, 0], written_out(kidneys, "kidney_left", image())[:, 0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dimensions", [2, 3])
def test_an_organ_that_nobody_knows_is_nowhere_and_disturbs_nobody(kind, dimensions):
    whole = ("liver", "pancreas", "spleen")
    some = build(whole, ("spleen", "liver"), organs=kind, dimensions=dimensions)
    few = build(["liver", "spleen"], organs=kind, dimensions=dimensions, seed=5)
    few.load_state_dict(some.state_dict())  # the very same weights
    logits = some(image(dimensions))
    assert (logits[:, 1] == -1e4).all()
    assert (logits[:, 1].sigmoid() == 0).all()
    assert torch.equal(logits[:, [0, 2]], few(image(dimensions)))
    asked, names = some.channels_for(image(dimensions), ("pancreas",))
    assert names.organs == ("pancreas",)
    assert (asked == -1e4).all()


# -- parts and keys --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("norm", ["instance", "batch", "group"])
@pytest.mark.parametrize("standardised", [False, True])
def test_parts_hold_every_key_once_and_name_their_organ(kind, norm, standardised):
    network = build(organs=kind, norm=norm, weight_standardisation=standardised, residual=True)
    parts = dict(network.parts())
    parts.pop("norm")
    keys = [key for own in parts.values() for key in own]
    assert sorted(keys) == sorted(network.state_dict())
    one = kind.removesuffix("s")
    assert {part for part in parts if ":" in part} == {f"{one}:liver", f"{one}:spleen"}
    for part, own in parts.items():
        group = part.partition(":")[2] or None
        assert own
        assert {group_of_key(key) for key in own} == {group}


def test_the_parts_of_each_network():
    names = {kind: sorted(build(["liver"], organs=kind).parts()) for kind in KINDS}
    assert names == {
        "heads": ["bottleneck", "decoder", "embedding", "encoder", "head:liver", "norm"],
        "task_blocks": ["bottleneck", "decoder", "encoder", "norm", "task_block:liver"],
        "decoders": ["bottleneck", "decoder:liver", "encoder", "norm"],
        "encoders": ["decoder", "encoder:liver", "head", "norm"],
    }


def test_plain_networks_have_no_key_of_a_single_organ():
    plain = UNet(Vocabulary(["liver"]), settings(organs="channels"))
    assert {group_of_key(key) for key in plain.state_dict()} == {None}
    assert group_of_key("heads.liver.0.weight") == "liver"
    assert group_of_key("members.site-north.heads.liver.0.weight") is None


# -- one pass, and gradients -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("norm", ["instance", "batch"])
@pytest.mark.parametrize("dimensions", [2, 3])
def test_one_call_gives_what_each_organ_alone_gives(kind, norm, dimensions):
    """Bit for bit, but for heads: run together, their sums are rounded in another order."""
    network = build(organs=kind, norm=norm, dimensions=dimensions).eval()
    whole = network(image(dimensions))
    for index, organ in enumerate(TUMOURS):
        alone, names = network.channels_for(image(dimensions), {organ})
        assert names.organs == (organ,)
        if kind == "heads":
            torch.testing.assert_close(alone[:, 0], whole[:, index], rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(alone[:, 0], whole[:, index])


def test_channels_come_in_the_order_of_the_vocabulary():
    network = build()
    logits, names = network.channels_for(image(), ["spleen", "liver"])
    assert names.organs == ("liver", "spleen")
    assert torch.equal(logits, network(image())[:, [0, 2]])


def test_a_head_does_not_feel_the_others():
    """Other weights in the spleen's head: not a bit of the liver's outputs or gradients changes."""
    network, outcomes = build(), []
    for change in (0.0, 5.0):
        with torch.no_grad():
            for parameter in network.heads["spleen"].parameters():
                parameter.add_(change)
        logits = network(image())[:, :2]
        weights = list(network.heads["liver"].parameters())
        outcomes.append((logits, *torch.autograd.grad(logits.square().sum(), weights)))
    assert all(torch.equal(first, second) for first, second in zip(*outcomes, strict=True))


def test_outputs_that_fill_up_a_matrix_change_nothing(monkeypatch):
    """As a GPU does it, for speed: outputs that were not requested are computed, but neither seen nor learnt from."""
    network, outcomes = build(), []
    for aligned in (1, 8):
        monkeypatch.setitem(head_stack._ALIGNED, "cpu", aligned)
        seen = image().requires_grad_()
        logits = network(seen)
        gradients = torch.autograd.grad(logits.square().sum(), [seen, *network.parameters()])
        outcomes.append([logits, *gradients])
    for plain, filled in zip(*outcomes, strict=True):
        torch.testing.assert_close(filled, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dimensions", [2, 3])
def test_only_the_asked_parts_receive_gradients(kind, dimensions):
    network = build(organs=kind, dimensions=dimensions)
    logits, _ = network.channels_for(image(dimensions), ["liver"])
    logits.square().sum().backward()
    for name, parameter in network.named_parameters():
        if group_of_key(name) == "spleen":
            assert parameter.grad is None, name
        else:
            assert parameter.grad is not None, name
            assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("kind", KINDS)
def test_layout_in_memory_and_lower_precision(kind):
    """channels_last changes no more than rounding; bfloat16 gives every organ, the unknown one still nowhere."""
    network = build(known=["liver", "liver_tumour"], organs=kind)
    plain = network(image())
    network.to(memory_format=torch.channels_last_3d)
    torch.testing.assert_close(network(image()), plain, rtol=1e-4, atol=1e-4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = network(image())
    assert torch.isfinite(rough).all()
    assert (rough[:, 2].float().sigmoid() == 0).all()
    torch.testing.assert_close(rough[:, :2].float(), plain[:, :2], rtol=0.1, atol=0.1)


# -- weight standardisation and normalisation ------------------------------------------------------------------------


@pytest.mark.parametrize("dimensions", [2, 3])
def test_standardised_weights_have_mean_0_and_variance_1_per_output(dimensions):
    network = build(weight_standardisation=True, dimensions=dimensions)
    standardised = [m for m in network.modules() if hasattr(m, "parametrizations")]
    # Two levels down and one up, two convolutions each: 6. Not the transposed one, the embedding or the heads.
    assert len(standardised) == 6
    for module in standardised:
        rows = module.weight.detach().double().flatten(1)
        torch.testing.assert_close(rows.mean(1), torch.zeros(len(rows)).double(), atol=1e-6, rtol=0)
        torch.testing.assert_close(rows.var(1), torch.ones(len(rows)).double(), atol=1e-3, rtol=0)
        assert not torch.equal(module.weight, module.parametrizations.weight.original)


def test_standardisation_by_hand():
    """Three taps 1, 2, 6: mean 3, variance (4 + 1 + 9)/2 = 7."""
    network = nn.Sequential(nn.Conv2d(1, 1, (1, 3), bias=False))
    finish(network, settings(weight_standardisation=True, dimensions=2))
    with torch.no_grad():
        network[0].parametrizations.weight.original.copy_(torch.tensor([1.0, 2.0, 6.0]).view(1, 1, 1, 3))
    expected = torch.tensor([-2.0, -1.0, 3.0]) / 7**0.5
    torch.testing.assert_close(network[0].weight.flatten(), expected, atol=1e-5, rtol=1e-5)


def test_scale_and_offset_of_a_standardised_weight_do_not_matter_and_it_learns():
    network = build(weight_standardisation=True, norm="group", groups=8)
    before = network(image())
    originals = [p for name, p in network.named_parameters() if name.endswith("weight.original")]
    with torch.no_grad():
        for original in originals:
            original.mul_(3).add_(1)
    torch.testing.assert_close(network(image()), before, rtol=1e-3, atol=1e-3)
    network(image()).square().sum().backward()
    assert all(original.grad.abs().max() > 0 for original in originals)


def test_standardised_networks_exist_without_memory_too():
    """Where only keys and shapes are wanted (what may leave a site), networks are built on the meta device."""
    with torch.device("meta"):
        empty = build(weight_standardisation=True)
    assert empty.state_dict().keys() == build(weight_standardisation=True).state_dict().keys()
    assert all(value.is_meta for value in empty.state_dict().values())


def test_groups_of_channels():
    network = build(norm="group", groups=16, features=(32, 64))
    norms = [m for m in network.modules() if isinstance(m, nn.GroupNorm)]
    assert {m.num_groups for m in norms} == {16}
    assert {m.num_channels for m in norms} == {32, 64}
    assert {m.num_groups for m in build(norm="group").modules() if isinstance(m, nn.GroupNorm)} == {8}


@pytest.mark.parametrize(
    ("wrong", "code", "where", "why"),
    [
        ({"norm": "group", "groups": 16, "features": (24, 32)}, "features-per-group", "network", "multiples of 16"),
        ({"groups": 0}, "bad-setting", "network: groups", "greater than 0"),
        ({"organs": "limbs"}, "bad-setting", "network: organs", "'task_blocks', 'decoders' or 'encoders'"),
        ({"weight_standardisation": "perhaps"}, "bad-setting", "network: weight_standardisation", "'perhaps'"),
    ],
)
def test_settings_that_cannot_be_say_why(wrong, code, where, why):
    with refused(code, ConfigError) as caught:
        validated(UNetSettings, wrong, "network")
    assert caught.value.where == where
    assert why in caught.value.why


def test_groups_do_not_matter_where_no_groups_are_normalised():
    assert settings(norm="instance", groups=16, features=(24, 32)).groups == 16


# -- first weights ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_decides_the_start_and_organs_begin_differently(kind):
    first, again, other = (build(["liver", "spleen"], organs=kind, seed=seed).state_dict() for seed in (1, 1, 2))
    weights = [key for key in first if first[key].ndim > 1]
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not any(torch.equal(first[key], other[key]) for key in weights)
    liver = [key for key in weights if group_of_key(key) == "liver"]
    assert liver
    assert not any(torch.equal(first[key], first[key.replace("liver", "spleen")]) for key in liver)


def test_thick_slices_reach_the_task_block():
    thick = settings(organs="task_blocks", features=(8, 8, 8), strides=((1, 1, 1), (2, 2, 1), (2, 2, 2)))
    assert Blocks(thick).last_convolution().conv.kernel_size == (3, 3, 1)
    network = organ_network(Vocabulary(["liver"]), thick)
    assert network.divisor == (4, 4, 2)
    assert network(torch.zeros(1, 1, 8, 8, 6)).shape == (1, 1, 8, 8, 6)
