"""Solo — every site trains alone on its own organs; the delivered model merges the sites' predictions.

The lower bound of federated learning, and the teachers of later methods. Nothing is averaged: each site's weights
travel under its own keys, so that the general rule "a key is averaged over the sites that sent it" leaves them alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import ClassVar, TypedDict, Unpack

import torch
from torch import nn

from panorgan.anatomy import Vocabulary
from panorgan.methods.base import (
    Federation,
    Method,
    MethodConfig,
    Payload,
    ServerRule,
    SiteRule,
)
from panorgan.methods.registry import register
from panorgan.methods.shared.merged_predictions import merge_predictions, trusted_models
from panorgan.networks import SegmentationNetwork, UNet, UNetSettings

_PREFIX = "site-"


class Merged(TypedDict):
    """How members are merged: all organs, the network's settings, and by member the structures it is taught."""

    vocabulary: Vocabulary
    settings: UNetSettings
    taught: Mapping[str, Collection[str]]


class SoloConfig(MethodConfig):
    """Solo has no settings of its own."""


@register("solo", config=SoloConfig)
class Solo(Method):
    """Each site alone; the tested model merges all site models."""

    group: ClassVar[str] = "bounds"
    paper: ClassVar[str] = (
        "Jiang et al., UFPS: A unified framework for partially annotated federated segmentation in heterogeneous data "
        "distribution (its lower bound, 'SOLO')"
    )

    class Site(SiteRule):
        """Inherited: the network is the site's own member, whose keys (`members.site-<name>.…`) no other site sends."""

    class Server(ServerRule):
        """Returns every site its own member."""

        def broadcast(self, site: str) -> Payload:
            """Of the members only this site's."""
            return Payload(self._own(site))

        def expects(self, site: str) -> Mapping[str, torch.Tensor]:
            """A site may write to its own member only, and to what all share."""
            return self._own(site)

        def _own(self, site: str) -> dict[str, torch.Tensor]:
            prefix = f"members.{member_of(site)}."
            return {k: v for k, v in self.weights.items() if k.startswith(prefix) or not k.startswith("members.")}

    def build_network(
        self, settings: UNetSettings, federation: Federation, site: str | None = None
    ) -> SegmentationNetwork:
        """One small network per site, each with its own organs; at a site only its own."""
        sites = sorted(federation.sites) if site is None else [site]
        own = {member_of(name): Vocabulary(federation.organs_of(name)) for name in sites}
        taught = {member_of(name): frozenset(federation.sites[name].annotated) for name in sites}
        whole = federation.vocabulary if site is None else own[member_of(site)]
        return self.merge(own, vocabulary=whole, settings=settings, taught=taught)

    def merge(self, own: Mapping[str, Vocabulary], **merged: Unpack[Merged]) -> SegmentationNetwork:
        """The network of some members, by their organs."""
        return MergedMembers({name: UNet(organs, merged["settings"]) for name, organs in own.items()}, **merged)

    def own_models(self, delivered: SegmentationNetwork) -> Mapping[str, SegmentationNetwork]:
        """Every member: it knows the organs of its own site only."""
        assert isinstance(delivered, MergedMembers)
        return {site_of(name): member for name, member in delivered.members.items()}  # type: ignore[misc]


def member_of(site: str) -> str:
    """A site's member by name; the prefix separates a site called `train` or `keys` from torch's attribute names."""
    return f"{_PREFIX}{site}"


def site_of(member: str) -> str:
    """The inverse of `member_of`."""
    return member.removeprefix(_PREFIX)


class MergedMembers(SegmentationNetwork):
    """Several networks, each for its own organs, combined into one.

    How, `merged_predictions` says. `taught`: by member, the structures that its site annotates.
    """

    def __init__(
        self,
        members: Mapping[str, nn.Module],
        vocabulary: Vocabulary,
        settings: UNetSettings,
        taught: Mapping[str, Collection[str]] | None = None,
    ) -> None:
        super().__init__(vocabulary, settings.activation)
        self.members = nn.ModuleDict(members)
        able = {name: tuple(one.vocabulary) for name, one in members.items()}  # type: ignore[arg-type]
        self._trusted = trusted_models(vocabulary, able, taught)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """[B, C, *S] → merged logits [B, channels, *S]."""
        (logits,) = self.run_pass("merged", self._merged, image)
        return logits

    def shared(self, image: torch.Tensor) -> torch.Tensor:
        """What every member reads."""
        return image

    def _merged(self, image: torch.Tensor) -> tuple[torch.Tensor]:
        shared = self.shared(image)
        predictions = ((name, member(shared), member.vocabulary) for name, member in self.members.items())
        return (merge_predictions(predictions, self._trusted, self.activation),)  # type: ignore[arg-type]
