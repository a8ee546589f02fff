"""Solo — every site trains alone on its own organs; the delivered model merges the sites' predictions.

The lower bound of federated learning, and the teachers of later methods. Nothing is averaged: each site's weights
travel under its own keys, so that the general rule "a key is averaged over the sites that sent it" leaves them alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import ClassVar

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
from panorgan.networks import SegmentationNetwork, UNet, UNetSettings

_PREFIX = "site-"
_NEVER = -1e4


class SoloConfig(MethodConfig):
    """Solo has no settings of its own."""


@register("solo", config=SoloConfig)
class Solo(Method):
    """Each site alone; the tested model merges all site models."""

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
        return self.merge(own, federation.vocabulary if site is None else own[member_of(site)], settings, taught)

    def merge(
        self,
        own: Mapping[str, Vocabulary],
        vocabulary: Vocabulary,
        settings: UNetSettings,
        taught: Mapping[str, Collection[str]],
    ) -> SegmentationNetwork:
        """The network of some members, by their organs and the structures they are taught."""
        members = {name: UNet(organs, settings) for name, organs in own.items()}
        return MergedMembers(members, vocabulary, settings, taught)

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

    Softmax channels: a member's logit minus its own background logit is the log odds of an organ against background.
    Stacked beside a background of 0, background wins exactly where every member predicts background, and among organs
    the most confident member wins. An organ that several members know gets the mean of their scores. A member trained
    on a union only (`taught`: structures by member) is used for its parts where no member knows them by name.
    Members have a `vocabulary`.
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
        able = {o: {n for n in members if o in members[n].vocabulary} for o in vocabulary}  # type: ignore[operator]
        sure = {o: {n for n in names if taught is None or o in taught[n]} for o, names in able.items()}
        self._heard = {organ: sure[organ] or able[organ] for organ in vocabulary}

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """[B, C, *S] → merged logits [B, channels, *S]."""
        (logits,) = self.run_pass("merged", self._merged, image)
        return logits

    def shared(self, image: torch.Tensor) -> torch.Tensor:
        """What every member reads."""
        return image

    def _merged(self, image: torch.Tensor) -> tuple[torch.Tensor]:
        scores: dict[str, list[torch.Tensor]] = {organ: [] for organ in self.vocabulary}
        shared = self.shared(image)
        for name, member in self.members.items():
            logits = member(shared)
            if self.activation == "softmax":
                logits = logits[:, 1:] - logits[:, :1]
            for index, organ in enumerate(member.vocabulary):  # type: ignore[arg-type]
                if name in self._heard[organ]:
                    scores[organ].append(logits[:, index])
        # An organ that no member knows yet (its site joins later) is predicted nowhere.
        nowhere = torch.full_like(logits[:, 0], _NEVER)
        merged = [torch.stack(known).mean(0) if known else nowhere for known in scores.values()]
        if self.activation == "softmax":
            merged.insert(0, torch.zeros_like(merged[0]))
        return (torch.stack(merged, dim=1),)
