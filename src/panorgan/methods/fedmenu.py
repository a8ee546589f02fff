"""Fed-MENU — an encoder per organ, one decoder that reads them all, and a small generic decoder. arXiv:2206.07156

Every organ has a sub-encoder; the features of all of them, level by level, are the input of one decoder with a softmax
over background and organs, taught by marginal and exclusion loss. A site trains the sub-encoders of its own organs, and
reads the others as it received them. The auxiliary generic decoder reads one sub-encoder alone, on every level, and
shows its organ: so a sub-encoder must know its organ by itself. It is shared by all organs, and not used in prediction.

- One step minimises the sum of all losses, where the released code takes two steps in turn.
- A sub-encoder is averaged over the organ's owners, each with weight 1. The released code also counts the others'
  copies, which they have not changed, with weight ½: to have it so would be to slow the sub-encoders down.
- The deepest level reads all sub-encoders and belongs to the decoder, as in the released code. The auxiliary decoder's
  answers are upsampled, and its loss is the sum over levels.
- There is a sub-encoder for every organ of the vocabulary from the start: the decoder's width depends on their number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import nn

from panorgan.anatomy import Vocabulary
from panorgan.losses import partial_dice_ce
from panorgan.methods.base import Federation, MethodConfig, Payload, ServerRule
from panorgan.methods.presets import ExclusionSettings, MarginalAndExclusion, SoftmaxChannels
from panorgan.methods.registry import register
from panorgan.networks import SegmentationNetwork, UNetSettings
from panorgan.networks.blocks import Blocks, begin_rare, decode, encode, finish
from panorgan.networks.organ_parts import OUTPUTS, group_of, group_of_key, groups_of, stack_outputs
from panorgan.networks.upsampling import upsample_channels
from panorgan.preparation.batch import Batch

Levels = Mapping[str, list[torch.Tensor]]
"""By group, the features of every level of its sub-encoder."""


class FedMENUConfig(ExclusionSettings, MethodConfig):
    """Fed-MENU's settings."""

    auxiliary_weight: float = Field(1.0, ge=0, description="weight of the auxiliary decoder's loss")
    unlabelled: Literal["marginal"] = Field("marginal", description="unlabelled organs are merged into the background")
    organ_parts: Literal["owners"] = Field("owners", description="only owners train and average an organ's sub-encoder")
    server_step: Literal[1] = Field(1, description="the plain mean")


@register("fedmenu", config=FedMENUConfig)
class FedMENU(SoftmaxChannels):
    """A sub-encoder per organ, trained by its owners, and one decoder over all."""

    group: ClassVar[str] = "networks"
    paper: ClassVar[str] = "arXiv:2206.07156"
    equations: ClassVar[Mapping[str, str]] = {
        "MENU-Net": "`MENUNet`",
        "marginal and exclusion loss": "`Site.supervised`",
        "auxiliary generic decoder": "`Site.loss`, `MENUNet.with_auxiliary`",
        "fusion weights": "`Server.weight`",
    }

    class Site(MarginalAndExclusion):
        """Marginal and exclusion loss of the whole, and the partial loss of each own sub-encoder."""

        config: FedMENUConfig  # type: ignore[assignment]
        model: MENUNet

        def loss(self, batch: Batch) -> torch.Tensor:
            """The sum of all, as a mean over samples."""
            own = Vocabulary(self.own_organs)
            logits, *auxiliary = self.model.with_auxiliary(batch.image, own.organs)
            loss = self.supervised(logits, self.model.vocabulary, batch)
            for level in auxiliary:
                shown = partial_dice_ce(
                    level,
                    batch,
                    own,
                    "sigmoid",
                    dice_weight=self.config.dice_weight,
                    ce_weight=self.config.ce_weight,
                    dice_over=self.config.dice_over,
                )
                loss = loss + self.config.auxiliary_weight * shown
            return loss.mean()

    class Server(ServerRule):
        """Sends everything; sub-encoders come back from their owners."""

        def broadcast(self, site: str) -> Payload:
            """All weights: the decoder reads every sub-encoder."""
            return Payload(self.weights)

        def weight(self, site: str, key: str) -> float:
            """1 for every owner of a sub-encoder."""
            return 1.0 if group_of_key(key) is not None else super().weight(site, key)

    def build_network(
        self, settings: UNetSettings, federation: Federation, site: str | None = None
    ) -> SegmentationNetwork:
        """The same network everywhere."""
        return MENUNet(federation.vocabulary, settings)


class MENUNet(SegmentationNetwork):
    """An encoder per organ (and its tumour), one decoder over their features, a softmax over all organs."""

    def __init__(self, vocabulary: Vocabulary, settings: UNetSettings) -> None:
        super().__init__(vocabulary, "softmax")
        self.divisor = settings.divisor
        self.groups = groups_of(vocabulary)
        all_features = tuple(len(self.groups) * width for width in settings.features)
        blocks, wide = Blocks(settings), Blocks(settings.model_copy(update={"features": all_features}))
        self.encoders = nn.ModuleDict({group: blocks.encoder() for group in self.groups})
        self.bottleneck, self.decoder = wide.bottleneck(), wide.decoder()
        self.head = wide.output(all_features[0], len(self.channels))
        narrow = settings.features[0]
        self.auxiliary = nn.ModuleList(
            nn.Sequential(blocks.convolution(level, width, narrow), blocks.output(narrow, OUTPUTS))
            for level, width in enumerate(settings.features[:-1])
        )
        finish(self, settings)
        begin_rare(self.head, settings, background=True)
        for level in self.auxiliary:
            begin_rare(level, settings)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """[B, C, *S] → logits [B, channels, *S]."""
        (logits,) = self.run_pass("logits", lambda image: (self._logits(self._encode(image)),), image)
        return logits

    def with_auxiliary(self, image: torch.Tensor, organs: tuple[str, ...]) -> tuple[torch.Tensor, ...]:
        """The logits, and those of some organs [B, len(organs), *S] by the auxiliary decoder, from every level."""

        def compute(image: torch.Tensor) -> tuple[torch.Tensor, ...]:
            levels = self._encode(image)
            shown = (self._shown(organs, level, levels) for level in range(len(self.auxiliary)))
            return (self._logits(levels), *(upsample_channels(logits, image.shape[2:]) for logits in shown))

        return self.run_pass(("auxiliary", organs), compute, image)

    def _encode(self, image: torch.Tensor) -> Levels:
        return {group: encode(part[:-1], part[-1], image) for group, part in self.encoders.items()}  # type: ignore[index]

    def _shown(self, organs: tuple[str, ...], level: int, levels: Levels) -> torch.Tensor:
        """What the auxiliary decoder makes of a level of the organs' own sub-encoders, [B, len(organs), *grid]."""
        decoder = self.auxiliary[level]
        return stack_outputs([group_of(organ) for organ in organs], lambda group: decoder(levels[group][level]))

    def _logits(self, levels: Levels) -> torch.Tensor:
        together = [torch.cat(level, dim=1) for level in zip(*levels.values(), strict=True)]
        logits: torch.Tensor = self.head(decode(self.decoder, [*together, self.bottleneck(together[-1])]))
        return logits
