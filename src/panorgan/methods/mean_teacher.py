"""Mean teacher — on noisy patches, a site's model agrees with an exponential moving average of the received models.

Tarvainen & Valpola, arXiv:1703.01780, in a federation: the teacher is θ' ← β·θ' + (1 − β)·θ over the global models of
all rounds, kept at the site, so that nothing more is sent. The student sees a patch with noise, the teacher the patch
as it is. Where the annotation leaves something open, the squared difference of their probabilities is added, with the
paper's ramp exp(−5·(1 − r/R_w)²). The plainest semi-supervised baseline; compare `chorus`.

- The teacher follows once per round in which the site takes part, in the paper after every step.
- Only the student's patch is noisy; both are augmented alike. In the paper each has noise of its own.
- What is compared are the organs about which a case's annotation says nothing; of a union it says something.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field

from panorgan.data.labels import Activation
from panorgan.losses.distillation import unlabelled
from panorgan.methods.base import Method, MethodConfig, SiteRule, published
from panorgan.methods.registry import register
from panorgan.methods.shared.memory import Remembers
from panorgan.networks.settings import OrganParts
from panorgan.preparation.batch import Batch


class MeanTeacherConfig(MethodConfig):
    """The settings of the mean teacher."""

    decay: float = published(0.8, "0.99 per step", "β: share of earlier models in the teacher, per round", ge=0, lt=1)
    consistency: float = published(10.0, "100 on CIFAR-10", "weight of the squared difference after its ramp", ge=0)
    ramp: float = published(0.4, "0.27", "share of the rounds in which that weight rises", gt=0, le=1)
    noise: float = published(0.1, "0.15", "standard deviation of the student's noise; images span [-1, 1]", ge=0)
    unlabelled: Literal["marginal"] = Field("marginal", description="the marginal loss, besides the consistency loss")


@register("mean_teacher", config=MeanTeacherConfig)
class MeanTeacher(Method):
    """FedAvg, and at every site consistency with a moving average of the received models."""

    group: ClassVar[str] = "systems"
    paper: ClassVar[str] = "arXiv:1703.01780"
    organs: ClassVar[OrganParts] = "channels"
    activation: ClassVar[Activation] = "softmax"

    class Site(Remembers, SiteRule):
        """Marginal loss, and consistency."""

        memory: ClassVar[Mapping[str, str]] = {"teacher": "mean_teacher/"}
        config: MeanTeacherConfig
        teacher: dict[str, torch.Tensor]

        @property
        def held_organs(self) -> tuple[str, ...]:
            """What the teacher is asked about."""
            return self.sometimes_unlabelled

        def before_round(self) -> None:
            """Take over the received model, and add it to the teacher."""
            super().before_round()
            if self.received_model is None:
                return
            received = self.received_model.state_dict()
            for key, value in received.items():
                known = self.teacher.get(key)
                mean = known is not None and value.is_floating_point()
                self.teacher[key] = value.lerp(known, self.config.decay) if mean else value.clone()
            self.received_model.load_state_dict(self.teacher)
            self.draws = torch.Generator().manual_seed(torch.initial_seed() ^ 3)

        def loss(self, batch: Batch) -> torch.Tensor:
            """Dice + marginal cross-entropy + w(r)·(student − teacher)²."""
            if self.received_model is None:
                return super().loss(batch)
            noise = torch.randn(batch.image.shape, generator=self.draws).to(batch.image)
            logits = self.model(batch.image + self.config.noise * noise)
            with torch.no_grad():
                teacher = self.received_model(batch.image).float().softmax(dim=1)
            loss = self.supervised(logits, self.federation.vocabulary, batch).mean()
            difference = (logits.float().softmax(dim=1) - teacher)[:, 1:].square().flatten(2).mean(2)
            open_ = unlabelled(batch, self.federation.vocabulary)
            consistency = difference.masked_fill(~open_, 0.0).sum() / open_.sum().clamp(min=1)
            return torch.add(loss, consistency, alpha=self.weight())

        def weight(self) -> float:
            """The weight after the ramp of this round."""
            progress = min(1.0, self.round_info.progress / self.config.ramp)
            return self.config.consistency * math.exp(-5 * (1 - progress) ** 2)
