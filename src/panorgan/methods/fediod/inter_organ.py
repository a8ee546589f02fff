"""FedIOD's network: one encoder, a decoder per organ, and between them a transformer that relates organs to each other.

The attention that a place receives re-weights the skip connections: places that help to find other organs count more.
Without the transformer this is `organ_parts.MultiDecoder`, key by key and bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple

import torch
from pydantic import Field, PositiveInt
from torch import nn

from panorgan.anatomy import Vocabulary
from panorgan.errors import ConfigError, RunError
from panorgan.methods.fediod.attention_gate import (
    Gate,
    attention_entropy,
    mean_attention,
    multiply_by_weights,
    token_weights,
)
from panorgan.methods.fediod.bottleneck_attention import BottleneckTransformer, head_of_key
from panorgan.networks.blocks import Blocks, decode, encode
from panorgan.networks.organ_parts import OUTPUTS, MultiDecoder, group_of
from panorgan.networks.settings import UNetSettings
from panorgan.settings import Settings


class InterOrganSettings(Settings):
    """What FedIOD's network has besides a U-Net's encoder. Tokens are as wide as the U-Net's deepest level."""

    transformer: bool = Field(True, description="attention between all places of the coarsest grid")
    layers: PositiveInt = Field(4, description="layers of the transformer")
    heads: PositiveInt = Field(6, description="heads per layer")
    head_width: PositiveInt = Field(256, description="channels of a head's queries, keys and values")
    mlp_width: PositiveInt = Field(1024, description="hidden channels of a layer's perceptron")
    dropout: float = Field(0.1, ge=0, lt=1, description="inside the transformer")
    gate: Gate = Field(
        "softmax",
        description="how attention re-weights the skip connections, x + x·W (eq. 2): W is a softmax over all places, a "
        "sigmoid of each, or 0",
    )
    decoders: Literal["whole", "single_layer"] = Field(
        "whole", description="per organ: a whole decoder, or just the last layer of one that all organs share"
    )


class AttentionLoss(NamedTuple):
    """A loss of the mean attention, and of tensors of its own, computed as a part of the pass."""

    key: Hashable
    """Identifies the function: same key, same function."""
    compute: Callable[..., torch.Tensor]
    given: tuple[torch.Tensor, ...] = ()
    """Arguments after the attention; they carry no gradient."""


def _nothing(mean: torch.Tensor) -> torch.Tensor:
    return mean.new_empty(0)


NUMBERS_ONLY = AttentionLoss("numbers only", _nothing)
"""An empty loss: the record gets its numbers, and no gradient is needed."""


class AttentionRecord:
    """The attention of the last forward pass under `InterOrganNetwork.record_attention`; its tensors carry gradients.

    For a pass replayed as a CUDA graph it holds the numbers, and the attention loss or, without one, the mean.
    """

    def __init__(self, attention_loss: AttentionLoss | None = None) -> None:
        self.attention_loss = attention_loss
        self.loss = torch.empty(0)
        """Its value."""
        self.grid: tuple[int, ...] = ()
        """Tokens along each axis; they are counted row by row."""
        self.maps: tuple[torch.Tensor, ...] = ()
        """Attention of every layer, [B, heads, N, N]."""
        self.mean = torch.empty(0)
        """Ā [B, N, N]: eq. 1."""
        self.weights: torch.Tensor | None = None
        """W [B, *grid]: eq. 2; None where nothing is re-weighted."""
        self.numbers = torch.empty(0)
        """Without gradients, [2]: the largest factor of a skip connection, and the entropy (`attention_entropy`)."""

    def keep(
        self,
        grid: tuple[int, ...],
        mean: torch.Tensor,
        maps: tuple[torch.Tensor, ...] = (),
        weights: torch.Tensor | None = None,
    ) -> None:
        """Replace the recorded attention."""
        self.grid, self.mean, self.maps, self.weights = grid, mean, maps, weights

    @torch.no_grad()
    def measure(self) -> None:
        """Compute the numbers of the recorded attention; does not synchronise the device."""
        largest = self.mean.new_ones(()) if self.weights is None else self.weights.amax() + 1
        self.numbers = torch.stack((largest, attention_entropy(self.maps)))


