"""Cross-entropy in which the model that a site received says what the annotation leaves open: the E-step of EM.

At a site that outlines the liver, a voxel outside it may be background or any other organ. The marginal loss,
−log Σ p_c over what is allowed, shares such a voxel out by the model's *own* probabilities, anew in every step.
Whatever looks a little like a spleen is pushed further towards the spleen, at a site without labels against it: an
organ floods, or is forgotten, until the next average. Here the shares are those of the received model, fixed for the
round. It is the same likelihood, maximised by EM: the received model makes the E-step, the local steps make the M-step.
Where a round begins, the gradients of both losses are equal.
"""

from __future__ import annotations

import torch

from panorgan.anatomy import Vocabulary
from panorgan.losses.soft_label import soft_cross_entropy, soft_label
from panorgan.preparation.batch import Batch


def expected_cross_entropy(
    logits: torch.Tensor, received: torch.Tensor, batch: Batch, vocabulary: Vocabulary
) -> torch.Tensor:
    """Per-sample [B] mean over voxels of −Σ q_c log p_c; softmax channels, logits of both models [B, C + 1, *S].

    q is the received model's probability given what the annotation allows at the voxel. With one channel left it is
    ordinary cross-entropy. Where masks of exclusive structures overlap nothing is allowed: such voxels are left out.
    """
    return soft_cross_entropy(logits, soft_label(batch, vocabulary, received))
