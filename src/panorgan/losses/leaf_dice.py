"""Leaf-Dice: the Dice loss where a voxel's label is a set of classes. arXiv:2107.03846

An annotation leaves several channels open at some voxels: outside a liver mask, background and every unlabelled organ.
Such a voxel has no class of its own (no *leaf*), and enters no overlap; a class that is predicted there pays in its
denominator like anywhere else. A class without a leaf in a sample gets no gradient from it.
"""

from __future__ import annotations

import torch

from panorgan.anatomy import Vocabulary
from panorgan.losses.unified_label import allowed_channels
from panorgan.preparation.batch import Batch

_EPSILON = 1e-5


def leaf_dice(logits: torch.Tensor, batch: Batch, vocabulary: Vocabulary, exponent: int = 2) -> torch.Tensor:
    """Per-sample [B] 1 − mean over all C + 1 classes of 2 Σ p·g/(Σ p^α + Σ g + ε); softmax channels, [B, C + 1, *S].

    g is 1 where the class is the only one that the annotation allows.
    """
    p = logits.float().softmax(dim=1).flatten(2)
    allowed = allowed_channels(batch, vocabulary).flatten(2)
    leaf = (allowed & (allowed.sum(1, keepdim=True) == 1)).to(p.dtype)
    overlap, predicted, labelled = (p * leaf).sum(2), (p**exponent).sum(2), leaf.sum(2)
    return 1 - (2 * overlap / (predicted + labelled + _EPSILON)).mean(1)
