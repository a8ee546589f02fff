"""Many small heads in one pass over the features, for NVIDIA GPUs, in Triton (which comes with PyTorch for CUDA).

Written as multiplications, the hidden channels of seven heads go to memory and back several times, and they are seven
times as many as the features. Here they never leave the registers: a block of voxels is read, all three layers are
computed, the outputs are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

_MOST_HIDDEN = 128
"""More hidden channels would no longer fit into registers."""
_NARROWEST = 16
"""The smallest matrix that the matrix units of a GPU multiply; smaller ones are filled up with zeros."""
_BLOCK = 128


def fits(features: torch.Tensor, layers: Sequence[torch.Tensor]) -> bool:
    """Whether `forward` can compute these heads."""
    return features.dtype in (torch.float32, torch.bfloat16) and max(layers[0].shape) <= _MOST_HIDDEN


def forward(features: torch.Tensor, layers: Sequence[torch.Tensor], slope: float) -> torch.Tensor:
    """Outputs [B, out, voxels] of features [B, in, voxels]; `layers`: W₁, W₂, W₃, b₁, b₂, b₃."""
    features = features.contiguous()
    batch, channels, voxels = features.shape
    inputs, hidden, last = (_filled_up(n) for n in (channels, len(layers[0]), len(layers[2])))
    sizes = ((inputs, hidden), (hidden, hidden), (hidden, last))
    matrices = [_padded(matrix.T, *size) for matrix, size in zip(layers, sizes, strict=False)]
    biases = [F.pad(bias.float(), (0, size[1] - len(bias))) for bias, size in zip(layers[3:], sizes, strict=True)]
    out = features.new_empty(batch, len(layers[2]), voxels)
    _heads[(triton.cdiv(voxels, _BLOCK), batch)](
        features, out, *matrices, *biases, voxels, channels, out.shape[1], slope, inputs, hidden, last, _BLOCK
    )
    return out


def _filled_up(n: int) -> int:
    return max(_NARROWEST, triton.next_power_of_2(n))


def _padded(matrix: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    return F.pad(matrix, (0, columns - matrix.shape[1], 0, rows - matrix.shape[0])).contiguous()


@triton.jit
def _heads(
    features,
    out,
    w1,
    w2,
    w3,
    b1,
    b2,
    b3,
    voxels,
    channels,
    outputs,
    slope,
    inputs: tl.constexpr,
    hidden: tl.constexpr,
    last: tl.constexpr,
    block: tl.constexpr,
):
    """One block of voxels of one sample."""
    sample = tl.program_id(1).to(tl.int64)
    voxel = tl.program_id(0) * block + tl.arange(0, block)
    c, h, o = tl.arange(0, inputs), tl.arange(0, hidden), tl.arange(0, last)
    k = tl.arange(0, hidden)
    inside = (voxel < voxels)[:, None]
    start = features + sample * channels * voxels
    x = tl.load(start + c[None, :] * voxels + voxel[:, None], mask=inside & (c < channels)[None, :], other=0.0)
    # Products are summed in float32; "ieee": float32 features are not rounded to fewer digits.
    first = tl.dot(x, tl.load(w1 + c[:, None] * hidden + h[None, :]), input_precision="ieee") + tl.load(b1 + h)[None, :]
    first = tl.where(first > 0, first, slope * first).to(x.dtype)
    second = tl.dot(first, tl.load(w2 + k[:, None] * hidden + h[None, :]), input_precision="ieee")
    second += tl.load(b2 + h)[None, :]
    second = tl.where(second > 0, second, slope * second).to(x.dtype)
    third = tl.dot(second, tl.load(w3 + k[:, None] * last + o[None, :]), input_precision="ieee")
    third += tl.load(b3 + o)[None, :]
    target = out + sample * outputs * voxels
    tl.store(target + o[None, :] * voxels + voxel[:, None], third.to(x.dtype), mask=inside & (o < outputs)[None, :])


def try_out() -> None:
    """Compile and run it once; raises whatever is wrong with this machine's compiler or GPU."""
    device = torch.device("cuda", torch.cuda.current_device())
    square, bias = torch.zeros(8, 8, device=device), torch.zeros(8, device=device)
    layers: list[Any] = [square, square, square, bias, bias, bias]
    forward(torch.zeros(1, 8, _BLOCK, device=device), layers, 0.0)
