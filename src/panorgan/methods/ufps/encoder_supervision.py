"""Encoder supervision: outputs after the levels of a U-Net's encoder, trained on the same labels as the network's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from panorgan.errors import ConfigError
from panorgan.networks import SegmentationNetwork, UNet, UNetSettings
from panorgan.networks.blocks import Blocks, begin_rare, finish

HEADS = "encoder_heads"
_FIRST = 1  # the finest level has seen too little of the image


def add_encoder_heads(network: SegmentationNetwork, settings: UNetSettings) -> None:
    """Add a 1×1 convolution after every level of a U-Net's encoder but the finest; the forward pass stays as it is."""
    blocks, widths = Blocks(settings), settings.features[_FIRST:-1]
    if not widths:
        raise ConfigError(
            "There is no level of the encoder to supervise.",
            code="no-encoder-level",
            where="method.encoder_supervision",
            why=f"the network has {len(settings.features)} levels, and neither the finest nor the deepest counts",
            fix="Add a level to network.features, or set method.encoder_supervision: 0.",
        )
    heads = nn.ModuleList(blocks.output(width, len(network.channels)) for width in widths)
    finish(heads, settings)
    for head in heads:
        begin_rare(head, settings, background=network.activation == "softmax")
    setattr(network, HEADS, heads)


def encoder_logits(network: UNet, features: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The logits of every head at full resolution, from `UNet.logits_and_features`."""
    full, mode = features[0].shape[2:], "bilinear" if features[0].ndim == 4 else "trilinear"
    for head, level in zip(getattr(network, HEADS), features[_FIRST:], strict=False):
        yield F.interpolate(head(level), size=full, mode=mode, align_corners=False)
