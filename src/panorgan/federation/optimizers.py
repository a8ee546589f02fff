"""Optimisers from settings, and their state as plain named tensors (no pickle)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from panorgan.federation.settings import OptimizerSettings

RATE_FACTOR = "rate_factor"
"""Key of a parameter group: the factor for the schedule's learning rate."""


def make_optimizer(
    model: nn.Module, settings: OptimizerSettings, rate_factors: Mapping[str, float] | None = None
) -> torch.optim.Optimizer:
    """The optimiser for a model's trainable parameters.

    `rate_factors` are factors for parts of the network, by the prefix of their parameters' names
    (`Method.rate_factors`); all other parameters learn at the configured rate.
    """
    parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = _groups(parameters, rate_factors or {})
    # A network has hundreds of small parameters, and a GPU is faster with one launch than with one for each. Not on a
    # CPU: there the fused step assumes that parameters and their state have the same memory layout.
    fused = all(p.is_cuda for _, p in parameters)
    if settings.name == "adamw":
        return torch.optim.AdamW(groups, settings.learning_rate, weight_decay=settings.weight_decay, fused=fused)
    optimizer = torch.optim.SGD(
        groups,
        settings.learning_rate,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
        nesterov=settings.momentum > 0,
        fused=fused,
    )
    if fused:
        optimizer.register_step_pre_hook(begin_momenta)
    return optimizer


def _groups(parameters: Sequence[tuple[str, nn.Parameter]], factors: Mapping[str, float]) -> list[dict[str, Any]]:
    """Parameters by the factor of the longest matching prefix; groups are in the order of their first parameter."""
    groups: dict[float, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in parameters:
        fitting = max((prefix for prefix in factors if name.startswith(prefix)), key=len, default=None)
        groups.setdefault(1.0 if fitting is None else factors[fitting], []).append((name, parameter))
    return [{"params": own, RATE_FACTOR: factor} for factor, own in groups.items()]


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """The schedule's learning rate for the next step, times the factor of every group."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get(RATE_FACTOR, 1.0)


def begin_momenta(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Momenta of 0 where there are none yet, for SGD's fused step.

    It assumes that all parameters start together, but heads may get their first gradient later than others.
    The numbers are the same: a momentum starts with the first gradient, and μ·0 + g is g.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            state = optimizer.state[parameter] if parameter.grad is not None else None
            if state is not None and state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(parameter)


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Every tensor of the optimiser's state, named `<parameter>/<name>`."""
    whole = optimizer.state_dict()
    names = {index: name for name, index in _indices(whole).items()}
    return {
        f"{names[index]}/{name}": value
        for index, entries in whole["state"].items()
        for name, value in entries.items()
        if isinstance(value, torch.Tensor)
    }


def load_optimizer_state(optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor]) -> None:
    """Restore what `optimizer_state` returned, parameter by parameter.

    By name: a network may have gained parts since (an organ of a late site), which start fresh.
    """
    whole = optimizer.state_dict()
    indices = _indices(whole)
    entries: dict[int, dict[str, torch.Tensor]] = {}
    for key, value in tensors.items():
        parameter, _, name = key.rpartition("/")
        if parameter in indices:
            entries.setdefault(indices[parameter], {})[name] = value
    whole["state"] = entries
    optimizer.load_state_dict(whole)


def _indices(state_dict: Mapping[str, Any]) -> dict[str, int]:
    """The position of a parameter in an optimiser's state dict."""
    groups = state_dict["param_groups"]
    return {n: i for group in groups for n, i in zip(group["param_names"], group["params"], strict=True)}
