"""One optimiser step by the gradient at the worst point nearby. A piece for methods (`fedasam`, presets)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from panorgan.cases.sampling import Batch
from panorgan.methods.base import SiteRule
from panorgan.methods.sharpness import ascend


def asam_step(rule: SiteRule, batch: Batch, rho: float, eta: float) -> torch.Tensor:
    """Both gradients on the same batch, whatever the rule's loss is; returns the loss at w, as a plain step does.

    Gradient at w → ε = ρ T² g/‖T g‖, T = |w| + η → gradient at w + ε → the optimiser steps with it from w. With ρ = 0
    it is a plain step, bit for bit and at the price of one.
    """
    loss = rule.compute_gradients(batch)
    if rho > 0:
        with ascend(rule.model, rho, eta), statistics_kept(rule.model):
            rule.compute_gradients(batch)
    rule.apply_gradients()
    return loss


@contextmanager
def statistics_kept(model: nn.Module) -> Iterator[None]:
    """Give every buffer back as it was: a forward pass in here leaves no trace in running statistics.

    Of the two passes of a step, the one at w counts: there the model stays, and w + ε is a place where it never is.
    Copies are put back instead of setting BatchNorm's momentum to 0, which would still count the batch, and would not
    help with a mean over all batches (momentum None). In training, layers normalise by the batch and not by what is
    put back, so that gradients are the same.
    """
    buffers = list(model.buffers())
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)
