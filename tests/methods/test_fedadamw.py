"""FedAdamW: local steps, block means, and what the server makes of them, by hand."""

from __future__ import annotations

import math

import pytest
import torch
from answers import Answers
from federations import run, same

from panorgan.anatomy import Vocabulary
from panorgan.methods.base import Payload, SiteTools
from panorgan.methods.protocol import Federation, RoundInfo, SiteInfo
from panorgan.methods.registry import find_method
from panorgan.networks import UNet, UNetSettings

ORGANS = Vocabulary(["liver"])
SITES = {name: SiteInfo(name, cases, {"liver": cases}) for name, cases in (("a", 1), ("b", 3))}
FEDERATION = Federation(ORGANS, SITES)
FEDADAMW = find_method("fedadamw")
RATE, DECAY = 0.1, 0.01


def site(**config: object):
    torch.manual_seed(0)
    model = UNet(ORGANS, UNetSettings(dimensions=2, features=(2, 4), norm="batch"))
    tools = SiteTools(model, torch.optim.SGD(model.parameters(), RATE, weight_decay=DECAY), clip_norm=1.0)
    return FEDADAMW.Site(FEDADAMW.Config(**config), SITES["a"], FEDERATION, tools)


def begin(rule, number: int = 1, **more: torch.Tensor) -> None:
    weights = {key: value.clone() for key, value in rule.model.state_dict().items()}
    rule.received, rule.round_info = Payload({**weights, **more}), RoundInfo("train", number, 3)
    rule.before_round()


def take_step(rule, seed: int) -> None:
    """A step on gradients drawn from a seed, which are short enough not to be clipped."""
    draws = torch.Generator().manual_seed(seed)
    for parameter in rule.model.parameters():
        parameter.grad = 0.01 * torch.randn(parameter.shape, generator=draws)
    rule.apply_gradients()


def weight_of(rule, name: str = "head.conv.conv.bias") -> torch.Tensor:
    return dict(rule.model.named_parameters())[name]


