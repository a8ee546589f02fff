"""FedProx — a proximal term holds each site near the global model. arXiv:1812.06127"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from panorgan.cases.sampling import Batch
from panorgan.methods.base import Method, ServerRule, SiteRule, stated
from panorgan.methods.fedavg import FedAvgConfig
from panorgan.methods.proximal import squared_distance
from panorgan.methods.registry import register


class FedProxConfig(FedAvgConfig):
    """FedProx's one number."""

    mu: float = stated(0.01, "tuned for each data set", "strength of the proximal term μ/2·‖w − w₀‖²", ge=0)


@register("fedprox", config=FedProxConfig)
class FedProx(Method):
    """FedAvg with local steps that may not wander far."""

    paper: ClassVar[str] = "arXiv:1812.06127"
    equations: ClassVar[Mapping[str, str]] = {"eq. 2": "`Site.loss`: F(w) + μ/2·‖w − w₀‖²"}

    class Site(SiteRule):
        """Adds μ/2·‖w − w₀‖² to the loss; w₀ is the round's global model."""

        config: FedProxConfig

        def loss(self, batch: Batch) -> torch.Tensor:
            """Partial supervision plus the proximal term."""
            loss = super().loss(batch)
            if self.config.mu == 0:  # keeps μ = 0 equal to FedAvg to the last bit
                return loss
            return loss + self.config.mu / 2 * squared_distance(self.model, self.received.arrays)

    class Server(ServerRule):
        """Inherited: the weighted mean of FedAvg."""
