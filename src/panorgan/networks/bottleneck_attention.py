"""A transformer between the encoder and the decoders of a U-Net: every place of the coarsest grid looks at every other.

Its attention maps say which places matter to which, so they are part of its result. Each head's weights have names of
their own (`layers.0.heads.3.query.weight`), because a server may weigh sites head by head; the work itself is done for
all heads of a layer at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

Gate = Literal["softmax", "sigmoid", "none"]
# Wavelengths of the positions go from 2π to a hundred times that. Sentences need longer ones; grids here are tens wide.
_LONGEST = 100.0


class Head(nn.Module):
    """The weights of one head. It has no biases: without its `output` it adds nothing."""

    def __init__(self, width: int, head_width: int, heads: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, head_width, bias=False) for _ in range(3))
        self.output = nn.Linear(head_width, width, bias=False)
        # As in one matrix for all heads: their sum starts no larger because there are several.
        bound = (heads * head_width) ** -0.5
        nn.init.uniform_(self.output.weight, -bound, bound)


class Layer(nn.Module):
    """Self-attention, then a perceptron on every token; both normalise first and are added to what comes in."""

    def __init__(self, width: int, heads: int, head_width: int, mlp_width: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.heads = nn.ModuleList(Head(width, head_width, heads) for _ in range(heads))
        self.dropout = nn.Dropout(dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, mlp_width),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(mlp_width, width),
            nn.Dropout(dropout),
        )

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, given: torch.Tensor | None = None, with_map: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tokens [B, N, width] → the same and, on request, the attention [B, heads, N, N]; its rows sum to 1.

        `positions` [N, width] steer who looks at whom and are no part of what is passed on. A `given` map takes the
        place of the layer's own.
        """
        normed = self.attention_norm(tokens)
        values = self._project(normed, "value")
        if given is None and not with_map:
            attention = None
            queries, keys = self._queries_and_keys(normed + positions)
            mixed = F.scaled_dot_product_attention(queries, keys, values)
        else:
            attention = self._map(normed + positions) if given is None else given
            mixed = attention.to(values.dtype) @ values
        outputs = torch.cat(self._weights("output"), dim=1)
        tokens = tokens + self.dropout(F.linear(mixed.transpose(1, 2).flatten(2), outputs))
        return tokens + self.mlp(self.mlp_norm(tokens)), attention

    def _map(self, tokens: torch.Tensor) -> torch.Tensor:
        """Attention [B, heads, N, N], in float32 at least: what is computed from it compares small differences."""
        queries, keys = self._queries_and_keys(tokens)
        scores = (queries * queries.shape[-1] ** -0.5) @ keys.mT
        return scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))

    def _queries_and_keys(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        queries, keys = self._project(tokens, "query", "key").chunk(2, dim=1)
        return queries, keys

    def _project(self, tokens: torch.Tensor, *kinds: str) -> torch.Tensor:
        """[B, N, width] → [B, kinds · heads, N, head_width], all in one multiplication."""
        weights = self._weights(*kinds)
        return F.linear(tokens, torch.cat(weights)).unflatten(2, (len(weights), -1)).transpose(1, 2)

    def _weights(self, *kinds: str) -> list[torch.Tensor]:
        return [getattr(head, kind).weight for kind in kinds for head in self.heads]


class BottleneckTransformer(nn.Module):
    """Layers of self-attention on the positions of a feature map of any size, 2D or 3D; its channels are the tokens."""

    def __init__(self, width: int, layers: int, heads: int, head_width: int, mlp_width: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, heads, head_width, mlp_width, dropout) for _ in range(layers))

    def forward(
        self, features: torch.Tensor, given: Sequence[torch.Tensor] | None = None, with_maps: bool = True
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """[B, width, *S] → the same and, on request, every layer's attention [B, heads, N, N] with N = ∏ S.

        Tokens are counted as `features.flatten(2)` does. `given` maps take the place of the layers' own.
        """
        tokens = features.flatten(2).transpose(1, 2)
        where = sinusoidal_positions(features.shape[2:], tokens.shape[2], features.device).to(tokens.dtype)
        maps = []
        for place, layer in enumerate(self.layers):
            tokens, attention = layer(tokens, where, None if given is None else given[place], with_maps)
            if attention is not None:
                maps.append(attention)
        out = tokens.transpose(1, 2).unflatten(2, features.shape[2:]).to(features.dtype)
        # Channels lie side by side now. Where they did not before, the decoders do not expect it.
        return out.contiguous() if features.is_contiguous() else out, maps


def head_of_key(key: str) -> tuple[int, int] | None:
    """(layer, head) that a weight belongs to by its key in the state dict; None for all that is no head's."""
    parts = key.split(".")
    if parts[:2] == ["transformer", "layers"] and parts[3:4] == ["heads"]:
        return int(parts[2]), int(parts[4])
    return None


def sinusoidal_positions(grid: Sequence[int], width: int, device: torch.device | str | None = None) -> torch.Tensor:
    """Sines and cosines of every position's coordinates, [∏ grid, width]; each axis has its share of the channels."""
    count = width // (2 * len(grid))
    frequencies = _LONGEST ** (-torch.arange(count, device=device) / max(count - 1, 1))
    coordinates = torch.cartesian_prod(*(torch.arange(size, device=device) for size in grid))
    angles = coordinates.unsqueeze(2) * frequencies
    waves = torch.cat((angles.sin(), angles.cos()), dim=2).flatten(1)
    return F.pad(waves, (0, width - waves.shape[1]))


def mean_attention(maps: Sequence[torch.Tensor]) -> torch.Tensor:
    """Ā, the mean over layers and heads: maps [B, heads, N, N] of every layer → [B, N, N]."""
    total = maps[0].mean(1)
    for attention in maps[1:]:
        total = total + attention.mean(1)
    return total / len(maps)


def token_weights(attention: torch.Tensor, gate: Gate) -> torch.Tensor:
    """W' [B, N] by how much attention [B, N, N] each token receives: its column sum, on average 1.

    - `softmax`: the softmax over all tokens, times N so that its mean is 1
    - `sigmoid`: twice the sigmoid of what exceeds 1; also 1 where attention is even, and never above 2
    """
    received = attention.sum(1)
    if gate == "softmax":
        return received.softmax(1) * received.shape[1]
    return 2 * (received - 1).sigmoid()


def reweighted(features: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """x·W' + x for features [B, C, *S] and weights [B, *grid] of a coarser grid, which are interpolated."""
    finer = _upsampled(weights, features.shape[2:]).unsqueeze(1)
    return features * (finer + 1).to(features.dtype)


def _upsampled(weights: torch.Tensor, space: Sequence[int]) -> torch.Tensor:
    """[B, *grid] → [B, *space], linearly between the centres of the coarse cells; the mean stays.

    As multiplications along each axis: on a GPU the gradient of `F.interpolate` differs from run to run.
    """
    with torch.autocast(weights.device.type, enabled=False):
        for axis, size in enumerate(space, start=1):
            cells = torch.eye(weights.shape[axis], dtype=weights.dtype, device=weights.device)
            matrix = F.interpolate(cells.unsqueeze(0), size=size, mode="linear", align_corners=False)[0]
            weights = torch.tensordot(weights, matrix, dims=([axis], [0])).movedim(-1, axis)
    return weights.contiguous()
