"""FedAlign — the deepest block of a site's network behaves like a narrower copy of itself. arXiv:2111.14213

The block runs a second time with the first ω_S of its channels, on the features that entered it. Both passes have a
transmitting matrix K = F_in·F_outᵀ/voxels between what enters and what leaves; its largest singular value σ stands for
the block's Lipschitz constant. μ·(σ_S − σ_T)² is added to the loss, σ_T of the full block being fixed, so that only the
block's own weights learn from it. Nothing more is sent than in FedAvg.

- The paper's last block is here the bottleneck: the deepest and widest, as in a ResNet, and cheap to run again.
- `relative: true` divides by the size of the difference, as the released code does: there the published μ is a share of
  the supervised loss. As printed, the difference outweighs that loss hundreds of times in a network of usual width.
- What enters is averaged down to the resolution of what leaves. The singular vectors come from the power iteration and
  are fixed; the gradient is then that of σ itself.
- The narrow pass leaves running statistics of batch normalisation alone. With group normalisation, its width is rounded
  up to whole groups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from panorgan.methods.base import Method, ServerRule, SiteRule, published
from panorgan.methods.fedavg import FedAvgConfig
from panorgan.methods.registry import register
from panorgan.networks import UNet
from panorgan.networks.settings import OrganParts
from panorgan.preparation.batch import Batch
from panorgan.settings import Settings


class AlignmentSettings(Settings):
    """The settings of FedAlign."""

    mu: float = published(0.45, "0.45", "weight μ of the difference between the two Lipschitz constants", ge=0)
    width: float = published(0.25, "0.25", "ω_S: share of the block's channels that the narrow copy has", gt=0, lt=1)
    relative: bool = published(True, "not printed; so released", "μ as a share of the supervised loss, in every step")
    iterations: int = published(10, "10 (released code)", "steps of the power iteration", ge=1)


class FedAlignConfig(AlignmentSettings, FedAvgConfig):
    """The settings of FedAvg and of the alignment."""


class AlignedSite(SiteRule):
    """Adds μ·(σ_S − σ_T)². Teachers are trained without."""

    config: FedAlignConfig
    model: UNet

    def loss(self, batch: Batch) -> torch.Tensor:
        """The loss of the rule it extends, plus the difference."""
        loss = super().loss(batch)
        if self.config.mu == 0 or not self.in_training:  # keeps μ = 0 equal to FedAvg to the last bit
            return loss
        difference = self.difference(batch.image)
        scale = loss.detach() / difference.detach().clamp(min=1e-12) if self.config.relative else 1.0
        return loss + self.config.mu * scale * difference

    def difference(self, image: torch.Tensor) -> torch.Tensor:
        """(σ_S − σ_T)², the mean over samples."""
        block = self.model.bottleneck
        with torch.no_grad():
            entering, leaving = self.model.around_bottleneck(image)
            full = spectral_norm(transmitting_matrix(entering, leaving), self.config.iterations)
        weights = narrowed(block, self.config.width)
        entering = entering[:, : narrow_width(block, entering.shape[1], self.config.width)]
        narrow = transmitting_matrix(entering, functional_call(block, weights, (entering,)))
        return F.mse_loss(spectral_norm(narrow, self.config.iterations), full)


def narrow_width(block: nn.Module, channels: int, share: float) -> int:
    """How many channels of so many remain."""
    groups = math.lcm(*(module.num_groups for module in block.modules() if isinstance(module, nn.GroupNorm)))
    return min(channels, math.ceil(share * channels / groups) * groups)


def narrowed(block: nn.Module, share: float) -> dict[str, torch.Tensor]:
    """The first channels of everything in a block: weights with their gradients, copies of running statistics."""

    def first(value: torch.Tensor) -> torch.Tensor:
        channels = [slice(narrow_width(block, size, share)) for size in value.shape[:2]]  # [out, in, *kernel] or [out]
        return value[tuple(channels)]

    statistics = {name: first(value).clone() for name, value in block.named_buffers()}
    return {**{name: first(value) for name, value in block.named_parameters()}, **statistics}


def transmitting_matrix(entering: torch.Tensor, leaving: torch.Tensor) -> torch.Tensor:
    """[B, C, *S] and [B, D, *T], T no finer than S → [B, C, D]: how channels go together, the mean over voxels."""
    pool = nn.AdaptiveAvgPool3d if leaving.dim() == 5 else nn.AdaptiveAvgPool2d
    with _in_float32(entering):
        before: torch.Tensor = pool(tuple(leaving.shape[2:]))(entering.float()).flatten(2)
        after = leaving.float().flatten(2)
        return before @ after.transpose(1, 2) / after.shape[2]


def spectral_norm(matrices: torch.Tensor, iterations: int) -> torch.Tensor:
    """The largest singular value [B] of matrices [B, C, D], by power iteration from equal weights."""
    with _in_float32(matrices):
        with torch.no_grad():
            left = matrices.new_ones(*matrices.shape[:2], 1)
            for _ in range(iterations):
                left = F.normalize(matrices @ (matrices.transpose(1, 2) @ left), dim=1)
        norms: torch.Tensor = torch.linalg.vector_norm(matrices.transpose(1, 2) @ left, dim=(1, 2))
        return norms


def _in_float32(tensor: torch.Tensor) -> torch.autocast:
    """Products as they are written: autocast would keep eight bits, and the two constants differ by little."""
    return torch.autocast(tensor.device.type, enabled=False)


@register("fedalign", config=FedAlignConfig)
class FedAlign(Method):
    """FedAvg with the Lipschitz constant of the deepest block held to that of a narrower copy."""

    paper: ClassVar[str] = "arXiv:2111.14213"
    equations: ClassVar[Mapping[str, str]] = {
        "transmitting matrix": "`transmitting_matrix`",
        "Lipschitz constant": "`spectral_norm`",
        "L_Lip": "`Site.difference`",
        "the sum": "`Site.loss`: L + μ·L_Lip",
    }
    organs: ClassVar[OrganParts | None] = "channels"

    class Site(AlignedSite):
        """Local steps on the partial loss and the difference."""

    class Server(ServerRule):
        """Inherited: the weighted mean of FedAvg."""
