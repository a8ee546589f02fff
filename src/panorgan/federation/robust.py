"""Trimmed mean and median over sites, value by value, so that a few extreme updates have no effect.

Extreme values are found by counting sites: one site, one vote, because a site reports its own number of cases and must
not gain influence by it. What is kept lies within the range of the honest sites, as long as no more sites are dishonest
than are left out at either end (for the median: less than half). Blocks of all sites are in memory together; the more
sites, the smaller the blocks.

Trimmed mean and median: Yin et al., Byzantine-robust distributed learning, arXiv:1803.01498.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

_VALUES = 1 << 19
"""Values of all sites processed at a time: four megabytes in double precision."""

Block = Callable[[torch.Tensor], torch.Tensor]
"""[sites, values] in double precision → [values]."""


def median(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The median value by value; of an even number, halfway between the middle two. Every site counts alike."""
    high = len(tensors) // 2
    low = (len(tensors) - 1) // 2

    def of_block(values: torch.Tensor) -> torch.Tensor:
        ordered = values.sort(dim=0).values
        return (ordered[low] + ordered[high]) / 2

    return _blockwise(tensors, of_block)


def trimmed_mean(tensors: Sequence[torch.Tensor], weights: Sequence[float], left_out: int) -> torch.Tensor:
    """The weighted mean without the `left_out` lowest and highest values; at least one value is kept.

    With nothing left out it is the mean: weights mix the kept values, but do not decide which are kept.
    """
    left_out = min(left_out, (len(tensors) - 1) // 2)
    weight = torch.tensor(list(weights), dtype=torch.float64)
    kept = slice(left_out, len(tensors) - left_out)

    def mean(values: torch.Tensor) -> torch.Tensor:
        ordered, order = values.sort(dim=0, stable=True)
        own = weight[order[kept]]
        return (ordered[kept] * own).sum(0) / own.sum(0)

    return _blockwise(tensors, mean)


def _blockwise(tensors: Sequence[torch.Tensor], combine: Block) -> torch.Tensor:
    flat = [tensor.reshape(-1) for tensor in tensors]
    result = torch.empty_like(flat[0])
    size = max(1, _VALUES // len(flat))
    for start in range(0, len(result), size):
        found = combine(torch.stack([values[start : start + size].double() for values in flat]))
        result[start : start + size] = found if result.is_floating_point() else found.round()
    return result.reshape(tensors[0].shape)
