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
            """Only the member of this site."""
            return Payload(self._own(site))

        def expects(self, site: str) -> Mapping[str, torch.Tensor]:
            """A site may write to its own member only."""
            return self._own(site)

        def _own(self, site: str) -> dict[str, torch.Tensor]:
            prefix = f"members.{_member(site)}."
            return {key: value for key, value in self.weights.items() if key.startswith(prefix)}

    def build_network(
        self, settings: UNetSettings, federation: Federation, site: str | None = None
    ) -> SegmentationNetwork:
        """One small network per site, each with its own organs; at a site only its own."""
        sites = sorted(federation.sites) if site is None else [site]
        own = {name: Vocabulary(federation.organs_of(name)) for name in sites}
        taught = {_member(name): frozenset(federation.sites[name].annotated) for name in sites}
        members = {_member(name): UNet(own[name], settings) for name in sites}
        return MergedMembers(members, federation.vocabulary if site is None else own[site], settings, taught)

    def own_models(self, delivered: SegmentationNetwork) -> Mapping[str, SegmentationNetwork]:
        """Every member: it knows the organs of its own site only."""
        assert isinstance(delivered, MergedMembers)
        return {name.removeprefix(_PREFIX): member for name, member in delivered.members.items()}  # type: ignore[misc]


def _member(site: str) -> str:
    """A site's member by name; the prefix separates a site called `train` or `keys` from torch's attribute names."""
    return f"{_PREFIX}{site}"


class MergedMembers(SegmentationNetwork):
    """Several networks, each for its own organs, combined into one.

    Softmax channels: a member's logit minus its own background logit is the log odds of an organ against background.
    Stacked beside a background of 0, background wins exactly where every member predicts background, and among organs
    the most confident member wins. An organ that several members know gets the mean of their scores. A member trained
    on a union only (`taught`: structures by member) is used for its parts where no member knows them by name.
    """

    def __init__(
        self,
        members: Mapping[str, SegmentationNetwork],
        vocabulary: Vocabulary,
        settings: UNetSettings,
        taught: Mapping[str, Collection[str]] | None = None,
    ) -> None:
        super().__init__(vocabulary, settings.activation)
        self.members = nn.ModuleDict(members)
        able = {organ: {name for name in members if organ in members[name].vocabulary} for organ in vocabulary}
        sure = {o: {n for n in names if taught is None or o in taught[n]} for o, names in able.items()}
        self._heard = {organ: sure[organ] or able[organ] for organ in vocabulary}

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """[B, C, *S] → merged logits [B, channels, *S]."""
        (logits,) = self.run_pass("merged", self._merged, image)
        return logits

    def _merged(self, image: torch.Tensor) -> tuple[torch.Tensor]:
        scores: dict[str, list[torch.Tensor]] = {organ: [] for organ in self.vocabulary}
        for name, member in self.members.items():
            logits = member(image)
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
