"""Similarity of two networks on the same images, layer by layer: linear CKA (Kornblith et al., arXiv:1905.00414).

Examples are places in the images. A layer's features at a place are those of the voxel there on the layer's own grid,
so that layers of different resolution can be compared too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from panorgan.networks import SegmentationNetwork


def linear_cka(first: torch.Tensor, second: torch.Tensor) -> float:
    """CKA of features [n, p] and [n, q] of the same n examples: ‖YᵀX‖² / (‖XᵀX‖·‖YᵀY‖), columns centred.

    1 for features that differ by rotation, shift and one scale; near 0 for unrelated ones if n ≫ p, q. NaN where
    features are the same for all examples.
    """
    return float(cka_matrix({"x": first}, {"y": second})[0, 0])


def cka_matrix(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> NDArray[np.float64]:
    """CKA of every layer of `first` with every layer of `second`, [layers, layers]."""
    ours, others = ([_centred(features) for features in layers.values()] for layers in (first, second))
    our_norms, other_norms = ([_dependence(x, x) for x in layers] for layers in (ours, others))
    matrix = np.full((len(ours), len(others)), np.nan)
    for i, x in enumerate(ours):
        for j, y in enumerate(others):
            norm = (our_norms[i] * other_norms[j]) ** 0.5
            if norm > 0:
                matrix[i, j] = _dependence(x, y) / norm
    return matrix


def layers_of(network: SegmentationNetwork) -> dict[str, nn.Module]:
    """The blocks of a network by name: levels of encoder and decoder, bottleneck, heads."""
    found: dict[str, nn.Module] = {}
    waiting: list[tuple[str, nn.Module]] = [("", network)]
    while waiting:
        name, module = waiting.pop(0)
        # Lists of blocks, and networks inside a network, are not blocks themselves.
        if isinstance(module, nn.ModuleList | nn.ModuleDict | SegmentationNetwork):
            inner = [(f"{name}.{child}".lstrip("."), block) for child, block in module.named_children()]
            waiting = inner + waiting
        else:
            found[name] = module
    return found


@torch.no_grad()
def layer_features(
    network: SegmentationNetwork, images: Iterable[torch.Tensor], places: int, seed: int
) -> dict[str, torch.Tensor]:
    """Features [examples, channels] by layer at `places` random places of every image [B, C, *S].

    The places depend on the seed alone. Layers are in the order of the data flow. A block that runs several times per
    image (the decoder shared by per-organ encoders) gives its features side by side and comes after all that it reads;
    one that does not run (heads that are computed all at once) is left out.
    """
    generator = torch.Generator().manual_seed(seed)
    gathered: dict[str, list[torch.Tensor]] = {}
    for image in images:
        chosen = torch.rand((len(image), places, image.ndim - 2), generator=generator)
        with _recording(network, chosen) as record:
            network(image)
        for name, passes in record.items():
            gathered.setdefault(name, []).append(torch.cat(passes, dim=1))
    return {name: torch.cat(features) for name, features in gathered.items()}


@contextmanager
def _recording(network: SegmentationNetwork, places: torch.Tensor) -> Iterator[dict[str, list[torch.Tensor]]]:
    """The outputs of every layer at the places, pass by pass, while the network runs; in the order of the last runs."""
    record: dict[str, list[torch.Tensor]] = {}

    def recorder(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            features = output[0] if isinstance(output, tuple) else output  # a transformer returns its attention too
            record[name] = [*record.pop(name, []), _at_places(features, places)]  # popped: to the end of the order

        return keep

    handles = [module.register_forward_hook(recorder(name)) for name, module in layers_of(network).items()]
    try:
        yield record
    finally:
        for handle in handles:
            handle.remove()


def _at_places(features: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """[B, channels, *S] at places [B, n, D] in the unit cube → [B · n, channels] on the CPU."""
    sizes = torch.tensor(features.shape[2:])
    indices = (places * sizes).long().clamp_(max=sizes - 1).to(features.device)
    samples = torch.arange(len(features), device=features.device)[:, None]
    picked = features.movedim(1, -1)[(samples, *indices.unbind(-1))]
    return picked.flatten(0, 1).float().cpu()


def _centred(features: torch.Tensor) -> torch.Tensor:
    wide = features.double()
    centred = wide - wide.mean(0)
    # Rounding errors of constant features must not look like features.
    return centred if centred.abs().max() > 1e-12 * wide.abs().max() else torch.zeros_like(wide)


def _dependence(x: torch.Tensor, y: torch.Tensor) -> float:
    """‖YᵀX‖²; in feature space, where it costs n·p·q for any number of examples."""
    return float((y.T @ x).square().sum())
