"""Chorus — every site learns all organs, from its own labels and from the received model's predictions of the rest.

The model that a site receives at the start of a round segments the organs that the site does not label; the site's own
labels always take precedence. No site's own model is a teacher for another: only weights leave a site.

- *Soft labels*: a voxel that the annotation leaves open is divided among the channels that it allows, by the
  received model's probabilities.
- *Teacher's Dice*: the Dice loss also covers the organs that the received model segments, weighted by its confidence,
  once the model knows the organ: once its validation Dice, which sites send anyway, has reached `known_from`. Earlier,
  this would keep the model from learning an organ that it still mistakes for another (a stomach for a liver). (Without
  validation, `training.validate_every: 0`, it never begins.)
- *CutMix*: every two patches of a batch give a third, one of them with a box of the other, image and label. The
  received model sees both patches whole: what it recognises by the surroundings, the model in training must recognise
  without them. That is how unlabelled voxels add information: without it, a model's own labels only keep it where it
  is. (A batch of one patch has nothing to mix.)
- *Momentum at the server*: what a site learns about its own organ, only that site learns; the others stay where they
  were, and the mean keeps only the site's share of it. But a site learns it round after round, so that it adds up in
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
    """One switch per ingredient."""

    dice_over: Literal["batch"] = Field("batch", description="the Dice loss of an organ: over the batch")
    unlabelled: Literal["received"] = Field(
        "received", description="which model decides the voxels that the annotation leaves open: the received one"
    )
    teacher_dice: bool = Field(True, description="whether Dice counts organs that only the received model outlines")
    known_from: float = Field(
        0.5, ge=0, le=1, description="validation Dice from which on the received model knows an organ; 0: at once"
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
    """The images that the model in training sees, their annotation, and the soft label of every voxel."""

    annotation: Batch
    label: SoftLabel


@register("chorus", config=ChorusConfig)
class Chorus(Method):
    """FedAvg with self-training on the received model's soft labels, CutMix and server momentum."""

    group: ClassVar[str] = "systems"
    paper: ClassVar[str] = "panorgan's own; CutMix: arXiv:1905.04899"
    organs: ClassVar[OrganParts] = "channels"
    activation: ClassVar[Activation] = "softmax"  # a voxel is divided among all channels
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
            """Load the received model. The boxes of a round depend only on its seed."""
            super().before_round()
            known = [f"{KNOWN}{organ}" in self.received.scalars for organ in self.federation.vocabulary]
            self.known = torch.tensor(known, device=next(self.model.parameters()).device)
            self.draws = torch.Generator().manual_seed(torch.initial_seed() ^ 2)

        def prepare(self, batch: Batch) -> None:
            """Label the patches, then add mixed ones."""
            teacher = None
            if self.received_model is not None:
                with torch.no_grad(), self.tools.autocast():
                    teacher = self.received_model(batch.image)
            label = soft_label(batch, self.federation.vocabulary, teacher)
            self.lesson = Lesson(batch, label)
            if float(torch.rand((), generator=self.draws)) < self.config.cutmix:
                self.lesson = with_mixed(self.lesson, random_box(batch.image.shape[2:], self.draws))

        def loss(self, batch: Batch) -> torch.Tensor:
            """Dice + cross-entropy with the soft label."""
            config, label = self.config, self.lesson.label
            logits = self.model(self.lesson.annotation.image)
            loss = config.ce_weight * soft_cross_entropy(logits, label).mean()
            return loss + config.dice_weight * self._dice(logits, self.lesson.annotation, label)

        def _dice(self, logits: torch.Tensor, annotation: Batch, label: SoftLabel) -> torch.Tensor:
            """The mean over annotated structures, as in FedAvg, and over organs that the received model supervises."""
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
    """Without momentum: with one site, the mean keeps all that it has learned."""

    server_momentum: float = Field(0.0, ge=0, lt=1, description="share of earlier updates that is added; 0 for none")


@register("central_chorus", config=CentralChorusConfig)
class CentralChorus(Chorus):
    """Chorus on all labels in one place: an upper bound, without teachers."""

    group: ClassVar[str] = "bounds"
    text: ClassVar[str] = (
        "Central chorus — CutMix on full labels, all cases in one place: the upper bound of chorus, as `central_full` "
        "is that of\nFedAvg. With every organ labelled, no teacher is needed. Possible only on a benchmark."
    )
    pooled: ClassVar[bool] = True
    labels: ClassVar[Literal["annotated", "withheld"]] = "withheld"
    ablation: ClassVar[tuple[AblationRow, ...]] = ()


def random_box(shape: torch.Size, draws: torch.Generator) -> tuple[slice, ...]:
    """A box with half to four fifths of the length of each axis, at a random place."""
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
