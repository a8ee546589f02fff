"""All heads of `head_stack` in one kernel: an NVIDIA GPU reads every voxel once and writes its outputs once.

Forward pass only: the backward pass needs the hidden layers, and recomputes them itself. Importing this needs Triton,
which comes with PyTorch for NVIDIA GPUs on Linux; without it `head_stack` multiplies matrices.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from panorgan.kernels import on_device_of

# Hidden channels computed at a time. Tensor cores multiply 16 columns at once, and more columns would need too many
# registers per voxel.
_PAIR = 16
_VOXELS = 128


def can_run(features: torch.Tensor, width: int) -> bool:
    """Whether the kernel supports these features [B, channels, voxels] and heads with hidden layers of this `width`."""
    known = features.dtype in (torch.float32, torch.bfloat16, torch.float16)
    fits = features.is_cuda and known and features.shape[1] <= _PAIR and _PAIR % width == 0
    return fits and _works_on(features.device, features.dtype)


@lru_cache
def _works_on(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether Triton can build and launch the kernel there: it needs a C compiler, and a GPU that supports the type."""
    matrices = [torch.zeros(size, 8, device=device, dtype=dtype) for size in (8, 8, 1)]
    biases = [torch.zeros(size, device=device, dtype=dtype) for size in (8, 8, 1)]
    try:
        run(torch.zeros(1, 8, 1, device=device, dtype=dtype), [*matrices, *biases], 0.0)
    except Exception:  # any failure: prediction continues without the kernel
        return False
    return True


def run(features: torch.Tensor, layers: Sequence[torch.Tensor], slope: float) -> torch.Tensor:
    """W₃·σ(W₂·σ(W₁·x + b₁) + b₂) + b₃, [B, channels, voxels] → [B, outputs, voxels].

    `layers`: W₁, W₂, W₃, b₁, b₂, b₃, see `head_stack`; `slope` of the leaky ReLUs σ.
    """
    features = features.contiguous()
    batch, channels, voxels = features.shape
    first, second, third, *biases = layers
    hidden = -(-len(first) // _PAIR) * _PAIR
    outputs, wide = len(third), max(_PAIR, triton.next_power_of_2(len(third)))
    matrices = [
        _filled_up(first.T, _PAIR, hidden),
        _filled_up(second.T, hidden, hidden),
        _filled_up(third.T, hidden, wide),
    ]
    sums = [
        F.pad(bias.float(), (0, size - len(bias))) for bias, size in zip(biases, (hidden, hidden, wide), strict=True)
    ]
    out = features.new_empty(batch, outputs, voxels)
    # fmt: off
    with on_device_of(features):
        _heads[(triton.cdiv(voxels, _VOXELS), batch)](
            features, out, *matrices, *sums, voxels, channels, outputs, hidden, slope, _PAIR, wide, _VOXELS,
            num_warps=4, num_stages=1,
        )
    # fmt: on
    return out


def _filled_up(matrix: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    return F.pad(matrix, (0, columns - matrix.shape[1], 0, rows - matrix.shape[0])).contiguous()


@triton.jit
def _heads(
    features, out, w1, w2, w3, b1, b2, b3,
    voxels, channels, outputs, hidden, slope,
    pair: tl.constexpr, wide: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """One program: `block` voxels of a sample, through `pair` hidden channels at a time."""
    sample = tl.program_id(1).to(tl.int64)
    voxel = tl.program_id(0) * block + tl.arange(0, block)
    c, o = tl.arange(0, pair).to(tl.int64), tl.arange(0, wide).to(tl.int64)
    inside = (voxel < voxels)[:, None]
    places = features + sample * channels * voxels + c[None, :] * voxels + voxel[:, None]
    x = tl.load(places, mask=inside & (c < channels)[None, :], other=0.0)
    third = tl.zeros((block, wide), tl.float32) + tl.load(b3 + o)[None, :]
    for start in range(0, hidden, pair):
        h = start + c
        first = tl.dot(x, tl.load(w1 + c[:, None] * hidden + h[None, :]), input_precision="ieee")
        first += tl.load(b1 + h)[None, :]
        first = tl.where(first > 0, first, slope * first).to(x.dtype)
        # Heads are independent of each other: of the second matrix only the diagonal block is not zero.
        second = tl.dot(first, tl.load(w2 + h[:, None] * hidden + h[None, :]), input_precision="ieee")
        second += tl.load(b2 + h)[None, :]
        second = tl.where(second > 0, second, slope * second).to(x.dtype)
        third = tl.dot(second, tl.load(w3 + h[:, None] * wide + o[None, :]), third, input_precision="ieee")
    places = out + sample * outputs * voxels + o[None, :] * voxels + voxel[:, None]
    tl.store(places, third.to(x.dtype), mask=inside & (o < outputs)[None, :])
