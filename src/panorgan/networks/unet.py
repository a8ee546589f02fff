"""One configurable U-Net, 2D or 3D, also for thick slices, from MONAI's building blocks."""

from __future__ import annotations

import math
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
    strides: tuple[tuple[Literal[1, 2], ...], ...] | None = Field(
        None, description="per level, 2 for each axis halved on the way there; null halves every axis every time"
    )

    @model_validator(mode="after")
    def _strides_fit(self) -> UNetSettings:
        if self.strides is None:
            return self
        if len(self.strides) != len(self.features):
            raise ValueError(
                f"strides has {len(self.strides)} levels and features {len(self.features)}: give one entry per level"
            )
        if any(len(level) != self.dimensions for level in self.strides):
            raise ValueError(f"every entry of strides needs {self.dimensions} numbers, one per axis of the network")
        if set(self.strides[0]) != {1}:
            raise ValueError("the first entry of strides must be all 1: the first level works on the image as it is")
        return self

    @model_validator(mode="after")
    def _groups_fit(self) -> UNetSettings:
        if self.norm == "group" and any(n % _GROUPS for n in self.features):
            raise ValueError(f"group normalisation needs features that are multiples of {_GROUPS}")
        return self

    @property
    def level_strides(self) -> tuple[tuple[int, ...], ...]:
        """Stride per level and axis."""
        if self.strides is not None:
            return self.strides
        return ((1,) * self.dimensions, *((2,) * self.dimensions for _ in self.features[1:]))

    @property
    def level_kernels(self) -> tuple[tuple[int, ...], ...]:
        """Kernel size per level and axis: 3, but 1 along an axis that is still too coarse to be mixed.

        That is an axis never halved so far which the next level leaves alone while it halves another one: its voxels
        are longer than the others there, as in thick slices. Once the others have caught up, kernels see all axes.
        """
        strides = self.level_strides

        def kernel(level: int, axis: int) -> int:
            following = strides[level + 1] if level + 1 < len(strides) else None
            untouched = all(stride[axis] == 1 for stride in strides[: level + 2])
            return 1 if following and untouched and 2 in following else 3

        return tuple(tuple(kernel(level, axis) for axis in range(self.dimensions)) for level in range(len(strides)))

    @property
    def divisor(self) -> tuple[int, ...]:
        """Sizes along each axis must be a multiple of this."""
        return tuple(math.prod(along) for along in zip(*self.level_strides, strict=True))


class UNet(SegmentationNetwork):
    """Encoder, bottleneck, decoder and a 1×1 head; every level halves the resolution by a strided convolution.

    With `strides` a level may leave some axes as they are, for scans whose slices are thick.
    """

    def __init__(self, vocabulary: Vocabulary, settings: UNetSettings) -> None:
        super().__init__(vocabulary, settings.convention)
        dims, features = settings.dimensions, settings.features
        strides, kernels = settings.level_strides, settings.level_kernels
        norm = _norm(settings.norm)
        dropout = settings.dropout or None
        block = UnetResBlock if settings.residual else UnetBasicBlock

        def down(level: int) -> nn.Module:
            inputs = 1 if level == 0 else features[level - 1]
            return block(dims, inputs, features[level], kernels[level], strides[level], norm_name=norm, dropout=dropout)

        def up(level: int) -> nn.Module:
            wider = strides[level + 1]
            inputs, outputs = features[level + 1], features[level]
            return UnetUpBlock(dims, inputs, outputs, kernels[level], wider, wider, norm_name=norm, dropout=dropout)

        self.divisor = settings.divisor
        depth = len(features)
        self.encoder = nn.ModuleList(down(level) for level in range(depth - 1))
        self.bottleneck = down(depth - 1)
        self.decoder = nn.ModuleList(up(level) for level in reversed(range(depth - 1)))
        self.head = UnetOutBlock(dims, features[0], len(self.channels))
        self.apply(_initialise)

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
