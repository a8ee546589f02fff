"""Attention heads' contribution to a site's organs, and their weights in the mean over sites (FedIOD, eqs. 17 to 20).

Integrated gradients on attention maps, not on the image: the maps of all heads of all layers are computed once for an
image, and faded in together from 0: F([εA_1, …, εA_H]) for ε = 1/S, 2/S, …, 1. They are fixed; deeper layers do not
recompute theirs from faded ones. F is the mean probability that the network gives to the site's own organ on the
organ's voxels. A head's attribution is A × the mean over ε of ∂F/∂A at εA, entry by entry of A; the largest entry
counts. In the sum, entries of either sign cancel, and mostly rounding is left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from panorgan.errors import RunError
from panorgan.networks.cuda_graphs import retry_without_graphs

Foreground = Callable[[Sequence[torch.Tensor]], torch.Tensor]
"""Attention maps of every layer, [B, heads, n, n] each → F, a number, of a network that uses them instead of its own.

All uses count: where a network re-weights skip connections by its maps, that is part of a head's contribution.
"""

STEPS = 15
"""The paper's S."""

NEGLIGIBLE = 1e-6
"""Attributions below this share of a site's largest are rounding errors of float32, and count as 0."""


# Processed together on a GPU: 48 slices of 256 × 256, each with 24 maps of 256 tokens. Three gigabytes for one organ.
_PIXELS = 48 * 256**2
_ATTENTION = 48 * 24 * 256**2


# -- at a site ---------------------------------------------------------------------------------------------------------


def head_attribution(
    foreground: Foreground, maps: Sequence[torch.Tensor], steps: int = STEPS, at_once: int = 1
) -> list[torch.Tensor]:
    """Eq. 17: (1/S) · A × Σ_s ∂F/∂A at s/S·A, of every layer as its maps are, [B, heads, n, n].

    The result stays on the maps' device. F of a scan whose slices come in batches is a sum over batches: each slice has
    its own attribution. The network should be in evaluation mode. Runs without autocast, unless `foreground` starts it.

    `at_once` steps are computed together where that is faster: `foreground` then gets maps [at_once · B, heads, n, n],
    all slices of the first step before those of the second, and returns the sum over steps.
    """
    maps = [layer.detach().float() for layer in maps]
    slopes_so_far = [torch.zeros_like(layer) for layer in maps]
    for first in range(1, steps + 1, at_once):
        fractions = [step / steps for step in range(first, min(first + at_once, steps + 1))]
        faded = [torch.cat([layer * fraction for fraction in fractions]).requires_grad_() for layer in maps]
        with torch.enable_grad(), torch.autocast(maps[0].device.type, enabled=False):
            slopes = _slopes(foreground(faded), faded)
        for total, slope in zip(slopes_so_far, slopes, strict=True):
            total += slope.unflatten(0, (len(fractions), -1)).sum(0)
    return [layer * total / steps for layer, total in zip(maps, slopes_so_far, strict=True)]


def largest_entries(attribution: Sequence[torch.Tensor]) -> torch.Tensor:
    """The largest entry of every head over slices and pairs of places: [B, heads, n, n] per layer → [layers, heads]."""
    return torch.stack([layer.amax((0, 2, 3)) for layer in attribution])


