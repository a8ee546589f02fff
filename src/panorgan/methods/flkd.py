"""FLKD — the global model and the other sites' teachers replace the labels that a site lacks.

Kim et al., "Federated learning with knowledge distillation for multi-organ segmentation with partially labeled
datasets". Local training on a few organs makes a site's model forget the others. Two distillation losses prevent that:
*global KD* from the round's frozen global model (eq. 7), and *local KD* from models of single sites, trained alone
beforehand and exchanged once (eqs. 9 and 10). The network has a head per organ (section 3.5). Every site trains every
head, and so sends the whole network; the mean is unweighted (eq. 6).

Stages: pretrain → exchange → train, see `teacher_stages`.

Two settings of the paper cannot be written down exactly. It scales patches by 0.7 to 1.4; `training.augment.scale` is
symmetric, and 0.3 is 0.7 to 1.3. It mirrors every axis, which suits its organs (`kidney`, both sides in one); with
`kidney_left` and `kidney_right` leave axis 0 out of `mirror_axes`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field

from panorgan.anatomy import Vocabulary
from panorgan.losses import distil_unlabelled, soft_bce
from panorgan.methods.base import LOSS_IN_PARTS, Method, MethodConfig, Stage, published
from panorgan.methods.registry import register
from panorgan.methods.shared.ablation import AblationRow
from panorgan.methods.shared.teacher_stages import (
    PRETRAIN,
    TEACHERS,
    TRAIN,
    TeacherServer,
    TeacherSite,
    stages_with_teachers,
)
from panorgan.networks import select_channels
from panorgan.networks.settings import OrganParts
from panorgan.preparation.batch import Batch
from panorgan.preparation.teacher_predictions import TeacherPredictions


class FLKDConfig(MethodConfig):
    """FLKD's settings."""

    weighting: Literal["cases", "uniform"] = published(
        "uniform", "uniform", "a site's weight in the mean: n_i, or 1 (eq. 6)"
    )
    organ_parts: Literal["everyone"] = published(
        "everyone",
        "everyone",
        "every site trains and averages every head: distillation trains those that it has no labels for (eq. 6)",
    )
    unlabelled: Literal["marginal"] = Field(
        "marginal", description="what unlabelled organs learn follows from `global_weight` and `local_weight`"
    )
    global_weight: float = published(1.0, "1", "weight of global KD (eq. 7); 0 for none", ge=0)
    local_weight: float = published(1.0, "1", "weight of local KD (eqs. 9, 10); 0 for none", ge=0)
    n_sampled_teachers: int | None = published(
        1, "1", "organs drawn per step for local KD (eq. 10); null for all of them (eq. 9)", ge=1
    )
    pretrain: float = published(
        0.5, "not stated", "rounds that a site trains its teacher, as a share of training.rounds", gt=0
    )
    teacher_cache: bool = published(
        True, "off", "predict every scan once and store it in 8 bit; off: predict every patch again, as a check"
    )