def test_the_first_round_is_adamw():
    rule, plain = site(), site()
    plain.tools.optimizer = torch.optim.AdamW(plain.model.parameters(), RATE, weight_decay=DECAY)
    begin(rule)
    for seed in range(3):
        take_step(rule, seed)
        for one, other in zip(rule.model.parameters(), plain.model.parameters(), strict=True):
            other.grad = one.grad.clone()
        plain.tools.optimizer.step()
    for one, other in zip(rule.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_a_step_of_a_later_round_by_hand():
    """v̄ = 4e-6 after t steps with 1 − β₂ᵗ = 0.002; Δx = 0.3 over a path of 0.2; g = 0.02 at x = 1, clipped to 0.01."""
    rule = site(alpha=0.5)
    begin(rule)
    rule.path = 0.2
    moments = torch.tensor([[4e-6, 0.002]]).repeat(len(rule.moments), 1)
    with torch.no_grad():
        weight_of(rule).fill_(1.0)
    begin(rule, 2, second_moments=moments, **{"direction/head.conv.conv.bias": torch.tensor([0.3, 0.3])})
    rule.tools.clip_norm = math.sqrt(2) * 0.01
    weight_of(rule).grad = torch.full((2,), 0.02)
    rule.apply_gradients()
    v, v_sum = 0.999 * 4e-6 + 0.001 * 0.01**2, 0.999 * 0.002 + 0.001
    expected = 1 - RATE * (0.01 / (math.sqrt(v / v_sum) + 1e-8) - 0.5 * 0.3 / 0.2 + DECAY * 1.0)
    assert weight_of(rule).tolist() == pytest.approx([expected] * 2, rel=1e-4)
    sent = rule.update().tensors
    assert sent["second_moment/head.conv.conv.bias"].tolist() == pytest.approx([v, v_sum], rel=1e-4)
    assert sent["second_moment/decoder.0.transp_conv.conv.weight"].tolist() == pytest.approx([4e-6, 0.002])


def test_a_round_begins_with_the_mean_of_each_block_and_without_a_mean_gradient():
    rule = site()
    begin(rule)
    take_step(rule, 0)
    v = rule.moments["head.conv.conv.weight"].v.clone()
    assert v.min() < v.max()
    sent = rule.update().tensors["second_moment/head.conv.conv.weight"]
    assert sent.tolist() == pytest.approx([v.mean().item(), 0.001])
    rows = len(list(rule.model.parameters()))
    begin(rule, 2, second_moments=torch.tensor([[0.25, 0.5]]).repeat(rows, 1))
    again = rule.moments["head.conv.conv.weight"]
    assert set(again.v.flatten().tolist()) == {0.25}
    assert (again.v_sum, again.m_sum, again.m.abs().sum().item()) == (0.5, 0.0, 0.0)


def test_the_path_of_a_round_is_the_sum_of_its_rates_and_survives():
    rule, again = site(), site()
    begin(rule)
    for seed, rate in enumerate((0.1, 0.05)):
        rule.tools.optimizer.param_groups[0]["lr"] = rate
        take_step(rule, seed)
    assert rule.path == 0
    rule.after_round()
    again.load_state(rule.state())
    assert again.path == rule.path == pytest.approx(0.15)


def server():
    rule = FEDADAMW.Server(FEDADAMW.Config(), FEDERATION, {"w": torch.tensor([1.0]), "running_mean": torch.zeros(1)})
    rule.round_info = RoundInfo("train", 1, 3)
    return rule


def test_two_rounds_at_the_server_by_hand():
    """Unweighted: w moves to 1.4, then one site answers. The moments' means, and back in one tensor."""
    rule = server()
    assert set(rule.broadcast("a").tensors) == {"w", "running_mean"}
    assert set(rule.expects("a")) == {"w", "running_mean", "second_moment/w"}
    sent = {"a": (1.2, [0.2, 0.002]), "b": (1.6, [0.4, 0.004])}
    rule.aggregate(
        Answers(
            {
                name: {"w": torch.tensor([w]), "running_mean": torch.ones(1), "second_moment/w": torch.tensor(moment)}
                for name, (w, moment) in sent.items()
            }
        )
    )
    resumed = server()
    resumed.weights = dict(rule.weights)
    resumed.load_state(rule.state())
    for one in (rule, resumed):
        got = one.broadcast("b").tensors
        assert got["w"].item() == pytest.approx(1.4)
        assert got["direction/w"].item() == pytest.approx(0.4)
        assert got["second_moments"].flatten().tolist() == pytest.approx([0.3, 0.003])
        assert set(got) == {"w", "running_mean", "direction/w", "second_moments"}
    resumed.aggregate(Answers({"b": {"w": torch.tensor([1.3]), "second_moment/w": torch.tensor([0.5, 0.006])}}))
    assert resumed.direction["w"].item() == pytest.approx(-0.1, rel=1e-5)
    assert resumed.moments["w"].tolist() == pytest.approx([0.5, 0.006])


def test_the_direction_reaches_the_sites(tiny, tmp_path):
    """α is felt from the second round on."""

    def weights(rounds: int, **method: object):
        folder = tmp_path / f"{rounds}{method}"
        training = {"rounds": rounds, "validate_every": 0, "local_steps": 1, "optimizer": {"schedule": "constant"}}
        return run(tiny(method={"name": "fedadamw", **method}, training=training), folder).state.weights

    assert same(weights(1), weights(1, alpha=0))
    assert not same(weights(2), weights(2, alpha=0))


def test_pseudo_labels_leave_the_rules_of_its_mean_alone():
    """Sites count the same, as published, and the server takes the plain mean."""
    config = find_method("fedadamw_pl").Config
    assert (config().weighting, config().server_step) == ("uniform", 1)
    with pytest.raises(ValueError, match="server_step"):
        config(server_step="fedexp")


def test_teachers_of_pseudo_labels_are_trained_as_ever(tiny, tmp_path):
    training = {"validate_every": 0, "rounds": 1}
    plain = run(tiny(method={"name": "fedavg_pl"}, training=training), tmp_path / "plain")
    other = run(tiny(method={"name": "fedadamw_pl"}, training=training), tmp_path / "other")
    for teacher in ("teacher/north", "teacher/south"):
        assert same(other.tensor_store.get(teacher), plain.tensor_store.get(teacher))
    assert not same(other.state.weights, plain.state.weights)
