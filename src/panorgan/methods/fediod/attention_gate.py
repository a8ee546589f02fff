"""The attention at a U-Net's bottleneck re-weights its skip connections: attended places count more."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Literal

import torch
import torch.nn.functional as F

from panorgan.networks.base import is_recording

Gate = Literal["softmax", "sigmoid", "none"]


def mean_attention(maps: Sequence[torch.Tensor]) -> torch.Tensor:
    """Ā, the mean over layers and heads: maps [B, heads, N, N] of every layer → [B, N, N]."""
    # A sum, then a product: the gradient of a mean would be written out for every head.
    return torch.stack(tuple(maps)).sum((0, 2)) * (1 / (len(maps) * maps[0].shape[1]))


def token_weights(attention: torch.Tensor, gate: Gate) -> torch.Tensor:
    """W [B, N] by how much attention [B, N, N] each token receives: its column sum, on average 1.

    - `softmax`: eq. 2 as printed, the softmax over all tokens. It sums to 1, so that x + x·W is at most 2x
    - `sigmoid`: twice the sigmoid of what exceeds 1; it is 1 where attention is even, and never above 2
    """
    received = attention.sum(1)
    if gate == "softmax":
        return received.softmax(1)
    return 2 * (received - 1).sigmoid()


def attention_entropy(maps: Sequence[torch.Tensor]) -> torch.Tensor:
    """Mean entropy of the rows of all maps [B, heads, N, N], as a share of log N: 1 is even, 0 attends to one token."""
    rows = torch.stack([torch.special.entr(layer).sum(-1).mean() for layer in maps])
    return rows.mean() / math.log(max(maps[0].shape[-1], 2))


def reweight(features: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """x + x·W for features [B, C, *S] and weights [B, *grid] of a coarser grid, which are interpolated."""
    return multiply_by_weights(features, weights + 1)


def multiply_by_weights(features: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """x·W for features [B, C, *S] and weights [B, *grid] of a coarser grid, which are interpolated."""
    return features * _upsample(weights, features.shape[2:]).to(features.dtype).unsqueeze(1)


def _upsample(weights: torch.Tensor, space: Sequence[int]) -> torch.Tensor:
    """[B, *grid] → [B, *space], linearly between the centres of the coarse cells; the mean stays.

    As multiplications along each axis: on a GPU the gradient of `F.interpolate` differs from run to run.
    """
    make = _interpolation.__wrapped__ if is_recording() else _interpolation
    matrices = [
        make(cells, size, weights.device, weights.dtype) for cells, size in zip(weights.shape[1:], space, strict=True)
    ]
    with torch.autocast(weights.device.type, enabled=False):
        weights = weights @ matrices[-1].mT
        for axis in range(len(matrices) - 1, 0, -1):  # [axes before, the axis, axes behind]
            behind = weights.flatten(0, axis - 1).flatten(2)
            finer = matrices[axis - 1].expand(behind.shape[0], -1, -1) @ behind
            weights = finer.unflatten(2, weights.shape[axis + 1 :]).unflatten(0, weights.shape[:axis])
    return weights


@cache
def _interpolation(cells: int, size: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """The weight of each of `cells` in each of `size` places, [size, cells].

    Cached and read-only: captured passes read it at this address.
    """
    with torch.inference_mode(False), torch.no_grad():  # the cached tensor may be used in training later
        shares = torch.eye(cells, dtype=dtype, device=device).unsqueeze(0)
        return F.interpolate(shares, size=size, mode="linear", align_corners=False)[0].mT.contiguous()
