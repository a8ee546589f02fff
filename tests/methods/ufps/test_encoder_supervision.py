"""Encoder supervision: which levels, the loss by hand, and which part of the network they belong to."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from federations import run
from refusing import refused
from ufps_pieces import FACTS, FEDERATION, OFF, enter, make_batch, site_of

from panorgan.errors import ConfigError
from panorgan.methods.ufps import UFPS, UFPSConfig
from panorgan.networks import UNetSettings


def network(features: tuple[int, ...] = (2, 4, 4, 8), weight: float = 0.5):
    torch.manual_seed(0)
    method = UFPS(UFPSConfig(**OFF, encoder_supervision=weight))
    return method.build_network(UNetSettings(dimensions=2, features=features), FEDERATION)


def test_every_level_but_the_finest_and_the_bottleneck_has_an_output():
    six = network(features=(2, 2, 2, 2, 2, 2))
    assert len(six.encoder_heads) == 4, "as the paper's network of six levels"
    assert {head.conv.conv.weight.shape[:2] for head in six.encoder_heads} == {(3, 2)}
    plain = network(weight=0)
    assert not hasattr(plain, "encoder_heads")
    assert plain.state_dict().keys() < network().state_dict().keys()
    with refused("no-encoder-level", ConfigError):
        network(features=(2, 4))


def test_the_loss_by_hand():
    """The network's own loss, and half the mean of those of two levels, brought to full resolution."""
    model = network()
    site = site_of(model, **OFF, encoder_supervision=0.5)
    enter(site, 3, 5)
    batch = make_batch()
    image = torch.randn(2, 1, 16, 16)
    batch = type(batch)(**{**vars(batch), "image": image, "masks": image > 0.5, "soft_targets": image.sigmoid()})
    site.prepare(batch)
    logits, features = model.logits_and_features(image)
    own, levels = site.sample_losses(logits), []
    for head, level in zip(model.encoder_heads, features[1:3], strict=True):
        assert level.shape[2:] in ((8, 8), (4, 4))
        levels.append(site.sample_losses(F.interpolate(head(level), size=(16, 16), mode="bilinear")))
    expected = (own + 0.5 * (levels[0] + levels[1]) / 2).mean()
    assert site.loss(batch).item() == pytest.approx(expected.item(), rel=1e-6)


def test_the_outputs_are_averaged_with_the_encoder():
    keys = ("encoder.0.weight", "encoder_heads.0.weight", "decoder.0.weight")
    for part, certain in (("encoder", [True, True, False]), ("decoder", [False, False, True]), ("all", [True] * 3)):
        server = UFPS.Server(UFPSConfig(uncertainty_aware=part), FEDERATION, {})
        server.certainty = {"a": 0.3, "b": 0.7}
        assert [server.weight("a", key) == 0.3 for key in keys] == certain
    assert FACTS["a"].train_cases == 1


def test_it_trains(tiny, tmp_path):
    experiment = tiny(
        method={**OFF, "name": "ufps", "encoder_supervision": 0.5, "pretrain": 0.5},
        network={"features": [4, 4, 8]},
        training={"rounds": 1, "validate_every": 0, "local_steps": 1},
    )
    weights = run(experiment, tmp_path).state.weights
    first = experiment.build_method().build_network(experiment.network, FEDERATION)
    assert {key for key in weights if key.startswith("encoder_heads.")} == {
        f"encoder_heads.{key}" for key in first.encoder_heads.state_dict()
    }
