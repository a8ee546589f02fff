"""Outputs begin with organs that are rare, so that none of them takes over the background by accident."""

from __future__ import annotations

import pytest
import torch

from panorgan.anatomy import Vocabulary
from panorgan.networks import SegmentationNetwork, UNet, UNetSettings, organ_network, organ_probabilities

VOCABULARY = Vocabulary(["liver", "spleen"])
PARTS = ("heads", "task_blocks", "decoders", "encoders")


def build(organs: str = "channels", **options: object) -> SegmentationNetwork:
    settings = UNetSettings(features=(4, 8), organs=organs, **options)
    torch.manual_seed(0)
    return UNet(VOCABULARY, settings) if organs == "channels" else organ_network(VOCABULARY, settings)


def first_probabilities(network: SegmentationNetwork) -> torch.Tensor:
    """Of every organ where nothing is seen: only biases speak."""
    for parameter in network.parameters():
        if parameter.ndim > 1:
            parameter.data.zero_()
    logits = network(torch.randn(1, 1, 8, 8, 8))
    return organ_probabilities(logits, network.activation)[0, :, 0, 0, 0]


@pytest.mark.parametrize("organs", PARTS)
@pytest.mark.parametrize("prior", [0.05, 0.2])
def test_every_part_of_an_organ_begins_at_the_prior(organs: str, prior: float) -> None:
    assert first_probabilities(build(organs, organ_prior=prior)).tolist() == pytest.approx([prior, prior])


def test_sigmoids_begin_at_the_prior() -> None:
    found = first_probabilities(build(activation="sigmoid", organ_prior=0.1))
    assert found.tolist() == pytest.approx([0.1, 0.1])


def test_a_softmax_begins_with_these_odds_against_the_background() -> None:
    """Each organ : background = 0.05 : 0.95, so with two organs an organ has 1/(19 + 2)."""
    assert first_probabilities(build(organ_prior=0.05)).tolist() == pytest.approx([1 / 21, 1 / 21])


@pytest.mark.parametrize("organs", ["channels", *PARTS])
def test_without_a_prior_chances_are_equal(organs: str) -> None:
    chance = 1 / 3 if organs == "channels" else 1 / 2
    assert first_probabilities(build(organs, organ_prior=None)).tolist() == pytest.approx([chance, chance])
