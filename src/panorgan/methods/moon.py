"""MOON — a site's features stay near those of the global model and away from those of its last model. arXiv:2103.16257

z, z_glob and z_prev are the features of a patch by the model in training, the model received in this round, and the
site's own model of its last round. −log of exp(sim(z, z_glob)/τ) / (exp(sim(z, z_glob)/τ) + exp(sim(z, z_prev)/τ)) is
added to the loss, with the cosine similarity.

- Features are those of the bottleneck, averaged over space: a U-Net has no projection head.
- They take a pass of the encoder of their own, which batch normalisation counts in its running statistics too.
- In its first round a site has no last model, and nothing is added. In the released code it is the first model, as the
  received one is: the loss is then log 2 without a gradient.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F

from panorgan.methods.base import Method, ServerRule, SiteRule, published
from panorgan.methods.fedavg import FedAvgConfig
from panorgan.methods.registry import register
from panorgan.methods.shared.memory import Remembers
from panorgan.networks import UNet
from panorgan.networks.settings import OrganParts
from panorgan.preparation.batch import Batch
from panorgan.settings import Settings


class ContrastiveSettings(Settings):
    """The settings of MOON."""

    mu: float = published(1.0, "tuned: 0.1 to 10", "weight μ of the contrastive loss", ge=0)
    temperature: float = published(0.5, "0.5", "τ: divides the similarities", gt=0)


class MoonConfig(ContrastiveSettings, FedAvgConfig):
    """The settings of FedAvg and of the contrastive loss."""


class ContrastiveMethod(Method):
    """The bottleneck of one network for all organs."""

    organs: ClassVar[OrganParts | None] = "channels"


class ContrastiveSite(Remembers, SiteRule):
    """Adds μ times the contrastive loss. Teachers are trained without."""

    memory: ClassVar[Mapping[str, str]] = {"last": "moon/"}
    config: MoonConfig
    model: UNet
    last: dict[str, torch.Tensor]
    """The weights at the end of the site's last round."""
    others: tuple[UNet, UNet] | None = None
    """The received model and the last one, frozen, during a round."""

    def before_round(self) -> None:
        """Set up the two models that features are compared with."""
        super().before_round()
        self.others = None
        if self.in_training and self.last and self.config.mu:
            received = copy.deepcopy(self.model).requires_grad_(False).eval()
            last = copy.deepcopy(received)
            last.load_state_dict(self.last)
            self.others = received, last

    def loss(self, batch: Batch) -> torch.Tensor:
        """The loss of the rule it extends, plus the contrastive loss."""
        loss = super().loss(batch)
        if self.others is None:
            return loss
        z = self.model.bottleneck_features(batch.image)
        with torch.no_grad():
            received, last = (model.bottleneck_features(batch.image) for model in self.others)
        return loss + self.config.mu * contrastive(z, received, last, self.config.temperature).mean()

    def after_round(self) -> None:
        """Keep the model for the next round."""
        super().after_round()
        if self.in_training:
            self.last = {key: value.detach().clone() for key, value in self.model.state_dict().items()}
        self.others = None


def contrastive(z: torch.Tensor, received: torch.Tensor, last: torch.Tensor, temperature: float) -> torch.Tensor:
    """Per sample [B] of features [B, F]: log(1 + exp((sim(z, last) − sim(z, received))/τ))."""
    near, far = (F.cosine_similarity(z.float(), other.float(), dim=1) for other in (received, last))
    return F.softplus((far - near) / temperature)


@register("moon", config=MoonConfig)
class Moon(ContrastiveMethod):
    """FedAvg with a contrastive loss on the features of the bottleneck."""

    paper: ClassVar[str] = "arXiv:2103.16257"
    equations: ClassVar[Mapping[str, str]] = {"eq. 3": "`contrastive`", "eq. 4": "`Site.loss`: ℓ_sup + μ·ℓ_con"}

    class Site(ContrastiveSite):
        """Local steps on the partial loss and the contrastive loss."""

    class Server(ServerRule):
        """Inherited: the weighted mean of FedAvg."""
