"""Exclusion: an organ without a label is not where the labels show another one. arXiv:2007.03868

The marginal loss says what a labelled voxel is. Exclusion says what it is not, organ by organ: the predicted region of
every unlabelled organ should not overlap the region that the annotation forbids it. The background has no such term (in
Fed-MENU's released code it has): the marginal loss keeps it off already.
"""

from __future__ import annotations

import torch

from panorgan.anatomy import Vocabulary
from panorgan.losses.distillation import unlabelled
from panorgan.losses.unified_label import allowed_channels
from panorgan.preparation.batch import Batch


def exclusion(
    logits: torch.Tensor, batch: Batch, vocabulary: Vocabulary, dice_weight: float = 1.0, ce_weight: float = 1.0
) -> torch.Tensor:
    """Per-sample [B] exclusion Dice + exclusion cross-entropy; the mean over unlabelled organs, 0 where there is none.

    Dice: (2 Σ p·e + 1)/(Σ p + Σ e + 1), e the forbidden region. Cross-entropy: the mean over voxels of e·log(p + 1),
    where the 1 keeps it finite. Both are smallest where p is 0 in e.
    """
    p = logits.float().softmax(dim=1)[:, 1:].flatten(2)
    e = (~allowed_channels(batch, vocabulary)[:, 1:]).to(p.dtype).flatten(2)
    counted = unlabelled(batch, vocabulary) & e.any(dim=2)
    dice = (2 * (p * e).sum(2) + 1) / (p.sum(2) + e.sum(2) + 1)
    loss = dice_weight * dice + ce_weight * (e * torch.log1p(p)).mean(2)
    return loss.masked_fill(~counted, 0.0).sum(1) / counted.sum(1).clamp(min=1)
