"""Networks with per-organ parts: a head, a task block, a decoder or an encoder for each organ.

Organs form *groups*: an organ and its tumour share one part with two outputs, independent of each other
(one sigmoid each, since a tumour lies inside its organ). A group's name, and so the name of its weights, follows from
anatomy alone (`heads.liver.…`), so that sites that know nothing of each other use the same keys.

One call computes every organ. Only the requested parts are computed, so only they receive gradients.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import nn

from panorgan.anatomy import Vocabulary
from panorgan.anatomy.catalogue import catalogue
from panorgan.errors import AnatomyError
from panorgan.networks.base import SelectiveNetwork, is_recording
from panorgan.networks.blocks import Blocks, begin_rare, decode, encode, finish
from panorgan.networks.head_stack import SLOPE, run_heads
from panorgan.networks.settings import UNetSettings

HEAD_WIDTH = 8
"""Channels of the input and of the hidden layers of a multi-head network's heads."""
OUTPUTS = 2
"""Per group: the organ and its tumour. An output without an organ in the vocabulary is not used."""
_NOWHERE = -1e4


def group_of(organ: str) -> tuple[str, int]:
    """The group whose part serves an organ, and which of its outputs that is: 0 the organ, 1 its tumour."""
    entry = catalogue()[organ]
    if entry.kind == "tumour" and entry.relation == "inside" and entry.parent is not None:
        return entry.parent, 1
    return organ, 0


def refuse_part_names(organs: Iterable[str]) -> None:
    """Refuse organ names that cannot name a part of a network, because torch uses them itself."""
    for name in organs:
        if hasattr(nn.ModuleDict, name):
            raise AnatomyError(
                f"{name!r} cannot be the name of an organ.",
                code="bad-organ-name",
                where="organs",
                why="torch uses this word itself where networks keep a part per organ",
                fix="Choose another name; 'title' and 'aliases' may be any text.",
            )


def groups_of(organs: Iterable[str]) -> tuple[str, ...]:
    """The groups of some organs, sorted."""
    return tuple(sorted({group_of(organ)[0] for organ in organs}))


def group_of_key(key: str) -> str | None:
    """The group that a weight serves by its key in the state dict; None for a weight that serves all organs."""
    module, _, rest = key.partition(".")
    return rest.partition(".")[0] if module in _NETWORKS_BY_MODULE else None


def weights_for(weights: Mapping[str, torch.Tensor], organs: Iterable[str]) -> dict[str, torch.Tensor]:
    """The weights that serve these organs: what is shared, and their own parts."""
    own = (None, *groups_of(organs))
    return {key: value for key, value in weights.items() if group_of_key(key) in own}


