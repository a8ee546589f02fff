"""Make a network twice differentiable: slower, same numbers."""

from __future__ import annotations

import torch
from torch import nn

_InstanceNorm = nn.modules.instancenorm._InstanceNorm
_PLAIN = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


class PlainInstanceNorm(_InstanceNorm):
    """Instance normalisation of images of any dimension by torch's own function, which is twice differentiable."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[B, C, *S] → [B, C, *S]."""
        return self._apply_instance_norm(input)


def use_plain_norms(network: nn.Module) -> None:
    """Replace normalisations that use our own kernels, which have first derivatives only. The weights stay."""
    for parent in list(network.modules()):
        for name, child in parent.named_children():
            if isinstance(child, _InstanceNorm) and type(child) not in (*_PLAIN, PlainInstanceNorm):
                plain = PlainInstanceNorm(child.num_features, child.eps, child.momentum or 0.0, affine=child.affine)
                plain.weight, plain.bias = child.weight, child.bias
                setattr(parent, name, plain.train(child.training))
