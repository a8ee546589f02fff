"""The sums over voxels that losses on a unified label need, in one kernel: an NVIDIA GPU reads every voxel once.

As single operations each of some forty passes would read and write all channels of all voxels, which is a tenth of a
training step. Importing this needs Triton, which comes with PyTorch for NVIDIA GPUs on Linux; without it `unified_loss`
and `reverse_ce` compute the formulas as written there, with which this must agree.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from panorgan.kernels import on_device_of

# Values that a program holds at a time, and channels that fit into the bits of a word.
_TILE = 2048
_MOST_CHANNELS = 32
_SUMS = 6


class Sums(NamedTuple):
    """Over the voxels of each sample, by channel, [B, C + 1] each. p is the softmax, y the label, 0 or 1.

    The first four are over the voxels where a channel counts.
    """

    overlap: torch.Tensor
    """Σ p·y"""
    probability: torch.Tensor
    """Σ p"""
    target: torch.Tensor
    """Σ y"""
    entropy: torch.Tensor
    """Σ −(y·log p + (1 − y)·log(1 − p))"""
    counted: torch.Tensor
    """Σ 1"""
    excluded: torch.Tensor
    """Σ p over all voxels whose label excludes the channel."""


def can_run(logits: torch.Tensor) -> bool:
    """Whether the kernel supports these logits [B, C + 1, *S]."""
    known = logits.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return logits.is_cuda and known and logits.shape[1] <= _MOST_CHANNELS and _works_on(logits.device, logits.dtype)


@lru_cache
def _works_on(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether Triton can build and launch the kernels there: needs a C compiler, and a GPU that supports the type."""
    logits = torch.zeros(1, 2, 1, device=device, dtype=dtype, requires_grad=True)
    values = torch.zeros(1, 1, device=device, dtype=torch.uint8)
    try:
        with torch.enable_grad():
            run(logits, values, torch.ones(3, 1, 1, device=device, dtype=torch.long)).entropy.sum().backward()
    except Exception:  # any failure: training continues without the kernel
        return False
    return True


def run(logits: torch.Tensor, values: torch.Tensor, words: torch.Tensor) -> Sums:
    """The sums for logits [B, C + 1, *S] and a label: `values` [B, *S] and `words` [3, B, values], `UnifiedLabel`'s."""
    sums: torch.Tensor = _Sums.apply(logits.flatten(2), values.flatten(1).contiguous(), words)
    return Sums(*sums.unbind(1))


class _Sums(torch.autograd.Function):
    """[B, C + 1, voxels] → [B, sums, C + 1]."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, values: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        logits = logits.contiguous()
        batch, channels, voxels = logits.shape
        wide, block = _sizes(channels)
        blocks = triton.cdiv(voxels, block)
        out = torch.empty(batch, blocks, _SUMS, wide, device=logits.device)
        with on_device_of(logits):
            _add_up[(blocks, batch)](logits, values, words, out, voxels, channels, words.shape[2], wide, block)
        ctx.save_for_backward(logits, values, words)
        return out.sum(1)[..., :channels]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, values, words = ctx.saved_tensors
        batch, channels, voxels = logits.shape
        wide, block = _sizes(channels)
        given = torch.nn.functional.pad(gradients[0].float(), (0, wide - channels)).contiguous()
        out = torch.empty_like(logits)
        with on_device_of(logits):
            _back[(triton.cdiv(voxels, block), batch)](
                logits, values, words, given, out, voxels, channels, words.shape[2], wide, block
            )
        return out, None, None


def _sizes(channels: int) -> tuple[int, int]:
    """Channels and voxels of a program's tile: powers of two."""
    wide = triton.next_power_of_2(channels)
    return wide, _TILE // wide


