"""Instance normalisation that uses a whole GPU.

The usual one gives every channel of every sample to one group of threads. A U-Net has few channels where it has many
voxels: at full resolution two samples of 32 channels keep half of a large GPU idle, and in bfloat16 normalisation takes
longer than the convolutions. Here a channel is cut into pieces. Their statistics are joined as synchronised batch
normalisation joins those of several GPUs, by the same kernels; they are in float32 whatever the image is in.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

# Above this many voxels per channel, pieces pay off; below, launching the extra kernels costs more than it saves.
_SMALLEST = 1 << 18
# Voxels of a piece: few enough for many pieces, enough for each to keep its threads busy.
_LARGEST_PIECE, _SMALLEST_PIECE = 1 << 14, 1 << 11


class InstanceNorm(nn.modules.instancenorm._InstanceNorm):
    """`nn.InstanceNorm2d`/`3d` with weights, for images of any dimension; same keys, same numbers."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[B, C, *S] → [B, C, *S]."""
        voxels = input[0, 0].numel()
        piece = math.gcd(voxels, _LARGEST_PIECE)
        if input.is_cuda and voxels >= _SMALLEST and piece >= _SMALLEST_PIECE:
            out: torch.Tensor = _Pieces.apply(input.contiguous(), self.weight, self.bias, self.eps, piece)
            return out
        return self._apply_instance_norm(input)


def use_whole_gpu(network: nn.Module) -> None:
    """Replace every plain instance normalisation that has weights and keeps no statistics by `InstanceNorm`."""
    for parent in list(network.modules()):
        for name, child in parent.named_children():
            if not isinstance(child, nn.InstanceNorm2d | nn.InstanceNorm3d):
                continue
            if child.affine and not child.track_running_stats:
                swapped = InstanceNorm(child.num_features, child.eps, child.momentum or 0.0, affine=True)
                swapped.weight, swapped.bias = child.weight, child.bias
                setattr(parent, name, swapped)


class _Pieces(torch.autograd.Function):
    """To the kernels, every piece is a channel of one sample; statistics of the whole channel are passed to each."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, piece: int
    ) -> torch.Tensor:
        """Normalise `x` [B, C, *S], cut into pieces of so many voxels."""
        channels, pieces = x.shape[0] * x.shape[1], x[0, 0].numel() // piece
        cut = x.view(1, channels * pieces, piece)
        means, scales = _stats(cut, eps)
        mean, scale = _gather(
            means,  # sets the type to compute in: the image itself may be in half precision
            means.view(channels, pieces).T,
            scales.view(channels, pieces).T,
            None,
            None,
            0.0,
            eps,
            torch.full((pieces,), float(piece), device=x.device),
        )
        per_channel = torch.stack([weight.repeat(len(x)), bias.repeat(len(x)), mean, scale])
        ctx.save_for_backward(x, per_channel)
        ctx.piece = piece
        out = torch.empty_like(x)  # not a view: the activation that follows works in place
        _normalise(cut, *_handed_out(per_channel, pieces), eps, out=out.view_as(cut))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of image, weight and bias."""
        x, per_channel = ctx.saved_tensors
        channels, voxels = x.shape[0] * x.shape[1], x[0, 0].numel()
        pieces = voxels // ctx.piece
        cut = x.view(1, -1, ctx.piece)
        gradient = gradients[0].contiguous().view_as(cut)
        weight, _, mean, scale = _handed_out(per_channel, pieces)
        sums = _backward_sums(gradient, cut, mean, scale, weight, True, True, True)
        totals = torch.stack(sums).view(4, channels, pieces).sum(2)
        voxels_of_a_channel = torch.full((1,), voxels, dtype=torch.int32, device=x.device)
        of_x = _backward(gradient, cut, mean, scale, weight, *_handed_out(totals[:2], pieces), voxels_of_a_channel)
        of_weight, of_bias = totals[2:].view(2, len(x), -1).sum(1)
        return of_x.view(x.shape), of_weight, of_bias, None, None


def _handed_out(per_channel: torch.Tensor, pieces: int) -> tuple[torch.Tensor, ...]:
    """[rows, channels] → rows of [channels · pieces]."""
    return per_channel.unsqueeze(2).expand(-1, -1, pieces).flatten(1).unbind(0)


# The kernels of synchronised batch normalisation; PyTorch's type hints for them are wrong.
_stats: Any = torch.batch_norm_stats
_gather: Any = torch.batch_norm_gather_stats_with_counts
_normalise: Any = torch.batch_norm_elemt
_backward_sums: Any = torch.batch_norm_backward_reduce
_backward: Any = torch.batch_norm_backward_elemt
