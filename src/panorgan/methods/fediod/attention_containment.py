"""The loss that keeps an attention map between two others: around the intersection, inside the union (FedIOD).

Eqs. 10 to 14. As printed the two terms are shares to be maximised; here they are 1 − share, in 0..1, to be minimised.
Maps are [B, n, n], rows of attention that add up to one. Gradients flow to the network's own map only.
"""

from __future__ import annotations

import torch

ALPHA = 1000.0
"""The paper's steepness of the gate, for n = 256 tokens: a row's mean is 1/n, so that no attention is σ(−α/n) = 0.02.

With other n, 1000·n/256 is as steep. Left at 1000, fewer tokens saturate the gate, and its gradient vanishes."""

# An empty map has nothing to contain: 0/this is 0, and no relevant sum is as small.
_SMALLEST = 1e-20


def gate(maps: torch.Tensor, alpha: float = ALPHA) -> torch.Tensor:
    """Γ of eq. 12: σ(α·(A − β)) with β the mean of each row, [..., n, n] → values in 0..1, always float32.

    The threshold β passes no gradient: a row of attention has a constant mean anyway.
    """
    # float32 before the subtraction: multiplied by α, a rounding of bfloat16 at 1/256 would matter.
    maps = maps.float()
    return torch.sigmoid(alpha * (maps - maps.mean(dim=-1, keepdim=True).detach()))


def missing_intersection(attention: torch.Tensor, intersection: torch.Tensor, alpha: float = ALPHA) -> torch.Tensor:
    """L_I of eq. 10, [B]: 1 − Σ Î·Γ(Ā)/Σ Î, the share of the intersection Î that the map Ā leaves out.

    0 where the intersection is empty. One number per slice: the sums of eqs. 13 and 14 are the caller's mean.
    """
    return _share_outside(intersection.detach(), attention, alpha)


def outside_union(attention: torch.Tensor, union: torch.Tensor, alpha: float = ALPHA) -> torch.Tensor:
    """L_U of eq. 11, [B]: 1 − Σ Ā·Γ(Û)/Σ Ā, the share of the map Ā that lies outside the union Û."""
    return _share_outside(attention, union.detach(), alpha)


def containment(
    attention: torch.Tensor, intersection: torch.Tensor, union: torch.Tensor, alpha: float = ALPHA
) -> torch.Tensor:
    """Both, [2, B]: L_I, then L_U, in half as many operations as separately."""
    inner = torch.stack((intersection.detach().float(), attention.float()))
    outer = torch.stack((attention.float(), union.detach().float()))
    return _share_outside(inner.flatten(0, 1), outer.flatten(0, 1), alpha).view(2, -1)


def _share_outside(inner: torch.Tensor, outer: torch.Tensor, alpha: float) -> torch.Tensor:
    """1 − Σ inner·Γ(outer)/Σ inner per sample, [B]."""
    # 1 − Γ is the gate with −α: what lies outside is summed directly, not as a difference of numbers near 1.
    inner = inner.float()
    outside = (inner * gate(outer, -alpha)).flatten(1).sum(1)
    return outside / (inner.flatten(1).sum(1) + _SMALLEST)
