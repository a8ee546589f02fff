"""A transformer between the encoder and the decoders of a U-Net: every place of the coarsest grid attends to all.

Its attention maps are part of the result. In the state dict each head's weights have their own names
(`layers.0.heads.3.query.weight`), because a server may weight sites head by head; they lie in two matrices, because all
heads of a layer are computed at once, and an optimiser's cost grows with the number of tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from panorgan.networks.base import is_recording

# Wavelengths of the positions go from 2π to a hundred times that. Sentences need longer ones; grids here are small.
_LONGEST = 100.0


class Head(NamedTuple):
    """The weights of one head, each a part of its layer's matrices. No biases: without its `output` it contributes
    nothing."""

    query: torch.Tensor
    """[head_width, width], as `key` and `value`."""
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor
    """[width, head_width]."""


class Heads(nn.Module):
    """The heads of a layer: `heads[2].query` is a view. Two parameters, which the state dict lists head by head."""

    def __init__(self, width: int, heads: int, head_width: int) -> None:
        super().__init__()
        self.count, self.head_width = heads, head_width
        projections, outputs = [], []
        # Initialised as one matrix for all heads, so that their sum does not grow with the number of heads.
        bound = (heads * head_width) ** -0.5
        for _ in range(heads):
            projections.append(torch.stack([nn.Linear(width, head_width, bias=False).weight for _ in range(3)]))
            outputs.append(nn.init.uniform_(nn.Linear(head_width, width, bias=False).weight, -bound, bound))
        self.projections = nn.Parameter(torch.cat(projections, dim=1).detach().mT.contiguous())
        """Of queries, keys and values, [3, width, heads · head_width]: in the layout of the products."""
        self.outputs = nn.Parameter(torch.cat(outputs, dim=1).detach())
        """[width, heads · head_width]."""

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, place: int) -> Head:
        if not 0 <= place < self.count:
            raise IndexError(f"head {place} of {self.count}")
        own = slice(place * self.head_width, (place + 1) * self.head_width)
        query, key, value = self.projections[..., own].mT.unbind()
        return Head(query, key, value, self.outputs[:, own])

    def __iter__(self) -> Iterator[Head]:
        return (self[place] for place in range(self.count))

    def _named(self, prefix: str) -> dict[str, torch.Tensor]:
        """Views of all weights by their names in the state dict."""
        return {
            f"{prefix}{place}.{name}.weight": weight
            for place, head in enumerate(self)
            for name, weight in head._asdict().items()
        }

    # Hooks of `nn.Module`, which would otherwise name the two matrices.

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        named = self._named(prefix)
        destination.update(named if keep_vars else {key: weight.detach() for key, weight in named.items()})

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, torch.Tensor],
        prefix: str,
        local_metadata: Mapping[str, object],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        if local_metadata.get("assign_to_params_buffers"):
            error_msgs.append(f"{prefix} cannot take over the tensors of a state dict: load without assign=True.")
        with torch.no_grad():
            own = self._named(prefix)
            for key, weight in own.items():
                given = state_dict.get(key)
                if given is None:
                    missing_keys.append(key)
                elif given.shape != weight.shape:
                    error_msgs.append(f"size mismatch for {key}: {tuple(given.shape)} instead of {tuple(weight.shape)}")
                else:
                    weight.copy_(given)
        if strict:
            unexpected_keys += [key for key in state_dict if key.startswith(prefix) and key not in own]


class Attend(torch.autograd.Function):
    """Queries, keys and values [3, N, heads, d] → output of each head, [N, heads, d], and its map, [heads, N, N].

    The map is softmax(q·kᵀ), float32 at least; the output is map · v. Written by hand so that products are stored where
    the next ones read them: autograd would copy all three gradients together, which takes longer than the products.
    """

    @staticmethod
    def forward(ctx: Any, projected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        queries, keys, values = (part.transpose(0, 1) for part in projected.unbind())
        attention = (queries @ keys.mT).softmax(-1, dtype=torch.promote_types(projected.dtype, torch.float32))
        mixed = projected.new_empty(projected.shape[1:])
        torch.bmm(attention.to(projected.dtype), values, out=mixed.transpose(0, 1))
        ctx.save_for_backward(projected, attention)
        ctx.set_materialize_grads(False)
        return mixed, attention

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> torch.Tensor | None:
        projected, attention = ctx.saved_tensors
        queries, keys, values = (part.transpose(0, 1) for part in projected.unbind())
        of_mixed, of_attention = gradients
        rounded = attention.to(projected.dtype)
        parts = [] if of_attention is None else [of_attention]
        if of_mixed is not None:
            of_mixed = of_mixed.transpose(0, 1)
            parts.append((of_mixed @ values.mT).to(attention.dtype))
        if not parts:
            return None
        whole = parts[0] if len(parts) == 1 else parts[0] + parts[1]
        if torch.is_grad_enabled():  # second derivatives are needed: use only operations that have them
            inner = attention * (whole - (whole * attention).sum(-1, keepdim=True))
        else:
            inner = _softmax_backward(whole, attention, -1, attention.dtype)
        inner = inner.to(projected.dtype)
        of_values = None if of_mixed is None else (rounded.mT, of_mixed)
        products = ((inner, keys), (inner.mT, queries), of_values)
        if torch.is_grad_enabled():
            each = [torch.zeros_like(values) if pair is None else pair[0] @ pair[1] for pair in products]
            return torch.stack([part.transpose(0, 1) for part in each])
        out = torch.empty_like(projected)
        for place, pair in zip(out, products, strict=True):
            if pair is None:
                place.zero_()
            else:
                torch.bmm(*pair, out=place.transpose(0, 1))
        return out


def _attend_plainly(projected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`Attend` without a backward pass of its own."""
    queries, keys, values = (part.transpose(0, 1) for part in projected.unbind())
    attention = (queries @ keys.mT).softmax(-1, dtype=torch.promote_types(projected.dtype, torch.float32))
    return (attention.to(projected.dtype) @ values).transpose(0, 1), attention


