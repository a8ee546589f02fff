"""The weighted mean per key over the sites that sent the key, streamed from disk.

One tensor of one site is in memory at a time, so the server's memory does not grow with the number of sites. Sites are
summed in sorted order: the result does not depend on who answered first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from panorgan.errors import RunError
from panorgan.federation.message import MessageFile

_BLOCK = 1 << 18


class SpooledUpdates:
    """The accepted answers of one round, lying on disk. Implements `methods.exchange.Updates`."""

    def __init__(self, files: Mapping[str, MessageFile]) -> None:
        self._files = dict(sorted(files.items()))

    @property
    def sites(self) -> Sequence[str]:
        """Who answered, sorted."""
        return tuple(self._files)

    def numbers(self, site: str) -> Mapping[str, float]:
        """The numbers a site sent."""
        return self._files[site].numbers

    def keys(self, site: str) -> Sequence[str]:
        """The tensors a site sent."""
        return self._files[site].keys

    def array(self, site: str, key: str) -> torch.Tensor:
        """One tensor of one site."""
        return self._files[site].array(key)

    def mean(self, weight: Callable[[str, str], float]) -> dict[str, torch.Tensor]:
        """Per key Σ w·θ / Σ w over the sites that sent it; a key whose weights are all zero is left out."""
        senders: dict[str, list[str]] = {}
        for site, file in self._files.items():
            for key in file.keys:
                senders.setdefault(key, []).append(site)
        means = {}
        for key, sites in sorted(senders.items()):
            weights = [_checked(weight(site, key), site, key) for site in sites]
            if (total := sum(weights)) > 0:
                shares = [w / total for w in weights]
                means[key] = _mean((self.array(site, key) for site in sites), shares)
        return means


def _checked(weight: float, site: str, key: str) -> float:
    if not (math.isfinite(weight) and weight >= 0):
        raise RunError(
            f"Site {site} has the weight {weight} in the mean of {key!r}.",
            why="a weight must be a finite number, zero or more",
            fix="Correct 'weight' of the method's server rule, or the numbers that the site sends for it.",
        )
    return weight


def _mean(tensors: Iterable[torch.Tensor], shares: Sequence[float]) -> torch.Tensor:
    """Σ share·θ in double precision (so that equal inputs stay equal), returned in the tensors' own type.

    It goes block by block: what stays in the processor's cache takes half the time.
    """
    total: torch.Tensor | None = None
    example = torch.empty(0)
    scratch = torch.empty(_BLOCK, dtype=torch.float64)
    for tensor, share in zip(tensors, shares, strict=True):
        example, values = tensor, tensor.reshape(-1)
        first = total is None
        total = torch.empty(values.shape, dtype=torch.float64) if total is None else total
        for start in range(0, values.numel(), _BLOCK):
            block, target = values[start : start + _BLOCK], total[start : start + _BLOCK]
            if first:
                target.copy_(block).mul_(share)
            else:
                target.add_(scratch[: len(block)].copy_(block).mul_(share))
    assert total is not None
    if not example.is_floating_point():
        total = total.round_()
    return total.to(example.dtype).reshape(example.shape)
