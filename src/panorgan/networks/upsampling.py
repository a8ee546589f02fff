"""Linear interpolation to a finer grid, with a gradient that is the same on every run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F

from panorgan.networks.base import is_recording


def upsample(values: torch.Tensor, space: Sequence[int]) -> torch.Tensor:
    """[B, *grid] → [B, *space], linearly between the centres of the coarse cells; the mean stays.

    As multiplications along each axis: on a GPU the gradient of `F.interpolate` differs from run to run.
    """
    make = _interpolation.__wrapped__ if is_recording() else _interpolation
    matrices = [
        make(cells, size, values.device, values.dtype) for cells, size in zip(values.shape[1:], space, strict=True)
    ]
    with torch.autocast(values.device.type, enabled=False):
        values = values @ matrices[-1].mT
        for axis in range(len(matrices) - 1, 0, -1):  # [axes before, the axis, axes behind]
            behind = values.flatten(0, axis - 1).flatten(2)
            finer = matrices[axis - 1].expand(behind.shape[0], -1, -1) @ behind
            values = finer.unflatten(2, values.shape[axis + 1 :]).unflatten(0, values.shape[:axis])
    return values


def upsample_channels(features: torch.Tensor, space: Sequence[int]) -> torch.Tensor:
    """The same for features [B, C, *grid] → [B, C, *space]."""
    if features.shape[2:] == tuple(space):
        return features
    return upsample(features.flatten(0, 1), space).unflatten(0, features.shape[:2])


@cache
def _interpolation(cells: int, size: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """The weight of each of `cells` in each of `size` places, [size, cells].

    Cached and read-only: captured passes read it at this address.
    """
    with torch.inference_mode(False), torch.no_grad():  # the cached tensor may be used in training later
        # Not in half precision: autocast on a GPU would answer in float32 anyway.
        shares = torch.eye(cells, dtype=torch.promote_types(dtype, torch.float32), device=device).unsqueeze(0)
        finer = F.interpolate(shares, size=size, mode="linear", align_corners=False)[0]
        return finer.mT.contiguous().to(dtype)
