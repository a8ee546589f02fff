"""Chorus — every site learns all organs, from its own labels and from what the federation's model makes of the rest.

What a hospital leaves unlabelled, the model that it received at the beginning of the round outlines for it; its own
labels always win. No model of a single site teaches another: nothing leaves a site but its weights.

- *Soft labels*: a voxel that the annotation leaves open is shared out among the channels that it allows, by the
  received model's probabilities.
- *Teacher's Dice*: the Dice loss counts the received model's organs too, each by how sure that model is of it, once the
  model knows the organ: its validation Dice, which sites send anyway, has reached `known_from`. Before, an organ that
  the model still mistakes for another (a stomach for a liver) would be kept from being learned. (Without validation,
  `training.validate_every: 0`, it never begins.)
- *CutMix*: to every two patches of a batch comes a third, one of them with a box of the other, image and label. The
  received model sees both patches whole: what it recognises by the surroundings, the model in training must recognise
  without them. That is where unlabelled voxels teach something new: without it, a label made by the model itself only
  holds it in place. (A batch of one patch has nothing to mix.)
- *Momentum at the server*: what a site learns about its own organ is new to that site alone; the others hold what they
  received, and the mean takes back all but its share. But a site learns it in round after round, so that it adds up in
  the momentum, while the noise of single rounds does not.

The server averages as FedAvg's does, and names the organs that its model knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from pydantic import Field

from panorgan.data.labels import Activation
from panorgan.losses import unlabelled
from panorgan.losses.partial import partial_dice, structure_probabilities
from panorgan.losses.soft_label import SoftLabel, soft_cross_entropy, soft_dice, soft_label
from panorgan.methods.base import Method, MethodConfig, Payload, Scalars, SiteRule
from panorgan.methods.registry import register
from panorgan.methods.shared.ablation import AblationRow
from panorgan.methods.shared.readiness import Readiness
from panorgan.methods.shared.server_momentum import MomentumServer, MomentumSettings
from panorgan.networks.settings import OrganParts
from panorgan.preparation.batch import Batch


class ChorusConfig(MomentumSettings, MethodConfig):
    """Each ingredient is one switch."""

    dice_over: Literal["batch"] = Field("batch", description="the Dice loss of an organ: over the batch")
    unlabelled: Literal["received"] = Field(
        "received", description="what a voxel is that the annotation leaves open: what the received model makes of it"
    )
    teacher_dice: bool = Field(True, description="whether Dice counts organs that only the received model outlines")
    known_from: float = Field(
        0.5, ge=0, le=1, description="validation Dice of an organ from which the received model knows it; 0 for at once"
    )
    cutmix: float = Field(
        1.0, ge=0, le=1, description="share of the batches that get a mixed patch for every two; 0 for none"
    )
    server_momentum: float = Field(
        0.5, ge=0, lt=1, description="share β of earlier updates that the server adds to the mean; 0 for none"
    )
    server_step: Literal[1] = Field(1, description="the server has momentum instead")


KNOWN = "known/"
"""Numbers in a request: `known/<organ>` for every organ that the model knows."""


@dataclass(frozen=True)
class Lesson:
    """What the model in training sees with its annotation, and what it should say at every voxel."""

    annotation: Batch
    label: SoftLabel


@register("chorus", config=ChorusConfig)
class Chorus(Method):
    """FedAvg with self-training on the received model's soft labels, CutMix and server momentum."""

    group: ClassVar[str] = "systems"
    paper: ClassVar[str] = "panorgan's own; CutMix: arXiv:1905.04899"
    organs: ClassVar[OrganParts] = "channels"
    activation: ClassVar[Activation] = "softmax"  # a voxel is shared out among all channels
    config: ChorusConfig
    ablation: ClassVar[tuple[AblationRow, ...]] = (
        AblationRow("FedAvg", (), method="fedavg"),
        AblationRow("without teacher's Dice", ("CutMix", "momentum"), {"teacher_dice": False}),
        AblationRow("without CutMix", ("teacher's Dice", "momentum"), {"cutmix": 0.0}),
        AblationRow("without momentum", ("teacher's Dice", "CutMix"), {"server_momentum": 0.0}),
        AblationRow("chorus", ("teacher's Dice", "CutMix", "momentum")),
    )

    class Site(SiteRule):
        """Learns from its labels and from the received model."""

        config: ChorusConfig
        lesson: Lesson

        @property
        def held_organs(self) -> tuple[str, ...]:
            """All, unless every case has a mask of every organ. (A union's mask leaves open which organ it is.)"""
            organs, counts = self.federation.vocabulary.organs, self.facts.annotated
            return () if all(counts.get(organ) == self.facts.train_cases for organ in organs) else organs

        def before_round(self) -> None:
            """Take over the received model. The boxes of a round depend on nothing but its seed."""
            super().before_round()
            known = [f"{KNOWN}{organ}" in self.received.scalars for organ in self.federation.vocabulary]
            self.known = torch.tensor(known, device=next(self.model.parameters()).device)
            self.draws = torch.Generator().manual_seed(torch.initial_seed() ^ 2)

        def prepare(self, batch: Batch) -> None:
            """Label the patches as they are, then add mixed ones."""
            teacher = None
            if self.received_model is not None:
                with torch.no_grad(), self.tools.autocast():
                    teacher = self.received_model(batch.image)
            label = soft_label(batch, self.federation.vocabulary, teacher)
            self.lesson = Lesson(batch, label)
            if float(torch.rand((), generator=self.draws)) < self.config.cutmix:
                self.lesson = with_mixed(self.lesson, random_box(batch.image.shape[2:], self.draws))

        def loss(self, batch: Batch) -> torch.Tensor:
            """Dice + cross-entropy to the soft label."""
            config, label = self.config, self.lesson.label
            logits = self.model(self.lesson.annotation.image)
            loss = config.ce_weight * soft_cross_entropy(logits, label).mean()
            return loss + config.dice_weight * self._dice(logits, self.lesson.annotation, label)

        def _dice(self, logits: torch.Tensor, annotation: Batch, label: SoftLabel) -> torch.Tensor:
            """The mean over what is annotated, as in FedAvg, and over the organs that the received model teaches."""
            vocabulary = self.federation.vocabulary
            probabilities = structure_probabilities(logits.float(), annotation, vocabulary, "softmax")
            own = partial_dice(probabilities, annotation.masks, annotation.annotated, "batch").mean()
            if self.received_model is None:
                return own
            count = annotation.annotated.any(dim=0).sum()
            taught, weight = soft_dice(logits, label, unlabelled(annotation, vocabulary) & self.known)
            return (count * own + taught) / (count + weight).clamp(min=1e-6)

        def after_round(self) -> None:
            """Release the last batch."""
            vars(self).pop("lesson", None)

    class Server(MomentumServer):
        """FedAvg's: output rows averaged over owners; with momentum. Says which organs the model knows."""

        config: ChorusConfig

        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)
            self.readiness = Readiness(self.config.known_from, gain=1.0)  # known is enough

        def broadcast(self, site: str) -> Payload:
            """The weights, and the organs that they know."""
            whole = super().broadcast(site)
            organs = self.readiness.ready(self.federation) if self.config.teacher_dice else ()
            return Payload(whole.tensors, {**whole.scalars, **{f"{KNOWN}{organ}": 1.0 for organ in organs}})

        def validated(self, scores: Mapping[str, Scalars]) -> None:
            """Take the validation Dice of the sites."""
            super().validated(scores)
            self.readiness.validated(scores, self.federation)

        def state(self) -> Payload:
            """The last validation Dice."""
            whole = super().state()
            return Payload(whole.tensors, {**whole.scalars, **self.readiness.numbers()})

        def load_state(self, state: Payload) -> None:
            """Restore it."""
            super().load_state(state)
            self.readiness.load(state.scalars)


