"""ConDist — conditional distillation: what is not a labelled organ, the received model divides among the others.

Wang et al., ConDistFL, arXiv:2308.04070. A site learns its labelled organs by the marginal loss. Outside them it
distils the model that it received: the probabilities of background and of every unlabelled organ, given that the voxel
is none of the labelled ones, p_o / (1 − Σ p_c over labelled c), at temperature T. The loss is a soft Dice of student
and teacher, its weight grows from 0.01 to 1 over the rounds, and the server has momentum.

- The labelled foreground that is left out is that of the annotation. The released code also leaves out what the
  received model takes for it: `foreground_filter`.
- An organ and its tumour are not one group but two, and in a labelled organ whose tumours are not marked, the received
  model divides between these. Where everything is labelled nothing is distilled.
- Dice is that of each patch, with 1 added above and below, so that an organ that neither model shows costs nothing; in
  the released code it is that of the batch.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field

from panorgan.anatomy import Vocabulary
from panorgan.data.labels import Activation
from panorgan.losses.unified_label import allowed_channels
from panorgan.methods.base import Method, MethodConfig, SiteRule, published
from panorgan.methods.registry import register
from panorgan.methods.shared.server_momentum import MomentumServer, MomentumSettings
from panorgan.networks.settings import OrganParts
from panorgan.preparation.batch import Batch


class ConDistConfig(MomentumSettings, MethodConfig):
    """The settings of ConDist."""

    temperature: float = published(2.0, "2", "T: divides the logits of both models", gt=0)
    first_weight: float = published(0.01, "0.01", "weight of the distillation in the first round", ge=0)
    last_weight: float = published(1.0, "1", "weight of the distillation in the last round", ge=0)
    foreground_filter: bool = published(
        False,
        "on (released code)",
        "leave out what the received model takes for an organ that the annotation denies: both models' shares of the "
        "others say little there",
    )
    weighting: Literal["cases", "uniform"] = published(
        "cases", "uniform (released code)", "a site's weight in the mean: n_i, or 1"
    )
    unlabelled: Literal["marginal"] = Field("marginal", description="the marginal loss, besides the distillation")
    server_step: Literal[1] = Field(1, description="the server has momentum instead")


@register("condist", config=ConDistConfig)
class ConDist(Method):
    """FedAvg with conditional distillation of the received model, and momentum at the server."""

    group: ClassVar[str] = "systems"
    paper: ClassVar[str] = "arXiv:2308.04070"
    organs: ClassVar[OrganParts] = "channels"
    activation: ClassVar[Activation] = "softmax"  # a condition on one organ changes the probabilities of the others

    class Site(SiteRule):
        """Marginal loss, and conditional distillation."""

        config: ConDistConfig

        @property
        def held_organs(self) -> tuple[str, ...]:
            """What the received model is asked about."""
            return self.sometimes_unlabelled

        def loss(self, batch: Batch) -> torch.Tensor:
            """Dice + marginal cross-entropy + w(r)·distillation."""
            vocabulary = self.federation.vocabulary
            logits = self.model(batch.image)
            loss = self.supervised(logits, vocabulary, batch).mean()
            if self.received_model is None:
                return loss
            with torch.no_grad():
                received = self.received_model(batch.image)
            config = self.config
            distilled = conditional_distillation(
                logits, received, batch, vocabulary, config.temperature, config.foreground_filter
            )
            return loss + self.weight() * distilled

        def weight(self) -> float:
            """From the first to the last weight, round by round."""
            first, last, info = self.config.first_weight, self.config.last_weight, self.round_info
            return first + (last - first) * (info.round - 1) / max(info.rounds - 1, 1)

    class Server(MomentumServer):
        """The mean with momentum."""


def conditional_distillation(
    logits: torch.Tensor,
    received: torch.Tensor,
    batch: Batch,
    vocabulary: Vocabulary,
    temperature: float,
    filtered: bool = False,
) -> torch.Tensor:
    """1 − the mean soft Dice of the conditional probabilities of student and teacher, a scalar.

    Over the channels and voxels that the annotation leaves open; a channel without any such voxel does not count.
    `filtered`: only voxels where the teacher's most probable channel is open too.
    """
    open_ = allowed_channels(batch, vocabulary)
    if filtered:
        open_ = open_ & open_.gather(1, received.argmax(dim=1, keepdim=True))
    several = open_.sum(dim=1, keepdim=True) > 1
    student, teacher = (_conditional(one.float() / temperature, open_ & several) for one in (logits, received))
    space = tuple(range(2, logits.ndim))
    overlap, total = (student * teacher).sum(space), (student + teacher).sum(space)
    counted = (open_ & several).flatten(2).any(dim=2)
    dice = torch.where(counted, (2 * overlap + 1) / (total + 1), torch.zeros_like(overlap))
    return ((1 - dice) * counted).sum() / counted.sum().clamp(min=1)


def _conditional(logits: torch.Tensor, open_: torch.Tensor) -> torch.Tensor:
    """Probabilities given that a voxel is one of the open channels; 0 where there is none."""
    some = open_.any(dim=1, keepdim=True)
    return logits.masked_fill(~(open_ | ~some), float("-inf")).softmax(dim=1) * some
