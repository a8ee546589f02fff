"""Med3D — one encoder for all data sets, and a light decoder for each. arXiv:1904.00625

A data set is a site. Its branch reads the deepest features alone, without skip connections: a transposed convolution, a
convolution and a 1×1 convolution to its organs, then linear interpolation to the image. Every site trains the encoder,
which is averaged, and its own branch, which no other site has.

- The paper discards the branches after training. Here the delivered model keeps them on one encoder, and an organ that
  several branches show gets the mean of their log odds, as in `solo`.
- The paper's encoder is a 3D ResNet of total stride 8; here it is that of the experiment's U-Net.
- Branches are as wide as the U-Net's first level (32 in the released code and by default).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import ClassVar, Unpack

import torch
from torch import nn

from panorgan.anatomy import Vocabulary
from panorgan.methods.base import MethodConfig
from panorgan.methods.registry import register
from panorgan.methods.solo import Merged, MergedMembers, Solo, site_of
from panorgan.networks import SegmentationNetwork, UNetSettings
from panorgan.networks.blocks import Blocks, begin_rare, encode, finish
from panorgan.networks.upsampling import upsample_channels


class Med3DConfig(MethodConfig):
    """Med3D has no settings of its own."""


@register("med3d", config=Med3DConfig)
class Med3D(Solo):
    """Shared encoder, a light decoder per site."""

    group: ClassVar[str] = "networks"
    paper: ClassVar[str] = "arXiv:1904.00625"
    equations: ClassVar[Mapping[str, str]] = {"decoder branches": "`Branch`"}

    class Site(Solo.Site):
        """Inherited: the partial loss; the network is the encoder and the site's own branch."""

    class Server(Solo.Server):
        """Inherited: a site gets and sends what all share and its own branch; the encoder is averaged."""

    def merge(self, own: Mapping[str, Vocabulary], **merged: Unpack[Merged]) -> SegmentationNetwork:
        """One encoder, and a branch per site."""
        return BranchedNetwork(own, **merged)

    def own_models(self, delivered: SegmentationNetwork) -> Mapping[str, SegmentationNetwork]:
        """The encoder with one branch."""
        assert isinstance(delivered, BranchedNetwork)
        return {site_of(name): delivered.alone(name) for name in delivered.members}


class Branch(nn.Module):
    """From the deepest features [B, F, *grid] to the logits of some organs at the image's resolution."""

    def __init__(self, organs: Vocabulary, settings: UNetSettings) -> None:
        super().__init__()
        self.vocabulary, self.divisor = organs, settings.divisor
        blocks, width, deepest = Blocks(settings), settings.features[0], len(settings.features) - 1
        background = settings.activation == "softmax"
        self.layers = nn.Sequential(
            blocks.convolution(deepest, settings.features[-1], width, finer=True),
            blocks.convolution(deepest - 1, width, width),
            blocks.output(width, len(organs) + background),
        )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """[B, F, *grid] → [B, channels, *S]."""
        space = [size * factor for size, factor in zip(features.shape[2:], self.divisor, strict=True)]
        return upsample_channels(self.layers(features), space)


class BranchedNetwork(MergedMembers):
    """One encoder, and several branches, each for its own organs, combined into one output."""

    def __init__(
        self,
        branches: Mapping[str, Vocabulary],
        vocabulary: Vocabulary,
        settings: UNetSettings,
        taught: Mapping[str, Collection[str]] | None = None,
    ) -> None:
        members = {name: Branch(organs, settings) for name, organs in branches.items()}
        super().__init__(members, vocabulary, settings, taught)
        self.settings, self.divisor = settings, settings.divisor
        blocks = Blocks(settings)
        self.encoder, self.bottleneck = blocks.encoder(), blocks.bottleneck()
        finish(self, settings)
        for member in self.members.values():
            begin_rare(member, settings, background=settings.activation == "softmax")

    def shared(self, image: torch.Tensor) -> torch.Tensor:
        """The deepest features."""
        return encode(self.encoder, self.bottleneck, image)[-1]

    def alone(self, name: str) -> BranchedNetwork:
        """The same encoder with one of the branches, for its organs."""
        organs = self.members[name].vocabulary
        assert isinstance(organs, Vocabulary)
        network = BranchedNetwork({name: organs}, organs, self.settings)
        network.encoder, network.bottleneck = self.encoder, self.bottleneck
        network.members[name] = self.members[name]
        return network.train(self.training)
