"""Momentum at the server, arXiv:1909.06335: v ← β·v + (mean − w), w ← w + v. A piece for methods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from panorgan.methods.base import published
from panorgan.methods.shared.server_step import StepsAtServer
from panorgan.settings import Settings


class MomentumSettings(Settings):
    """The setting of the momentum."""

    server_momentum: float = published(
        0.6,
        "0.6 (ConDist, released code); tuned, 0.7 to 0.997 (FedAvgM)",
        "share β of earlier updates that is added to the mean",
        ge=0,
        lt=1,
    )


class MomentumServer(StepsAtServer):
    """Adds a share of earlier updates to each round's mean."""

    memory: ClassVar[Mapping[str, str]] = {"velocity": "momentum/"}
    config: MomentumSettings  # type: ignore[assignment]  # besides those of the rule that it extends
    velocity: dict[str, torch.Tensor]

    def step_along(self, key: str, delta: torch.Tensor) -> torch.Tensor:
        """v, the momentum over earlier rounds."""
        earlier = self.velocity.get(key, torch.zeros_like(self.weights[key])).double()
        velocity = self.config.server_momentum * earlier + delta
        self.velocity[key] = velocity.to(self.weights[key].dtype)
        return velocity
