"""Knowledge distillation for sigmoid channels: a teacher's probabilities replace the labels that a case lacks."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from panorgan.anatomy import Vocabulary
from panorgan.data.labels import labelled_organs
from panorgan.losses.partial import on_device
from panorgan.preparation.batch import Batch

try:
    from panorgan.losses import soft_bce_kernel
except Exception:  # Triton comes with PyTorch for NVIDIA GPUs only; one that is broken must break nothing else
    soft_bce_kernel = None  # type: ignore[assignment]


def soft_bce(logits: torch.Tensor, targets: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Binary cross-entropy to soft targets, [B]: mean over voxels, then over the channels that count.

    −(t·log σ(x) + (1 − t)·log(1 − σ(x))) for logits x and targets t [B, C, *S]; `counted` [B, C] bool. A sample without
    a counted channel has loss 0. These are FLKD's eqs. 7, 9 and 10, plus the second term of a binary cross-entropy,
    which the printed equations leave out.
    """
    if soft_bce_kernel and soft_bce_kernel.can_run(logits, targets):
        loss = soft_bce_kernel.run(logits, targets, counted) / math.prod(logits.shape[2:])
    else:
        # Filled before the formula, not masked after it: an uncounted NaN would give the gradient 0 · NaN.
        aside = ~counted.view(*counted.shape, *(1,) * (logits.ndim - 2))
        logits, targets = logits.float().masked_fill(aside, 0.0), targets.float().masked_fill(aside, 0.0)
        # −log σ(x) = softplus(x) − x, so that all of it is softplus(x) − t·x: two passes over the voxels.
        loss = torch.addcmul(F.softplus(logits), targets, logits, value=-1).flatten(2).mean(2)
    kept = loss.masked_fill(~counted, 0.0).sum(1)
    return kept / counted.sum(1).clamp(min=1)


def distil_unlabelled(
    logits: torch.Tensor, received: torch.Tensor, batch: Batch, vocabulary: Vocabulary
) -> torch.Tensor:
    """Cross-entropy with a frozen model's sigmoids on the organs that a sample does not label, [B]; FLKD's eq. 7.

    Logits of both models are [B, C, *S], their channels named by the vocabulary.
    """
    return soft_bce(logits, received.float().sigmoid(), unlabelled(batch, vocabulary))


def unlabelled(batch: Batch, vocabulary: Vocabulary) -> torch.Tensor:
    """[B, C] bool: the organs that a sample's annotation does not cover.

    A union (`kidney`) covers its parts; an organ does not cover unmarked organs inside it.
    """
    says = on_device(labelled_organs(batch.structures, vocabulary), batch.annotated.device)
    return batch.annotated.float() @ says == 0
