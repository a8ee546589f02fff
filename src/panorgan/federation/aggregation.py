"""Combine one weight from all sites that sent it, streamed from disk: a weighted mean, or a robust one.

The updates are memory-mapped files, read block by block, so the server's memory does not grow with the number of sites,
and the blocks fit into the processor's cache. Sites are summed in sorted order: the result does not depend on the order
of answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from panorgan.errors import RunError
from panorgan.federation.message import MessageFile
from panorgan.federation.robust import median, trimmed_mean
from panorgan.preparation.pooling import FEWEST, capped

_BLOCK = 1 << 17
"""Elements processed at a time."""


@dataclass(frozen=True)
class Aggregation:
    """How the sites' tensors are combined; the experiment's `training.aggregation` and `limits.largest_share`."""

    kind: Literal["mean", "trimmed_mean", "median"] = "mean"
    trimmed_share: float = 0.2
    largest_share: float = 1.0

    def combine(self, tensors: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
        """One tensor from those of several sites, whose weights are all above zero.

        With two sites neither can be outvoted, so it is their mean.
        """
        weights = capped(weights, self.largest_share)
        if self.kind == "median" and len(tensors) >= FEWEST:
            return median(tensors)
        if self.kind == "trimmed_mean" and len(tensors) >= FEWEST:
            left_out = max(1, math.floor(round(self.trimmed_share * len(tensors), 9)))
            return trimmed_mean(tensors, weights, left_out)
        total = sum(weights)
        return _mean(tensors, [weight / total for weight in weights])


class SpooledUpdates:
    """The accepted answers of one round, on disk. Implements `methods.protocol.Updates`."""

    def __init__(self, files: Mapping[str, MessageFile], aggregation: Aggregation | None = None) -> None:
        self._files = dict(sorted(files.items()))
        self._aggregation = aggregation or Aggregation()

    @property
    def sites(self) -> Sequence[str]:
        """The sites that answered, sorted."""
        return tuple(self._files)

    def scalars(self, site: str) -> Mapping[str, float]:
        """The numbers a site sent."""
        return self._files[site].scalars

    def keys(self, site: str) -> Sequence[str]:
        """The tensors a site sent."""
        return self._files[site].keys

    def tensor(self, site: str, key: str) -> torch.Tensor:
        """One tensor of one site."""
        return self._files[site].tensor(key)

    def mean(self, weight: Callable[[str, str], float]) -> dict[str, torch.Tensor]:
        """Per key Σ w·θ / Σ w over the sites that sent it, or the experiment's choice instead of the mean.

        A site whose weight is zero does not count for a key; a key whose weights are all zero is left out.
        """
        senders: dict[str, list[str]] = {}
        for site, file in self._files.items():
            for key in file.keys:
                senders.setdefault(key, []).append(site)
        means = {}
        for key, sites in sorted(senders.items()):
            weights = {site: _check_weight(weight(site, key), site, key) for site in sites}
            if counting := [site for site in sites if weights[site] > 0]:
                tensors = [self.tensor(site, key) for site in counting]
                means[key] = self._aggregation.combine(tensors, [weights[site] for site in counting])
        return means


def _check_weight(weight: float, site: str, key: str) -> float:
    if not (math.isfinite(weight) and weight >= 0):
        raise RunError(
            f"Site {site} has the weight {weight} in the mean of {key!r}.",
            code="bad-weight",
            why="a weight must be a finite number, zero or more",
            fix="Correct 'weight' of the method's server rule, or the numbers that the site sends for it.",
        )
    return weight


def _mean(tensors: Sequence[torch.Tensor], shares: Sequence[float]) -> torch.Tensor:
    """Σ share·θ in double precision (so that equal inputs stay equal), returned in the tensors' own type."""
    flat = [tensor.reshape(-1) for tensor in tensors]
    mean = torch.empty_like(flat[0])
    total, part = torch.empty(2, min(_BLOCK, len(mean)), dtype=torch.float64)
    for start in range(0, len(mean), _BLOCK):
        blocks = [values[start : start + _BLOCK] for values in flat]
        sums = total[: len(blocks[0])].copy_(blocks[0]).mul_(shares[0])
        for block, share in zip(blocks[1:], shares[1:], strict=True):
            sums.add_(part[: len(block)].copy_(block).mul_(share))
        if not mean.is_floating_point():
            sums.round_()
        mean[start : start + _BLOCK] = sums
    return mean.reshape(tensors[0].shape)
