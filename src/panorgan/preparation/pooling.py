"""Pools numbers of several sites so that no single site decides: capped weights, medians."""

from __future__ import annotations

from collections.abc import Sequence

FEWEST = 3
"""The smallest number of sites among which one can be outvoted; of two, either may be wrong."""

MINORITY = 0.49
"""The largest share with which a site cannot decide a weighted median alone."""


def capped(weights: Sequence[float], largest_share: float) -> list[float]:
    """Weights reduced so that none exceeds a share of their sum.

    The others share what is taken away in their own proportions. With fewer than three weights above zero, or a share
    below 1/n, there is nothing to take, or no other weight to give it to: then all count alike at most.
    """
    counting = [place for place, weight in enumerate(weights) if weight > 0]
    limit = max(largest_share, 1 / max(len(counting), 1))
    if len(counting) < FEWEST or max(weights) <= limit * sum(weights):
        return list(weights)
    held: set[int] = set()
    while free := [place for place in counting if place not in held]:
        left, total = 1 - limit * len(held), sum(weights[place] for place in free)
        over = {place for place in free if weights[place] * left > limit * total}
        if not over:
            break
        held |= over
    shares = [0.0] * len(weights)
    for place in counting:
        shares[place] = limit if place in held else weights[place] / total * left
    return shares


def weighted_median(values: Sequence[float], weights: Sequence[float]) -> float:
    """The smallest value that at least half of the weight does not exceed."""
    half, reached = sum(weights) / 2, 0.0
    for value, weight in sorted(zip(values, weights, strict=True)):
        reached += weight
        if reached >= half:
            return value
    return max(values)


def without_extremes(lows: Sequence[float], highs: Sequence[float]) -> tuple[float, float]:
    """From the lowest to the highest; of three or more, without the one that reaches farthest at either end."""
    left_out = 1 if len(lows) >= FEWEST else 0
    return sorted(lows)[left_out], sorted(highs)[-1 - left_out]
