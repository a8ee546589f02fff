"""FedProx* — FedProx on pseudo labels, one of UFPS's starred baselines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field

from panorgan.cases.sampling import Batch
from panorgan.methods.proximal import squared_distance
from panorgan.methods.pseudo_labels import PseudoLabelConfig, PseudoLabelMethod, PseudoLabelServer, PseudoLabelSite
from panorgan.methods.registry import register


class FedProxPLConfig(PseudoLabelConfig):
    """FedProx's one number."""

    mu: float = Field(0.01, ge=0, description="strength of the proximal term μ/2·‖w − w₀‖²")


@register("fedprox_pl", config=FedProxPLConfig)
class FedProxPL(PseudoLabelMethod):
    """FedAvg* with local steps that may not wander far."""

    paper: ClassVar[str] = "FedProx* in Jiang et al., UFPS; arXiv:1812.06127"
    equations: ClassVar[Mapping[str, str]] = {
        "FedProx, eq. 2": "`Site.loss`: F(w) + μ/2·‖w − w₀‖², F on the unified label"
    }

    class Site(PseudoLabelSite):
        """Adds μ/2·‖w − w₀‖² to the loss; w₀ is the round's global model. Teachers are trained without."""

        config: FedProxPLConfig

        def loss(self, batch: Batch) -> torch.Tensor:
            """The loss on the unified label plus the proximal term."""
            loss = super().loss(batch)
            if self.config.mu == 0 or not self.in_training:  # keeps μ = 0 equal to FedAvg* to the last bit
                return loss
            return loss + self.config.mu / 2 * squared_distance(self.model, self.received.arrays)

    class Server(PseudoLabelServer):
        """Inherited: the exchange of teachers, then FedAvg's mean."""
