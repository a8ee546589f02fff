"""How the server turns answers into new weights, beyond the mean per key.

*Owners average an output row.* In one network for all organs, the last convolution has a row per organ. A site that
does not annotate an organ has nothing to say about its row: to the marginal loss the organ is a part of the background.
Averaged in, such rows pull the organ towards the background, or the background towards the organ, by accident.

*Extrapolation* (FedExP, arXiv:2301.09604, eq. 3). Sites with different organs move in different directions, so the mean
divides what each has learned by their number. The less they agree, the farther the server goes along the mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from panorgan.methods.exchange import Arrays, Federation, Updates
from panorgan.networks.organ_parts import group_of_key
from panorgan.networks.unet import OUTPUT_KEYS

Weight = Callable[[str, str], float]
_STATISTICS = ("running_mean", "running_var")
"""Of batch normalisation: a variance beyond the sites' own could be negative."""


def owner_rows(updates: Updates, weights: Arrays, federation: Federation, weight: Weight) -> dict[str, torch.Tensor]:
    """The output layer, each organ's row averaged over the sites that annotate the organ; the background over all.

    A row none of whose owners has answered stays as it is. Networks with parts of single organs have no such rows.
    """
    if any(group_of_key(key) is not None for key in weights):
        return {}
    organs = tuple(federation.vocabulary)
    layer = {}
    for key in OUTPUT_KEYS:
        if key not in weights:
            continue
        layer[key] = weights[key].clone()
        names = (None, *organs) if len(weights[key]) == len(organs) + 1 else organs
        senders = {site: updates.array(site, key) for site in updates.sites if key in updates.keys(site)}
        for row, organ in enumerate(names):
            shares = {s: weight(s, key) for s in senders if organ is None or organ in federation.organs_of(s)}
            if (total := sum(shares.values())) > 0:
                rows = (senders[site][row].double() * (share / total) for site, share in shares.items())
                layer[key][row] = torch.stack(list(rows)).sum(0)
    return layer


def shared_keys(updates: Updates, means: Arrays) -> list[str]:
    """What several sites have trained, and may be extrapolated."""
    senders: dict[str, int] = {}
    for site in updates.sites:
        for key in updates.keys(site):
            senders[key] = senders.get(key, 0) + 1
    return [
        key
        for key, value in means.items()
        if senders.get(key, 0) > 1 and value.is_floating_point() and not key.endswith(_STATISTICS)
    ]


def extrapolation(updates: Updates, old: Arrays, means: Arrays, weight: Weight) -> float:
    """FedExP's step η = max(1, Σ p_i ‖Δ_i‖² / (2 ‖Σ p_i Δ_i‖²)) for these means; p_i are the sites' shares.

    Where updates all but cancel out, that would go far along what is left of them, which is noise. So the model never
    moves farther than the sites did themselves: η ‖Σ p_i Δ_i‖ ≤ √(Σ p_i ‖Δ_i‖²), which the paper does not ask for.
    """
    keys = set(means)
    sites = [site for site in updates.sites if keys & set(updates.keys(site))]
    total = sum(weight(site, next(iter(means))) for site in sites)
    own = sum(
        weight(site, key) / total * _squared(updates.array(site, key), old[key])
        for site in sites
        for key in updates.keys(site)
        if key in means
    )
    common = sum(_squared(value, old[key]) for key, value in means.items())
    return max(1.0, min(own / (2 * common), math.sqrt(own / common))) if common > 0 else 1.0


def stepped(old: Arrays, means: Mapping[str, torch.Tensor], step: float) -> dict[str, torch.Tensor]:
    """w + η·(mean − w), in double precision."""
    return {
        key: (old[key].double() + step * (mean.double() - old[key].double())).to(mean.dtype)
        for key, mean in means.items()
    }


def _squared(new: torch.Tensor, old: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(new.float() - old.float(), dtype=torch.float64)) ** 2
