"""The answers of a round, made by hand, for server rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from panorgan.methods.protocol import Scalars


class Answers:
    """Answers of sites, as a server rule sees them."""

    def __init__(self, answers: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        self.answers = answers

    @property
    def sites(self) -> Sequence[str]:
        return tuple(self.answers)

    def scalars(self, site: str) -> Scalars:
        return {}

    def keys(self, site: str) -> Sequence[str]:
        return tuple(self.answers[site])

    def tensor(self, site: str, key: str) -> torch.Tensor:
        return self.answers[site][key]

    def mean(self, weight: Callable[[str, str], float]) -> dict[str, torch.Tensor]:
        means = {}
        for key in sorted({key for site in self.sites for key in self.keys(site)}):
            senders = [site for site in self.sites if key in self.keys(site)]
            total = sum(weight(site, key) for site in senders)
            if total:
                mean = sum(weight(site, key) / total * self.tensor(site, key) for site in senders)
                means[key] = mean.to(self.tensor(senders[0], key).dtype)
        return means
