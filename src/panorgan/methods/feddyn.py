"""FedDyn — a dynamic regulariser moves the optimum of a site's loss to that of all sites together. arXiv:2111.04263

Site i minimises L_i(w) − ⟨h_i, w⟩ + α/2·‖w − w₀‖²; at its end h_i ← h_i − α·(w − w₀), which is ∇L_i where the local
optimum is reached. The server keeps h ← h − α/m·Σ(w_i − w₀) over the sites that answered, m counting all, and the next
model is the mean of those that answered − h/α.

h_i stays at its site. For the model to settle where the gradients of all sites cancel, h must stay the mean of the
h_i. So a site changes its h_i only when the server confirms that the answer arrived, and the server keeps the sum m·h,
to which a site that joins later adds zero. A part that only some sites train has its own m.

Rows of one output layer for all organs are trained and averaged without h: an organ's owners may all be silent in a
round, and h would then move it on and on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field

from panorgan.methods.base import Method, Updates, published
from panorgan.methods.fedavg import FedAvgConfig
from panorgan.methods.fedprox import squared_distance
from panorgan.methods.registry import register
from panorgan.methods.shared.acknowledged import AcknowledgedSite, AcknowledgingServer
from panorgan.methods.shared.memory import Remembers
from panorgan.methods.shared.server_average import STATISTICS
from panorgan.networks.unet import OUTPUT_KEYS
from panorgan.preparation.batch import Batch
from panorgan.settings import Settings


class DynamicSettings(Settings):
    """The setting of FedDyn."""

    alpha: float = published(0.01, "tuned: 10⁻³ to 10⁻¹", "strength α of the dynamic regularisation", gt=0)


class FedDynConfig(DynamicSettings, FedAvgConfig):
    """The settings of FedAvg and of the regularisation; the mean is without weights, and the server's step its own."""

    weighting: Literal["uniform"] = Field("uniform", description="every site counts the same")
    server_step: Literal[1] = Field(1, description="h takes the place of a longer step")


class DynamicSite(Remembers, AcknowledgedSite):
    """Adds −⟨h_i, w⟩ + α/2·‖w − w₀‖² to the loss. Teachers are trained without."""

    memory: ClassVar[Mapping[str, str]] = {"h": "feddyn/", "next_h": "feddyn_next/"}
    config: FedDynConfig
    h: dict[str, torch.Tensor]
    """h_i, as the server knows it."""
    next_h: dict[str, torch.Tensor]
    """The new h_i once the server confirms the last answer."""

    def before_round(self) -> None:
        """Load the received weights, and apply the last answer's h_i if the server acknowledged it."""
        super().before_round()
        if self.in_training:
            self.h, self.next_h = self.next_h if self.next_h and self.was_acknowledged else self.h, {}

    def loss(self, batch: Batch) -> torch.Tensor:
        """The loss of the rule it extends, and the regulariser."""
        loss = super().loss(batch)
        if not self.in_training:
            return loss
        named = dict(self.model.named_parameters())
        linear = [(h * named[key]).sum() for key, h in self.h.items() if key in named]
        loss = loss + self.config.alpha / 2 * squared_distance(self.model, self.received.tensors)
        return loss - torch.stack(linear).sum() if linear else loss

    @torch.no_grad()
    def after_round(self) -> None:
        """h_i ← h_i − α·(w − w₀)."""
        super().after_round()
        if not self.in_training:
            return
        self.next_h = dict(self.h)
        for key, value in self.model.named_parameters():
            if value.requires_grad and key not in OUTPUT_KEYS:
                moved = value - self.received.tensors[key].to(value)
                self.next_h[key] = self.h.get(key, torch.zeros_like(value)) - self.config.alpha * moved


@register("feddyn", config=FedDynConfig)
class FedDyn(Method):
    """FedAvg with dynamic regularisation."""

    paper: ClassVar[str] = "arXiv:2111.04263"
    equations: ClassVar[Mapping[str, str]] = {
        "Algorithm 1, at a site": "`Site.loss`, `Site.after_round`",
        "Algorithm 1, at the server": "`Server.aggregate`",
    }

    class Site(DynamicSite):
        """Local steps on the regularised loss."""

    class Server(Remembers, AcknowledgingServer):
        """The mean − h/α."""

        memory: ClassVar[Mapping[str, str]] = {"total": "feddyn_sum/"}
        config: FedDynConfig
        total: dict[str, torch.Tensor]
        """m·h: unlike the mean h, the sum stays as it is when another site joins."""

        def aggregate(self, updates: Updates) -> None:
            """m·h ← m·h − α·Σ(w_i − w₀); w ← mean − h/α."""
            before = dict(self.weights)
            super().aggregate(updates)
            for key in sorted({key for site in updates.sites for key in updates.keys(site)} & before.keys()):
                mean = self.weights[key]
                if not mean.is_floating_point() or key.endswith(STATISTICS) or key in OUTPUT_KEYS:
                    continue
                answered = sum(key in updates.keys(site) for site in updates.sites)
                sites = sum(key in self.weights_of(site) for site in self.federation.sites)
                moved = answered * (mean.double() - before[key].double())
                total = self.total.get(key, torch.zeros_like(mean)).double() - self.config.alpha * moved
                self.weights[key] = (mean.double() - total / (self.config.alpha * sites)).to(mean.dtype)
                self.total[key] = total.to(mean.dtype)
