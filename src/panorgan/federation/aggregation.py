"""The weighted mean per key over the sites that sent the key, streamed from disk.

One tensor of one site is in memory at a time, so the server's memory does not grow with the number of sites. Sites are
summed in sorted order: the result does not depend on who answered first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from panorgan.federation.message import MessageFile


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
            weights = [weight(site, key) for site in sites]
            if (total := sum(weights)) > 0:
                shares = [w / total for w in weights]
                means[key] = _mean((self.array(site, key) for site in sites), shares)
        return means


def _mean(tensors: object, shares: Sequence[float]) -> torch.Tensor:
    """Σ share·θ in double precision (so that equal inputs stay equal), returned in the tensors' own type."""
    total: torch.Tensor | None = None
    kind = torch.float32
    for tensor, share in zip(tensors, shares, strict=True):  # type: ignore[call-overload]
        kind = tensor.dtype
        part = tensor.double().mul_(share)
        total = part if total is None else total.add_(part)
    assert total is not None
    if not kind.is_floating_point:
        total = total.round()
    return total.to(kind)
