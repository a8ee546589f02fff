"""Attention maps of whole scans: their intersection and union at a site, and those of all sites (FedIOD, eqs. 3 to 9).

A slice has one map [n, n], the mean over layers and heads of a transformer with n tokens. A scan has a stack of them,
one per slice along its depth. Everything is computed in float32 or wider, whatever the precision around it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from panorgan.errors import RunError


def best_scans(dice_losses: Mapping[str, float], share: float) -> tuple[str, ...]:
    """The share of scans (0..1) with the lowest Dice loss, best first: the paper's top τ % or µ %.

    Their number is rounded to the nearest, halves upward, and is at least one. Equal losses go by name. Scans whose
    loss is not a number are left out, and not counted either; if there are no others, the answer is empty.
    """
    known = {scan: loss for scan, loss in dice_losses.items() if math.isfinite(loss)}
    # Rounded first: 0.29 · 50 is 14.499… in floating point.
    count = max(1, math.floor(round(share * len(known), 9) + 0.5))
    return tuple(sorted(known, key=lambda scan: (known[scan], scan))[:count])


# -- at a site ---------------------------------------------------------------------------------------------------------


def resample_depth(maps: torch.Tensor, depth: int) -> torch.Tensor:
    """Eq. 4: a stack [D, n, n] → [depth, n, n], linear along depth; both stacks span the same length.

    Every slice of the result is a weighted mean of two, so that rows still add up to one.
    """
    slices = torch.arange(depth, device=maps.device)
    return _mixed(_depth_weights(_positions(slices, depth, len(maps)), len(maps)), maps)


class ScanMaps:
    """I_k and U_k of eqs. 5 and 6: element-wise minimum and maximum over scans, one scan after another.

    Parameters
    ----------
    depth : D̄, the number of slices that all scans of all sites are resampled to.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.scans = 0
        self._least = self._most = torch.empty(0)

    def add(self, maps: torch.Tensor) -> None:
        """Add the stack [D, n, n] of one scan; only two maps of D̄ slices are kept."""
        resampled = resample_depth(maps.detach(), self.depth)
        if self.scans == 0:
            self._least, self._most = resampled, resampled.clone()
        else:
            torch.minimum(self._least, resampled, out=self._least)
            torch.maximum(self._most, resampled, out=self._most)
        self.scans += 1

    @property
    def intersection(self) -> torch.Tensor:
        """I_k [D̄, n, n]."""
        return self._checked(self._least)

    @property
    def union(self) -> torch.Tensor:
        """U_k [D̄, n, n]."""
        return self._checked(self._most)

    def _checked(self, maps: torch.Tensor) -> torch.Tensor:
        if self.scans == 0:
            raise RunError(
                "There is no attention map to take the intersection or union of.",
                code="no-attention-maps",
                fix="Add the maps of at least one scan first.",
            )
        return maps


def pack(maps: torch.Tensor) -> torch.Tensor:
    """Maps with values in 0..1 as they travel: float16, on the CPU; two bytes per value.

    A value x is off by at most max(x·2⁻¹¹, 2⁻²⁵): 0.05 % of it, and below 6·10⁻⁵ by 3·10⁻⁸. Rounding keeps order,
    so that an intersection stays within its union. `Tensor.float()` is the inverse.
    """
    return maps.detach().to("cpu", torch.float16)


def packed(maps: torch.Tensor) -> torch.Tensor:
    """Maps [D, n, n] as one matrix that may travel, [n, D·n] float16.

    An n × n array would look like an image of that size, which egress never lets out.
    """
    return pack(maps).movedim(0, 1).flatten(1).contiguous()


def unpacked(sent: torch.Tensor) -> torch.Tensor:
    """The inverse of `packed`, on the same device, in float32."""
    stacked: torch.Tensor = sent.unflatten(1, (-1, len(sent)))
    return stacked.movedim(1, 0).float().contiguous()


# -- at the server -----------------------------------------------------------------------------------------------------


