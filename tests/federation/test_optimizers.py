"""SGD's fused step, which GPUs take, is the plain one also where heads get their first gradients late."""

from __future__ import annotations

import torch
from torch import nn

from panorgan.federation.optimizers import begin_momenta, load_optimizer_state, make_optimizer, optimizer_state
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


class _Hooked:
    def __init__(self, made):
        self.register_step_pre_hook = made.append
