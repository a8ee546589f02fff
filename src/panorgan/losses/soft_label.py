"""Soft labels: at every voxel a probability of each channel, from the annotation and a teacher; Dice and cross-entropy.

Where the annotation leaves one channel, the label is that channel. Where it leaves several, the voxel is divided among
them by the teacher's probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from panorgan.anatomy import Vocabulary
from panorgan.losses.unified_label import allowed_channels
from panorgan.preparation.batch import Batch


@dataclass(frozen=True)
class SoftLabel:
    """`shares` [B, C + 1, *S] sum to 1 over the channels, background first; `counted` [B, *S] bool is False where
    masks of exclusive structures overlap, so that nothing is allowed."""

    shares: torch.Tensor
    counted: torch.Tensor


def soft_label(batch: Batch, vocabulary: Vocabulary, teacher: torch.Tensor | None) -> SoftLabel:
    """Soft labels from the annotation and, where it leaves several channels, from the teacher's logits [B, C + 1, *S].

    Without a teacher (where the annotation leaves nothing open) all allowed channels get equal shares.
    """
    allowed = allowed_channels(batch, vocabulary)
    counted = allowed.any(dim=1)
    logits = torch.zeros(allowed.shape, device=allowed.device) if teacher is None else teacher.float()
    return SoftLabel(logits.masked_fill(~(allowed | ~counted.unsqueeze(1)), float("-inf")).softmax(dim=1), counted)


def soft_cross_entropy(logits: torch.Tensor, label: SoftLabel) -> torch.Tensor:
    """Per-sample [B] mean over the voxels that count of −Σ q_c log p_c."""
    loss = F.cross_entropy(logits.float(), label.shares, reduction="none").masked_fill(~label.counted, 0.0)
    return loss.flatten(1).sum(1) / label.counted.flatten(1).sum(1).clamp(min=1)


def soft_dice(logits: torch.Tensor, label: SoftLabel, taught: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """1 − (2 Σ p·q + 1)/(Σ p + Σ q + 1) of the organs that a teacher teaches: their weighted sum, and the weights' sum.

    Sums run over the voxels of the samples in which an organ is taught (`taught` [B, C] bool). An organ counts by how
    sure its label is, Σ q² / Σ q: little where the teacher sees it everywhere a bit, not at all where it is absent.
    """
    counted = label.counted.unsqueeze(1) & taught.view(*taught.shape, *(1,) * (logits.ndim - 2))
    p = logits.float().softmax(dim=1)[:, 1:] * counted
    q = label.shares[:, 1:] * counted
    over = (0, *range(2, p.ndim))
    overlap, predicted, labelled, squared = (p * q).sum(over), p.sum(over), q.sum(over), (q * q).sum(over)
    dice = (2 * overlap + 1) / (predicted + labelled + 1)
    # An organ that fills less than a voxel is absent; a teacher's small probabilities of it must not become a label.
    sure = torch.where(labelled >= 1, squared / labelled.clamp(min=1), torch.zeros_like(labelled))
    return ((1 - dice) * sure).sum(), sure.sum()


__all__ = ["SoftLabel", "soft_cross_entropy", "soft_dice", "soft_label"]
