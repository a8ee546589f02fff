"""Pseudo labels: teachers of the other sites fill in what a site does not annotate, and one loss covers all organs.

The ground that UFPS (eq. 4) and its starred baselines share: FedAvg*, FedProx*, FedASAM*. One network with exclusive
channels; stages pretrain → exchange → train, see `teaching`. A teacher learns its site's organs against everything
else; it is never asked about organs that a case annotates itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field

from panorgan.cases.companions import Companions
from panorgan.cases.sampling import Batch
from panorgan.losses.unified_label import Conflicts, UnifiedLabel, merge, painting_order
from panorgan.losses.unified_loss import unified_dice_bce
from panorgan.methods.base import Federation, Method, MethodConfig, Stage, stated
from panorgan.methods.teaching import PRETRAIN, TEACHERS, TaughtServer, TaughtSite, stages_with_teachers
from panorgan.networks import SegmentationNetwork
from panorgan.networks.settings import OrganParts, UNetSettings


class PseudoLabelConfig(MethodConfig):
    """Teachers, and how their predictions become labels."""

    dice_weight: float = stated(0.5, "0.5", "weight of the Dice loss", ge=0)
    ce_weight: float = stated(0.5, "0.5", "weight of the binary cross-entropy over all channels", ge=0)
    organ_parts: Literal["everyone"] = Field(
        "everyone", description="every site averages every organ's output row: pseudo labels teach it all of them"
    )
    pretrain: float = stated(1.0, "1", "rounds that a site trains its teacher, as a share of training.rounds", gt=0)
    teacher_cache: bool = stated(
        True, "off", "predict every scan once and keep it in 8 bit; off predicts anew for every patch, for checking"
    )
    merge: Conflicts = stated(
        "sequence",
        "sequence",
        "when teachers claim the same voxel: the smaller organ wins (see `larger_first`), "
        "or the more confident teacher",
    )
    larger_first: tuple[str, ...] = stated(
        (),
        "liver, kidney, spleen, pancreas",
        "organs from large to small, for `merge: sequence`; those not named follow in vocabulary order",
    )


class PseudoLabelSite(TaughtSite):
    """Learns from its own annotation where there is one, and from the teachers elsewhere."""

    config: PseudoLabelConfig
    label: UnifiedLabel
    """Of the batch at hand: made once per step, however often its loss is asked for."""

    def companions(self) -> Companions | None:
        """Exchange: predict every scan. Train: the predictions, cut and moved with the labels."""
        if self.moment.stage == PRETRAIN or not self.teachers.known():
            return None
        return self.teachers.predictions(self.organs_without_label, self.config.teacher_cache)

    def step(self, batch: Batch) -> dict[str, torch.Tensor]:
        """One step on the unified label; in pretrain, on the annotation alone."""
        if self.in_training:
            self.prepare(batch)
        return super().step(batch)

    def prepare(self, batch: Batch) -> None:
        """What a batch is to be taught with."""
        self.label = merge(batch, self.federation.vocabulary, self.config.larger_first, self.config.merge)

    def loss(self, batch: Batch) -> torch.Tensor:
        """Dice + BCE on the unified label; a teacher in the making has its own organs only, against the rest."""
        if not self.in_training:
            return super().loss(batch)
        return self.sample_losses(self.model(batch.image)).mean()

    def sample_losses(self, logits: torch.Tensor) -> torch.Tensor:
        """Per sample, [B], for logits [B, C + 1, *S]."""
        return unified_dice_bce(logits, self.label, self.config.dice_weight, self.config.ce_weight)

    def after_round(self) -> None:
        """The label of the last batch has served: with its masks it is larger than many a network."""
        super().after_round()
        vars(self).pop("label", None)


class PseudoLabelMethod(Method):
    """A method that trains on pseudo labels."""

    organs: ClassVar[OrganParts] = "channels"
    tensors: ClassVar[Mapping[str, str]] = TEACHERS
    Site = PseudoLabelSite
    Server = TaughtServer

    def network_settings(self, settings: UNetSettings) -> UNetSettings:
        """Exclusive channels, whatever the experiment says: the unified label has one value per voxel."""
        return super().network_settings(settings).model_copy(update={"convention": "exclusive"})

    def build_network(
        self, settings: UNetSettings, federation: Federation, site: str | None = None
    ) -> SegmentationNetwork:
        """Inherited, once the painting order is known to fit: else it would be found wrong after all of pretrain."""
        assert isinstance(self.config, PseudoLabelConfig)
        painting_order(federation.vocabulary, self.config.larger_first)
        return super().build_network(settings, federation, site)

    def stages(self, rounds: int) -> tuple[Stage, ...]:
        """Teachers come first."""
        assert isinstance(self.config, PseudoLabelConfig)
        return stages_with_teachers(rounds, self.config.pretrain)
