"""FedAdam and FedYogi: two rounds by hand, statistics left alone, moments that survive."""

from __future__ import annotations

import math

import pytest
import torch
from answers import Answers

from panorgan.anatomy import Vocabulary
from panorgan.methods.protocol import Federation, RoundInfo, SiteInfo
from panorgan.methods.registry import find_method

SITES = {name: SiteInfo(name, 1, {"liver": 1}) for name in ("a", "b")}
KEY, STATISTIC, COUNTER = "encoder.w", "encoder.norm.running_var", "encoder.norm.num_batches_tracked"
BEGIN = {KEY: torch.tensor([1.0]), STATISTIC: torch.tensor([1.0]), COUNTER: torch.tensor(3)}


def server(name: str):
    method = find_method(name)
    config = method.Config(server_rate=0.5, beta1=0.5, beta2=0.75, tau=0.1)
    rule = method.Server(config, Federation(Vocabulary(["liver"]), SITES), BEGIN)
    rule.round_info = RoundInfo("train", 1, 2)
    return rule


def answers(*values: float) -> Answers:
    return Answers(
        {
            site: {KEY: torch.tensor([v]), STATISTIC: torch.tensor([v]), COUNTER: torch.tensor(4)}
            for site, v in zip("ab", values, strict=True)
        }
    )


def by_hand(name: str) -> tuple[float, float]:
    """Both rounds: the first mean update is 0.2; in the second, sites return what they received plus 0.1 and 0.3."""
    w, m, v, after = 1.0, 0.0, 0.01, []
    for delta in (0.2, 0.2):
        m = 0.5 * m + 0.5 * delta
        square = delta**2
        v = 0.75 * v + 0.25 * square if name == "fedadam" else v - 0.25 * square * (1 if v > square else -1)
        w += 0.5 * m / (math.sqrt(v) + 0.1)
        after.append(w)
    return after[0], after[1]


@pytest.mark.parametrize("name", ["fedadam", "fedyogi"])
def test_two_rounds_by_hand(name):
    rule, found = server(name), []
    for _ in range(2):
        w = rule.weights[KEY].item()
        rule.aggregate(answers(w + 0.1, w + 0.3))
        found.append(rule.weights[KEY].item())
    assert found == pytest.approx(by_hand(name), rel=1e-6)


def test_the_two_differ():
    assert by_hand("fedadam") != pytest.approx(by_hand("fedyogi"))


def test_statistics_and_counters_take_the_mean():
    rule = server("fedadam")
    rule.aggregate(answers(1.5, 2.5))
    assert rule.weights[STATISTIC].item() == 2.0
    assert rule.weights[COUNTER].item() == 4


@pytest.mark.parametrize("name", ["fedadam", "fedyogi"])
def test_moments_survive_a_restart(name):
    through, first = server(name), server(name)
    for rule in (through, first):
        rule.aggregate(answers(1.1, 1.5))
    second = server(name)
    second.weights = dict(first.weights)
    second.load_state(first.state())
    for rule in (through, second):
        rule.aggregate(answers(1.7, 0.9))
    assert torch.equal(through.weights[KEY], second.weights[KEY])


@pytest.mark.parametrize("name", ["fedadam", "fedyogi", "fedavgm"])
def test_a_part_whose_owners_are_silent_stays_as_it_is(name):
    """Otherwise moments of earlier rounds would move a head that no site trains."""
    method, head = find_method(name), "heads.liver.0.bias"
    rule = method.Server(method.Config(), Federation(Vocabulary(["liver"]), SITES), {head: torch.tensor([1.0])})
    rule.round_info = RoundInfo("train", 1, 2)
    rule.aggregate(Answers({"a": {head: torch.tensor([1.5])}}))
    after = rule.weights[head].clone()
    assert after != 1.0
    state = rule.state().tensors
    rule.aggregate(Answers({"b": {}}))
    assert torch.equal(rule.weights[head], after)
    assert all(torch.equal(value, state[key]) for key, value in rule.state().tensors.items())


def test_the_server_step_is_the_optimisers():
    with pytest.raises(ValueError, match="server_step"):
        find_method("fedadam").Config(server_step=2)
