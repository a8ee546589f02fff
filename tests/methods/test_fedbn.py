"""FedBN: whose normalisation layers are where, what is averaged, and which network predicts what."""

from __future__ import annotations

import pytest
import torch
from answers import Answers
from federations import Tampering, make_coordinator, make_workers, run, same
from safetensors.torch import load_file

from panorgan.anatomy import Vocabulary
from panorgan.federation.starting_weights import take_over
from panorgan.methods.about.metadata import describe
from panorgan.methods.protocol import Federation, RoundInfo, SiteInfo
from panorgan.methods.registry import find_method
from panorgan.networks import UNet, UNetSettings
from panorgan.workflows.execute import train
from panorgan.workflows.model_bundle import load_model
from panorgan.workflows.tables import read_metrics

ORGANS = Vocabulary(["liver", "spleen"])
FEDERATION = Federation(ORGANS, {"a": SiteInfo("a", 1, {"liver": 1}), "b": SiteInfo("b", 3, {"spleen": 3})})
NORMS = {
    "instance": {"norm": "instance"},
    "batch, residual": {"norm": "batch", "residual": True},
    "group, slices": {"norm": "group", "groups": 2, "dimensions": 2},
}
METHOD = find_method("fedbn")(find_method("fedbn").Config())


def network(site: str | None = None, **settings: object):
    torch.manual_seed(0)
    return METHOD.build_network(UNetSettings(features=(2, 4), **settings), FEDERATION, site)


def plain(key: str) -> str:
    return ".".join(part for part in key.split(".") if not part.startswith("site-"))


@pytest.mark.parametrize("norm", NORMS)
def test_a_site_has_its_own_layers_of_every_kind_of_norm(norm):
    whole, own = network(**NORMS[norm]), network("b", **NORMS[norm])
    usual = UNet(ORGANS, UNetSettings(features=(2, 4), **NORMS[norm]))
    norms = set(usual.parts()["norm"])
    assert {plain(key) for key in own.state_dict()} == set(usual.state_dict())
    assert {plain(key) for key in own.state_dict() if "site-b" in key} == norms
    assert sum("site-a" in key for key in whole.state_dict()) == len(norms)
    assert len(whole.state_dict()) == len(usual.state_dict()) + len(norms)
    if norm.startswith("batch"):
        assert any(key.endswith("running_mean") for key in norms)


@pytest.mark.parametrize("norm", NORMS)
def test_the_network_of_a_site_is_a_unet_with_its_layers(norm):
    """Also as a part of the delivered one."""
    whole = network(**NORMS[norm]).eval()
    with torch.no_grad():
        for key, value in whole.state_dict().items():
            if "site-b" in key and value.is_floating_point():
                value.mul_(1.5).add_(0.3)
    image = torch.randn(1, 1, *[8] * (2 if "slices" in norm else 3))
    found = {}
    for site, model in METHOD.own_models(whole).items():
        usual = UNet(ORGANS, UNetSettings(features=(2, 4), **NORMS[norm])).eval()
        own = {plain(k): v for k, v in whole.state_dict().items() if f"site-{site}" in k or "site-" not in k}
        usual.load_state_dict(own)
        found[site] = model(image)
        assert torch.equal(found[site], usual(image))
    assert not torch.equal(found["a"], found["b"])
    odds = {site: logits[:, 1:] - logits[:, :1] for site, logits in found.items()}
    merged = torch.stack([torch.zeros_like(odds["a"][:, 0]), odds["a"][:, 0], odds["b"][:, 1]], dim=1)
    assert torch.equal(whole(image), merged)


def test_all_sites_start_from_the_layers_of_another_model():
    whole, start = network(), UNet(ORGANS, UNetSettings(features=(2, 4)))
    with torch.no_grad():
        for value in start.parameters():
            value.add_(0.5)
    taken, _ = take_over(whole, start)
    assert all(torch.equal(value, start.state_dict()[plain(key)]) for key, value in taken.items())


