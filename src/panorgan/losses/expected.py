"""Cross-entropy with soft labels from the received model where the annotation leaves several channels: EM.

At a site that labels the liver, a voxel outside it may be background or any other organ. The marginal loss,
−log Σ p_c over the allowed channels c, divides such a voxel by the probabilities of the model in training, again in
every step. So whatever looks a little like a spleen is pushed further towards the spleen, and the site has no labels
against it: an organ floods, or is forgotten, until the next average. Here the received model's probabilities divide
the voxel, fixed for the round. It is the same likelihood, maximised by EM: the received model is the E-step, the local
steps are the M-step. At the start of a round, the gradients of both losses are equal.
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

    q is the received model's probability among the channels that the annotation allows at the voxel. With one channel
    left it is ordinary cross-entropy. Where masks of exclusive structures overlap, no channel is allowed, and the voxel
    is left out.
    """
    return soft_cross_entropy(logits, soft_label(batch, vocabulary, received))
