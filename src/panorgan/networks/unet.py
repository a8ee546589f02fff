"""One configurable U-Net, 2D or 3D, also for thick slices, from MONAI's building blocks."""

from __future__ import annotations

import torch

from panorgan.anatomy import Vocabulary
from panorgan.networks.base import SegmentationNetwork
from panorgan.networks.blocks import Blocks, begin_rare, decode, decode_levels, encode, finish
from panorgan.networks.settings import UNetSettings

OUTPUT_KEYS = ("head.conv.conv.weight", "head.conv.conv.bias")
"""The output layer in the state dict: one row per channel."""


class UNet(SegmentationNetwork):
    """Encoder, bottleneck, decoder and a 1×1 head; every level halves the resolution by a strided convolution.

    With `strides` a level may leave some axes as they are, for scans whose slices are thick.
    """

    def __init__(self, vocabulary: Vocabulary, settings: UNetSettings) -> None:
        super().__init__(vocabulary, settings.activation)
        blocks = Blocks(settings)
        self.divisor = settings.divisor
        self.encoder, self.bottleneck, self.decoder = blocks.encoder(), blocks.bottleneck(), blocks.decoder()
        self.head = blocks.output(settings.features[0], len(self.channels))
        finish(self, settings)
        begin_rare(self.head, settings, background=settings.activation == "softmax")

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """[B, C, *S] → logits [B, channels, *S]."""
        (logits,) = self.run_pass("logits", self._logits, image)
        return logits

    def bottleneck_features(self, image: torch.Tensor) -> torch.Tensor:
        """[B, 1, *S] → the features of the deepest level, averaged over space, [B, F]."""
        (features,) = self.run_pass("bottleneck", self._bottleneck_features, image)
        return features

    def around_bottleneck(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, C, *S] → the input and the output of the deepest level, [B, F, *S']."""
        levels = encode(self.encoder, self.bottleneck, image)
        return levels[-2], levels[-1]

    def _bottleneck_features(self, image: torch.Tensor) -> tuple[torch.Tensor]:
        return (encode(self.encoder, self.bottleneck, image)[-1].flatten(2).mean(2),)

    def logits_and_features(self, image: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Logits, and the features of every level of encoder and decoder, each [B, F, *S]."""
        logits, *features = self.run_pass("features", self._logits_and_features, image)
        return logits, tuple(features)

    def _logits_and_features(self, image: torch.Tensor) -> tuple[torch.Tensor, ...]:
        down = encode(self.encoder, self.bottleneck, image)
        _, *up = decode_levels(self.decoder, down)
        return self.head([*down, *up][-1]), *down, *up

    def _logits(self, image: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.head(decode(self.decoder, encode(self.encoder, self.bottleneck, image))),)
