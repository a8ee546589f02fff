"""Plain rules on pseudo labels: one line of data each, teachers as without the rule, and the rule's own formula."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from answers import Answers
from federations import run, same
from pydantic import Field, ValidationError
from torch import nn

from panorgan.anatomy import Vocabulary
from panorgan.methods import registry
from panorgan.methods.base import Method, Payload, SiteTools
from panorgan.methods.dodnet import DynamicHeads
from panorgan.methods.fedavg import FedAvgConfig
from panorgan.methods.protocol import Federation, RoundInfo, SiteInfo
from panorgan.methods.registry import find_method, methods, register
from panorgan.methods.shared.composition import compose, config_of
from panorgan.methods.shared.pseudo_labels import PseudoLabelSite
from panorgan.methods.shared.starred import starred
from panorgan.networks import SegmentationNetwork, UNetSettings
from panorgan.preparation.batch import Batch
from panorgan.settings import Settings

ORGANS = Vocabulary(["liver", "spleen"])
HERE = SiteInfo("here", 1, {"liver": 1})
FEDERATION = Federation(ORGANS, {"here": HERE, "there": SiteInfo("there", 1, {"spleen": 1})})
STARRED = sorted(name for name in methods() if name.endswith("_pl") and name != "fedavg_pl")
TRAINING = {"rounds": 2, "validate_every": 0, "local_steps": 2}
NOTHING = {
    "moon_pl": {"mu": 0},
    "fedexp_pl": {"epsilon": 1e30},
    "fedavgm_pl": {"server_momentum": 0},
    "fedprox_pl": {"mu": 0},
    "fedasam_pl": {"rho": 0, "swa_start": None},
}
"""Settings with which a rule has no effect."""


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    """Runs of the tiny federation, each made once."""
    made: dict[str, Any] = {}
    folder = tmp_path_factory.mktemp("starred")

    def train(name: str, **config: Any):
        key = f"{name} {config}"
        if key not in made:
            experiment = tiny(method={"name": name, "pretrain": 0.5, **config}, training=TRAINING)
            made[key] = run(experiment, folder / str(len(made)))
        return made[key]

    return train


@pytest.mark.parametrize("name", STARRED)
def test_teachers_are_trained_without_the_rule_and_the_model_with_it(trained, name):
    plain, found = trained("fedavg_pl"), trained(name)
    if name != "dodnet_pl":  # another network
        for site in ("north", "south"):
            assert same(found.tensor_store.get(f"teacher/{site}"), plain.tensor_store.get(f"teacher/{site}"))
        assert found.state.weights.keys() == plain.state.weights.keys()
    assert not same(dict(found.delivered_weights()[1]), dict(plain.delivered_weights()[1]))


@pytest.mark.parametrize("name", NOTHING)
def test_a_rule_without_effect_is_fedavg_on_pseudo_labels_bit_for_bit(trained, name):
    assert same(dict(trained(name, **NOTHING[name]).state.weights), dict(trained("fedavg_pl").state.weights))


class Voxels(SegmentationNetwork):
    """One weight per channel."""

    def __init__(self) -> None:
        super().__init__(ORGANS, "softmax")
        self.w = nn.Parameter(torch.tensor([0.5, -1.0, 2.0]))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.w.view(1, 3, 1).expand(len(image), -1, image.shape[-1])


def test_feddyn_regularises_the_loss_on_the_unified_label_by_hand():
    """− ⟨h, w⟩ + α/2·‖w − w₀‖², with α = 0.5, h = (0.2, 0, −0.1), w₀ = 0: −(0.1 − 0.2) + 0.25·5.25."""
    model, method = Voxels(), find_method("feddyn_pl")
    tools = SiteTools(model, torch.optim.SGD(model.parameters(), 0.1))
    rule = method.Site(method.Config(alpha=0.5), HERE, FEDERATION, tools)
    rule.round_info, rule.received = RoundInfo("train", 1, 2), Payload({"w": torch.zeros(3)})
    rule.h = {"w": torch.tensor([0.2, 0.0, -0.1])}
    batch = Batch(torch.zeros(1, 1, 2), torch.tensor([[[True, False]]]), torch.tensor([[True]]), ("liver",), ("case",))
    rule.prepare(batch)
    plain = PseudoLabelSite.loss.__get__(rule)
    before = rule.sample_losses(model(batch.image)).mean().item()
    assert rule.loss(batch).item() == pytest.approx(before + 0.1 + 0.25 * 5.25, rel=1e-6)
    assert plain(batch).item() == pytest.approx(before), "the starred rule extends this one"


def test_the_server_s_optimiser_waits_for_training():
    """While teachers are trained v would fall, and the first step would be longer."""
    method = find_method("fedadam_pl")
    rule = method.Server(method.Config(), FEDERATION, {"w": torch.zeros(2)})
    for stage in ("pretrain", "exchange"):
        rule.round_info = RoundInfo(stage, 1, 1)
        rule.aggregate(Answers({"here": {}, "there": {}}))
    assert not rule.m
    assert not rule.v
    rule.round_info = RoundInfo("train", 1, 2)
    rule.aggregate(Answers({site: {"w": torch.tensor([0.5, -0.5])} for site in FEDERATION.sites}))
    assert rule.m["w"].tolist() == pytest.approx([0.05, -0.05])


def test_dynamic_heads_share_a_softmax_with_a_background_of_zero():
    settings = UNetSettings(dimensions=2, features=(4, 8))
    independent, exclusive = DynamicHeads(ORGANS, settings), DynamicHeads(ORGANS, settings, "softmax")
    exclusive.load_state_dict(independent.state_dict())
    image = torch.randn(2, 1, 8, 8)
    logits = exclusive(image)
    assert exclusive.channels == ("background", "liver", "spleen")
    assert torch.equal(logits[:, 1:], independent(image))
    assert not logits[:, 0].any()
    found, vocabulary = exclusive.channels_for(image, {"liver"})
    assert vocabulary == ORGANS
    assert torch.equal(found, logits)


def test_what_a_rule_declares_stays_and_the_rest_is_that_of_pseudo_labels(monkeypatch):
    """Settings that it inherits, its own, limits included; `unlabelled` is FedAvg's, not its own."""
    monkeypatch.setattr(registry, "_registered", dict(methods()))

    class Extra(Settings):
        """A piece's settings."""

        strength: float = Field(2.0, ge=0, description="a test")

    class PlainConfig(Extra, FedAvgConfig):
        """A rule's own."""

        server_step: Literal[1] = Field(1, description="a test")
        share: float = Field(0.5, le=1, description="a test")

    @register("plain", config=PlainConfig)
    class Plain(Method):
        """A rule."""

        paper = "a paper"

    preset = starred(Plain, "Plain", "with nothing")
    config = config_of(preset)()
    assert (preset.name, preset.title, preset.summary) == ("plain_pl", "Plain*", "FedAvg* with nothing.")
    assert (config.strength, config.share, config.server_step, config.unlabelled) == (2.0, 0.5, 1, "marginal")
    assert config.organ_parts == "everyone"
    assert isinstance(config, Extra)
    for wrong in ({"strength": -1}, {"share": 2}, {"server_step": "fedexp"}, {"unlabelled": "received"}):
        with pytest.raises(ValidationError):
            type(config)(**wrong)
    assert issubclass(compose(preset, __name__), Plain)
