"""The kernel of distillation's cross-entropy gives what the plain way gives.

On a GPU where there is one; and by Triton's interpreter where Triton is installed, which needs none. Otherwise skipped.
"""

from __future__ import annotations

import pytest
import torch
from interpreting import interpret, needs_triton

from panorgan.losses import distillation, soft_bce

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
# Channels, voxels, and how large logits are; more voxels than a program has, and fewer.
SHAPES = [(6, (20, 50), 2.0), (2, (5000,), 60.0), (3, (7, 2, 5), 1.0), (1, (1,), 9.0)]


def loss_and_gradient(logits, targets, counted):
    """Of all channels but the first, which are a view; weighed sample by sample."""
    logits = logits.detach().requires_grad_()
    losses = soft_bce(logits[:, 1:], targets, counted)
    (losses * torch.tensor([0.7, 1.3], device=losses.device)).sum().backward()
    return losses.detach(), logits.grad


def compare(device, dtype, tolerance):
    """Both ways, on all shapes; the plain one on the CPU, from the same rounded logits."""
    torch.manual_seed(0)
    kernel = distillation.soft_bce_kernel
    assert kernel is not None
    kernel.can_run = lambda logits, targets: logits.device.type == device and not plainly
    for channels, space, spread in SHAPES:
        logits = (spread * torch.randn(2, channels + 1, *space)).to(dtype)
        targets, counted = torch.rand(2, channels, *space), torch.rand(2, channels) < 0.6
        counted[1, 0], counted[0, -1] = True, channels < 3
        logits[0, -1, ..., 0] = 0 if counted[0, -1] else torch.nan  # what does not count may be anything
        plainly = True
        expected = loss_and_gradient(logits.float(), targets, counted)
        plainly = False
        found = loss_and_gradient(logits.to(device), targets.to(device), counted.to(device))
        alike = counted[:1].expand(2, -1)
        assert torch.equal(
            soft_bce(logits.to(device)[:, 1:], targets.to(device), counted[:1].to(device)),
            soft_bce(logits.to(device)[:, 1:], targets.to(device), alike.to(device)),
        )
        in_channels = targets.to(device).movedim(1, -1).contiguous().movedim(-1, 1)  # laid out otherwise
        again = loss_and_gradient(logits.to(device), in_channels, counted.to(device))
        for ours, other, plain, bound in zip(found, again, expected, (1e-5, tolerance), strict=True):
            assert torch.equal(ours, other)
            largest = float(plain.abs().max())
            torch.testing.assert_close(ours.cpu().float(), plain, rtol=bound, atol=bound * largest)


@needs_gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-3)], ids=str)
def test_on_a_gpu(dtype, tolerance, monkeypatch):
    kernel = distillation.soft_bce_kernel
    monkeypatch.setattr(kernel, "can_run", kernel.can_run)
    logits, targets = torch.zeros(1, 3, 4, device="cuda", dtype=dtype), torch.zeros(1, 3, 4, device="cuda")
    assert kernel.can_run(logits, targets)
    assert not kernel.can_run(logits.cpu(), targets.cpu())
    assert not kernel.can_run(logits, targets.requires_grad_())  # it has no gradient for them
    assert not kernel.can_run(logits.double(), targets.detach())
    compare("cuda", dtype, tolerance)


@needs_triton
def test_in_the_interpreter():
    interpret("tests.losses.test_soft_bce_kernel")


if __name__ == "__main__":
    compare("cpu", torch.float32, 1e-5)