@triton.jit
def _softmax(
    logits, values, words, voxels, channels, kinds, sample, voxel, k,
):  # fmt: skip
    """Of a tile [channels, voxels]: x − max, powers e^(x − max), their total, which x is the only largest, the powers
    of all other channels (as `unified_loss` has them, with its smallest number); and three masks of the label."""
    inside = voxel < voxels
    value = tl.load(values + sample * voxels + voxel, mask=inside, other=0).to(tl.int64)
    samples = tl.num_programs(1)
    place = words + sample * kinds + value
    said = tl.load(place, mask=inside, other=0)
    counts = tl.load(place + samples * kinds, mask=inside, other=0)
    open_to = tl.load(place + 2 * samples * kinds, mask=inside, other=-1)
    target = ((said[None, :] >> k[:, None]) & 1) != 0
    counted = ((counts[None, :] >> k[:, None]) & 1) != 0
    excluded = (((open_to[None, :] >> k[:, None]) & 1) == 0) & (k < channels)[:, None]
    places = logits + (sample * channels + k[:, None]) * voxels + voxel[None, :]
    x = tl.load(places, mask=inside[None, :] & (k < channels)[:, None], other=0.0).to(tl.float32)
    x = tl.where((k < channels)[:, None], x, float("-inf"))
    below = x - tl.max(x, 0)[None, :]
    powers = tl.exp(below)
    total = tl.sum(powers, 0)
    top = below == 0
    largest = top & (tl.sum(top.to(tl.int32), 0) == 1)[None, :]
    # See `unified_loss`: for the largest, 1 − p would cancel.
    others = tl.sum(tl.where(largest, 0.0, powers), 0) + 1e-37
    rest = tl.where(largest, others[None, :], total[None, :] - powers)
    return below, powers, total, largest, rest, target, counted, excluded


@triton.jit
def _add_up(
    logits, values, words, out, voxels, channels, kinds, wide: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """One program: `block` voxels of a sample; the partial sums are added later, in a fixed order."""
    sample = tl.program_id(1).to(tl.int64)
    voxel = tl.program_id(0) * block + tl.arange(0, block)
    k = tl.arange(0, wide).to(tl.int64)
    below, powers, total, _largest, rest, target, counted, excluded = _softmax(
        logits, values, words, voxels, channels, kinds, sample, voxel, k
    )
    p = powers / total[None, :]
    here = tl.where(counted, p, 0.0)
    entropy = tl.log(total)[None, :] - tl.where(target, below, tl.log(rest))
    row = out + (sample * tl.num_programs(0) + tl.program_id(0)) * 6 * wide + k
    tl.store(row, tl.sum(tl.where(target, here, 0.0), 1))
    tl.store(row + wide, tl.sum(here, 1))
    tl.store(row + 2 * wide, tl.sum(target.to(tl.float32), 1))
    tl.store(row + 3 * wide, tl.sum(tl.where(counted, entropy, 0.0), 1))
    tl.store(row + 4 * wide, tl.sum(counted.to(tl.float32), 1))
    tl.store(row + 5 * wide, tl.sum(tl.where(excluded, p, 0.0), 1))


@triton.jit
def _back(
    logits, values, words, given, out, voxels, channels, kinds, wide: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """One program: gradients of `block` voxels' logits from those of the sums."""
    sample = tl.program_id(1).to(tl.int64)
    voxel = tl.program_id(0) * block + tl.arange(0, block)
    k = tl.arange(0, wide).to(tl.int64)
    _below, powers, total, largest, rest, target, counted, excluded = _softmax(
        logits, values, words, voxels, channels, kinds, sample, voxel, k
    )
    row = given + sample * 6 * wide + k
    overlap, probability, entropy, wrong = (
        tl.load(row)[:, None], tl.load(row + wide)[:, None], tl.load(row + 3 * wide)[:, None],
        tl.load(row + 5 * wide)[:, None],
    )  # fmt: skip
    p = powers / total[None, :]
    of_p = tl.where(counted, tl.where(target, overlap, 0.0) + probability, 0.0) + tl.where(excluded, wrong, 0.0)
    of_x = p * (of_p - tl.sum(of_p * p, 0)[None, :])
    # Of log Σ e^x − x where the label says the channel, and log Σ e^x − log(rest) where it says another.
    weight = tl.where(counted, entropy, 0.0)
    of_rest = tl.where(target, 0.0, weight / rest)
    of_top = tl.sum(tl.where(largest, of_rest, 0.0), 0)[None, :]
    of_low = tl.sum(tl.where(largest, 0.0, of_rest), 0)[None, :]
    from_others = tl.where(largest, of_low, of_low - of_rest + of_top)
    of_x += p * tl.sum(weight, 0)[None, :] - tl.where(target, weight, 0.0) - powers * from_others
    places = out + (sample * channels + k[:, None]) * voxels + voxel[None, :]
    tl.store(places, of_x, mask=(voxel < voxels)[None, :] & (k < channels)[:, None])
