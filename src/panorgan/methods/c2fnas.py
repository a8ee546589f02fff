"""C2FNAS — FedAvg of a network that a search found: where it has cells, and whether they are 2D, 3D or pseudo-3D.

Yu et al., "C2FNAS: Coarse-to-Fine Neural Architecture Search for 3D Medical Image Segmentation" (arXiv:1912.09628). The
coarse search chose the topology, twelve cells on four resolutions; the fine search chose an operation for each: 2D
(3×3×1), 3D (3×3×3) or P3D (3×3×1, then 1×1×3). Nothing is searched here: the network is the one that was found. Labels
are partial, as elsewhere; the paper knows one data set.

- The paper shows the network in a figure alone. `ENCODER` and `DECODER` follow a public reading of it, which may
  not be exact: with features 32 to 512 it has 7.66 M parameters in 2D, where FedIOD's Table VII counts 7.88 M.
- Widths and strides are those of the experiment's `network`. The image is halved once before the first cell, so that
  cells work on the levels below the first one.
- A network with more levels repeats the cells of the deepest published one; one with fewer leaves the deepest out.
- A slice has no third axis: in 2D all three operations are a 3×3 convolution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from monai.networks.layers.utils import get_norm_layer
from torch import nn

from panorgan.anatomy import Vocabulary
from panorgan.methods.base import Federation, Method, SiteRule
from panorgan.methods.fedavg import FedAvgConfig
from panorgan.methods.registry import register
from panorgan.networks import SegmentationNetwork, UNetSettings
from panorgan.networks.blocks import Blocks, begin_rare, finish
from panorgan.networks.settings import OrganParts
from panorgan.networks.upsampling import upsample_channels

Operation = Literal["2D", "3D", "P3D"]
Other = Literal["", "coarse", "earlier"]
"""What a cell reads besides the cell before it: nothing, the next coarser resolution, or what that cell read."""
Cells = tuple[tuple[Operation, Other], ...]

ENCODER: tuple[Cells, ...] = (
    (("2D", ""), ("P3D", "earlier")),
    (("3D", ""), ("3D", "")),
    (("3D", ""),),
    (("2D", ""),),
)
"""The cells of each resolution on the way down, the finest first."""
DECODER: tuple[Cells, ...] = (
    (("3D", "coarse"), ("2D", ""), ("3D", "earlier")),
    (("P3D", "coarse"),),
    (("3D", "coarse"), ("3D", "")),
)
"""The same on the way up. The network's output reads the last two cells of the finest."""


class C2FNASConfig(FedAvgConfig):
    """The settings of FedAvg."""


@register("c2fnas", config=C2FNASConfig)
class C2FNAS(Method):
    """FedAvg of a searched network."""

    group: ClassVar[str] = "networks"
    paper: ClassVar[str] = "arXiv:1912.09628"
    organs: ClassVar[OrganParts] = "channels"
    equations: ClassVar[Mapping[str, str]] = {"coarse stage": "`SearchedNetwork`", "fine stage": "`ENCODER`, `DECODER`"}

    class Site(SiteRule):
        """Inherited: the partial loss."""

    def build_network(
        self, settings: UNetSettings, federation: Federation, site: str | None = None
    ) -> SegmentationNetwork:
        """The same network everywhere."""
        return SearchedNetwork(federation.vocabulary, settings)


