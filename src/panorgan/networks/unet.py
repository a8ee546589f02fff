"""One configurable U-Net, 2D or 3D, from MONAI's building blocks."""

from __future__ import annotations

from typing import Literal

import torch
from monai.networks.blocks.dynunet_block import UnetBasicBlock, UnetOutBlock, UnetResBlock, UnetUpBlock
from pydantic import Field, PositiveInt, model_validator
from torch import nn

from panorgan.anatomy import Vocabulary
from panorgan.cases.labels import Convention
from panorgan.networks.base import SegmentationNetwork
from panorgan.settings import Settings

# Groups of channels that group normalisation averages over.
_GROUPS = 8


class UNetSettings(Settings):
    """Shape of the U-Net."""

    dimensions: Literal[2, 3] = 3
    features: tuple[PositiveInt, ...] = Field(
        (32, 64, 128, 256, 320), min_length=2, description="channels per level, top to bottom"
    )
    norm: Literal["instance", "batch", "group"] = "instance"
    residual: bool = Field(False, description="residual blocks in the encoder")
    convention: Convention = Field(
        "exclusive", description="softmax over background + organs, or one sigmoid per organ"
    )
    dropout: float = Field(0.0, ge=0, lt=1)

    @model_validator(mode="after")
    def _groups_fit(self) -> UNetSettings:
        if self.norm == "group" and any(n % _GROUPS for n in self.features):
            raise ValueError(f"group normalisation needs features that are multiples of {_GROUPS}")
        return self


class UNet(SegmentationNetwork):
    """Encoder, bottleneck, decoder and a 1×1 head; every level halves the resolution by a strided convolution."""

    def __init__(self, vocabulary: Vocabulary, settings: UNetSettings) -> None:
        super().__init__(vocabulary, settings.convention)
        dims, features = settings.dimensions, settings.features
        norm = _norm(settings.norm)
        dropout = settings.dropout or None
        block = UnetResBlock if settings.residual else UnetBasicBlock

        def down(level: int) -> nn.Module:
            inputs = 1 if level == 0 else features[level - 1]
            stride = 1 if level == 0 else 2
            return block(dims, inputs, features[level], 3, stride, norm_name=norm, dropout=dropout)

        def up(level: int) -> nn.Module:
            return UnetUpBlock(dims, features[level + 1], features[level], 3, 2, 2, norm_name=norm, dropout=dropout)

        depth = len(features)
        self.encoder = nn.ModuleList(down(level) for level in range(depth - 1))
        self.bottleneck = down(depth - 1)
        self.decoder = nn.ModuleList(up(level) for level in reversed(range(depth - 1)))
        self.head = UnetOutBlock(dims, features[0], len(self.channels))
        self.apply(_initialise)

    @property
    def divisor(self) -> int:
        """Spatial sizes must be a multiple of this."""
        return int(2 ** len(self.encoder))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """[B, 1, *S] → logits [B, channels, *S]."""
        skips = []
        features = image
        for level in self.encoder:
            features = level(features)
            skips.append(features)
        features = self.bottleneck(features)
        for level in self.decoder:
            features = level(features, skips.pop())
        logits: torch.Tensor = self.head(features)
        return logits


def _norm(kind: str) -> tuple[str, dict[str, object]]:
    if kind == "group":
        return "group", {"num_groups": _GROUPS, "affine": True}
    return kind, {"affine": True}


def _initialise(module: nn.Module) -> None:
    """Kaiming for the leaky ReLUs inside; zero biases."""
    if isinstance(module, nn.Conv2d | nn.Conv3d | nn.ConvTranspose2d | nn.ConvTranspose3d):
        nn.init.kaiming_normal_(module.weight, a=0.01)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
