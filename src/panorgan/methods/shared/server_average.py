"""How the server turns answers into new weights, beyond the mean per key.

*An organ's output row is averaged over its owners.* In one network for all organs, the last convolution has a row per
organ. A site that does not annotate the organ knows nothing about its row: for the marginal loss the organ is part of
the background. If such rows were averaged too, they would blur organ and background at random.

*Extrapolation* (FedExP, arXiv:2301.09604). Sites with different organs move in different directions, so the mean
divides what each has learned by the number of sites. The less they agree, the longer the server's step.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping

import torch

from panorgan.methods.protocol import Federation, Tensors, Updates
from panorgan.networks.organ_parts import group_of_key
from panorgan.networks.unet import OUTPUT_KEYS

Weight = Callable[[str, str], float]
STATISTICS = ("running_mean", "running_var")
"""Of batch normalisation: a variance beyond the sites' own could be negative."""


def owner_rows(updates: Updates, weights: Tensors, federation: Federation, weight: Weight) -> dict[str, torch.Tensor]:
    """The output layer: each organ's row averaged over the sites that annotate the organ, the background's over all.

    A row stays as it is if none of its owners has answered. Networks with parts of single organs have no such rows.
    """
    if any(group_of_key(key) is not None for key in weights):
        return {}
    organs = tuple(federation.vocabulary)
    layer = {key: weights[key].clone() for key in OUTPUT_KEYS if key in weights}
    if not layer:
        return {}
    rows = len(next(iter(layer.values())))
    for row, organ in enumerate((None, *organs) if rows == len(organs) + 1 else organs):

        def of_owners(site: str, key: str, organ: str | None = organ) -> float:
            owns = organ is None or organ in federation.organs_of(site)
            return weight(site, key) if owns and key in layer else 0.0

        for key, mean in updates.mean(of_owners).items():
            layer[key][row] = mean[row]
    return layer


def shared_keys(updates: Updates, means: Tensors) -> list[str]:
    """Keys that several sites have trained, which may be extrapolated."""
    senders: dict[str, int] = {}
    for site in updates.sites:
        for key in updates.keys(site):
            senders[key] = senders.get(key, 0) + 1
    return [
        key
        for key, value in means.items()
        if senders.get(key, 0) > 1 and value.is_floating_point() and not key.endswith(STATISTICS)
    ]


def extrapolation(updates: Updates, old: Tensors, means: Tensors) -> float:
    """FedExP's step η = max(1, D² / (2 ‖mean of Δ_i‖²)) for these means; D² stands for the sites' ‖Δ_i‖².

    Two things differ from the paper. D² is the median over sites rather than their mean: one site must not be able to
    choose the step. And where updates all but cancel out, what is left of them is noise, and the paper's step would go
    far along it: here the model never moves farther than a site does, η ‖mean‖ ≤ D.
    """
    # Sorted: the order of a set differs from process to process, and with it the last bit of a sum.
    senders = [sorted(set(updates.keys(site)) & means.keys()) for site in updates.sites]
    moved = [
        sum(_squared(updates.tensor(site, key), old[key]) for key in keys)
        for site, keys in zip(updates.sites, senders, strict=True)
        if keys
    ]
    common = sum(_squared(value, old[key]) for key, value in means.items())
    if not common:
        return 1.0
    ratio = statistics.median(moved) / common
    return max(1.0, min(ratio / 2, math.sqrt(ratio)))


def published_extrapolation(updates: Updates, old: Tensors, means: Tensors, epsilon: float, weight: Weight) -> float:
    """FedExP's step as published: η = max(1, Σ p_i ‖Δ_i‖² / (2·(‖Δ‖² + ε))), p_i a site's share in the mean."""
    sent = {site: frozenset(updates.keys(site)) for site in updates.sites}
    moved = common = 0.0
    for key in sorted(means):
        weights = {site: weight(site, key) for site in updates.sites if key in sent[site]}
        squares = sum(one * _squared(updates.tensor(site, key), old[key]) for site, one in weights.items())
        moved += squares / sum(weights.values())
        common += _squared(means[key], old[key])
    return max(1.0, moved / (2 * (common + epsilon))) if common + epsilon else 1.0


def stepped(old: Tensors, means: Mapping[str, torch.Tensor], step: float) -> dict[str, torch.Tensor]:
    """w + η·(mean − w), in double precision."""
    return {
        key: (old[key].double() + step * (mean.double() - old[key].double())).to(mean.dtype)
        for key, mean in means.items()
    }


def _squared(new: torch.Tensor, old: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(new.float() - old.float(), dtype=torch.float64)) ** 2