def fuse(maps_of: Callable[[str], torch.Tensor], sites: Sequence[str], scale: float | None = None) -> torch.Tensor:
    """Eqs. 7 to 9 for one kind of map: Σ_k φ_k·I_k with φ = softmax over sites of −|d|, d = I_k − mean, by element.

    The printed exponent lacks the absolute value, without which low outliers would count more; the printed 1/K would
    shrink the maps K-fold, because a softmax already sums to one. Entries of n tokens are 1/n on average, and e^−1/n is
    close to 1: so the sum is nearly the plain mean. With a `scale` the exponent is −(n·d/scale)² instead: a site that
    deviates by `scale` times even attention counts e^−1 of one that does not.

    `maps_of(site)` is called two or three times for every site and read one site at a time; sites are summed in the
    order of their names. Returns float32.
    """
    sites = sorted(sites)
    if not sites:
        raise RunError("There are no sites whose attention maps could be fused.", code="no-attention-maps")
    mean = maps_of(sites[0]).to(torch.float64, copy=True)
    for site in sites[1:]:
        mean += maps_of(site)
    mean /= len(sites)

    def distance(maps: torch.Tensor) -> torch.Tensor:
        away = (maps - mean).abs_()
        return away if scale is None else away.mul_(maps.shape[-1] / scale).square_()

    # Distances lie in 0..1: their exponential needs no shift. Their squares may be large.
    nearest = torch.zeros_like(mean)
    if scale is not None:
        nearest += math.inf
        for site in sites:
            torch.minimum(nearest, distance(maps_of(site).double()), out=nearest)
    total, weighted = torch.zeros_like(mean), torch.zeros_like(mean)
    for site in sites:
        maps = maps_of(site).double()
        closeness = distance(maps).sub_(nearest).neg_().exp_()
        total += closeness
        weighted += closeness.mul_(maps)
    return weighted.div_(total).float()


# -- back at a site ----------------------------------------------------------------------------------------------------


def slice_targets(maps: torch.Tensor, slices: torch.Tensor, depths: torch.Tensor) -> torch.Tensor:
    """Fused maps [D̄, n, n] for single slices, [B, n, n]: the inverse of eq. 4.

    Slice `slices[b]` of a scan with `depths[b]` slices gets the mean of three: itself and its two neighbours in the
    maps resampled to the scan's own depth. At either end there are two.
    """
    return _mixed(_slice_weights(slices, depths, len(maps)), maps)


class SliceTargets:
    """`slice_targets` for a round: the mixing weights of all slices are computed once, and looked up.

    Parameters
    ----------
    maps : one or several stacks [D̄, n, n]; all are mixed at once.
    depths : of all scans whose slices will be requested.
    """

    def __init__(self, maps: Sequence[torch.Tensor], depths: Iterable[int]) -> None:
        known = sorted(set(depths))
        device, depth = maps[0].device, len(maps[0])
        table = [_slice_weights(torch.arange(own), torch.full((own,), own), depth) for own in known]
        self._weights = torch.cat(table).to(device)
        first = torch.zeros(known[-1] + 1, dtype=torch.int64)  # row of a depth's slice 0
        first[known] = torch.tensor([0, *known[:-1]]).cumsum(0)
        self._first = first.to(device)
        self._maps = torch.stack(tuple(maps), dim=1)  # [D̄, K, n, n]

    def __call__(self, slices: torch.Tensor, depths: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Of every stack, [B, n, n]."""
        return _mixed(self._weights[self._first[depths] + slices], self._maps).unbind(1)


def _slice_weights(slices: torch.Tensor, depths: torch.Tensor, depth: int) -> torch.Tensor:
    """The weights of the `depth` fused slices in the target of a slice, [B, depth]."""
    near = slices.view(-1, 1) + torch.arange(-1, 2, device=slices.device)  # [B, 3]
    depths = depths.view(-1, 1)
    there = (near >= 0) & (near < depths)
    weights = _depth_weights(_positions(near, depths, depth), depth) * there.unsqueeze(-1)
    return weights.sum(1) / there.sum(1, keepdim=True)


def _positions(slices: torch.Tensor, depth: int | torch.Tensor, other: int) -> torch.Tensor:
    """Where the centres of slices of a stack of `depth` lie in a stack of `other` slices; not beyond its outer ones."""
    return ((slices + 0.5) * other / depth - 0.5).clamp(0, other - 1)


def _depth_weights(positions: torch.Tensor, depth: int) -> torch.Tensor:
    """Linear interpolation as weights of `depth` slices: positions [*P] → [*P, depth], adding up to one."""
    slices = torch.arange(depth, device=positions.device)
    return (1 - (positions.unsqueeze(-1) - slices).abs()).clamp(min=0)


def _mixed(weights: torch.Tensor, maps: torch.Tensor) -> torch.Tensor:
    """Weighted sums of slices: [K, D] and [D, ..., n, n] → [K, ..., n, n] in float32."""
    with torch.autocast(maps.device.type, enabled=False):  # autocast would round the maps to eight bits
        mixed = weights.to(maps.device, torch.float32) @ maps.float().flatten(1)
    return mixed.view(-1, *maps.shape[1:])