class Attributor:
    """`head_attribution` for many images: on a GPU several steps at a time, as long as its memory suffices.

    Step by step, with a few slices each, most of a GPU would be idle.
    """

    def __init__(self) -> None:
        self.one_by_one = False
        """Whether memory has run out once."""

    def __call__(
        self, foreground: Foreground, maps: Sequence[torch.Tensor], pixels: int, steps: int = STEPS
    ) -> list[torch.Tensor]:
        """`head_attribution`; `pixels` of all images that the maps belong to."""
        at_once = self.steps_at_once(maps, pixels)
        if at_once > 1:
            try:
                return head_attribution(foreground, maps, steps, at_once)
            except torch.OutOfMemoryError:
                self.one_by_one = True
        # Outside the except block, nothing keeps the failed attempt's tensors alive.
        return retry_without_graphs(maps[0].device, lambda: head_attribution(foreground, maps, steps))

    def steps_at_once(self, maps: Sequence[torch.Tensor], pixels: int) -> int:
        """As many steps as make up 48 of the paper's slices, in images and in maps."""
        if self.one_by_one or not maps[0].is_cuda:
            return 1
        attention = sum(layer.numel() for layer in maps)
        return max(1, min(_PIXELS // pixels, _ATTENTION // attention))


def _slopes(probability: torch.Tensor, faded: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """∂F/∂A of every layer; raises an error if F does not depend on some of the maps."""
    found = torch.autograd.grad(probability, faded, allow_unused=True) if probability.requires_grad else ()
    slopes = [slope for slope in found if slope is not None]
    if len(slopes) < len(faded):
        raise RunError(
            "The foreground probability does not depend on all given attention maps.",
            code="maps-without-effect",
            why="the network does not use them instead of its own, or they were detached",
        )
    return slopes


def head_importance(scans: Iterable[torch.Tensor]) -> torch.Tensor:
    """HA of eq. 18: the largest over scans of their `largest_entries`, [layers, heads] each → [layers, heads].

    May be negative: a head that works against the organ on every scan. Rounding errors become 0 (`NEGLIGIBLE`), so that
    a head without a contribution does not count.
    """
    attributions = torch.stack(list(scans))
    largest = attributions.amax(0)
    return largest.masked_fill(largest.abs() <= NEGLIGIBLE * attributions.abs().amax(), 0.0)


def foreground_probability(probabilities: torch.Tensor, masks: torch.Tensor, voxels: torch.Tensor) -> torch.Tensor:
    """F: the mean probability of each organ on its own voxels, then the mean over organs; a number.

    Probabilities and masks [B, T, *S] of some slices of a scan; `voxels` [T] counts the organs' voxels in the whole
    scan, so that batches of slices add up to the scan. A mean, not a sum: sites with large organs would outweigh the
    others. Organs without voxels take no part.
    """
    inside = (probabilities * masks).flatten(2).sum((0, 2)) / voxels.clamp(min=1)
    present = voxels > 0
    return (inside * present).sum() / present.sum().clamp(min=1)


# -- at the server -----------------------------------------------------------------------------------------------------


def head_weights(
    importance: Mapping[str, Mapping[str, float]], cases: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """λ of eq. 19 by head and site, from each site's HA by head; per head they add up to one.

    HA_{i,k}/Σ_k HA_{i,k}, where a negative HA counts as 0: a mean needs non-negative weights, and a head that helps an
    organ on no scan has nothing to contribute. If no site has an HA above 0, sites count by their `cases`, which names
    all sites. So does a site that sends no number for a head; the others share the rest.
    """
    everywhere = math.fsum(cases.values())
    by_cases = {site: number / everywhere for site, number in sorted(cases.items())}
    heads = sorted({head for numbers in importance.values() for head in numbers})
    attributions = {head: {site: importance.get(site, {}).get(head, math.nan) for site in by_cases} for head in heads}
    return {head: _one_head(attributions[head], by_cases) for head in heads}


def _one_head(attributions: Mapping[str, float], by_cases: Mapping[str, float]) -> dict[str, float]:
    helpful = {site: max(value, 0.0) for site, value in attributions.items() if math.isfinite(value)}
    largest = max(helpful.values(), default=0.0)
    if largest == 0:
        return dict(by_cases)
    # Divided by the largest first: the sum of large numbers may overflow.
    total = math.fsum(value / largest for value in helpful.values())
    left = math.fsum(by_cases[site] for site in helpful)
    return {
        site: left * (helpful[site] / largest / total) if site in helpful else share for site, share in by_cases.items()
    }
