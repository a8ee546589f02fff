"""The building blocks of all U-Nets here, built from MONAI's by the network's settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from monai.networks.blocks.convolutions import Convolution
from monai.networks.blocks.dynunet_block import UnetBasicBlock, UnetOutBlock, UnetResBlock, UnetUpBlock, get_padding
from torch import nn
from torch.nn.utils import parametrize

from panorgan.networks.instance_norm import use_whole_gpu
from panorgan.networks.settings import UNetSettings

_CONVOLUTIONS = (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_SLOPE = 0.01

Level = Callable[..., torch.Tensor]


class Blocks:
    """Builds the levels of a U-Net; level 0 has the resolution of the image, every further level is coarser."""

    def __init__(self, settings: UNetSettings) -> None:
        self.settings = settings
        self.depth = len(settings.features)
        self.norm = _norm(settings)
        self.dropout = settings.dropout or None

    def encoder(self) -> nn.ModuleList:
        """All levels but the deepest."""
        return nn.ModuleList(self._down(level) for level in range(self.depth - 1))

    def bottleneck(self) -> nn.Module:
        """The deepest level."""
        return self._down(self.depth - 1)

    def decoder(self, whole: bool = True) -> nn.ModuleList:
        """The decoder levels; with `whole=False` without the last convolution, which the caller adds."""
        levels: list[nn.Module] = [self._up(level) for level in reversed(range(self.depth - 1))]
        if not whole:
            levels[-1] = _FirstHalf(levels[-1])
        return nn.ModuleList(levels)

    def last_convolution(self) -> nn.Module:
        """What `decoder(whole=False)` leaves out: a convolution at full resolution, normalised."""
        return self.convolution(0, self.settings.features[0], self.settings.features[0])

    def convolution(self, level: int, inputs: int, outputs: int, finer: bool = False) -> nn.Module:
        """One convolution with the kernel of a level, normalised, and a leaky ReLU.

        `finer`: a transposed one, to the resolution of the level above.
        """
        s = self.settings
        kernel, stride = (s.level_strides[level],) * 2 if finer else (s.level_kernels[level], 1)
        return Convolution(
            s.dimensions,
            inputs,
            outputs,
            strides=stride,
            kernel_size=kernel,
            padding=0 if finer else get_padding(kernel, 1),
            is_transposed=finer,
            bias=False,
            adn_ordering="DNA",  # dropout before normalisation, as in the blocks that it was cut from
            act=("leakyrelu", {"inplace": True, "negative_slope": _SLOPE}),
            norm=self.norm,
            dropout=self.dropout,
        )

    def block(self, level: int, inputs: int, outputs: int, stride: tuple[int, ...] | int = 1) -> nn.Module:
        """Two convolutions with the kernel of a level."""
        s = self.settings
        block = UnetResBlock if s.residual else UnetBasicBlock
        kernel = s.level_kernels[level]
        return block(s.dimensions, inputs, outputs, kernel, stride, norm_name=self.norm, dropout=self.dropout)

    def output(self, inputs: int, outputs: int) -> nn.Module:
        """A 1×1 convolution."""
        return UnetOutBlock(self.settings.dimensions, inputs, outputs)

    def _down(self, level: int) -> nn.Module:
        s = self.settings
        inputs = s.input_channels if level == 0 else s.features[level - 1]
        return self.block(level, inputs, s.features[level], s.level_strides[level])

    def _up(self, level: int) -> nn.Module:
        s = self.settings
        wider = s.level_strides[level + 1]
        inputs, outputs, kernel = s.features[level + 1], s.features[level], s.level_kernels[level]
        return UnetUpBlock(
            s.dimensions, inputs, outputs, kernel, wider, wider, norm_name=self.norm, dropout=self.dropout
        )


class _FirstHalf(nn.Module):
    """An up block without its second convolution."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.transp_conv = block.transp_conv
        inner = block.conv_block
        self.conv1, self.norm1, self.lrelu = inner.conv1, inner.norm1, inner.lrelu  # type: ignore[union-attr]

    def forward(self, features: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        """Coarse features and the skip connection → features at the skip's resolution."""
        both = torch.cat((self.transp_conv(features), skip), dim=1)  # type: ignore[operator]
        out: torch.Tensor = self.lrelu(self.norm1(self.conv1(both)))  # type: ignore[operator]
        return out


def encode(encoder: Iterable[Level], bottleneck: Level, image: torch.Tensor) -> list[torch.Tensor]:
    """Features of every level, the deepest last."""
    levels = [image]
    for level in (*encoder, bottleneck):
        levels.append(level(levels[-1]))
    return levels[1:]


def decode(decoder: Iterable[Level], levels: list[torch.Tensor]) -> torch.Tensor:
    """From the features of every level to those at full resolution."""
    return decode_levels(decoder, levels)[-1]


def decode_levels(decoder: Iterable[Level], levels: list[torch.Tensor]) -> list[torch.Tensor]:
    """The features of `decode` at every level, from the deepest, which it leaves as it is, to full resolution."""
    decoded = [levels[-1]]
    for level, skip in zip(decoder, reversed(levels[:-1]), strict=True):
        decoded.append(level(decoded[-1], skip))
    return decoded


def finish(network: nn.Module, settings: UNetSettings) -> None:
    """Initialise the weights, add weight standardisation if requested, and use normalisation that is fast on a GPU."""
    network.apply(_initialise)
    use_whole_gpu(network)
    if settings.weight_standardisation:
        for module in list(network.modules()):
            # No normalisation follows transposed and output convolutions, so none would remove the scale again.
            if isinstance(module, nn.Conv2d | nn.Conv3d) and max(module.kernel_size) > 1:
                parametrize.register_parametrization(module, "weight", _Standardised())


def begin_rare(part: nn.Module, settings: UNetSettings, background: bool = False) -> None:
    """Initialise the last convolution of `part` so that every organ starts with probability `settings.organ_prior`.

    A site's loss cannot distinguish background from an organ that the site does not label. Starting from equal
    probabilities, such an organ might take over the background by chance. `background`: channel 0 is the background.
    """
    bias = [module for module in part.modules() if isinstance(module, _CONVOLUTIONS)][-1].bias
    if settings.organ_prior is None or bias is None or bias.is_meta:
        return
    log_odds = math.log(settings.organ_prior) - math.log(1 - settings.organ_prior)
    with torch.no_grad():
        if background:
            bias[0] = -log_odds
        else:
            bias.fill_(log_odds)


class _Standardised(nn.Module):
    """Weights with mean 0 and variance 1 over the inputs of each output channel (arXiv:1903.10520)."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """[out, in, *kernel] → the same, standardised."""
        flat = weight.flatten(1)
        centred = flat - flat.mean(1, keepdim=True)
        return (centred / (centred.std(1, keepdim=True) + 1e-5)).view_as(weight)


def _norm(settings: UNetSettings) -> tuple[str, dict[str, object]]:
    if settings.norm == "group":
        return "group", {"num_groups": settings.groups, "affine": True}
    return settings.norm, {"affine": True}


def _initialise(module: nn.Module) -> None:
    """Kaiming for the leaky ReLUs inside; zero biases."""
    if isinstance(module, _CONVOLUTIONS) and not module.weight.is_meta:  # meta tensors have no values to draw
        nn.init.kaiming_normal_(module.weight, a=_SLOPE)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
