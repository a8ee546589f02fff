"""Fed-MENU: parameters by hand, one organ is a U-Net, who trains and averages a sub-encoder, the loss in parts."""

from __future__ import annotations

import pytest
import torch
from answers import Answers
from torch import nn

from panorgan.anatomy import Vocabulary
from panorgan.losses import partial_dice_ce
from panorgan.losses.exclusion import exclusion
from panorgan.methods.base import SiteTools
from panorgan.methods.fedmenu import FedMENU, FedMENUConfig, MENUNet
from panorgan.methods.protocol import Federation, Payload, SiteInfo
from panorgan.networks import UNet, UNetSettings
from panorgan.preparation.batch import Batch

ORGANS = Vocabulary(["liver", "liver_tumour", "spleen"])
SITES = {"a": ("liver",), "b": ("liver", "spleen"), "c": ("spleen",)}
WHO = Federation(ORGANS, {s: SiteInfo(s, n, dict.fromkeys(o, n)) for n, (s, o) in enumerate(SITES.items(), start=1)})
FEATURES = (4, 8, 8)


def network(organs: Vocabulary = ORGANS, dimensions: int = 2) -> MENUNet:
    torch.manual_seed(0)
    return MENUNet(organs, UNetSettings(dimensions=dimensions, features=FEATURES))


def site(name: str = "a", **settings: float) -> FedMENU.Site:
    model = network()
    tools = SiteTools(model, torch.optim.SGD(model.parameters(), 0.1))
    rule = FedMENU.Site(FedMENUConfig(**settings), WHO.sites[name], WHO, tools)
    rule.received = Payload(model.state_dict())
    rule.before_round()
    return rule


def batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    image = torch.randn(2, 1, 8, 8, generator=generator)
    masks = torch.rand(2, 2, 8, 8, generator=generator) > 0.5
    return Batch(image, masks, torch.tensor([[True, False]] * 2), ("liver", "spleen"), ("x", "y"))


def size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("dimensions", [2, 3])
def test_it_has_encoders_of_u_nets_and_the_decoder_of_a_wide_one(dimensions):
    """Two organs: the rest is that of features (8, 16, 16). Auxiliary: width·4·3^d + 2·4, then (4 + 1)·2."""
    narrow, wide = (
        UNet(ORGANS, UNetSettings(dimensions=dimensions, features=features)) for features in (FEATURES, (8, 16, 16))
    )
    joint = size(wide.bottleneck) + size(wide.decoder) + size(wide.head)
    auxiliary = sum(width * 4 * 3**dimensions + 2 * 4 + (4 + 1) * 2 for width in FEATURES[:-1])
    assert size(network(dimensions=dimensions)) == 2 * size(narrow.encoder) + joint + auxiliary


@pytest.mark.parametrize("dimensions", [2, 3])
def test_for_one_organ_it_is_the_u_net_bit_for_bit(dimensions):
    liver = Vocabulary(["liver"])
    plain, menu = UNet(liver, UNetSettings(dimensions=dimensions, features=FEATURES)), network(liver, dimensions)
    plain.load_state_dict(
        {
            key.replace("encoders.liver.", "encoder."): value
            for key, value in menu.state_dict().items()
            if not key.startswith("auxiliary.")
        }
    )
    image = torch.randn(2, 1, *(8,) * dimensions)
    assert torch.equal(menu(image), plain(image))
    assert torch.equal(menu.with_auxiliary(image, ("liver",))[0], plain(image))


def test_the_auxiliary_decoder_reads_one_sub_encoder_and_the_decoder_all():
    net, image = network(), torch.randn(1, 1, 8, 8)
    before = net.with_auxiliary(image, ("liver", "spleen"))
    assert [tuple(level.shape) for level in before] == [(1, 4, 8, 8), *[(1, 2, 8, 8)] * 2]
    with torch.no_grad():
        for parameter in net.encoders["spleen"].parameters():
            parameter.mul_(1.5)
    after = net.with_auxiliary(image, ("liver", "spleen"))
    assert not torch.equal(before[0], after[0])
    for old, new in zip(before[1:], after[1:], strict=True):
        assert torch.equal(old[:, 0], new[:, 0])
        assert not torch.equal(old[:, 1], new[:, 1])


def test_the_loss_is_the_sum_of_its_parts():
    rule, whole = site(exclusion_weight=0.5, auxiliary_weight=0.25), batch()
    logits, *levels = rule.model.with_auxiliary(whole.image, ("liver",))
    marginal = partial_dice_ce(logits, whole, ORGANS, "softmax", dice_over="batch")
    excluded = exclusion(logits, whole, ORGANS)
    alone = [partial_dice_ce(level, whole, Vocabulary(["liver"]), "sigmoid", dice_over="batch") for level in levels]
    expected = (marginal + 0.5 * excluded + 0.25 * sum(alone)).mean()
    torch.testing.assert_close(rule.loss(whole), expected)
    assert torch.equal(site(exclusion_weight=0, auxiliary_weight=0).loss(whole), marginal.mean())


def test_a_site_trains_its_own_sub_encoders_and_what_is_shared():
    rule = site("a")
    rule.loss(batch()).backward()
    moved = {name for name, parameter in rule.model.named_parameters() if parameter.grad is not None}
    assert moved == {name for name, _ in rule.model.named_parameters() if not name.startswith("encoders.spleen.")}
    assert set(rule.update().tensors) == {k for k in rule.model.state_dict() if not k.startswith("encoders.spleen.")}


def test_owners_count_alike_in_a_sub_encoder_and_by_cases_elsewhere():
    """Sites a, b and c have 1, 2 and 3 cases: the liver's mean is (1 + 4)/2, the decoder's (1·1 + 2·4 + 3·9)/6."""
    key, shared = "encoders.liver.0.conv1.conv.weight", "decoder.0.transp_conv.conv.weight"
    rule = FedMENU.Server(FedMENUConfig(), WHO, {key: torch.zeros(1), shared: torch.zeros(1)})
    assert {site: set(rule.expects(site)) for site in SITES} == {"a": {key, shared}, "b": {key, shared}, "c": {shared}}
    assert set(rule.broadcast("c").tensors) == {key, shared}
    sent = {"a": {key: 1.0, shared: 1.0}, "b": {key: 4.0, shared: 4.0}, "c": {shared: 9.0}}
    rule.aggregate(Answers({s: {k: torch.tensor([v]) for k, v in keys.items()} for s, keys in sent.items()}))
    assert rule.weights[key].item() == 2.5
    assert rule.weights[shared].item() == 6