def test_what_leaves_a_site_says_that_parts_of_others_do_not():
    (sent,) = describe(find_method("fedbn")).sent
    assert (sent.weights, sent.tensors) == (
        "what all sites share, and the weights of its own part, which no other site trains",
        (),
    )
    assert sent.relative == pytest.approx(1)


def test_the_server_averages_all_but_the_layers_and_returns_every_site_its_own():
    weights = {key: torch.zeros(1) for key in ("w", "n.site-a.weight", "n.site-b.weight")}
    rule = METHOD.Server(METHOD.Config(server_step=1), FEDERATION, weights)
    rule.round_info = RoundInfo("train", 1, 3)
    assert set(rule.expects("a")) == {"w", "n.site-a.weight"}
    rule.aggregate(
        Answers(
            {
                "a": {"w": torch.tensor([1.0]), "n.site-a.weight": torch.tensor([0.1])},
                "b": {"w": torch.tensor([5.0]), "n.site-b.weight": torch.tensor([0.2])},
            }
        )
    )
    assert rule.weights["w"].item() == (1 * 1.0 + 3 * 5.0) / 4
    for site, own in (("a", 0.1), ("b", 0.2)):
        sent = rule.broadcast(site).tensors
        assert set(sent) == {"w", f"n.site-{site}.weight"}
        assert sent[f"n.site-{site}.weight"].item() == torch.tensor(own).item()


def test_one_site_alone_is_fedavg_bit_for_bit(tiny, tmp_path):
    phantom = {"sites": [{"name": "north", "annotated": ["liver"], "cases": 4, "spacing_mm": [12, 12, 12]}]}
    weights = {}
    for name in ("fedavg", "fedbn"):
        experiment = tiny(method={"name": name}, vocabulary=["liver"], phantom=phantom, network={"norm": "batch"})
        weights[name] = run(experiment, tmp_path / name).state.weights
    assert same({plain(key): value for key, value in weights["fedbn"].items()}, weights["fedavg"])


def test_every_site_is_scored_with_its_own_layers(tiny, tmp_path):
    experiment = tiny(method={"name": "fedbn"}, training={"rounds": 2, "validate_every": 0})
    train(experiment, tmp_path)
    weights = load_file(tmp_path / "model" / "model.safetensors")
    layers = [[v for k, v in weights.items() if f".site-{site}." in k] for site in ("north", "south")]
    assert any(not torch.equal(*pair) for pair in zip(*layers, strict=True))
    rows = read_metrics(tmp_path / "own_models.csv")
    # South annotates both kidneys as one structure, and so cannot say which is which.
    assert {(row["model"], row["organ"]) for row in rows} == {("north", "liver"), ("south", "spleen")}
    assert {row["site"] for row in rows} == {"north", "south", "island"}
    assert set(load_model(tmp_path, "cpu").own_models()) == {"north", "south"}


def test_a_late_joiner_begins_with_layers_as_initialised(tiny, tmp_path):
    training = {"rounds": 3, "local_steps": 1, "validate_every": 0}
    experiment = tiny(method={"name": "fedbn"}, training=training)
    transport = Tampering(make_workers(experiment, tmp_path))
    coordinator = make_coordinator(experiment, tmp_path, transport, joins_at={"south": 3})
    coordinator.run(2)
    assert not any(".site-south." in key for key in coordinator.state.weights)
    before = {key: value.clone() for key, value in coordinator.state.weights.items() if ".site-north." in key}
    seen = {}
    original = transport.exchange

    def exchange(sites, make_request, on_reply, deadline=None):
        seen.update(coordinator.state.weights)
        original(sites, make_request, on_reply, deadline)

    transport.exchange = exchange
    coordinator.run(1)
    scales = [v for k, v in seen.items() if k.endswith(".site-south.weight")]
    assert scales
    assert all(torch.equal(value, torch.ones_like(value)) for value in scales)
    assert all(torch.equal(seen[key], value) for key, value in before.items())
