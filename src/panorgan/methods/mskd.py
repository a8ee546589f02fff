"""MS-KD* — the student distils the other sites' teachers' probabilities and features, in the organs. arXiv:2108.02559

Multi-teacher, single-student knowledge distillation on pseudo labels, one of UFPS's starred baselines. Beside the
unified label (eq. 4 of UFPS), the student takes over how probable a teacher finds its organ, and where the teacher's
features respond, level by level. Both count only where the pseudo label shows the teacher's organs.

Decisions where the papers are silent:

- UFPS names a multi-scale loss on logits and on features, and before it "features in all layers along with final
  logits": logits are those of full resolution, features those of every level of encoder and decoder.
- The foreground alone counts, as UFPS says; MS-KD adds the background on which all teachers agree.
- A teacher knows its organ against everything else, so the student's probability p of one organ stands against all
  other channels together, in a cross-entropy with the teacher's q. q is read from the stored predictions.
- Teachers and student begin with different weights, so a channel of one is not the same channel of another. What is
  compared is how strongly every place responds: A, the mean square over the channels. 1 − cos of A over the foreground.
- Foreground at a coarse level is every place that holds some of it.
- The features cost a pass of every teacher per step; `feature_weight: 0` saves it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F

from panorgan.anatomy import Vocabulary
from panorgan.losses.unified_label import UnifiedLabel
from panorgan.methods.base import published
from panorgan.methods.registry import register
from panorgan.methods.shared.pseudo_labels import PseudoLabelConfig, PseudoLabelMethod, PseudoLabelSite
from panorgan.networks import UNet
from panorgan.preparation.batch import Batch


class MSKDConfig(PseudoLabelConfig):
    """Teachers, pseudo labels, and distillation."""

    logit_weight: float = published(1.0, "not stated", "weight of the distillation of probabilities; 0 for none", ge=0)
    feature_weight: float = published(1.0, "not stated", "weight of the distillation of features; 0 for none", ge=0)


@register("mskd", config=MSKDConfig)
class MSKD(PseudoLabelMethod):
    """FedAvg* that distils the teachers' probabilities and features too."""

    paper: ClassVar[str] = "MS-KD* in Jiang et al., UFPS; arXiv:2108.02559"
    equations: ClassVar[Mapping[str, str]] = {
        "MS-KD, logits": "`organ_cross_entropy`",
        "MS-KD, features": "`response_distance`, the mean over levels and teachers",
    }

    class Site(PseudoLabelSite):
        """Pseudo labels, and distillation in their foreground."""

        config: MSKDConfig
        model: UNet

        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)
            self.networks: dict[str, UNet] = {}
            """The other sites' teachers, during a round that needs their features."""

        def before_round(self) -> None:
            """Load the teachers."""
            super().before_round()
            self.networks = {}
            if self.in_training and self.config.feature_weight:
                device = next(self.model.parameters()).device
                unlabelled = set(self.sometimes_unlabelled)
                for site, organs in self.teachers.owners.items():
                    if site != self.facts.name and unlabelled.intersection(organs):  # others would thin out the mean
                        self.networks[site] = self.teachers.load(site).to(device)  # type: ignore[assignment]

        def loss(self, batch: Batch) -> torch.Tensor:
            """Dice + BCE on the unified label, and both distillations."""
            config = self.config
            if not self.in_training or batch.soft_targets is None or not (config.logit_weight or config.feature_weight):
                return super().loss(batch)
            logits, features = self.model.logits_and_features(batch.image)
            loss = self.sample_losses(logits)
            shown = foreground(self.label, batch, self.federation.vocabulary)
            if config.logit_weight:
                organs = organ_cross_entropy(logits, batch, shown, self.federation.vocabulary)
                loss = loss + config.logit_weight * organs
            if self.networks:
                loss = loss + config.feature_weight * self.feature_loss(features, batch, shown)
            return loss.mean()

        def feature_loss(
            self, features: tuple[torch.Tensor, ...], batch: Batch, shown: Mapping[str, torch.Tensor]
        ) -> torch.Tensor:
            """Mean over the teachers, and the levels, of how differently they respond, [B]."""
            total = features[0].new_zeros(len(batch.image), dtype=torch.float32)
            for site, network in self.networks.items():
                masks = [mask for organ, mask in shown.items() if organ in self.teachers.owners[site]]
                if masks:
                    with torch.no_grad():
                        _, taught = network.logits_and_features(batch.image)
                    where = torch.stack(masks).any(0)
                    distances = [response_distance(s, t, where) for s, t in zip(features, taught, strict=True)]
                    total = total + torch.stack(distances).mean(0)
            return total / len(self.networks)

        def after_round(self) -> None:
            """Release the teachers."""
            super().after_round()
            self.networks = {}


def foreground(label: UnifiedLabel, batch: Batch, vocabulary: Vocabulary) -> dict[str, torch.Tensor]:
    """Where the label shows an organ because a teacher says so, by organ, [B, *S] bool."""
    assert batch.soft_targets is not None
    shown = {}
    for place, organ in enumerate(batch.soft_target_organs):
        shown[organ] = label.values == vocabulary.index(organ) + 1
        if batch.soft_targets_valid is not None:
            valid = batch.soft_targets_valid[:, place]
            shown[organ] = shown[organ] & valid.view(-1, *(1,) * (label.values.ndim - 1))
    return shown


def organ_cross_entropy(
    logits: torch.Tensor, batch: Batch, shown: Mapping[str, torch.Tensor], vocabulary: Vocabulary
) -> torch.Tensor:
    """−(q·log p + (1 − q)·log(1 − p)) in an organ's foreground, [B]: mean over the foreground of all organs."""
    assert batch.soft_targets is not None
    logits = logits.float()
    loss, voxels = logits.new_zeros(len(logits)), logits.new_zeros(len(logits))
    for place, organ in enumerate(batch.soft_target_organs):
        channel = vocabulary.index(organ) + 1
        others = torch.cat([logits[:, :channel], logits[:, channel + 1 :]], dim=1).logsumexp(1)
        entropy = F.binary_cross_entropy_with_logits(
            logits[:, channel] - others, batch.soft_targets[:, place].float(), reduction="none"
        )
        loss = loss + (entropy * shown[organ]).flatten(1).sum(1)
        voxels = voxels + shown[organ].flatten(1).sum(1)
    return loss / voxels.clamp(min=1)


def response_distance(student: torch.Tensor, teacher: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """1 − cos(A, A') over the places of a level [B, F, *S] that hold some of `where` [B, *S'], [B]; 0 where none
    does."""
    pool = F.adaptive_max_pool2d if where.ndim == 3 else F.adaptive_max_pool3d
    mask = pool(where.unsqueeze(1).float(), student.shape[2:]).flatten(1)
    own, taught = (features.float().square().mean(1).flatten(1) * mask for features in (student, teacher))
    return (1 - F.cosine_similarity(own, taught, dim=1)) * (mask.amax(1) > 0)
