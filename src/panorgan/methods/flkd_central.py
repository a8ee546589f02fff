"""FLKD, centralised — pooled cases; predictions for unlabelled organs are kept as they were before each step.

The variant of FLKD for data in one place (see flkd.py), its eq. 11: a batch labels a few organs, and a step on them
makes the model forget the others. So every step is followed by a second one that pulls the model's predictions for
the organs absent from the whole batch back to what they were before the first. Two forward and backward passes per
batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from panorgan.losses import soft_bce, unlabelled
from panorgan.methods.base import LOSS_IN_PARTS, Method, MethodConfig, ServerRule, SiteRule, published
from panorgan.methods.registry import register
from panorgan.networks.settings import OrganParts
from panorgan.preparation.batch import Batch


class FLKDCentralConfig(MethodConfig):
    """One number."""

    kd_weight: float = published(1.0, "1", "weight of eq. 11; 0 for none", ge=0)


@register("flkd_central", config=FLKDCentralConfig)
class FLKDCentral(Method):
    """Pooled cases, partial labels, multi-head network, distillation from the model before each step."""

    group: ClassVar[str] = "bounds"
    paper: ClassVar[str] = (
        "Kim et al., Federated learning with knowledge distillation for multi-organ segmentation with partially "
        "labeled datasets"
    )
    equations: ClassVar[Mapping[str, str]] = {"eq. 11": "`Site.step`"}
    organs: ClassVar[OrganParts] = "heads"
    pooled: ClassVar[bool] = True
    numbers: ClassVar[Mapping[str, str]] = LOSS_IN_PARTS

    class Site(SiteRule):
        """Two half-steps per batch."""

        config: FLKDCentralConfig
        before: torch.Tensor

        def step(self, batch: Batch) -> dict[str, torch.Tensor]:
            """θ → θ′ on what is labelled (eq. 3), then θ′ towards the predictions of θ for the rest (eq. 11)."""
            if not self.config.kd_weight:
                return super().step(batch)
            loss = self.compute_gradients(batch)
            self.apply_gradients()
            absent = unlabelled(batch, self.model.vocabulary).all(0, keepdim=True)
            if not absent.any():  # nothing to hold: a step on a gradient of 0 would still follow momentum
                return {"loss": loss, "loss/kd": torch.zeros_like(loss)}
            self.tools.optimizer.zero_grad(set_to_none=True)
            with self.tools.autocast():
                after = self.model(batch.image)
            distillation = soft_bce(after, self.before.sigmoid(), absent.expand(len(after), -1)).mean()
            (self.config.kd_weight * distillation).backward()
            self.apply_gradients()
            return {"loss": loss, "loss/kd": distillation.detach()}

        def loss(self, batch: Batch) -> torch.Tensor:
            """Eq. 3. This pass also gives the predictions for all organs before the step."""
            logits = self.model(batch.image)
            self.before = logits.detach().float()
            return self.supervised(logits, self.model.vocabulary, batch).mean()

    class Server(ServerRule):
        """Inherited: the mean over one participant."""
