"""Shared code of all Triton kernels. It needs PyTorch alone; kernels are next to the code that they speed up."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Triton launches kernels on the current device (and without one in its interpreter): make it the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
