"""SGD's fused step, which GPUs take, is the plain one also where heads get their first gradients late; parts of a
network may have learning rates of their own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from panorgan.federation.optimizers import (
    begin_momenta,
    load_optimizer_state,
    make_optimizer,
    optimizer_state,
    set_rate,
)
from panorgan.federation.settings import OptimizerSettings

SETTINGS = OptimizerSettings(name="sgd", learning_rate=0.1, momentum=0.9, weight_decay=0.01)


def two_heads():
    torch.manual_seed(0)
    return nn.ModuleDict({"early": nn.Linear(3, 2), "late": nn.Linear(3, 2)})


def plain(model):
    return make_optimizer(model, SETTINGS)


def fused(model):
    """As on a GPU; a CPU has the same step, and these weights lie as it takes for granted."""
    optimizer = torch.optim.SGD(
        list(model.named_parameters()), 0.1, momentum=0.9, weight_decay=0.01, nesterov=True, fused=True
    )
    optimizer.register_step_pre_hook(begin_momenta)
    return optimizer


def train(model, optimizer, steps, late_from=2):
    image = torch.linspace(-1, 1, 12).view(4, 3)
    for step in steps:
        optimizer.zero_grad(set_to_none=True)
        heads = ["early"] if step < late_from else ["early", "late"]
        sum(model[name](image).square().sum() for name in heads).backward()
        optimizer.step()


def test_a_head_may_get_its_first_gradient_later_than_others():
    models = [two_heads(), two_heads()]
    for model, make in zip(models, (plain, fused), strict=True):
        train(model, make(model), range(5))
    for expected, found in zip(*(model.state_dict().values() for model in models), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_head_without_gradient_has_no_state():
    model = two_heads()
    optimizer = fused(model)
    train(model, optimizer, range(2))
    assert {key.split(".")[0] for key in optimizer_state(optimizer)} == {"early"}
    before = model["late"].weight.clone()
    train(model, optimizer, range(2))
    assert torch.equal(model["late"].weight, before)


def test_momenta_that_come_back_are_used():
    """Three steps, a restart, two more: as five in a row."""
    whole, first = two_heads(), two_heads()
    train(whole, fused(whole), range(5))
    optimizer = fused(first)
    train(first, optimizer, range(3))
    again = two_heads()
    again.load_state_dict(first.state_dict())
    restarted = fused(again)
    load_optimizer_state(restarted, optimizer_state(optimizer))
    train(again, restarted, range(3, 5))
    for expected, found in zip(whole.state_dict().values(), again.state_dict().values(), strict=True):
        assert torch.equal(found, expected)


def test_on_a_gpu_the_step_is_fused_and_momenta_begin_with_it(monkeypatch):
    """`make_optimizer` where all weights lie on a GPU, which is pretended here."""
    made = []
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    monkeypatch.setattr(torch.optim, "SGD", lambda *arguments, **settings: made.append(settings) or _Hooked(made))
    make_optimizer(two_heads(), SETTINGS)
    assert made[0]["fused"] is True
    assert made[1:] == [begin_momenta]


# -- learning rates of parts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_part_learns_at_its_own_rate(name):
    """The first step of either moves weights by the rate times something that depends on the gradient alone."""
    settings = OptimizerSettings(name=name, learning_rate=0.1, momentum=0.0, weight_decay=0.0)
    moved = {}
    for factor in (1.0, 0.25):
        model = two_heads()
        before = {key: value.clone() for key, value in model.state_dict().items()}
        optimizer = make_optimizer(model, settings, {"late.": factor})
        set_rate(optimizer, 0.2)
        train(model, optimizer, range(2, 3))
        moved[factor] = {key: value - before[key] for key, value in model.state_dict().items()}
    for key, whole in moved[1.0].items():
        torch.testing.assert_close(moved[0.25][key], whole * (0.25 if key.startswith("late") else 1))
        assert whole.abs().min() > 0


def test_the_longest_name_that_fits_decides_and_no_group_is_empty():
    model = nn.ModuleDict({"a": two_heads(), "b": two_heads()})
    factors = {"a.": 0.5, "a.late.": 0.25, "nowhere.": 9.0, "b.early.": 0.5}
    optimizer = make_optimizer(model, SETTINGS, factors)
    set_rate(optimizer, 1.0)
    rates = {name: group["lr"] for group in optimizer.param_groups for name in group["param_names"]}
    by_part = {".".join(name.split(".")[:2]): rate for name, rate in rates.items()}
    assert by_part == {"a.early": 0.5, "a.late": 0.25, "b.early": 0.5, "b.late": 1.0}
    assert len(rates) == len(list(model.parameters()))
    assert len(optimizer.param_groups) == 3
    assert len(make_optimizer(model, SETTINGS, {"nowhere.": 9.0}).param_groups) == 1


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_state_goes_from_one_division_into_parts_to_another(name):
    """State goes by name: three steps, a restart that divides the network otherwise, two more: as five in a row."""
    settings = OptimizerSettings(name=name, learning_rate=0.1)
    whole, first, again = two_heads(), two_heads(), two_heads()
    train(whole, make_optimizer(whole, settings), range(5))
    optimizer = make_optimizer(first, settings)
    train(first, optimizer, range(3))
    again.load_state_dict(first.state_dict())
    restarted = make_optimizer(again, settings, {"early.": 0.5})
    load_optimizer_state(restarted, optimizer_state(optimizer))
    for group in restarted.param_groups:
        group["lr"] = 0.1
    train(again, restarted, range(3, 5))
    for expected, found in zip(whole.state_dict().values(), again.state_dict().values(), strict=True):
        torch.testing.assert_close(found, expected)


class _Hooked:
    def __init__(self, made):
        self.register_step_pre_hook = made.append