@register("flkd", config=FLKDConfig)
class FLKD(Method):
    """A multi-head network with global and local knowledge distillation."""

    group: ClassVar[str] = "systems"
    paper: ClassVar[str] = (
        "Kim et al., Federated learning with knowledge distillation for multi-organ segmentation with partially "
        "labeled datasets"
    )
    equations: ClassVar[Mapping[str, str]] = {
        "eq. 3": "`Site.loss`: cross-entropy + Dice on what is annotated",
        "eq. 6": "`Server.aggregate`: the unweighted mean of everything; with `server_step: 1` nothing else",
        "eq. 7": "`Site.global_distillation`",
        "eq. 8": "`Site.loss`: the sum",
        "eqs. 9, 10": "`Site.local_distillation`, over all or `n_sampled_teachers` organs",
        "section 3.5": "`networks.organ_parts.MultiHead`: heads of 162 parameters",
    }
    recipe: ClassVar[Mapping[str, object]] = {
        "network.features": [32, 64, 128, 256],
        "network.norm": "group",
        "network.groups": 16,
        "network.weight_standardisation": True,
        "plan.spacing_mm": [1.5, 1.5, 3.0],
        "plan.intensity": "window",
        "plan.window_hu": [-325, 325],
        "method.server_step": 1,
        "training.rounds": 1000,
        "training.local_steps": 80,
        "training.optimizer.name": "sgd",
        "training.optimizer.learning_rate": 0.01,
        "training.optimizer.momentum": 0.99,
        "training.optimizer.weight_decay": 0,
        "training.optimizer.clip_norm": None,
        "training.optimizer.schedule": "poly",
        "training.sampling.patch_size": [128, 128, 64],
        "training.sampling.batch_size": 2,
        "training.sampling.foreground": 0.8,
        "training.augment.rotation_degrees": 0,
        "training.augment.scale": 0.3,
        "training.augment.geometry_probability": 1,
        "training.augment.mirror_axes": [0, 1, 2],
        "training.augment.brightness": 0,
        "training.augment.contrast": 0,
        "training.augment.gamma": 0,
        "training.augment.noise": 0,
        "training.augment.blur_probability": 0,
    }
    organs: ClassVar[OrganParts] = "heads"
    numbers: ClassVar[Mapping[str, str]] = LOSS_IN_PARTS
    tensors: ClassVar[Mapping[str, str]] = TEACHERS
    ablation: ClassVar[tuple[AblationRow, ...]] = (  # table 2: mean Dice of seven sites in percent
        AblationRow("no KD", (), {"global_weight": 0, "local_weight": 0}, paper="66.58"),
        AblationRow("global KD", ("global KD",), {"local_weight": 0}, paper="69.55"),
        AblationRow("local KD", ("local KD",), {"global_weight": 0}, paper="70.80"),
        AblationRow("both", ("global KD", "local KD"), paper="71.00"),
    )

    class Site(TeacherSite):
        """Supervision on what is annotated, distillation for the rest."""

        config: FLKDConfig

        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)
            self.logged: dict[str, torch.Tensor] = {}

        @property
        def held_organs(self) -> tuple[str, ...]:
            """The organs that global KD distils: those that at least one case here does not label."""
            return self.sometimes_unlabelled if self.in_training and self.config.global_weight else ()

        def teacher_predictions(self) -> TeacherPredictions | None:
            """Exchange: predict every scan. Train: the stored predictions, augmented like the labels."""
            if self.round_info.stage == PRETRAIN or not self.config.local_weight or not self.teachers.known():
                return None
            return self.teachers.predictions(
                self.organs_without_label, self.config.teacher_cache, self.config.n_sampled_teachers
            )

        def after_round(self) -> None:
            """Release the copy of the global model."""
            super().after_round()
            self.received_model = None

        # -- formulas

        def step(self, batch: Batch) -> dict[str, torch.Tensor]:
            """Take one optimiser step; logs the terms of the loss too."""
            self.logged = {}
            return {**super().step(batch), **self.logged}

        def loss(self, batch: Batch) -> torch.Tensor:
            """Eq. 8: supervision, distillation from the global model, and from the teachers' predictions."""
            own, held = self.own_organs, self.held_organs
            logits, vocabulary = self.model.channels_for(batch.image, {*own, *held, *batch.soft_target_organs})
            # Own channels only: else a union's mask would supervise outputs that it does not show, such as a tumour's.
            loss = self.supervised(select_channels(logits, vocabulary, own), Vocabulary(own), batch).mean()
            if held:
                part = self.global_distillation(logits, vocabulary, batch).mean()
                self.logged["loss/global_kd"] = part.detach()
                loss = loss + self.config.global_weight * part
            if batch.soft_targets is not None:
                part = self.local_distillation(logits, vocabulary, batch).mean()
                self.logged["loss/local_kd"] = part.detach()
                loss = loss + self.config.local_weight * part
            return loss

        def global_distillation(self, logits: torch.Tensor, vocabulary: Vocabulary, batch: Batch) -> torch.Tensor:
            """Eq. 7, [B]: cross-entropy with the frozen global model on the organs that a sample does not label."""
            assert self.received_model is not None
            with torch.no_grad():
                received, organs = self.received_model.channels_for(batch.image, self.held_organs)
            return distil_unlabelled(select_channels(logits, vocabulary, organs.organs), received, batch, organs)

        def local_distillation(self, logits: torch.Tensor, vocabulary: Vocabulary, batch: Batch) -> torch.Tensor:
            """Eq. 10 (eq. 9 with every organ), [B]: cross-entropy with the teachers of the drawn organs."""
            assert batch.soft_targets is not None
            assert batch.soft_targets_valid is not None
            chosen = select_channels(logits, vocabulary, batch.soft_target_organs)
            return soft_bce(chosen, batch.soft_targets, batch.soft_targets_valid)

    class Server(TeacherServer):
        """The unweighted mean of everything (eq. 6); before that, the exchange of teachers."""

        @property
        def teachers_are_needed(self) -> bool:
            """Whether local KD is on: only it uses teachers."""
            assert isinstance(self.config, FLKDConfig)
            return bool(self.config.local_weight)

    def stages(self, rounds: int) -> tuple[Stage, ...]:
        """Pretraining and exchange only where local KD needs teachers; then training."""
        assert isinstance(self.config, FLKDConfig)
        if not self.config.local_weight:
            return (Stage(TRAIN, rounds),)
        return stages_with_teachers(rounds, self.config.pretrain)