_softmax_backward: Any = torch.ops.aten._softmax_backward_data.default


class LayerWeights(NamedTuple):
    """The matrices of a layer in the layout of the products: those of all heads in one."""

    projections: torch.Tensor
    """Of queries, keys and values, [3, width, heads · head_width]."""
    outputs: torch.Tensor
    """[width, heads · head_width]."""
    mlp: Sequence[torch.Tensor]
    """Weight and bias of the first, then of the second part of the perceptron."""


class Places(NamedTuple):
    """Positions of tokens as they enter queries, keys and values: each is `scales` · token + `offsets`.

    Values have no position. The scale of queries and keys is that of their products, 1/√head_width.
    """

    offsets: torch.Tensor
    """[3, N, 1, width]."""
    scales: torch.Tensor
    """[3, 1, 1, 1]."""


class Layer(nn.Module):
    """Self-attention, then a perceptron on every token; both normalise first and are added to their input.

    Inside, tokens are [N, B, width]: each head's tokens are then a matrix that is multiplied without a copy.
    """

    def __init__(self, width: int, heads: int, head_width: int, mlp_width: int, dropout: float) -> None:
        super().__init__()
        self.head_width = head_width
        self.attention_norm = nn.LayerNorm(width)
        self.heads = Heads(width, heads, head_width)
        self.dropout = nn.Dropout(dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, mlp_width),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(mlp_width, width),
            nn.Dropout(dropout),
        )

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, given: torch.Tensor | None = None, with_map: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tokens [B, N, width] → the same and, on request, the attention [B, heads, N, N]; its rows sum to 1.

        `positions` [N, width] enter queries and keys, and are not part of the output. A `given` map replaces the
        layer's own.
        """
        places = places_of(positions, self.head_width)
        tokens, attention = self.apply_weights(tokens.transpose(0, 1), places, self.weights(), given, with_map)
        return tokens.transpose(0, 1), attention

    def apply_weights(
        self,
        tokens: torch.Tensor,
        places: Places,
        weights: LayerWeights,
        given: torch.Tensor | None = None,
        with_map: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`forward` of tokens [N, B, width], with weights given separately, possibly of another type."""
        mixed, attention = self._mixed(self.attention_norm(tokens), places, weights.projections, given, with_map)
        tokens = tokens + self.dropout(F.linear(mixed, weights.outputs))
        first, first_bias, second, second_bias = weights.mlp
        hidden = F.linear(self.mlp_norm(tokens), first, first_bias)
        return tokens + self.mlp[4](F.linear(self.mlp[2](self.mlp[1](hidden)), second, second_bias)), attention

    def _mixed(
        self,
        normed: torch.Tensor,
        places: Places,
        projections: torch.Tensor,
        given: torch.Tensor | None,
        with_map: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The outputs of all heads, side by side: [N, B, heads · head_width]. The map is float32 at least.

        Later computations compare small differences of it.
        """
        samples = normed.shape[1]
        if given is not None:
            attention = given
            values = (normed @ projections[2]).view(normed.shape[0], -1, self.head_width).transpose(0, 1)
            mixed = attention.to(values.dtype).flatten(0, 1) @ values
        else:
            placed = torch.addcmul(places.offsets, normed, places.scales).flatten(1, 2)
            projected = (placed @ projections).view(3, normed.shape[0], -1, self.head_width)
            if with_map:
                mixed, attention = _attend_plainly(projected) if is_recording() else Attend.apply(projected)
                return mixed.reshape(normed.shape[0], samples, -1), attention.unflatten(0, (samples, -1))
            attention = None
            q, k, v = (part.transpose(0, 1).unflatten(0, (samples, len(self.heads))) for part in projected.unbind())
            mixed = F.scaled_dot_product_attention(q, k, v, scale=1.0).flatten(0, 1)  # q and k are scaled already
        return mixed.transpose(0, 1).reshape(normed.shape[0], samples, -1), attention

    def weights(self) -> LayerWeights:
        """The layer's own."""
        first, second = self.mlp[0], self.mlp[3]
        perceptron = (first.weight, first.bias, second.weight, second.bias)
        return LayerWeights(self.heads.projections, self.heads.outputs, perceptron)  # type: ignore[arg-type]


def cast_together(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """The tensors in another type: one copy and one cast for all of them."""
    flat = torch.cat([tensor.flatten() for tensor in tensors]).to(dtype)
    pieces = flat.split([tensor.numel() for tensor in tensors])
    return [piece.view_as(tensor) for piece, tensor in zip(pieces, tensors, strict=True)]


def _copied(tensor: torch.Tensor, dtype: torch.dtype, layout: torch.memory_format) -> torch.Tensor:
    """Change type and layout at once; `to` alone keeps the layout where the type does not change."""
    return tensor.to(dtype, memory_format=layout, copy=True)


def places_of(positions: torch.Tensor, head_width: int) -> Places:
    """Positions [N, width], and the scale of queries and keys, half of it on either side."""
    scale = head_width**-0.25
    placed = positions * scale
    scales = torch.tensor([scale, scale, 1.0], dtype=positions.dtype, device=positions.device)
    return Places(torch.stack((placed, placed, torch.zeros_like(placed))).unsqueeze(2), scales.view(3, 1, 1, 1))


@cache
def _places_on(grid: tuple[int, ...], width: int, head_width: int, device: torch.device, dtype: torch.dtype) -> Places:
    """The places of a grid, cached and read-only: captured passes read them at this address."""
    with torch.inference_mode(False), torch.no_grad():  # the cached tensor may be used in training later
        return places_of(sinusoidal_positions(grid, width, device).to(dtype), head_width)


class BottleneckTransformer(nn.Module):
    """Layers of self-attention on the positions of a feature map of any size, 2D or 3D; its channels are the tokens.

    Layers add to their input, so a last normalisation sets the size of the result: without it the decoders would see
    features that grow with every step.
    """

    def __init__(self, width: int, layers: int, heads: int, head_width: int, mlp_width: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, heads, head_width, mlp_width, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(
        self, features: torch.Tensor, given: Sequence[torch.Tensor] | None = None, with_maps: bool = True
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """[B, width, *S] → the same and, on request, every layer's attention [B, heads, N, N] with N = ∏ S.

        Tokens are ordered as in `features.flatten(2)`. `given` maps replace the layers' own.
        """
        space, layers = tuple(features.shape[2:]), self._layers()
        own = layers[0].attention_norm.weight.dtype  # under autocast the wider type, in which sums stay
        tokens = _copied(features.flatten(2).permute(2, 0, 1), own, torch.contiguous_format)
        # Recorded passes have sizes that are no numbers yet, which nothing can be cached for.
        find_places = _places_on.__wrapped__ if is_recording() else _places_on
        places = find_places(space, features.shape[1], layers[0].head_width, features.device, own)
        maps = []
        for place, (layer, weights) in enumerate(zip(layers, self._weights(features.device.type), strict=True)):
            tokens, attention = layer.apply_weights(
                tokens, places, weights, None if given is None else given[place], with_maps
            )
            if attention is not None:
                maps.append(attention)
        tokens = self.norm(tokens)
        if tokens.requires_grad:  # otherwise every layer would reorder the gradient itself
            tokens.register_hook(torch.Tensor.contiguous)
        # In the memory format of the input, which the decoders expect.
        channels_last = torch.channels_last if len(space) == 2 else torch.channels_last_3d
        layout = torch.contiguous_format if features.is_contiguous() else channels_last
        return _copied(tokens.permute(1, 2, 0).unflatten(2, space), features.dtype, layout), maps

    def _weights(self, device: str) -> list[LayerWeights]:
        """Of every layer. Where autocast needs another type, all are cast at once, not matrix by matrix."""
        layers = self._layers()
        own = [layer.weights() for layer in layers]
        if not torch.is_autocast_enabled(device) or layers[0].mlp_norm.weight.dtype != torch.float32:
            return own
        every = [tensor for of in own for tensor in (of.projections, of.outputs, *of.mlp)]
        cast = iter(cast_together(every, torch.get_autocast_dtype(device)))
        return [LayerWeights(next(cast), next(cast), [next(cast) for _ in of.mlp]) for of in own]

    def _layers(self) -> list[Layer]:
        return list(self.layers)  # type: ignore[arg-type]


def head_of_key(key: str) -> tuple[int, int] | None:
    """(layer, head) that a weight belongs to by its key in the state dict; None for weights outside of heads."""
    parts = key.split(".")
    if parts[:2] == ["transformer", "layers"] and parts[3:4] == ["heads"]:
        return int(parts[2]), int(parts[4])
    return None


def sinusoidal_positions(grid: Sequence[int], width: int, device: torch.device | str | None = None) -> torch.Tensor:
    """Sines and cosines of every position's coordinates, [∏ grid, width]; the channels are split between the axes."""
    count = width // (2 * len(grid))
    frequencies = _LONGEST ** (-torch.arange(count, device=device) / max(count - 1, 1))
    coordinates = torch.cartesian_prod(*(torch.arange(size, device=device) for size in grid))
    angles = coordinates.unsqueeze(2) * frequencies
    waves = torch.cat((angles.sin(), angles.cos()), dim=2).flatten(1)
    return F.pad(waves, (0, width - waves.shape[1]))
