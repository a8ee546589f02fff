"""Transposed convolutions whose kernel is as large as their stride, as a matrix product on a GPU.

Every coarse voxel then makes a block of fine ones by itself, so that the layer is one product per voxel and a change of
order. cuDNN has no such kernel: for the thick slices' kernel of 2 × 2 × 1 it takes one meant for grouped convolutions,
and a third of the GPU's time in training goes there.
"""

from __future__ import annotations

import torch
from torch import nn

_TRANSPOSED = (nn.ConvTranspose2d, nn.ConvTranspose3d)


class Upsampling2d(nn.ConvTranspose2d):
    """`nn.ConvTranspose2d` with the same keys, and the same numbers up to rounding."""

    def forward(self, input: torch.Tensor, output_size: list[int] | None = None) -> torch.Tensor:
        """[B, Cin, *S] → [B, Cout, *(S · stride)]."""
        return upsample(input, self.weight, self.bias) if input.is_cuda else super().forward(input, output_size)


class Upsampling3d(nn.ConvTranspose3d):
    """`nn.ConvTranspose3d` likewise."""

    def forward(self, input: torch.Tensor, output_size: list[int] | None = None) -> torch.Tensor:
        """[B, Cin, *S] → [B, Cout, *(S · stride)]."""
        return upsample(input, self.weight, self.bias) if input.is_cuda else super().forward(input, output_size)


def upsample(image: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Transposed convolution of `image` [B, Cin, *S] with `weight` [Cin, Cout, *K] and stride K."""
    (outputs, *kernel), shape = weight.shape[1:], image.shape[2:]
    axes = len(shape)
    blocks = torch.matmul(weight.flatten(1).T, image.flatten(2)).view(len(image), outputs, *kernel, *shape)
    if bias is not None:
        blocks = blocks + bias.view(-1, *(1,) * (2 * axes))
    # [B, C, K1, K2, …, S1, S2, …] → [B, C, S1, K1, S2, K2, …]
    order = [axis for pair in zip(range(2 + axes, 2 + 2 * axes), range(2, 2 + axes), strict=True) for axis in pair]
    fine = blocks.permute(0, 1, *order)
    return fine.reshape(len(image), outputs, *(k * n for k, n in zip(kernel, shape, strict=True)))


def use_products(network: nn.Module) -> None:
    """Let every transposed convolution that qualifies be computed so."""
    for module in network.modules():
        if isinstance(module, _TRANSPOSED) and _is_disjoint(module):
            module.__class__ = Upsampling2d if isinstance(module, nn.ConvTranspose2d) else Upsampling3d


def _is_disjoint(layer: nn.ConvTranspose2d | nn.ConvTranspose3d) -> bool:
    """Whether no two coarse voxels reach the same fine one, and nothing is left out."""
    plain = layer.groups == 1 and all(value == 0 for value in (*layer.padding, *layer.output_padding))
    return plain and layer.kernel_size == layer.stride and all(value == 1 for value in layer.dilation)
