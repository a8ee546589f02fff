"""A network as other software runs it: images in, probabilities out, by plain operations only."""

from __future__ import annotations

import copy

import torch
from torch import nn

from panorgan.networks import SegmentationNetwork
from panorgan.networks.second_derivatives import use_plain_norms


class PlainNetwork(nn.Module):
    """Images [B, C, *S] → probabilities [B, channels, *S]: a copy on the CPU, with the activation inside.

    The activation belongs to the network here because windows are averaged as probabilities.
    """

    def __init__(self, network: SegmentationNetwork) -> None:
        super().__init__()
        self.network = copy.deepcopy(network).cpu().eval()
        self.network.graphs = None
        use_plain_norms(self.network)
        for parameter in self.network.parameters():
            parameter.requires_grad_(False)
        self.softmax = network.activation == "softmax"

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """[B, C, *S] → [B, channels, *S]."""
        logits = self.network(image).float()
        return logits.softmax(1) if self.softmax else logits.sigmoid()
