"""A piece for methods that hold a model near another one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn


def squared_distance(model: nn.Module, anchor: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """‖w − w₀‖² over the trainable parameters of `model`; `anchor` holds w₀ by the same keys."""
    distances = [
        (parameter - anchor[key].to(parameter)).square().sum()
        for key, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    return torch.stack(distances).sum()
