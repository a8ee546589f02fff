"""The teachers' uncertainty about a sample (UFPS, eq. 6)."""

from __future__ import annotations

import torch

# Odds of 0 and 1 are infinite; clamped here they carry no weight (stored probabilities come in steps of 1/255).
_CERTAIN = 1e-7
# The smallest probability with a logarithm; smaller ones do not contribute to an entropy.
_SMALLEST = 1e-37


def teacher_logits(probabilities: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """Organs' probabilities [B, E, *S], each by its own teacher → logits of one softmax, [B, 1 + E, *S].

    log(p/(1 − p)) against 0 for the background: what independent predictions imply if a voxel has at most one organ.
    Organs without a teacher (`known` [B, E] bool) do not contribute.
    """
    odds = torch.logit(probabilities.float(), eps=_CERTAIN)
    odds += known.float().log().view(*known.shape, *(1,) * (odds.ndim - 2))  # 0 or −∞
    background = odds.new_zeros(len(odds), 1, *odds.shape[2:])
    return torch.cat([background, odds], dim=1)


def voxel_entropy(logits: torch.Tensor, classes: int | None = None) -> torch.Tensor:
    """E [B, *S] = −(1/N) Σ_c p_c log p_c of the softmax over the channels of logits [B, channels, *S].

    N is `classes`, background included, where the logits leave out classes without a teacher.
    """
    p = logits.float().softmax(dim=1)
    # 0·log 0 is 0 here. `torch.special.entr` does the same, several times slower on a CPU.
    parts = p * p.clamp(min=_SMALLEST).log()
    return parts.sum(1) / -(classes or logits.shape[1])


def sample_uncertainty(entropy: torch.Tensor, label: torch.Tensor, classes: int) -> torch.Tensor:
    """Eq. 6: U [B] = (1/N) Σ_c (Σ_vox E·q_c)/(Σ_vox q_c + 1) for an entropy and a label [B, *S] of integers.

    Classes 0 … N − 1 include the background; larger values of the label belong to none.
    """
    entropy, label = entropy.float().flatten(1), label.flatten(1)
    values = torch.arange(classes, dtype=label.dtype, device=label.device)
    inside = (label.unsqueeze(1) == values.view(1, -1, 1)).float()
    voxels = inside.sum(2)
    # All classes at once, without scattered additions: these sums have a fixed order, also on a GPU.
    total = inside.mul_(entropy.unsqueeze(1)).sum(2)
    return (total / (voxels + 1)).mean(1)
