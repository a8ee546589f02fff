"""Conditional networks — one network conditioned on the organ, by one more channel after each of its blocks.

Every organ has a number, and a channel that is this number everywhere is appended to what a block gives: to every
block of the decoder (`conddec`), or of the encoder, the deepest one included (`condenc`). The network answers for one
organ at a time. Published for pooled sets of single organs; here in a federation: a site asks for its own organs alone,
and everything is averaged over all sites.

- The published table of numbers is arbitrary. Here they are spread evenly from −1 to 1.
- Instance normalisation takes a constant away: appended before a convolution that it follows, the number would change
  nothing. So a 1×1 convolution with a leaky ReLU mixes it in first.
- An organ and its tumour are two outputs of one answer, as in FLKD's comparison.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import nn

from panorgan.anatomy import Vocabulary
from panorgan.methods.base import Federation, Method, MethodConfig, SiteRule
from panorgan.methods.registry import register
from panorgan.networks import SegmentationNetwork, UNetSettings
from panorgan.networks.base import SelectiveNetwork
from panorgan.networks.blocks import Blocks, Level, begin_rare, decode, encode, finish
from panorgan.networks.head_stack import SLOPE
from panorgan.networks.organ_parts import OUTPUTS, group_of, groups_of, stack_outputs
from panorgan.networks.settings import OrganParts

Where = Literal["encoder", "decoder"]
_ABOUT = (__doc__ or "").partition(" — ")[2]


class ConditionalConfig(MethodConfig):
    """Conditional networks have no settings of their own."""


class Condition(nn.Module):
    """The number of an organ as one more channel of features, and the convolution that mixes it in."""

    def __init__(self, width: int, blocks: Blocks) -> None:
        super().__init__()
        self.mix = blocks.output(width + 1, width)

    def forward(self, features: torch.Tensor, number: float) -> torch.Tensor:
        """[B, width, *S] → the same shape."""
        conditioned = torch.cat([features, torch.full_like(features[:, :1], number)], dim=1)
        return F.leaky_relu(self.mix(conditioned), SLOPE)


class ConditionalNetwork(SelectiveNetwork):
    """A U-Net that shows the organ whose number it is given: a sigmoid for it and one for its tumour."""

    def __init__(self, vocabulary: Vocabulary, settings: UNetSettings, where: Where) -> None:
        super().__init__(vocabulary, "sigmoid")
        self.divisor = settings.divisor
        self.groups, self.where = groups_of(vocabulary), where
        blocks = Blocks(settings)
        self.encoder, self.bottleneck, self.decoder = blocks.encoder(), blocks.bottleneck(), blocks.decoder()
        widths = settings.features if where == "encoder" else settings.features[-2::-1]
        self.conditions = nn.ModuleList(Condition(width, blocks) for width in widths)
        # Not "head": the server averages the rows of that layer by organ, and these serve all organs.
        self.output = blocks.output(settings.features[0], OUTPUTS)
        finish(self, settings)
        begin_rare(self.output, settings)

    def number(self, group: str) -> float:
        """The number of a group: evenly spread from −1 to 1."""
        return 2 * self.groups.index(group) / max(len(self.groups) - 1, 1) - 1

    def _logits(self, image: torch.Tensor, organs: tuple[str, ...]) -> torch.Tensor:
        (logits,) = self.run_pass(organs, lambda image: (self._outputs(image, organs),), image)
        return logits

    def _outputs(self, image: torch.Tensor, organs: tuple[str, ...]) -> torch.Tensor:
        """One answer after the other; where numbers enter the decoder, the encoder runs once for all."""
        once = encode(self.encoder, self.bottleneck, image) if self.where == "decoder" else None

        def answer(group: str) -> torch.Tensor:
            if once is None:
                *encoder, bottleneck = self._conditioned([*self.encoder, self.bottleneck], group)
                features = decode(self.decoder, encode(encoder, bottleneck, image))
            else:
                features = decode(self._conditioned(self.decoder, group), once)
            logits: torch.Tensor = self.output(features)
            return logits

        return stack_outputs([group_of(organ) for organ in organs], answer)

    def _conditioned(self, levels: Iterable[nn.Module], group: str) -> list[Level]:
        """Blocks, each with the group's number behind it."""

        def conditioned(block: nn.Module, condition: nn.Module, *features: torch.Tensor) -> torch.Tensor:
            x: torch.Tensor = condition(block(*features), self.number(group))
            return x

        return [partial(conditioned, *pair) for pair in zip(levels, self.conditions, strict=True)]


class Conditional(Method):
    """FedAvg of a conditional network."""

    group: ClassVar[str] = "networks"
    paper: ClassVar[str] = (
        "Dmitriev and Kaufman, Learning multi-class segmentations from single-class datasets, CVPR 2019"
    )
    organs: ClassVar[OrganParts] = "channels"
    equations: ClassVar[Mapping[str, str]] = {"additional activation": "`Condition.forward`"}
    where: ClassVar[Where]

    class Site(SiteRule):
        """Inherited: the partial loss on the organs that the site annotates."""

    def build_network(
        self, settings: UNetSettings, federation: Federation, site: str | None = None
    ) -> SegmentationNetwork:
        """The same network everywhere."""
        return ConditionalNetwork(federation.vocabulary, settings, self.where)


@register("conddec", config=ConditionalConfig)
class ConditionalDecoder(Conditional):
    """FedAvg of a network with the organ as an input of its decoder."""

    text: ClassVar[str] = f"Conditional decoder — {_ABOUT}"
    where: ClassVar[Where] = "decoder"


@register("condenc", config=ConditionalConfig)
class ConditionalEncoder(Conditional):
    """FedAvg of a network with the organ as an input of its encoder."""

    text: ClassVar[str] = f"Conditional encoder — {_ABOUT}"
    where: ClassVar[Where] = "encoder"
