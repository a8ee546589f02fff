"""Parts of a network that every site keeps for itself: no other site trains them, and they are not averaged.

The delivered network holds one set of all other weights, and these parts of every site, under keys of their own
(`….site-north.weight`). It predicts with each site's parts in turn and trusts each on the organs that the site
annotates (see `merged_predictions`), also at hospitals outside the federation. Every site's own network is scored too.
The parts of a site that joins late begin as initialised, or as in the model that the run starts from.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import ClassVar

import torch
from torch import nn

from panorgan.methods.base import Federation, Method, Payload, ServerRule
from panorgan.methods.protocol import Tensors
from panorgan.methods.shared.merged_predictions import merge_predictions, trusted_models
from panorgan.networks import SegmentationNetwork, UNet, UNetSettings
from panorgan.networks.settings import OrganParts

_PREFIX = "site-"


class PerSite(nn.ModuleDict):
    """A copy of a layer for each site; the chosen one runs."""

    def __init__(self, layer: nn.Module, sites: Iterable[str]) -> None:
        super().__init__({f"{_PREFIX}{site}": copy.deepcopy(layer) for site in sites})
        self.chosen = next(iter(self))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Run the chosen site's layer."""
        out: torch.Tensor = self[self.chosen](features)
        return out


class NetworkWithSiteParts(UNet):
    """A U-Net with parts of every site, whose predictions are merged; with one site alone, a plain U-Net."""

    def __init__(self, settings: UNetSettings, federation: Federation, site: str | None) -> None:
        super().__init__(federation.vocabulary, settings)
        self.sites = tuple(federation.sites) if site is None else (site,)
        own = {name: federation.organs_of(name) for name in federation.sites}
        taught = {name: tuple(facts.annotated) for name, facts in federation.sites.items()}
        self._trusted = trusted_models(self.vocabulary, own, taught)

    def separate(self, names: Iterable[str]) -> None:
        """Give every site its own copy of these layers."""
        for name in names:
            parent, _, child = name.rpartition(".")
            setattr(self.get_submodule(parent), child, PerSite(self.get_submodule(name), self.sites))

    def choose(self, site: str) -> None:
        """Predict with the parts of this site."""
        for module in self.modules():
            if isinstance(module, PerSite):
                module.chosen = f"{_PREFIX}{site}"

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """[B, C, *S] → logits [B, channels, *S]."""
        if len(self.sites) == 1:
            return self.predict(image)
        predictions = ((site, self.predict_as(site, image), self.vocabulary) for site in self.sites)
        return merge_predictions(predictions, self._trusted, self.activation)

    def predict(self, image: torch.Tensor) -> torch.Tensor:
        """Logits with the chosen site's parts."""
        return super().forward(image)

    def predict_as(self, site: str, image: torch.Tensor) -> torch.Tensor:
        """The logits of one site's own network."""
        self.choose(site)
        return self.predict(image)


class OneSite(SegmentationNetwork):
    """The network of one site, inside the delivered one."""

    def __init__(self, whole: NetworkWithSiteParts, site: str) -> None:
        super().__init__(whole.vocabulary, whole.activation)
        self.whole, self.site = whole, site

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """[B, C, *S] → logits [B, channels, *S]."""
        return self.whole.predict_as(self.site, image)


class SitePartsMethod(Method):
    """A method whose sites have parts of their own: its `build_network` says which."""

    organs: ClassVar[OrganParts | None] = "channels"

    def own_models(self, delivered: SegmentationNetwork) -> Mapping[str, SegmentationNetwork]:
        """Every site's network."""
        assert isinstance(delivered, NetworkWithSiteParts)
        return {site: OneSite(delivered, site) for site in delivered.sites}


class SitePartsServer(ServerRule):
    """Returns each site's own parts to it. Only one site sends such a key, so the mean leaves it unchanged."""

    def broadcast(self, site: str) -> Payload:
        """Without the other sites' parts."""
        whole = super().broadcast(site)
        return Payload(without_other_sites(whole.tensors, site), whole.scalars)

    def weights_of(self, site: str) -> dict[str, torch.Tensor]:
        """A site may write to its own parts only."""
        return without_other_sites(super().weights_of(site), site)


def without_other_sites(tensors: Tensors, site: str) -> dict[str, torch.Tensor]:
    """What all sites share, and the parts of this one."""
    own = f"{_PREFIX}{site}"
    others = {key for key in tensors if any(p.startswith(_PREFIX) and p != own for p in key.split("."))}
    return {key: value for key, value in tensors.items() if key not in others}
