"""Binary cross-entropy to soft targets, summed over voxels in one kernel: an NVIDIA GPU reads every voxel once.

Importing this needs Triton, which comes with PyTorch for NVIDIA GPUs on Linux; without it `distillation.soft_bce`
computes the formula as written there, with which this must agree.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from panorgan.kernels import on_device_of

_VOXELS = 2048
_KNOWN = (torch.float32, torch.bfloat16, torch.float16)


def can_run(logits: torch.Tensor, targets: torch.Tensor) -> bool:
    """Whether the kernel supports these logits and targets, [B, C, *S]."""
    known = logits.dtype in _KNOWN and targets.dtype in _KNOWN and not targets.requires_grad
    same = logits.shape == targets.shape and logits.device == targets.device
    return logits.is_cuda and known and same and _works_on(logits.device, logits.dtype, targets.dtype)


@lru_cache
def _works_on(device: torch.device, of_logits: torch.dtype, of_targets: torch.dtype) -> bool:
    """Whether Triton can build and launch the kernels there: needs a C compiler, and a GPU that supports the types."""
    logits = torch.zeros(1, 1, 1, device=device, dtype=of_logits, requires_grad=True)
    counted = torch.ones(1, 1, device=device, dtype=torch.bool)
    try:
        with torch.enable_grad():
            run(logits, torch.zeros(1, 1, 1, device=device, dtype=of_targets), counted).sum().backward()
    except Exception:  # any failure: training continues without the kernel
        return False
    return True


def run(logits: torch.Tensor, targets: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Σ over voxels of softplus(x) − t·x, [B, C] in float32, for logits x and targets t [B, C, *S].

    0 where `counted` [B, C] is false; those voxels are not read.
    """
    sums: torch.Tensor = _Sums.apply(logits.flatten(2), targets.flatten(2), counted.expand(logits.shape[:2]))
    return sums


class _Sums(torch.autograd.Function):
    """[B, C, voxels] → [B, C]."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        logits, targets = _in_rows(logits), _in_rows(targets)
        counted = counted.to(torch.uint8).contiguous()
        batch, channels, voxels = logits.shape
        blocks = triton.cdiv(voxels, _VOXELS)
        out = torch.empty(batch, channels, blocks, device=logits.device)
        with on_device_of(logits):
            _add_up[(blocks, channels, batch)](
                logits, targets, counted, out, voxels, *logits.stride()[:2], *targets.stride()[:2], _VOXELS
            )
        ctx.save_for_backward(logits, targets, counted)
        return out.sum(2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, targets, counted = ctx.saved_tensors
        batch, channels, voxels = logits.shape
        out = torch.empty(logits.shape, device=logits.device, dtype=logits.dtype)
        with on_device_of(logits):
            _back[(triton.cdiv(voxels, _VOXELS), channels, batch)](
                logits, targets, counted, gradients[0].float().contiguous(), out, voxels,
                *logits.stride()[:2], *targets.stride()[:2], _VOXELS,
            )  # fmt: skip
        return out, None, None


def _in_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Make the voxels of a channel contiguous; a no-op where they are."""
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()


@triton.jit
def _tile(
    logits, targets, counted, voxels, of_sample, of_channel, of_sample_t, of_channel_t, block: tl.constexpr,
):  # fmt: skip
    """The program's tile: which channel of all samples, which voxels, their values, and whether they count."""
    channel, sample = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    place = sample * tl.num_programs(1) + channel
    voxel = tl.program_id(0) * block + tl.arange(0, block)
    here = (voxel < voxels) & (tl.load(counted + place) != 0)
    x = tl.load(logits + sample * of_sample + channel * of_channel + voxel, mask=here, other=0.0).to(tl.float32)
    t = tl.load(targets + sample * of_sample_t + channel * of_channel_t + voxel, mask=here, other=0.0).to(tl.float32)
    return place, voxel, x, t, here


@triton.jit
def _add_up(
    logits, targets, counted, out, voxels, of_sample, of_channel, of_sample_t, of_channel_t, block: tl.constexpr,
):  # fmt: skip
    """One program: `block` voxels of a channel; the partial sums are added later, in a fixed order."""
    place, _voxel, x, t, here = _tile(
        logits, targets, counted, voxels, of_sample, of_channel, of_sample_t, of_channel_t, block
    )
    small = tl.exp(-tl.abs(x))
    # log(1 + small), also where 1 + small would round to 1.
    softplus = tl.maximum(x, 0.0) + tl.where(small < 4e-3, small * (1 - small / 2), tl.log(1 + small))
    total = tl.sum(tl.where(here, softplus - t * x, 0.0), 0)
    tl.store(out + place * tl.num_programs(0) + tl.program_id(0), total)


@triton.jit
def _back(
    logits, targets, counted, given, out, voxels, of_sample, of_channel, of_sample_t, of_channel_t, block: tl.constexpr,
):  # fmt: skip
    """One program: (σ(x) − t) · the sum's gradient, of `block` voxels."""
    place, voxel, x, t, here = _tile(
        logits, targets, counted, voxels, of_sample, of_channel, of_sample_t, of_channel_t, block
    )
    gradient = tl.where(here, (tl.sigmoid(x) - t) * tl.load(given + place), 0.0)
    tl.store(out + place * voxels + voxel, gradient, mask=voxel < voxels)
