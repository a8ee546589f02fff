"""FedExP as published: the step by hand, the mean of the last two models, restarts; sums in one order."""

from __future__ import annotations

import pytest
import torch
from answers import Answers

from panorgan.anatomy import Vocabulary
from panorgan.methods.protocol import Federation, RoundInfo, SiteInfo
from panorgan.methods.registry import find_method
from panorgan.methods.shared import server_average

SITES = {name: SiteInfo(name, 1, {"liver": 1}) for name in ("a", "b")}
BEGIN = {"encoder.w": torch.tensor([0.0, 0.0])}


def server(**config: object):
    method = find_method("fedexp")
    rule = method.Server(method.Config(**config), Federation(Vocabulary(["liver"]), SITES), BEGIN)
    rule.round_info = RoundInfo("train", 1, 2)
    return rule


def answers(a: tuple[float, float], b: tuple[float, float]) -> Answers:
    return Answers({"a": {"encoder.w": torch.tensor(a)}, "b": {"encoder.w": torch.tensor(b)}})


@pytest.mark.parametrize(
    ("a", "b", "step"),
    [
        ((3.0, 1.0), (-1.0, 1.0), 12 / (2 * 2 * (2 + 0.5))),  # Σ‖Δ_i‖² = 10 + 2, ‖Δ‖² = 1 + 1
        ((1.0, 1.0), (1.0, 1.0), 1.0),  # agreed: never below the mean
    ],
)
def test_the_step_by_hand(a, b, step):
    rule = server(epsilon=0.5)
    rule.aggregate(answers(a, b))
    expected = [step * (x + y) / 2 for x, y in zip(a, b, strict=True)]
    assert rule.weights["encoder.w"].tolist() == pytest.approx(expected)


def test_the_mean_of_the_last_two_models_is_delivered():
    rule = server(epsilon=0.5)
    rule.aggregate(answers((1.0, 1.0), (1.0, 1.0)))
    assert rule.delivered()["encoder.w"].tolist() == pytest.approx([0.5, 0.5])
    resumed = server(epsilon=0.5)
    resumed.weights = dict(rule.weights)
    resumed.load_state(rule.state())
    assert torch.equal(resumed.delivered()["encoder.w"], rule.delivered()["encoder.w"])


def test_opposite_updates_go_as_far_as_published():
    """panorgan's own step stops where a site stopped; the published one goes on."""
    published, own = server(epsilon=0.0), find_method("fedavg")
    careful = own.Server(own.Config(), Federation(Vocabulary(["liver"]), SITES), BEGIN)
    careful.round_info = RoundInfo("train", 1, 2)
    far = []
    for rule in (published, careful):
        rule.aggregate(answers((1.1, 0.0), (-0.9, 0.0)))
        far.append(rule.weights["encoder.w"][0].item())
    assert far[0] == pytest.approx(0.1 * 2.02 / (4 * 0.01))
    assert far[1] == pytest.approx((0.5 * (1.1**2 + 0.9**2)) ** 0.5)


def test_sites_weigh_in_the_norms_what_they_weigh_in_the_mean():
    """Cases 3 : 1. Δ = ¾·(2, 0) + ¼·(−2, 0) = (1, 0), and ¾·4 + ¼·4 = 4; then ¾·4 + ¼·36 = 12, Δ = 0."""
    sites = {name: SiteInfo(name, cases, {"liver": cases}) for name, cases in (("a", 3), ("b", 1))}
    method = find_method("fedexp")
    rule = method.Server(method.Config(epsilon=1.0), Federation(Vocabulary(["liver"]), sites), BEGIN)
    for b, mean, step in (((-2.0, 0.0), (1.0, 0.0), 4 / (2 * 2)), ((-6.0, 0.0), (0.0, 0.0), 12 / 2)):
        means = {"encoder.w": torch.tensor(mean)}
        assert rule.extrapolated(answers((2.0, 0.0), b), means) == pytest.approx(step)
        assert torch.allclose(answers((2.0, 0.0), b).mean(rule.weight)["encoder.w"], means["encoder.w"])


@pytest.mark.parametrize("function", ["extrapolation", "published_extrapolation"])
def test_norms_are_added_in_the_order_of_the_names(function, monkeypatch):
    """The order of a set differs between processes; a run that is resumed in another one must end in the same bits."""
    names = [f"layer{number}.w" for number in range(40)]
    old = {name: torch.zeros(1) for name in names}
    new = {site: {name: torch.full((1,), float(number)) for number, name in enumerate(names)} for site in "ab"}
    asked: list[float] = []
    squared = server_average._squared
    monkeypatch.setattr(server_average, "_squared", lambda a, b: asked.append(a.item()) or squared(a, b))
    more = {"epsilon": 1e-3, "weight": lambda site, key: 1.0} if function == "published_extrapolation" else {}
    getattr(server_average, function)(Answers(new), old, new["a"], **more)
    in_order = [float(names.index(name)) for name in sorted(names)]
    by_site, by_key = [*in_order, *in_order, *map(float, range(40))], [n for number in in_order for n in 3 * [number]]
    assert asked == (by_key if function == "published_extrapolation" else by_site)
