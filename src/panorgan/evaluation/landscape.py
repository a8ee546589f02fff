"""The loss on a plane through the weights of a model, along two random directions.

Li et al., Visualizing the loss landscape of neural nets, arXiv:1712.09913: a random direction is scaled filter by
filter to the length of the model's own filters. Without that, a network whose weights are large would look flat.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from panorgan.evaluation.curvature import Loss

Direction = list[torch.Tensor]
"""A step per parameter, of its shape."""


def weights_by_name(network: nn.Module) -> tuple[torch.Tensor, ...]:
    """All weights by their names in the state dict, as views of the network's own.

    Not `parameters()`: there the heads of a transformer's layer may share one matrix, and rows would not be filters.
    """
    return tuple(weight for weight in network.state_dict().values() if weight.is_floating_point())


def filter_normalised_direction(parameters: Sequence[torch.Tensor], seed: int) -> Direction:
    """A random direction in which every filter (first axis) is as long as that filter of the model.

    Biases and the scales of normalisation layers do not change.
    """
    generator = torch.Generator().manual_seed(seed)  # on the CPU: the same direction on every device
    direction = []
    for parameter in parameters:
        if parameter.ndim < 2:
            direction.append(torch.zeros_like(parameter))
            continue
        drawn = torch.randn(parameter.shape, generator=generator).to(parameter).flatten(1)
        own = parameter.detach().flatten(1)
        scaled = drawn / drawn.norm(dim=1, keepdim=True) * own.norm(dim=1, keepdim=True)
        direction.append(scaled.view_as(parameter))
    return direction


def plane_steps(radius: float, size: int) -> NDArray[np.float64]:
    """Coordinates along one axis of the plane, from −radius to radius; an odd `size` has the model at its centre."""
    return np.linspace(-radius, radius, size)


@torch.no_grad()
def loss_plane(
    losses: Mapping[str, Sequence[Loss]],
    parameters: Sequence[torch.Tensor],
    directions: tuple[Direction, Direction],
    steps: Sequence[float],
    on_row: Callable[[int], None] = lambda row: None,
) -> dict[str, NDArray[np.float64]]:
    """Mean loss by name at θ + a·d₁ + b·d₂, [a, b]. The weights are restored bit for bit, also after an error."""
    planes = {name: np.empty((len(steps), len(steps))) for name in losses}
    original = [parameter.detach().clone() for parameter in parameters]
    try:
        for row, a in enumerate(steps):
            for column, b in enumerate(steps):
                for parameter, start, first, second in zip(parameters, original, *directions, strict=True):
                    parameter.copy_(start + float(a) * first + float(b) * second)
                for name, batches in losses.items():
                    planes[name][row, column] = np.mean([loss().item() for loss in batches])
            on_row(row + 1)
    finally:
        for parameter, start in zip(parameters, original, strict=True):
            parameter.copy_(start)
    return planes