class InterOrganNetwork(MultiDecoder):
    """`MultiDecoder` with a transformer at the bottleneck, whose attention re-weights the skip connections."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        settings: UNetSettings,
        known: Collection[str] | None = None,
        inter_organ: InterOrganSettings | None = None,
    ) -> None:
        self.inter_organ = s = inter_organ or InterOrganSettings()  # needed by the constructor of the base class
        super().__init__(vocabulary, settings, tuple(vocabulary) if known is None else known)
        # Built last, so that everything else starts with the same weights with and without it.
        self.transformer: BottleneckTransformer | None = None
        if s.transformer:
            self.transformer = BottleneckTransformer(
                settings.features[-1], s.layers, s.heads, s.head_width, s.mlp_width, s.dropout
            )
        self._record: AttentionRecord | None = None
        self._given: Sequence[torch.Tensor] | None = None

    def _build_shared(self, blocks: Blocks) -> None:
        super()._build_shared(blocks)
        if self.inter_organ.decoders == "single_layer":
            self.decoder = blocks.decoder()

    def _build_part(self, blocks: Blocks) -> nn.Module:
        if self.inter_organ.decoders == "whole":
            return super()._build_part(blocks)
        return nn.ModuleDict({"output": blocks.output(blocks.settings.features[0], OUTPUTS)})

    def shared(self, image: torch.Tensor) -> list[torch.Tensor]:
        """The encoder's features of every level, attended and re-weighted; or the features of the shared decoder."""
        return self._shared_of(self.encoded(image))

    def _shared_of(self, encoded: list[torch.Tensor]) -> list[torch.Tensor]:
        levels = self._attend(encoded)
        return levels if self.inter_organ.decoders == "whole" else [decode(self.decoder, levels)]

    def _outputs_of(self, part: nn.Module, shared: list[torch.Tensor]) -> torch.Tensor:
        """A decoder per organ, or just its last layer."""
        if self.inter_organ.decoders == "whole":
            return super()._outputs_of(part, shared)
        logits: torch.Tensor = part["output"](shared[0])  # type: ignore[index]
        return logits

    def _chosen(self, chosen: list[tuple[str, int]], image: torch.Tensor) -> torch.Tensor:
        """Logits; a record gets the mean attention of the same pass, or the attention loss."""
        record = self._record
        if record is None:
            plainly = self._given is not None  # overridden maps are not part of a key
            return self.outputs(chosen, self.shared(image)) if plainly else super()._chosen(chosen, image)
        attention_loss = record.attention_loss

        def compute(image: torch.Tensor, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
            logits = self.outputs(chosen, self.shared(image))
            record.loss = record.mean if attention_loss is None else attention_loss.compute(record.mean, *given)
            return logits, record.loss, record.numbers

        key, given = (None, ()) if attention_loss is None else (attention_loss.key, attention_loss.given)
        if self._given is None:
            logits, found, record.numbers = self.run_pass(("watched", key, *chosen), compute, image, *given)
        else:
            logits, found, _ = compute(image, *given)
        if found is not record.loss:  # replayed: the record holds tensors of the captured pass
            grid = tuple(n // divisor for n, divisor in zip(image.shape[2:], self.divisor, strict=True))
            record.keep(grid, found if attention_loss is None else torch.empty(0))
            record.loss = found
        return logits

    def attention(self, image: torch.Tensor) -> torch.Tensor:
        """Ā [B, N, N] of images [B, C, *S], without running any decoder."""
        return mean_attention(self.maps_of(self.encoded(image)))

    # `channels_for` in two halves, to evaluate the same image with many different attention maps.

    def encoded(self, image: torch.Tensor) -> list[torch.Tensor]:
        """The encoder's features of every level, which do not depend on attention."""
        return encode(self.encoder, self.bottleneck, image)

    def maps_of(self, encoded: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The attention of every layer, [B, heads, N, N] each."""
        maps: list[torch.Tensor] = self._transformer()(encoded[-1], self._given)[1]
        return maps

    def decoded(self, encoded: list[torch.Tensor], organs: Sequence[str]) -> torch.Tensor:
        """Logits [B, len(organs), *S] of organs that have a part."""
        return self.outputs([group_of(organ) for organ in organs], self._shared_of(encoded))

    @contextmanager
    def record_attention(self, attention_loss: AttentionLoss | None = None) -> Iterator[AttentionRecord]:
        """Keep the attention of forward passes: `with network.record_attention() as seen: network(image)`."""
        self._transformer()
        before, self._record = self._record, AttentionRecord(attention_loss)
        try:
            yield self._record
        finally:
            self._record = before

    @contextmanager
    def override_attention(self, maps: Sequence[torch.Tensor]) -> Iterator[None]:
        """Replace the network's own attention by these maps, [B, heads, N, N] for every layer.

        The weights of the skip connections follow from them too: logits become a function of the maps.
        """
        layers = len(self._transformer().layers)
        if len(maps) != layers:
            raise RunError(
                f"There are {len(maps)} attention maps for a transformer of {layers} layers.",
                code="wrong-number-of-maps",
            )
        before, self._given = self._given, maps
        try:
            yield
        finally:
            self._given = before

    def _attend(self, levels: list[torch.Tensor]) -> list[torch.Tensor]:
        """Features of every level, the deepest through the transformer, the others re-weighted by its attention."""
        if self.transformer is None:
            return levels
        gate, record = self.inter_organ.gate, self._record
        wanted = gate != "none" or record is not None
        deepest, maps = self.transformer(levels[-1], self._given, wanted)
        if not wanted:
            return [*levels[:-1], deepest]
        mean, grid, weights = mean_attention(maps), deepest.shape[2:], None
        skips = levels[:-1]
        if gate != "none":
            weights = token_weights(mean, gate).unflatten(1, grid)
            raised = weights + 1  # x + x·W of every level at once
            skips = [multiply_by_weights(skip, raised) for skip in skips]
        if record is not None:
            record.keep(tuple(grid), mean, tuple(maps), weights)
            record.measure()
        return [*skips, deepest]

    def _transformer(self) -> BottleneckTransformer:
        if self.transformer is None:
            raise ConfigError(
                "This network has no attention.",
                code="no-attention",
                where="transformer",
                why="it was built with transformer: false",
                fix="Switch the transformer on, or leave out settings that need its attention.",
            )
        return self.transformer


__all__ = ["NUMBERS_ONLY", "AttentionLoss", "AttentionRecord", "InterOrganNetwork", "InterOrganSettings", "head_of_key"]
