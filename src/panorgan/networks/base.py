"""The base class of networks: named channels, their activation, and named parts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Hashable, Mapping, Sequence

import torch
from torch import nn

from panorgan.anatomy import Vocabulary
from panorgan.data.labels import Activation
from panorgan.networks.cuda_graphs import Compute, GraphCache

BACKGROUND = "background"

_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)


def is_recording() -> bool:
    """Whether a pass is being recorded to be run elsewhere: plain operations, no caches and no kernels of our own."""
    return bool(torch.jit.is_tracing() or torch.compiler.is_exporting())


class SegmentationNetwork(nn.Module):
    """Base of all networks: images [B, C, *S] in, logits [B, len(channels), *S] out.

    Subclasses group their layers in child modules whose names are the structural parts (`encoder`, `decoder`…).
    """

    def __init__(self, vocabulary: Vocabulary, activation: Activation) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.activation: Activation = activation
        self.graphs: GraphCache | None = None
        """CUDA graphs of training passes, set by the code that trains the network (`cuda_graphs.graph_cache_for`)."""

    @property
    def channels(self) -> tuple[str, ...]:
        """Names of the output channels."""
        organs = tuple(self.vocabulary)
        return (BACKGROUND, *organs) if self.activation == "softmax" else organs

    def channels_for(self, image: torch.Tensor, organs: Collection[str]) -> tuple[torch.Tensor, Vocabulary]:
        """Logits that hold at least these organs, and the vocabulary that names their channels.

        Networks with per-organ parts compute only the requested organs; this base class computes all of them.
        """
        return self(image), self.vocabulary

    def run_pass(
        self, key: Hashable, compute: Compute, image: torch.Tensor, *more: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """`compute(image, *more)`, in training possibly as a CUDA graph; `key` identifies the computation."""
        if self.graphs is None or not (self.training and image.is_cuda and torch.is_grad_enabled()):
            return compute(image, *more)
        return self.graphs(key, compute, image, *more)

    def parts(self) -> Mapping[str, tuple[str, ...]]:
        """Keys of the state dict by part.

        The structural parts (child module names) hold every parameter and buffer exactly once; `norm` names, across
        them, those that belong to normalisation layers.
        """
        norm_modules = {name for name, module in self.named_modules() if isinstance(module, _NORMS)}
        parts: dict[str, list[str]] = {}
        for key in self.state_dict():
            parts.setdefault(key.split(".", 1)[0], []).append(key)
            if key.rpartition(".")[0] in norm_modules:
                parts.setdefault("norm", []).append(key)
        return {part: tuple(keys) for part, keys in parts.items()}


class SelectiveNetwork(SegmentationNetwork):
    """A network that computes only the requested organs; their channels are independent of each other."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """[B, C, *S] → logits [B, organs, *S]."""
        return self._logits(image, tuple(self.vocabulary))

    def channels_for(self, image: torch.Tensor, organs: Collection[str]) -> tuple[torch.Tensor, Vocabulary]:
        """Logits of just these organs (in vocabulary order), and the vocabulary that names the channels."""
        wanted = Vocabulary(organ for organ in self.vocabulary if organ in organs)
        return self._logits(image, wanted.organs), wanted

    @abstractmethod
    def _logits(self, image: torch.Tensor, organs: tuple[str, ...]) -> torch.Tensor:
        """Logits [B, len(organs), *S] of some organs, in vocabulary order."""


def organ_probabilities(logits: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Logits [B, channels, *S] → probability per organ [B, organs, *S], background left out."""
    if activation == "softmax":
        return logits.softmax(dim=1)[:, 1:]
    return logits.sigmoid()


def select_channels(logits: torch.Tensor, vocabulary: Vocabulary, organs: Sequence[str]) -> torch.Tensor:
    """The sigmoid channels [B, len(organs), *S] of some organs; a view where they lie side by side."""
    places = [vocabulary.index(organ) for organ in organs]
    if places == list(range(places[0], places[0] + len(places))):
        return logits[:, places[0] : places[0] + len(places)]
    return logits[:, places]