def stack_outputs(chosen: Sequence[tuple[str, int]], outputs_of: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """Logits [B, len(chosen), *S] of some groups' outputs; calls `outputs_of`, [B, 2, *S], once per group."""
    groups = {group: outputs_of(group) for group in sorted({group for group, _ in chosen})}
    return torch.stack([groups[group][:, output] for group, output in chosen], dim=1)


class OrganNetwork(SelectiveNetwork):
    """Base of the networks with per-organ parts, held in one `nn.ModuleDict` by group.

    `known` are the organs that have a part. Other organs of the vocabulary have none: no site annotates them yet.
    """

    module: ClassVar[str]
    """Name of the `nn.ModuleDict`, a plural: `heads` holds the parts `head:liver`, `head:spleen`…"""

    def __init__(self, vocabulary: Vocabulary, settings: UNetSettings, known: Collection[str]) -> None:
        super().__init__(vocabulary, "sigmoid")
        self.settings, self.divisor = settings, settings.divisor
        self.groups = groups_of(organ for organ in vocabulary if organ in known)
        blocks = Blocks(settings)
        self._build_shared(blocks)
        setattr(self, self.module, nn.ModuleDict({group: self._build_part(blocks) for group in self.groups}))
        finish(self, settings)
        for part in self._output_parts():
            begin_rare(part, settings)

    @abstractmethod
    def _build_shared(self, blocks: Blocks) -> None:
        """Build the layers that serve all organs."""

    @abstractmethod
    def _build_part(self, blocks: Blocks) -> nn.Module:
        """Build the part of one group."""

    def _output_parts(self) -> Iterable[nn.Module]:
        """The modules whose last convolutions produce the logits."""
        return [self._part(group) for group in self.groups]

    @abstractmethod
    def shared(self, image: torch.Tensor) -> list[torch.Tensor]:
        """The features computed once for all groups from images [B, C, *S]."""

    def outputs(self, chosen: Sequence[tuple[str, int]], shared: list[torch.Tensor]) -> torch.Tensor:
        """Logits [B, len(chosen), *S] from the shared features; `chosen` names groups and which of their outputs."""
        return stack_outputs(chosen, lambda group: self._outputs_of(self._part(group), shared))

    @abstractmethod
    def _outputs_of(self, part: nn.Module, shared: list[torch.Tensor]) -> torch.Tensor:
        """Logits [B, 2, *S] of one group's part from the shared features."""

    def _logits(self, image: torch.Tensor, organs: tuple[str, ...]) -> torch.Tensor:
        wanted = [group_of(organ) for organ in organs]
        places = [place for place, (group, _) in enumerate(wanted) if group in self.groups]
        if not places:
            return image.new_full((image.shape[0], len(organs), *image.shape[2:]), _NOWHERE)
        logits = self._chosen([wanted[place] for place in places], image)
        if len(places) == len(organs):
            return logits
        whole = logits.new_full((image.shape[0], len(organs), *image.shape[2:]), _NOWHERE)
        return whole.index_copy(1, torch.tensor(places, device=image.device), logits)

    def _chosen(self, chosen: list[tuple[str, int]], image: torch.Tensor) -> torch.Tensor:
        """Logits of these groups' outputs."""
        (logits,) = self.run_pass(tuple(chosen), lambda image: (self.outputs(chosen, self.shared(image)),), image)
        return logits

    def parts(self) -> Mapping[str, tuple[str, ...]]:
        """Keys by part; the weights of one group are a part, `head:liver`."""
        parts: dict[str, tuple[str, ...]] = {}
        for part, keys in super().parts().items():
            if part != self.module:
                parts[part] = keys
                continue
            for group in self.groups:
                own = tuple(key for key in keys if group_of_key(key) == group)
                parts[f"{self.module.removesuffix('s')}:{group}"] = own
        return parts

    def _part(self, group: str) -> nn.Module:
        parts: nn.ModuleDict = getattr(self, self.module)
        return parts[group]


class MultiHead(OrganNetwork):
    """FLKD's network: a whole U-Net for all, 1×1 to 8 channels, then a head of 162 parameters per group."""

    module = "heads"

    def _build_shared(self, blocks: Blocks) -> None:
        self.encoder, self.bottleneck, self.decoder = blocks.encoder(), blocks.bottleneck(), blocks.decoder()
        self.embedding = blocks.output(blocks.settings.features[0], HEAD_WIDTH)

    def _build_part(self, blocks: Blocks) -> nn.Module:
        convolution = nn.Conv3d if blocks.settings.dimensions == 3 else nn.Conv2d
        return nn.Sequential(
            convolution(HEAD_WIDTH, HEAD_WIDTH, 1),
            nn.LeakyReLU(SLOPE, inplace=True),
            convolution(HEAD_WIDTH, HEAD_WIDTH, 1),
            nn.LeakyReLU(SLOPE, inplace=True),
            convolution(HEAD_WIDTH, OUTPUTS, 1),
        )

    def shared(self, image: torch.Tensor) -> list[torch.Tensor]:
        """The eight channels that every head reads."""
        return [self.embedding(decode(self.decoder, encode(self.encoder, self.bottleneck, image)))]

    def outputs(self, chosen: Sequence[tuple[str, int]], shared: list[torch.Tensor]) -> torch.Tensor:
        """All heads at once; one by one where a pass is recorded."""
        if is_recording():
            return super().outputs(chosen, shared)
        groups = sorted({group for group, _ in chosen})
        places = [(groups.index(group), output) for group, output in chosen]
        return run_heads([self._part(group) for group in groups], shared[0], places)  # type: ignore[misc]

    def _outputs_of(self, part: nn.Module, shared: list[torch.Tensor]) -> torch.Tensor:
        """Three 1×1 convolutions, as written."""
        logits: torch.Tensor = part(shared[0])
        return logits


class TaskBlocks(OrganNetwork):
    """SegViz's network: a U-Net whose last two convolutions are a task block per group.

    The first of them is followed by a normalisation, which belongs to the task block too.
    """

    module = "task_blocks"

    def _build_shared(self, blocks: Blocks) -> None:
        self.encoder, self.bottleneck = blocks.encoder(), blocks.bottleneck()
        self.decoder = blocks.decoder(whole=False)

    def _build_part(self, blocks: Blocks) -> nn.Module:
        return nn.Sequential(blocks.last_convolution(), blocks.output(blocks.settings.features[0], OUTPUTS))

    def shared(self, image: torch.Tensor) -> list[torch.Tensor]:
        """The representation."""
        return [decode(self.decoder, encode(self.encoder, self.bottleneck, image))]

    def _outputs_of(self, part: nn.Module, shared: list[torch.Tensor]) -> torch.Tensor:
        """The last two convolutions."""
        logits: torch.Tensor = part(shared[0])
        return logits


class MultiDecoder(OrganNetwork):
    """One encoder for all, a decoder with its own output per group."""

    module = "decoders"

    def _build_shared(self, blocks: Blocks) -> None:
        self.encoder, self.bottleneck = blocks.encoder(), blocks.bottleneck()

    def _build_part(self, blocks: Blocks) -> nn.Module:
        output = blocks.output(blocks.settings.features[0], OUTPUTS)
        return nn.ModuleDict({"up": blocks.decoder(), "output": output})

    def shared(self, image: torch.Tensor) -> list[torch.Tensor]:
        """The encoder's features of every level."""
        return encode(self.encoder, self.bottleneck, image)

    def _outputs_of(self, part: nn.Module, shared: list[torch.Tensor]) -> torch.Tensor:
        """A decoder per group."""
        logits: torch.Tensor = part["output"](decode(part["up"], shared))  # type: ignore[index]
        return logits


class MultiEncoder(OrganNetwork):
    """One encoder per group; the decoder and its two outputs (organ, tumour) are shared.

    Every group takes its own pass through the decoder: the most expensive of the four.
    """

    module = "encoders"

    def _build_shared(self, blocks: Blocks) -> None:
        self.decoder = blocks.decoder()
        self.head = blocks.output(blocks.settings.features[0], OUTPUTS)

    def _build_part(self, blocks: Blocks) -> nn.Module:
        return nn.ModuleDict({"down": blocks.encoder(), "bottleneck": blocks.bottleneck()})

    def _output_parts(self) -> Iterable[nn.Module]:
        """The output that all groups share."""
        return [self.head]

    def shared(self, image: torch.Tensor) -> list[torch.Tensor]:
        """The image itself."""
        return [image]

    def _outputs_of(self, part: nn.Module, shared: list[torch.Tensor]) -> torch.Tensor:
        """The group's encoder, the shared decoder."""
        levels = encode(part["down"], part["bottleneck"], shared[0])  # type: ignore[index]
        logits: torch.Tensor = self.head(decode(self.decoder, levels))
        return logits


_NETWORKS_BY_MODULE: dict[str, type[OrganNetwork]] = {
    network.module: network for network in (MultiHead, TaskBlocks, MultiDecoder, MultiEncoder)
}


def organ_network(vocabulary: Vocabulary, settings: UNetSettings, known: Collection[str] | None = None) -> OrganNetwork:
    """The network that `settings.organs` names, with parts for the `known` organs (all, if left out)."""
    return _NETWORKS_BY_MODULE[settings.organs](vocabulary, settings, tuple(vocabulary) if known is None else known)