class CentralChorusConfig(ChorusConfig):
    """There is one site: no mean takes back what it has learned."""

    server_momentum: float = Field(0.0, ge=0, lt=1, description="share of earlier updates that is added; 0 for none")


@register("central_chorus", config=CentralChorusConfig)
class CentralChorus(Chorus):
    """chorus on all labels in one place: the bound of a federation that needs no teacher."""

    group: ClassVar[str] = "bounds"
    text: ClassVar[str] = (
        "Central chorus — CutMix on full labels, all cases in one place: what chorus itself could reach at best, where "
        "`central_full` has\nnone of its extras. With every organ labelled there is nothing for a teacher to say. "
        "Possible only on a benchmark."
    )
    pooled: ClassVar[bool] = True
    labels: ClassVar[Literal["annotated", "withheld"]] = "withheld"
    ablation: ClassVar[tuple[AblationRow, ...]] = ()


def random_box(shape: torch.Size, draws: torch.Generator) -> tuple[slice, ...]:
    """A box of half to four fifths of the length of each axis, anywhere inside."""
    box = []
    for length in shape:
        size = max(1, round(length * (0.5 + 0.3 * float(torch.rand((), generator=draws)))))
        start = int(torch.randint(length - size + 1, (), generator=draws))
        box.append(slice(start, start + size))
    return tuple(box)


def with_mixed(lesson: Lesson, box: tuple[slice, ...]) -> Lesson:
    """The lesson, and for every two patches a mixed one: the first with a box of the second."""
    plain, label = lesson.annotation, lesson.label
    count = len(plain.image) // 2

    def extended(samples: torch.Tensor) -> torch.Tensor:
        return torch.cat([samples, with_box_of_next(samples, box)[:count]])

    annotation = replace(
        plain,
        image=extended(plain.image),
        masks=extended(plain.masks),
        annotated=torch.cat([plain.annotated, (plain.annotated & plain.annotated.roll(-1, dims=0))[:count]]),
        cases=plain.cases + plain.cases[:count],
        slices=None,
        depths=None,
    )
    return Lesson(annotation, SoftLabel(extended(label.shares), extended(label.counted)))


def with_box_of_next(samples: torch.Tensor, box: tuple[slice, ...]) -> torch.Tensor:
    """`samples` [B, …, *S], each with this box of the next sample, the last with that of the first."""
    inside = torch.zeros(samples.shape[-len(box) :], dtype=torch.bool, device=samples.device)
    inside[box] = True
    return torch.where(inside, samples.roll(-1, dims=0), samples)


__all__ = [
    "CentralChorus",
    "CentralChorusConfig",
    "Chorus",
    "ChorusConfig",
    "Lesson",
    "random_box",
    "with_box_of_next",
    "with_mixed",
]
