"""DoDNet — one network for all organs, whose last layers are generated for every scan and organ. arXiv:2011.10217

A controller reads the bottleneck's features, averaged over space, and the code of an organ (one-hot), and gives the 162
weights of a head of three 1×1 convolutions 8 → 8 → 8 → 2 (organ and tumour). Published for pooled data with partial
labels; here in a federation: a site asks for its own organs alone, and everything is averaged over all sites.

- Encoder and decoder are those of the experiment's U-Net, and the head has their leaky ReLUs; in the paper they are a
  residual network and ReLUs.
- A code stands for an organ, in the paper for one of the pooled data sets: a site may have several organs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from panorgan.anatomy import Vocabulary
from panorgan.data.labels import Activation
from panorgan.methods.base import Federation, Method, MethodConfig, SiteRule
from panorgan.methods.registry import register
from panorgan.networks import SegmentationNetwork, UNetSettings
from panorgan.networks.base import SelectiveNetwork
from panorgan.networks.blocks import Blocks, decode, encode, finish
from panorgan.networks.head_stack import SLOPE
from panorgan.networks.organ_parts import HEAD_WIDTH, OUTPUTS, group_of, groups_of, stack_outputs
from panorgan.networks.settings import OrganParts

LAYERS = ((HEAD_WIDTH, HEAD_WIDTH), (HEAD_WIDTH, HEAD_WIDTH), (HEAD_WIDTH, OUTPUTS))
"""Inputs and outputs of the head's convolutions."""
HEAD_WEIGHTS = sum(inputs * outputs + outputs for inputs, outputs in LAYERS)


class DoDNetConfig(MethodConfig):
    """DoDNet has no settings of its own."""


@register("dodnet", config=DoDNetConfig)
class DoDNet(Method):
    """FedAvg of a network with dynamic heads."""

    group: ClassVar[str] = "networks"
    paper: ClassVar[str] = "arXiv:2011.10217"
    organs: ClassVar[OrganParts] = "channels"
    activation: ClassVar[Activation] = "sigmoid"
    equations: ClassVar[Mapping[str, str]] = {
        "eq. 2, controller": "`DynamicHeads.head_weights`",
        "eq. 3, dynamic head": "`DynamicHeads.run_head`",
    }

    class Site(SiteRule):
        """Inherited: the partial loss on the organs that the site annotates."""

    def build_network(
        self, settings: UNetSettings, federation: Federation, site: str | None = None
    ) -> SegmentationNetwork:
        """The same network everywhere."""
        return DynamicHeads(federation.vocabulary, settings, self.network_settings(settings).activation)


class DynamicHeads(SelectiveNetwork):
    """A U-Net to eight channels, a controller, and a head that has no weights of its own.

    A sigmoid per organ; or one softmax over all of them and a background of logit 0.
    """

    def __init__(self, vocabulary: Vocabulary, settings: UNetSettings, activation: Activation = "sigmoid") -> None:
        super().__init__(vocabulary, activation)
        self.divisor = settings.divisor
        self.groups = groups_of(vocabulary)
        blocks = Blocks(settings)
        self.encoder, self.bottleneck, self.decoder = blocks.encoder(), blocks.bottleneck(), blocks.decoder()
        self.embedding = blocks.output(settings.features[0], HEAD_WIDTH)
        self.controller = nn.Linear(settings.features[-1] + len(self.groups), HEAD_WEIGHTS)
        finish(self, settings)
        nn.init.zeros_(self.controller.bias)
        if settings.organ_prior is not None and not self.controller.bias.is_meta:
            with torch.no_grad():  # the head's last biases: every organ begins at the prior
                self.controller.bias[-OUTPUTS:] = math.log(settings.organ_prior / (1 - settings.organ_prior))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """[B, C, *S] → logits [B, channels, *S]."""
        logits = super().forward(image)
        return logits if self.activation == "sigmoid" else F.pad(logits, (*(0, 0) * (logits.ndim - 2), 1, 0))

    def channels_for(self, image: torch.Tensor, organs: Collection[str]) -> tuple[torch.Tensor, Vocabulary]:
        """A softmax needs all organs."""
        return super().channels_for(image, organs) if self.activation == "sigmoid" else (self(image), self.vocabulary)

    def _logits(self, image: torch.Tensor, organs: tuple[str, ...]) -> torch.Tensor:
        (logits,) = self.run_pass(organs, lambda image: (self._outputs(image, organs),), image)
        return logits

    def _outputs(self, image: torch.Tensor, organs: tuple[str, ...]) -> torch.Tensor:
        levels = encode(self.encoder, self.bottleneck, image)
        features = self.embedding(decode(self.decoder, levels))
        described = levels[-1].flatten(2).mean(2)
        return stack_outputs(
            [group_of(organ) for organ in organs],
            lambda group: self.run_head(features, self.head_weights(described, group)),
        )

    def head_weights(self, described: torch.Tensor, group: str) -> torch.Tensor:
        """The weights of a group's head for each sample, [B, 162], from the bottleneck's mean features [B, F]."""
        code = described.new_zeros(described.shape[0], len(self.groups))
        code[:, self.groups.index(group)] = 1
        weights: torch.Tensor = self.controller(torch.cat([described, code], dim=1))
        return weights

    @staticmethod
    def run_head(features: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Logits [B, 2, *S] from features [B, 8, *S] with each sample's own weights [B, 162]."""
        x, begin = features.flatten(2), 0
        for number, (inputs, outputs) in enumerate(LAYERS):
            matrix = weights[:, begin : begin + inputs * outputs].view(-1, outputs, inputs)
            begin += inputs * outputs
            bias = weights[:, begin : begin + outputs].unsqueeze(2)
            begin += outputs
            x = torch.baddbmm(bias.to(x.dtype), matrix.to(x.dtype), x)
            if number < len(LAYERS) - 1:
                x = F.leaky_relu(x, SLOPE)
        logits: torch.Tensor = x.unflatten(2, features.shape[2:])
        return logits
