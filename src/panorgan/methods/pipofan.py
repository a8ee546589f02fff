"""PIPO-FAN — a pyramid of images in, and one of outputs out, weighed by attention. arXiv:2001.00208

The image enters the network at every scale. What is merged at a scale, features from the finer one and the smaller
image, has passed equally many blocks; so have the outputs, which all come from features of the same width. A small
attention, the same for all scales, gives each output a number; their softmax weighs the outputs, whose sum is the
prediction. The loss is the target-adaptive one of `tal`, of the prediction and of every output alone.

- The released network trains outputs and attention one after the other; here they are trained together.
- The attention reads an output as it is: normalised first, as in the released code, all scales would look alike to
  instance normalisation.
- Levels are those of the experiment's U-Net, and the decoder is its own; the published one interpolates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import nn

from panorgan.anatomy import Vocabulary
from panorgan.methods.base import Federation, SiteRule
from panorgan.methods.presets import MarginalConfig, SoftmaxChannels
from panorgan.methods.registry import register
from panorgan.networks import SegmentationNetwork, UNetSettings
from panorgan.networks.blocks import Blocks, begin_rare, decode_levels, finish
from panorgan.networks.head_stack import SLOPE
from panorgan.networks.upsampling import upsample_channels
from panorgan.preparation.batch import Batch


class PIPOFANConfig(MarginalConfig):
    """PIPO-FAN's setting."""

    scales_weight: float = Field(1.0, ge=0, description="weight of the mean loss of the single scales' outputs")


@register("pipofan", config=PIPOFANConfig)
class PIPOFAN(SoftmaxChannels):
    """FedAvg of a pyramid network on the target-adaptive loss, plain mean."""

    group: ClassVar[str] = "networks"
    paper: ClassVar[str] = "arXiv:2001.00208"
    equations: ClassVar[Mapping[str, str]] = {
        "equal convolutional depth": "`PyramidNetwork.scales`",
        "adaptive weighting layer": "`PyramidNetwork.fuse`",
        "section III-C, target-adaptive loss": "`Site.loss`",
    }

    class Site(SiteRule):
        """The target-adaptive loss of the prediction, and of every scale."""

        config: PIPOFANConfig
        model: PyramidNetwork

        def loss(self, batch: Batch) -> torch.Tensor:
            """Both, as a mean over samples."""
            fused, *scales = (
                self.supervised(logits, self.model.vocabulary, batch) for logits in self.model.with_scales(batch.image)
            )
            return (fused + self.config.scales_weight * torch.stack(scales).mean(0)).mean()

    def build_network(
        self, settings: UNetSettings, federation: Federation, site: str | None = None
    ) -> SegmentationNetwork:
        """The same network everywhere."""
        return PyramidNetwork(federation.vocabulary, settings)


class PyramidNetwork(SegmentationNetwork):
    """A U-Net with an image and an output at every level; attention weighs the outputs."""

    def __init__(self, vocabulary: Vocabulary, settings: UNetSettings) -> None:
        super().__init__(vocabulary, "softmax")
        self.divisor, self.strides = settings.divisor, settings.level_strides[1:]
        self.dimensions, widths = settings.dimensions, settings.features
        blocks, deeper = Blocks(settings), range(1, len(settings.features))
        self.stem = blocks.block(0, settings.input_channels, widths[0])
        self.images = nn.ModuleList(
            nn.Sequential(*(blocks.block(level, widths[i - 1], widths[i]) for i in range(1, level))) for level in deeper
        )
        self.down = nn.ModuleList(blocks.block(level, 2 * widths[level - 1], widths[level]) for level in deeper)
        self.decoder = blocks.decoder()
        self.narrow = nn.ModuleList(
            nn.Sequential(*(blocks.block(level, widths[i], widths[i - 1]) for i in range(level, 0, -1)))
            for level in (0, *deeper)
        )
        self.outputs = nn.ModuleList(blocks.output(widths[0], len(self.channels)) for _ in widths)
        convolution = nn.Conv3d if settings.dimensions == 3 else nn.Conv2d
        self.attention = nn.Sequential(
            nn.LeakyReLU(SLOPE),
            blocks.output(len(self.channels), 1),
            nn.LeakyReLU(SLOPE),
            convolution(1, 1, 3, padding=1),
        )
        finish(self, settings)
        for output in self.outputs:
            begin_rare(output, settings, background=True)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """[B, C, *S] → logits [B, channels, *S]."""
        (logits,) = self.run_pass("logits", lambda image: (self.fuse(self.scales(image)),), image)
        return logits

    def with_scales(self, image: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The same, and behind it the logits of every scale alone."""

        def compute(image: torch.Tensor) -> tuple[torch.Tensor, ...]:
            scales = self.scales(image)
            return (self.fuse(scales), *scales)

        return self.run_pass("scales", compute, image)

    def scales(self, image: torch.Tensor) -> list[torch.Tensor]:
        """The logits of every scale at the image's resolution, [B, channels, *S] each, the finest first."""
        mean, most = (F.avg_pool3d, F.max_pool3d) if self.dimensions == 3 else (F.avg_pool2d, F.max_pool2d)
        smaller, levels = image, [self.stem(image)]
        for stride, own, down in zip(self.strides, self.images, self.down, strict=True):
            smaller = mean(smaller, stride)
            levels.append(down(torch.cat([most(levels[-1], stride), own(self.stem(smaller))], dim=1)))
        decoded = reversed(decode_levels(self.decoder, levels))
        ways = zip(decoded, self.narrow, self.outputs, strict=True)
        return [upsample_channels(output(narrow(level)), image.shape[2:]) for level, narrow, output in ways]

    def fuse(self, scales: list[torch.Tensor]) -> torch.Tensor:
        """The outputs' sum, weighed by the softmax over scales of each one's mean and largest attention."""
        maps = [self.attention(logits).flatten(2) for logits in scales]
        weights = torch.cat([found.mean(2) + found.amax(2) for found in maps], dim=1).softmax(dim=1)
        together = torch.stack(scales, dim=1)
        return (weights.view(*weights.shape, *(1,) * (together.ndim - 2)) * together).sum(1)
