"""FedProx — a proximal term holds each site near the global model. arXiv:1812.06127"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import nn

from panorgan.methods.base import Method, ServerRule, SiteRule, published
from panorgan.methods.fedavg import FedAvgConfig
from panorgan.methods.registry import register
from panorgan.preparation.batch import Batch
from panorgan.settings import Settings


class ProximalSettings(Settings):
    """The setting of FedProx."""

    mu: float = published(0.01, "tuned for each data set", "strength of the proximal term μ/2·‖w − w₀‖²", ge=0)


class FedProxConfig(ProximalSettings, FedAvgConfig):
    """The settings of FedAvg and of the proximal term."""


class ProximalSite(SiteRule):
    """Adds μ/2·‖w − w₀‖² to the loss; w₀ is the round's global model. Teachers are trained without."""

    config: FedProxConfig

    def loss(self, batch: Batch) -> torch.Tensor:
        """The loss of the rule it extends, plus the proximal term."""
        loss = super().loss(batch)
        if self.config.mu == 0 or not self.in_training:  # keeps μ = 0 equal to FedAvg to the last bit
            return loss
        return loss + self.config.mu / 2 * squared_distance(self.model, self.received.tensors)


def squared_distance(model: nn.Module, anchor: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """‖w − w₀‖² over the trainable parameters of `model`; `anchor` holds w₀ by the same keys."""
    distances = [
        (parameter - anchor[key].to(parameter)).square().sum()
        for key, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    return torch.stack(distances).sum()


@register("fedprox", config=FedProxConfig)
class FedProx(Method):
    """FedAvg with local steps held near the global model."""

    paper: ClassVar[str] = "arXiv:1812.06127"
    equations: ClassVar[Mapping[str, str]] = {"eq. 2": "`Site.loss`: F(w) + μ/2·‖w − w₀‖²"}

    class Site(ProximalSite):
        """Local steps on the partial loss and the proximal term."""

    class Server(ServerRule):
        """Inherited: the weighted mean of FedAvg."""
