"""Reverse cross-entropy: the prediction weighs the label, so that wrong labels count less (UFPS, eq. 9)."""

from __future__ import annotations

import math

import torch

from panorgan.losses.unified_label import UnifiedLabel
from panorgan.losses.unified_loss import sums_on_gpu

LOG_ZERO = -4.0
"""Stands for log 0."""


def reverse_cross_entropy(logits: torch.Tensor, possible: torch.Tensor, log_zero: float = LOG_ZERO) -> torch.Tensor:
    """RCE [B] = −Σ_c q_c log p_c, mean over voxels; q the softmax of logits [B, C + 1, *S], p the label.

    `possible` [B, C + 1, *S] bool are the channels that the label names: log 1 = 0 there, and `log_zero` elsewhere.
    So it is −log_zero times the probability of all that the label excludes.
    """
    q = logits.float().softmax(dim=1)
    # A product with 0 or 1: many times faster on a CPU than filling in zeros.
    return -log_zero * (q * (~possible).float()).sum(1).flatten(1).mean(1)


def growing_factor(round_number: int, rounds: int, steepness: float = 20.0) -> float:
    """e^{−20 (1 − r/R)}: close to 0 at first, 1 in the last round."""
    return math.exp(-steepness * (1 - round_number / rounds))


def adaptive_rce(logits: torch.Tensor, label: UnifiedLabel, round_number: int, rounds: int) -> torch.Tensor:
    """Eq. 9, [B]: reverse cross-entropy times its growing factor."""
    return growing_factor(round_number, rounds) * _of_label(logits, label)


def _of_label(logits: torch.Tensor, label: UnifiedLabel) -> torch.Tensor:
    sums = sums_on_gpu(logits, label)
    if sums is not None:
        return -LOG_ZERO * sums.excluded.sum(1) / label.values[0].numel()
    return reverse_cross_entropy(logits, label.channels())
