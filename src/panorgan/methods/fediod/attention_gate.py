"""Re-weights a U-Net's skip connections by the attention at its bottleneck: attended places count more."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch

from panorgan.networks.upsampling import upsample

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
    return features * upsample(weights, features.shape[2:]).to(features.dtype).unsqueeze(1)
