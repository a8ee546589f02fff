"""Pseudo labels: the other sites' teachers label what a site does not annotate, and one loss covers all organs.

The basis of UFPS (eq. 4) and its starred baselines: FedAvg*, FedProx*, FedASAM*. One network with softmax channels;
stages pretrain → exchange → train, see `teacher_stages`. A teacher learns its site's organs against everything else; it
is never used for organs that a case annotates itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field, PositiveFloat

from panorgan.data.labels import Activation
from panorgan.losses.unified_label import Conflicts, UnifiedLabel, merge, overlap_priority
from panorgan.losses.unified_loss import unified_dice_bce
from panorgan.methods.base import Federation, Method, MethodConfig, Payload, Stage, Updates, published
from panorgan.methods.shared.organ_volumes import VOLUMES, ServerVolumes, larger_first, measure_volumes
from panorgan.methods.shared.teacher_stages import PRETRAIN, TEACHERS, TeacherServer, TeacherSite, stages_with_teachers
from panorgan.methods.shared.teachers import PREFIX
from panorgan.networks import SegmentationNetwork
from panorgan.networks.settings import OrganParts, UNetSettings
from panorgan.preparation.batch import Batch
from panorgan.preparation.store import StoredCase
from panorgan.preparation.teacher_predictions import TeacherPredictions


class PseudoLabelConfig(MethodConfig):
    """How teachers are trained, and how their predictions become labels."""

    dice_weight: float = published(0.5, "0.5", "weight of the Dice loss", ge=0)
    ce_weight: float = published(0.5, "0.5", "weight of the binary cross-entropy over all channels", ge=0)
    organ_parts: Literal["everyone"] = Field(
        "everyone", description="every site averages every organ's output row: pseudo labels cover all of them"
    )
    unlabelled: Literal["marginal"] = Field(
        "marginal", description="the loss of the sites' teachers; afterwards pseudo labels leave nothing unknown"
    )
    server_step: PositiveFloat | Literal["fedexp"] = Field(
        1.0, description="step of the server along the mean of the updates: sites learn the same organs and agree"
    )
    pretrain: float = published(
        1.0, "1", "rounds in which a site trains its teacher, as a share of training.rounds", gt=0
    )
    teacher_select: Literal["best", "last"] = published(
        "best",
        "not stated",
        "the round whose model becomes a site's teacher: the best on its own validation cases (else the last), or the "
        "last",
    )
    teacher_cache: bool = published(
        True, "off", "predict every scan once and store it in 8 bit; off: predict every patch again, as a check"
    )
    merge: Conflicts = published(
        "sequence",
        "sequence",
        "when teachers claim the same voxel: the smaller organ wins (see `larger_first`), "
        "or the more confident teacher",
    )
    larger_first: tuple[str, ...] = published(
        (),
        "liver, kidney, spleen, pancreas",
        "organs from large to small, for `merge: sequence`; those not named follow by the mean volume that sites "
        "measure on their labels",
    )


class PseudoLabelSite(TeacherSite):
    """Trains on its own annotation where there is one, and on the teachers' labels elsewhere."""

    config: PseudoLabelConfig
    label: UnifiedLabel
    """The label of the current batch, computed once per step."""
    order: tuple[str, ...] = ()
    """Organs from large to small."""

    @property
    def selects_teacher(self) -> bool:
        """As configured."""
        return self.config.teacher_select == "best"

    def before_round(self) -> None:
        """Inherited; then sort the organs by size."""
        super().before_round()
        self.order = larger_first(self.config.larger_first, self.received.scalars, self.federation.vocabulary)

    def teacher_predictions(self) -> TeacherPredictions | None:
        """Exchange: predict every scan. Train: the stored predictions, augmented like the labels."""
        if self.round_info.stage == PRETRAIN or not self.teachers.known():
            return None
        return self.teachers.predictions(self.organs_asked, self.config.teacher_cache)

    def organs_asked(self, case: StoredCase) -> tuple[str, ...]:
        """The organs of a case that teachers are used for: those without a label."""
        return self.organs_without_label(case)

    def prepare(self, batch: Batch) -> None:
        """The unified label of a batch (eq. 4)."""
        self.label = merge(batch, self.federation.vocabulary, self.order, self.config.merge)

    def loss(self, batch: Batch) -> torch.Tensor:
        """Dice + BCE on the unified label; while the teacher is trained, of its own organs against everything else."""
        if not self.in_training:
            return super().loss(batch)
        return self.sample_losses(self.model(batch.image)).mean()

    def sample_losses(self, logits: torch.Tensor) -> torch.Tensor:
        """The loss of each sample, [B], for logits [B, C + 1, *S]."""
        config = self.config
        return unified_dice_bce(logits, self.label, config.dice_weight, config.ce_weight, config.dice_over)

    def after_round(self) -> None:
        """Release the label of the last batch: with its masks it is larger than many networks."""
        super().after_round()
        vars(self).pop("label", None)

    def update(self) -> Payload:
        """Inherited; a teacher is sent with the volumes of the structures that it was trained on."""
        whole = super().update()
        if not any(key.startswith(PREFIX) for key in whole.tensors):
            return whole
        return Payload(whole.tensors, {**whole.scalars, **measure_volumes(self.tools.cases)})


class PseudoLabelServer(TeacherServer):
    """The exchange of teachers and of organs' volumes; then the mean of the models."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.volumes = ServerVolumes()

    def broadcast(self, site: str) -> Payload:
        """Inherited; after pretraining with the organs' volumes."""
        whole = super().broadcast(site)
        if self.round_info.stage == PRETRAIN:
            return whole
        return Payload(whole.tensors, {**whole.scalars, **self.volumes.pooled(self.federation)})

    def aggregate(self, updates: Updates) -> None:
        """Inherited; keeps the volumes too."""
        self.volumes.collect(updates, self.federation)
        super().aggregate(updates)

    def state(self) -> Payload:
        """Which sites have the teachers, and the volumes."""
        whole = super().state()
        return Payload(whole.tensors, {**whole.scalars, **self.volumes.numbers()})

    def load_state(self, state: Payload) -> None:
        """Restore them."""
        super().load_state(state)
        self.volumes.load(state.scalars)


class PseudoLabelMethod(Method):
    """A method that trains on pseudo labels."""

    group: ClassVar[str] = "pseudo_labels"
    organs: ClassVar[OrganParts] = "channels"
    activation: ClassVar[Activation] = "softmax"  # the unified label has one value per voxel
    numbers: ClassVar[Mapping[str, str]] = {**Method.numbers, **VOLUMES}
    tensors: ClassVar[Mapping[str, str]] = TEACHERS
    Site = PseudoLabelSite
    Server = PseudoLabelServer

    def build_network(
        self, settings: UNetSettings, federation: Federation, site: str | None = None
    ) -> SegmentationNetwork:
        """Inherited, after checking `larger_first`: an error in it would otherwise appear only after pretraining."""
        assert isinstance(self.config, PseudoLabelConfig)
        overlap_priority(federation.vocabulary, self.config.larger_first)
        return super().build_network(settings, federation, site)

    def stages(self, rounds: int) -> tuple[Stage, ...]:
        """The stages of `stages_with_teachers`."""
        assert isinstance(self.config, PseudoLabelConfig)
        return stages_with_teachers(rounds, self.config.pretrain)
