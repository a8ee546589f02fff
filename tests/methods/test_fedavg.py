"""FedAvg at a site: what the received model says about organs without a label. Its server: test_server_average."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from panorgan.anatomy import Vocabulary
from panorgan.data.labels import Activation
from panorgan.losses import expected_cross_entropy, partial_dice_ce
from panorgan.methods.base import Payload, SiteTools
from panorgan.methods.protocol import Federation, RoundInfo, SiteInfo
from panorgan.methods.registry import find_method
from panorgan.networks import SegmentationNetwork
from panorgan.preparation.batch import Batch

ORGANS = Vocabulary(["liver", "spleen"])
RECEIVED, TRAINED = (torch.randn(2, 3, 30, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
AVERAGING = ["fedavg", "fedprox", "scaffold", "fedasam"]


class FixedNetwork(SegmentationNetwork):
    """Logits [B, C, V], whatever the image."""

    def __init__(self, activation: Activation) -> None:
        super().__init__(ORGANS, activation)
        self.logits = nn.Parameter(torch.zeros_like(RECEIVED))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.logits if self.activation == "softmax" else self.logits[:, 1:]


def loss_at(
    name: str, annotated: Mapping[str, int], activation: Activation = "softmax", **config: object
) -> torch.Tensor:
    """Of a site with two cases, whose model says TRAINED after it has received RECEIVED."""
    here = SiteInfo("here", 2, annotated)
    federation = Federation(ORGANS, {"here": here, "there": SiteInfo("there", 1, {"liver": 1, "spleen": 1})})
    model = FixedNetwork(activation)
    method = find_method(name)
    tools = SiteTools(model, torch.optim.SGD(model.parameters(), 0.1))
    site = method.Site(method.Config(**({"mu": 0} if name == "fedprox" else {}), **config), here, federation, tools)
    site.round_info, site.received = RoundInfo("train", 1, 1), Payload({"logits": RECEIVED})
    site.before_round()
    with torch.no_grad():
        model.logits.copy_(TRAINED)
    loss = site.loss(batch_of(annotated))
    loss.backward()
    assert site.received_model is None or torch.equal(site.received_model.logits, RECEIVED)
    return loss.detach()


def batch_of(annotated: Mapping[str, int]) -> Batch:
    generator = torch.Generator().manual_seed(2)
    liver = torch.rand(2, 1, 30, generator=generator) > 0.6
    masks = torch.cat([liver, ~liver], dim=1)
    known = torch.tensor([[case < annotated.get(organ, 0) for organ in ORGANS] for case in range(2)])
    return Batch(torch.zeros(2, 1, 30), masks, known, ("liver", "spleen"), ("a", "b"))


@pytest.mark.parametrize("name", AVERAGING)
def test_the_received_model_shares_out_what_the_annotation_leaves_open(name):
    batch = batch_of({"liver": 2})
    dice = partial_dice_ce(TRAINED, batch, ORGANS, "softmax", ce_weight=0, dice_over="batch")
    by_hand = dice + 3 * expected_cross_entropy(TRAINED, RECEIVED, batch, ORGANS)
    torch.testing.assert_close(loss_at(name, {"liver": 2}, ce_weight=3), by_hand.mean())
    torch.testing.assert_close(loss_at(name, {"liver": 2}, ce_weight=0), dice.mean())


@pytest.mark.parametrize("name", AVERAGING)
def test_the_marginal_loss_is_one_setting_away(name):
    by_hand = partial_dice_ce(TRAINED, batch_of({"liver": 2}), ORGANS, "softmax", dice_over="batch")
    assert torch.equal(loss_at(name, {"liver": 2}, unlabelled="marginal"), by_hand.mean())


def test_with_nothing_left_open_it_is_the_ordinary_loss_bit_for_bit():
    assert torch.equal(
        loss_at("fedavg", {"liver": 2, "spleen": 2}),
        loss_at("fedavg", {"liver": 2, "spleen": 2}, unlabelled="marginal"),
    )


def test_an_organ_that_one_case_does_not_label_is_open_there():
    """Two cases, one of which labels the spleen: the received model is needed."""
    mixed = {"liver": 2, "spleen": 1}
    assert loss_at("fedavg", mixed) != loss_at("fedavg", mixed, unlabelled="marginal")


def test_sigmoid_channels_of_unlabelled_organs_stay_with_the_received_model():
    """The liver as ever; the spleen, which no sample labels, by binary cross-entropy to the received sigmoid."""
    batch, liver = batch_of({"liver": 2}), Vocabulary(["liver"])
    own = partial_dice_ce(TRAINED[:, 1:2], batch, liver, "sigmoid", dice_over="batch")
    held = F.binary_cross_entropy_with_logits(TRAINED[:, 2], RECEIVED[:, 2].sigmoid())
    torch.testing.assert_close(loss_at("fedavg", {"liver": 2}, "sigmoid"), own.mean() + held)
    torch.testing.assert_close(loss_at("fedavg", {"liver": 2}, "sigmoid", unlabelled="marginal"), own.mean())
