"""Many small heads at once: per head three 1×1 convolutions, leaky ReLUs between them, on the same few channels.

Written as convolutions, seven heads of 162 parameters each cost as much as a large part of the U-Net below them: not
for their arithmetic, but because every layer of every head writes its channels at full resolution to memory and reads
them back. Here all heads are one multiplication per layer, on a CPU in blocks of voxels that stay in the cache. The
backward pass recomputes the hidden layers instead of storing them; on a GPU the forward pass is one kernel
(`head_kernel`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

try:
    from panorgan.networks import head_kernel
except Exception:  # Triton comes with PyTorch for NVIDIA GPUs only; a broken one must not break anything else
    head_kernel = None  # type: ignore[assignment]

SLOPE = 0.01
"""Of the leaky ReLUs, as in the U-Net below. With plain ReLUs a head of eight channels can die: once no hidden unit
is active, it gets no gradient."""
_leaky_backward = torch.ops.aten.leaky_relu_backward.default

# Voxels per block. On a CPU the hidden channels of a few heads then stay in the cache; a GPU is faster with few large
# blocks, because a launch costs more than memory traffic.
_BLOCK = {"cpu": 1 << 13}
_LARGE_BLOCK = 1 << 22
# Number of pieces into which a GPU cuts sums over voxels.
_PIECES = 128
# A GPU multiplies matrices with this many columns, or multiples of it, several times faster than with one less.
_ALIGNED = {"cuda": 8}


def run_heads(
    heads: Sequence[nn.Sequential], features: torch.Tensor, outputs: Sequence[tuple[int, int]]
) -> torch.Tensor:
    """Selected outputs (head, output of that head), [B, len(outputs), *S], from features [B, channels, *S].

    Each head is convolution, leaky ReLU, convolution, leaky ReLU, convolution, all 1×1 with a bias.
    """
    first, second, third = ([_matrix(head, place) for head in heads] for place in (0, 2, 4))
    biases = [torch.cat([_bias(head, place) for head in heads]) for place in (0, 2)]
    biases.append(torch.stack([_bias(heads[head], 4)[output] for head, output in outputs]))
    # The first layer reads the same channels for every head. From there each head has its own: one block-diagonal
    # matrix makes that a single multiplication, and autograd ignores the entries between the blocks.
    last = torch.block_diag(*third).unflatten(0, (len(heads), -1))
    chosen = torch.stack([last[head, output] for head, output in outputs])
    matrices = [torch.cat(first), torch.block_diag(*second), chosen]
    kind = features.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        features, matrices, biases = features.to(dtype), [m.to(dtype) for m in matrices], [b.to(dtype) for b in biases]
    flat = features.flatten(2)
    in_one = head_kernel is not None and head_kernel.can_run(flat, len(first[0]))
    if in_one and not torch.is_grad_enabled():
        return head_kernel.run(flat, [*matrices, *biases], SLOPE).unflatten(2, features.shape[2:])
    if missing := -len(outputs) % _ALIGNED.get(kind, 1):
        matrices[2], biases[2] = F.pad(matrices[2], (0, 0, 0, missing)), F.pad(biases[2], (0, missing))
    with torch.autocast(kind, enabled=False):
        out: torch.Tensor = _Stack.apply(flat, in_one, *matrices, *biases)
    return out[:, : len(outputs)].unflatten(2, features.shape[2:])


def _bias(head: nn.Sequential, place: int) -> torch.Tensor:
    bias: torch.Tensor = head[place].bias  # type: ignore[assignment]
    return bias


def _matrix(head: nn.Sequential, place: int) -> torch.Tensor:
    weight: torch.Tensor = head[place].weight  # type: ignore[assignment]
    return weight.flatten(1)


class _Stack(torch.autograd.Function):
    """W₃·σ(W₂·σ(W₁·x + b₁) + b₂) + b₃ for features x, [B, in, voxels] → [B, out, voxels]."""

    @staticmethod
    def forward(ctx: Any, features: torch.Tensor, in_one: bool, *layers: torch.Tensor) -> torch.Tensor:
        """`layers`: W₁, W₂, W₃, b₁, b₂, b₃; `in_one`: one kernel instead of matrix products."""
        ctx.save_for_backward(features, *layers)
        if in_one:
            return head_kernel.run(features, layers, SLOPE)
        rows = _rows(features)
        out = rows.new_empty(len(features), features.shape[2], len(layers[2]))
        for start, stop in _blocks(rows):
            _, hidden = _hidden(rows[start:stop], layers)
            out.view(len(rows), -1)[start:stop] = F.linear(hidden, layers[2], layers[5])
        return out.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of the features and of all layers; sums over blocks are in float32 at least."""
        features, *layers = ctx.saved_tensors
        rows, whole = _rows(features), _rows(gradients[0])
        precise = torch.promote_types(rows.dtype, torch.float32)
        sums = [torch.zeros_like(layer, dtype=precise) for layer in layers]
        of_rows = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
        for start, stop in _blocks(rows):
            block = rows[start:stop]
            first, second = _hidden(block, layers)
            gradient = whole[start:stop].to(rows.dtype)
            for place, values in ((2, second), (1, first), (0, block)):
                sums[place] += _product(gradient, values)
                sums[3 + place] += gradient.sum(0, dtype=precise)
                if place:
                    gradient = _leaky_backward(gradient @ layers[place], values, SLOPE, True)
                elif of_rows is not None:
                    of_rows[start:stop] = gradient @ layers[0]
        of_features = None if of_rows is None else of_rows.view(len(features), -1, features.shape[1]).transpose(1, 2)
        return of_features, None, *(total.to(layer.dtype) for total, layer in zip(sums, layers, strict=True))


def _rows(features: torch.Tensor) -> torch.Tensor:
    """[B, channels, voxels] → [B · voxels, channels]; a view where channels are contiguous."""
    return features.transpose(1, 2).flatten(0, 1)


def _hidden(rows: torch.Tensor, layers: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Both hidden layers of some rows."""
    first = F.leaky_relu_(F.linear(rows, layers[0], layers[3]), SLOPE)
    return first, F.leaky_relu_(F.linear(first, layers[1], layers[4]), SLOPE)


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """leftᵀ · right for tall matrices [M, a] and [M, b] → [a, b].

    The result is so small that a single product would occupy one multiprocessor; cut into pieces that are summed
    afterwards it occupies many.
    """
    if left.device.type == "cpu" or len(left) % _PIECES:
        return left.T @ right
    pieces = torch.bmm(left.view(_PIECES, -1, left.shape[1]).mT, right.view(_PIECES, -1, right.shape[1]))
    return pieces.sum(0, dtype=torch.promote_types(left.dtype, torch.float32))


def _blocks(rows: torch.Tensor) -> list[tuple[int, int]]:
    size = _BLOCK.get(rows.device.type, _LARGE_BLOCK)
    return [(start, min(start + size, len(rows))) for start in range(0, len(rows), size)]
