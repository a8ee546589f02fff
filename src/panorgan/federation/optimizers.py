"""Optimisers from settings, and their state as plain named tensors (no pickle)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from panorgan.federation.settings import OptimizerSettings


def make_optimizer(model: nn.Module, settings: OptimizerSettings) -> torch.optim.Optimizer:
    """The optimiser for a model's trainable parameters."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if settings.name == "adamw":
        return torch.optim.AdamW(parameters, settings.learning_rate, weight_decay=settings.weight_decay)
    return torch.optim.SGD(
        parameters,
        settings.learning_rate,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
        nesterov=settings.momentum > 0,
    )


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Every tensor of the optimiser's state, named `<parameter index>/<name>`."""
    return {
        f"{index}/{name}": value
        for index, entries in optimizer.state_dict()["state"].items()
        for name, value in entries.items()
        if isinstance(value, torch.Tensor)
    }


def load_optimizer_state(optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor]) -> None:
    """Take back what `optimizer_state` gave."""
    whole = optimizer.state_dict()
    entries: dict[int, dict[str, torch.Tensor]] = {}
    for key, value in tensors.items():
        index, _, name = key.partition("/")
        entries.setdefault(int(index), {})[name] = value
    whole["state"] = entries
    optimizer.load_state_dict(whole)
