"""The shape of a method: a config, a rule that runs at each site, a rule that runs at the server.

Hooks, from most used to least: `loss(batch)` · `step(batch)` · `before_round` / `after_round` · `update()` ·
`broadcast(site)` · `aggregate(updates)` · `stages()` · `build_network()`. The defaults are FedAvg.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import nn

from panorgan.cases.sampling import Batch
from panorgan.losses import partial_dice_ce
from panorgan.methods.exchange import Content, Federation, Moment, Numbers, SiteFacts, Stage, Updates
from panorgan.networks import SegmentationNetwork, UNet, UNetSettings
from panorgan.settings import Settings


class MethodConfig(Settings):
    """Numbers every method has."""

    dice_weight: float = Field(1.0, ge=0, description="weight of the Dice loss")
    ce_weight: float = Field(1.0, ge=0, description="weight of the cross-entropy loss")
    weighting: Literal["cases", "uniform"] = Field("cases", description="a site's weight in the mean: n_i, or 1")


@dataclass
class SiteTools:
    """What the site worker hands to a rule: the model on its device, an optimiser, and numeric habits.

    `autocast()` makes a fresh context each time, so that it may be entered within itself.
    """

    model: SegmentationNetwork
    optimizer: torch.optim.Optimizer
    clip_norm: float | None = None
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext


class SiteRule:
    """Runs where the data is."""

    def __init__(self, config: MethodConfig, facts: SiteFacts, federation: Federation, tools: SiteTools) -> None:
        self.config = config
        self.facts = facts
        self.federation = federation
        self.model = tools.model
        self.tools = tools
        self.received = Content()
        self.moment = Moment("", 1, 1)

    # -- hooks ---------------------------------------------------------------------------------------------

    def before_round(self) -> None:
        """Called once `self.received` and `self.moment` are set; takes over the received weights.

        Other tensors that came along (control variates, masks) stay in `self.received` for the method to use.
        """
        own = self.model.state_dict().keys()
        self.model.load_state_dict({key: value for key, value in self.received.arrays.items() if key in own})

    def loss(self, batch: Batch) -> torch.Tensor:
        """The scalar to minimise on one batch."""
        return self.supervision(batch).mean()

    def step(self, batch: Batch) -> dict[str, torch.Tensor]:
        """One optimiser step; returns scalars to log, left on their device."""
        self.tools.optimizer.zero_grad(set_to_none=True)
        with self.tools.autocast():
            loss = self.loss(batch)
        loss.backward()
        if self.tools.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.tools.clip_norm)
        self.tools.optimizer.step()
        return {"loss": loss.detach()}

    def after_round(self) -> None:
        """Called after the last step of a round, before `update`."""

    def update(self) -> Content:
        """What leaves the site."""
        return Content(self.model.state_dict(), {"cases": float(self.facts.train_cases)})

    def state(self) -> Content:
        """What must survive until the next round. It stays on the site's disk and never travels.

        Parts of the model that `before_round` does not take over belong here too.
        """
        return Content()

    def load_state(self, state: Content) -> None:
        """Take back what `state` gave; its tensors lie on the model's device."""

    # -- shared by methods ---------------------------------------------------------------------------------

    def supervision(self, batch: Batch) -> torch.Tensor:
        """Per-sample partial Dice + cross-entropy of the model on what the batch annotates, [B]."""
        return partial_dice_ce(
            self.model(batch.image),
            batch,
            self.model.vocabulary,
            self.model.convention,
            dice_weight=self.config.dice_weight,
            ce_weight=self.config.ce_weight,
        )


class ServerRule:
    """Runs at the coordinator. Its types cannot hold an image."""

    def __init__(self, config: MethodConfig, federation: Federation, weights: Mapping[str, torch.Tensor]) -> None:
        self.config = config
        self.federation = federation
        self.weights = dict(weights)
        self.moment = Moment("", 1, 1)

    # -- hooks ---------------------------------------------------------------------------------------------

    def broadcast(self, site: str) -> Content:
        """What a site receives at the start of a round."""
        return Content(self.weights)

    def aggregate(self, updates: Updates) -> None:
        """Turn the answers of a round into new global weights: per key, the mean over the sites that sent it.

        What a method sends besides weights (see `expects`) is no business of the mean: read it from `updates`.
        """
        self.weights.update(updates.mean(lambda site, key: self.weight(site, key) if key in self.weights else 0.0))

    def weight(self, site: str, key: str) -> float:
        """How much a site counts in the mean of a key."""
        return float(self.federation.sites[site].train_cases) if self.config.weighting == "cases" else 1.0

    def delivered(self) -> Mapping[str, torch.Tensor]:
        """The weights that are validated and delivered; not those of `broadcast` when a method averages over rounds."""
        return self.weights

    def expects(self, site: str) -> Mapping[str, torch.Tensor]:
        """Keys a site may send, each with an example of its shape and type; anything else is refused.

        An example may lie on the `meta` device. Where nothing is expected, an answer of numbers alone is accepted.
        """
        return self.weights

    def state(self) -> Content:
        """What the coordinator must keep besides the weights."""
        return Content()

    def load_state(self, state: Content) -> None:
        """Take back what `state` gave."""


class Method:
    """A published system or a baseline: two rules and what they need around them."""

    name: ClassVar[str]
    Config: ClassVar[type[MethodConfig]] = MethodConfig
    Site: ClassVar[type[SiteRule]] = SiteRule
    Server: ClassVar[type[ServerRule]] = ServerRule

    pooled: ClassVar[bool] = False
    """All sites' cases in one place. Possible only on a benchmark."""
    labels: ClassVar[Literal["annotated", "withheld"]] = "annotated"
    """`withheld`: train on the full labels that a benchmark holds back for scoring."""
    numbers: ClassVar[tuple[str, ...]] = ("loss", "cases")
    """Names or patterns (`loss/*`) of the numbers in a site's updates: what `step` logs and `update` adds."""
    tensors: ClassVar[Mapping[str, str]] = {}
    """What leaves a site besides weights: key or pattern → a plain sentence for the hospital that reads its policy."""

    def __init__(self, config: MethodConfig) -> None:
        self.config = config

    def stages(self, rounds: int) -> tuple[Stage, ...]:
        """What happens in which order; `rounds` is the experiment's number of training rounds."""
        return (Stage("train", rounds),)

    def build_network(
        self, settings: UNetSettings, federation: Federation, site: str | None = None
    ) -> SegmentationNetwork:
        """The network that a site trains, or with `site=None` the one that the federation delivers."""
        return UNet(federation.vocabulary, settings)

    def own_models(self, delivered: SegmentationNetwork) -> Mapping[str, SegmentationNetwork]:
        """Models of single sites inside the delivered network, by site; scored one by one besides the whole."""
        return {}


__all__ = [
    "Content",
    "Federation",
    "Method",
    "MethodConfig",
    "Moment",
    "Numbers",
    "ServerRule",
    "SiteFacts",
    "SiteRule",
    "SiteTools",
    "Stage",
    "Updates",
]
