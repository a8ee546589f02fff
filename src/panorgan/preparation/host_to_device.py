"""Copies many small tensors to a device at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def in_one_copy(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Float tensors of the CPU on a device, in the same order.

    Each copy costs a GPU's host as much as a whole kernel, and one from ordinary memory makes it wait for all that was
    started before: so they travel together, and from pinned memory.
    """
    if device.type == "cpu" or not tensors:
        return list(tensors)
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    flat = (flat.pin_memory() if device.type == "cuda" else flat).to(device, non_blocking=True)
    pieces = flat.split([tensor.numel() for tensor in tensors])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]
