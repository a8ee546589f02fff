"""The kernel of the losses on a unified label gives what the plain way gives.

On a GPU where there is one; and by Triton's interpreter where Triton is installed, which needs none. Otherwise skipped.
"""

from __future__ import annotations

import pytest
import torch
from interpreting import interpret, needs_triton

from panorgan.losses import unified_loss
from panorgan.losses.unified_label import UnifiedLabel
from panorgan.losses.unified_loss import unified_dice_bce
from panorgan.methods.ufps.reverse_ce import adaptive_rce

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
# Channels, voxels, and how far apart logits are: at 60 the softmax is utterly sure, and often utterly wrong.
SHAPES = [(8, (20, 50), 2.0), (8, (5000,), 60.0), (3, (7, 2, 5), 1.0), (17, (300,), 5.0), (2, (1,), 1.0)]


def make(channels, space):
    """Labels of every kind: sure, one of several channels, anything; the samples differ in what a value means."""
    kinds = channels + 2
    values = torch.randint(0, kinds, (2, *space), dtype=torch.uint8)
    possible = torch.eye(channels, dtype=torch.bool).repeat(2, 2, 1)[:, :kinds].clone()
    possible[:, -1] = True
    possible[1, 0, : channels // 2 + 1] = True
    return UnifiedLabel(values, possible)


def losses_and_gradient(logits, label, dice_weight, bce_weight, dice_over):
    logits = logits.detach().requires_grad_()
    losses = unified_dice_bce(logits, label, dice_weight, bce_weight, dice_over) + 0.3 * adaptive_rce(
        logits, label, 9, 10
    )
    (losses * torch.tensor([0.7, 1.3], device=losses.device)).sum().backward()
    return losses.detach(), logits.grad


def compare(device, dtype, tolerance):
    """Both ways, on all shapes; the plain one on the CPU, from the same rounded logits."""
    torch.manual_seed(0)
    kernel = unified_loss.unified_kernel
    assert kernel is not None
    kernel.can_run = lambda logits: logits.device.type == device and not plainly
    for channels, space, spread in SHAPES:
        for weights in ((0.5, 0.5, "sample"), (1.0, 0.0, "batch"), (0.0, 1.0, "sample")):
            label, logits = make(channels, space), (spread * torch.randn(2, channels, *space)).to(dtype)
            logits[..., 0] = 0  # no channel is the largest here
            plainly = True
            expected = losses_and_gradient(logits.float(), label, *weights)
            plainly = False
            there = UnifiedLabel(label.values.to(device), label.possible.to(device))
            found = losses_and_gradient(logits.to(device), there, *weights)
            for ours, plain, bound in zip(found, expected, (1e-5, tolerance), strict=True):
                largest = float(plain.abs().max())
                torch.testing.assert_close(ours.cpu().float(), plain, rtol=bound, atol=bound * largest)


@needs_gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-3)], ids=str)
def test_on_a_gpu(dtype, tolerance, monkeypatch):
    monkeypatch.setattr(unified_loss.unified_kernel, "can_run", unified_loss.unified_kernel.can_run)
    logits = torch.zeros(1, 3, 4, device="cuda", dtype=dtype)
    assert unified_loss.unified_kernel.can_run(logits)
    assert not unified_loss.unified_kernel.can_run(logits.cpu())
    assert not unified_loss.unified_kernel.can_run(torch.zeros(1, 33, 4, device="cuda"))  # more than its words have
    compare("cuda", dtype, tolerance)


@needs_triton
def test_in_the_interpreter():
    interpret("tests.losses.test_unified_kernel")


def test_words_say_what_masks_say():
    """The lowest bit is the background's."""
    possible = torch.tensor([[[True, False, False], [False, True, True]]])
    label = UnifiedLabel(torch.tensor([[0, 1]], dtype=torch.uint8), possible)
    assert label.words.tolist() == [[[0b001, 0b000]], [[0b111, 0b001]], [[0b001, 0b110]]]


if __name__ == "__main__":
    compare("cpu", torch.float32, 1e-5)
