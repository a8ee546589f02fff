"""Servers that take a step of their own along the mean of the sites' updates, weight by weight."""

from __future__ import annotations

from abc import abstractmethod

import torch

from panorgan.methods.base import ServerRule, Updates
from panorgan.methods.shared.memory import Remembers
from panorgan.methods.shared.server_average import STATISTICS


class StepsAtServer(Remembers, ServerRule):
    """w ← w + step(Δ), Δ the mean of the updates. Statistics of batch normalisation are averaged as they are.

    A part that no site has sent, because its owners are silent, stays as it is: it has no Δ.
    """

    @abstractmethod
    def step_along(self, key: str, delta: torch.Tensor) -> torch.Tensor:
        """The step for one weight and its Δ, both in double precision; remembers what the next one needs."""

    def aggregate(self, updates: Updates) -> None:
        """The mean, then the step in its place; neither while teachers are trained."""
        before = dict(self.weights)
        super().aggregate(updates)
        if not self.in_training:
            return
        sent = {key for site in updates.sites for key in updates.keys(site)}
        for key, mean in list(self.weights.items()):
            if key in before and key in sent and mean.is_floating_point() and not key.endswith(STATISTICS):
                old = before[key].double()
                self.weights[key] = (old + self.step_along(key, mean.double() - old)).to(mean.dtype)