class Layers:
    """Convolutions without biases, and normalisation behind a ReLU and a convolution."""

    def __init__(self, settings: UNetSettings) -> None:
        self.dimensions, self.norm = settings.dimensions, Blocks(settings).norm
        self.kind = nn.Conv3d if settings.dimensions == 3 else nn.Conv2d

    def convolution(
        self, inputs: int, outputs: int, kernel: Sequence[int], stride: Sequence[int] | int = 1
    ) -> nn.Module:
        """Of the network's dimensions; a kernel of (3, 3, 1) is one of (3, 3) in 2D."""
        sizes = tuple(kernel)[: self.dimensions]
        padding = tuple(size // 2 for size in sizes)
        return self.kind(inputs, outputs, sizes, stride, padding, bias=False)  # type: ignore[arg-type]

    def normalisation(self, width: int) -> nn.Module:
        """As the experiment's `network` says."""
        layer: nn.Module = get_norm_layer(self.norm, self.dimensions, width)
        return layer

    def block(self, *convolutions: nn.Module, width: int) -> nn.Sequential:
        """ReLU, convolutions, normalisation."""
        return nn.Sequential(nn.ReLU(), *convolutions, self.normalisation(width))

    def operation(self, kind: Operation, width: int) -> list[nn.Module]:
        """The convolutions of a cell."""
        kernels = {"2D": [(3, 3, 1)], "3D": [(3, 3, 3)], "P3D": [(3, 3, 1), (1, 1, 3)]}[kind]
        return [self.convolution(width, width, kernel) for kernel in kernels if kernel[: self.dimensions] != (1, 1)]


class Cell(nn.Module):
    """One or two inputs, each through a 1×1 convolution and added; the operation; another 1×1 convolution."""

    def __init__(self, layers: Layers, kind: Operation, width: int, other: int = 0, coarse: bool = False) -> None:
        super().__init__()
        self.first, self.last = (layers.convolution(width, width, (1, 1, 1)) for _ in range(2))
        self.operation = layers.block(*layers.operation(kind, width), width=width)
        self.second: nn.Module | None = None
        if other:
            second = layers.convolution(other, width, (1, 1, 1))
            self.second = layers.block(second, width=width) if coarse else second

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        """[B, width, *S], and perhaps [B, other, *grid] → [B, width, *S]."""
        x = self.first(x)
        if self.second is not None and other is not None:
            x = x + self.second(upsample_channels(other, x.shape[2:]))
        out: torch.Tensor = self.last(self.operation(x))
        return out


class Resolution(nn.Module):
    """The cells of one resolution, one after the other."""

    def __init__(self, layers: Layers, cells: Cells, width: int, coarser: int = 0) -> None:
        super().__init__()
        widths = {"": 0, "coarse": coarser, "earlier": width}
        self.others = [other for _, other in cells]
        self.cells = nn.ModuleList(Cell(layers, kind, width, widths[other], other == "coarse") for kind, other in cells)

    def forward(self, x: torch.Tensor, coarse: torch.Tensor | None = None) -> list[torch.Tensor]:
        """What every cell gives."""
        made = [x]
        for cell, other in zip(self.cells, self.others, strict=True):
            earlier = made[-2] if other == "earlier" else None
            made.append(cell(made[-1], coarse if other == "coarse" else earlier))
        return made[1:]


class SearchedNetwork(SegmentationNetwork):
    """Twelve cells on four resolutions, as C2FNAS found them."""

    def __init__(self, vocabulary: Vocabulary, settings: UNetSettings) -> None:
        super().__init__(vocabulary, settings.activation)
        self.divisor = settings.divisor
        top, *widths = settings.features
        first, *strides = settings.level_strides[1:]
        layers, three = Layers(settings), (3, 3, 3)
        self.stem = nn.Sequential(
            layers.convolution(settings.input_channels, top, three),
            layers.normalisation(top),
            nn.ReLU(),
            layers.convolution(top, widths[0], three, first),
            layers.normalisation(widths[0]),
        )
        self.down = nn.ModuleList(
            layers.block(layers.convolution(fine, coarse, three, stride), width=coarse)
            for fine, coarse, stride in zip(widths[:-1], widths[1:], strides, strict=True)
        )
        self.encoder = nn.ModuleList(
            Resolution(layers, ENCODER[min(level, len(ENCODER) - 1)], width) for level, width in enumerate(widths)
        )
        self.decoder = nn.ModuleList(
            Resolution(layers, DECODER[min(level, len(DECODER) - 1)], widths[level], widths[level + 1])
            for level in range(len(widths) - 1)
        )
        self.together = layers.block(layers.convolution(2 * widths[0], widths[0], three), width=widths[0])
        self.finest = nn.Sequential(layers.convolution(widths[0], top, three), layers.normalisation(top), nn.ReLU())
        # Named as the U-Net's last layer: the server averages its rows by organ.
        self.head = Blocks(settings).output(top, len(self.channels))
        finish(self, settings)
        begin_rare(self.head, settings, background=settings.activation == "softmax")

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """[B, C, *S] → logits [B, channels, *S]."""
        (logits,) = self.run_pass("logits", self._logits, image)
        return logits

    def _logits(self, image: torch.Tensor) -> tuple[torch.Tensor]:
        made = [self.encoder[0](self.stem(image))]
        for down, level in zip(self.down, self.encoder[1:], strict=True):
            made.append(level(down(made[-1][-1])))
        last = made.pop()
        for level, skip in zip(reversed(self.decoder), reversed(made), strict=True):
            last = level(skip[-1], last[-1])
        fused = F.relu(self.together(torch.cat(last[-2:], dim=1)))
        return (self.head(self.finest(upsample_channels(fused, image.shape[2:]))),)
