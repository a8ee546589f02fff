"""CPS* — two networks with different first weights teach each other, as do the sites' teachers. arXiv:2106.01226

Cross pseudo supervision on pseudo labels, one of UFPS's starred baselines. Both networks learn the unified label (eq. 4
of UFPS). Beside it, each learns the other's hard label: at every voxel the channel that the other finds most probable.
Its noise is not that of the teachers, and differs between the two networks.

Decisions where the papers are silent:

- UFPS says "two local models" of a method for pooled data. Here both are averaged over the sites, each with its own
  kind, or each would drift away with its site: what is sent in training doubles.
- The first network predicts, as in CPS. The delivered model holds both.
- Ground truth wins over the other network too: a hard label is the most probable channel that the annotation allows.
- The cross loss is Dice + BCE, as all of UFPS's baselines have; CPS has cross-entropy.
- Teachers are single networks. The two begin from the federation's first weights, which differ between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from panorgan.anatomy import Vocabulary
from panorgan.losses.unified_label import UnifiedLabel, chosen_label
from panorgan.losses.unified_loss import unified_dice_bce
from panorgan.methods.base import Federation, Method, published
from panorgan.methods.registry import register
from panorgan.methods.shared.pseudo_labels import (
    PseudoLabelConfig,
    PseudoLabelMethod,
    PseudoLabelServer,
    PseudoLabelSite,
)
from panorgan.methods.shared.teachers import PREFIX
from panorgan.networks import SegmentationNetwork, UNet, UNetSettings
from panorgan.preparation.batch import Batch

_TWIN = "twin."


class TwinUNet(UNet):
    """A U-Net, and a second one with different first weights, which only training uses."""

    def __init__(self, vocabulary: Vocabulary, settings: UNetSettings) -> None:
        super().__init__(vocabulary, settings)
        self.twin = UNet(vocabulary, settings)

    def both(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, C, *S] → logits of the two networks, [B, channels, *S] each."""
        first, second = self.run_pass("both", lambda x: (*self._logits(x), *self.twin._logits(x)), image)
        return first, second


class TwinMethod(Method):
    """Two networks for all organs."""

    def build_network(
        self, settings: UNetSettings, federation: Federation, site: str | None = None
    ) -> SegmentationNetwork:
        """The same everywhere."""
        return TwinUNet(federation.vocabulary, self.network_settings(settings))


class CPSConfig(PseudoLabelConfig):
    """Teachers, pseudo labels, and cross supervision."""

    cross_weight: float = published(
        0.5, "1.5 (PASCAL VOC)", "λ: weight of what the networks teach each other; 0 for two that do not", ge=0
    )


@register("cps", config=CPSConfig)
class CPS(PseudoLabelMethod, TwinMethod):
    """FedAvg* of two networks that teach each other by hard labels."""

    paper: ClassVar[str] = "CPS* in Jiang et al., UFPS; arXiv:2106.01226"
    equations: ClassVar[Mapping[str, str]] = {
        "CPS, eq. 1": "`Site.loss`: ℓ(p₁, y) + ℓ(p₂, y), y the unified label",
        "CPS, eqs. 2 to 4": "`Site.loss`: λ·(ℓ(p₁, ŷ₂) + ℓ(p₂, ŷ₁)), ŷ by `losses.unified_label.chosen_label`",
    }

    class Site(PseudoLabelSite):
        """Trains both networks."""

        config: CPSConfig
        model: TwinUNet

        def loss(self, batch: Batch) -> torch.Tensor:
            """Both on the unified label, and each on the other's hard label; a teacher is a single network."""
            if not self.in_training:
                return super().loss(batch)
            first, second = self.model.both(batch.image)
            loss = self.sample_losses(first) + self.sample_losses(second)
            if self.config.cross_weight:
                loss = loss + self.config.cross_weight * (
                    self.loss_on(first, self.chosen(second, batch)) + self.loss_on(second, self.chosen(first, batch))
                )
            return loss.mean()

        def chosen(self, logits: torch.Tensor, batch: Batch) -> UnifiedLabel:
            """A network's hard label ŷ."""
            return chosen_label(logits, batch, self.federation.vocabulary)

        def loss_on(self, logits: torch.Tensor, label: UnifiedLabel) -> torch.Tensor:
            """ℓ, [B]."""
            config = self.config
            return unified_dice_bce(logits, label, config.dice_weight, config.ce_weight, config.dice_over)

        def _own_part(self) -> dict[str, torch.Tensor]:
            return {key: value for key, value in super()._own_part().items() if not key.startswith(_TWIN)}

        def _empty_teacher(self, site: str) -> SegmentationNetwork:
            network = self.tools.network_of(site)
            assert isinstance(network, TwinUNet)
            return network.twin

    class Server(PseudoLabelServer):
        """Averages both networks; teachers are single ones."""

        def expects(self, site: str) -> Mapping[str, torch.Tensor]:
            """Both networks in training; one as a teacher."""
            return {key: value for key, value in super().expects(site).items() if not key.startswith(PREFIX + _TWIN)}
