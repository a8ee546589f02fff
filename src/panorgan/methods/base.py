"""The shape of a method: a config, a rule that runs at each site, a rule that runs at the server.

Hooks, from most used to least: `loss(batch)` · `step(batch)` · `prepare(batch)` · `before_round` / `after_round` ·
`update()` · `broadcast(site)` · `aggregate(updates)` · `stages()` · `build_network()`. The defaults are FedAvg.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, PositiveFloat
from torch import nn

from panorgan.anatomy import Vocabulary
from panorgan.data.labels import Activation
from panorgan.losses import distil_unlabelled, expected_cross_entropy, partial_dice_ce
from panorgan.methods.protocol import (
    Federation,
    MemoryTensorStore,
    Notice,
    Payload,
    RoundInfo,
    Scalars,
    SiteInfo,
    Stage,
    TensorStore,
    Updates,
)
from panorgan.methods.shared.ablation import AblationRow
from panorgan.methods.shared.server_average import extrapolation, owner_rows, shared_keys, stepped
from panorgan.methods.shared.site_tools import SiteTools
from panorgan.networks import SegmentationNetwork, UNet, UNetSettings, organ_network, select_channels
from panorgan.networks.organ_parts import group_of_key, groups_of, weights_for
from panorgan.networks.settings import OrganParts
from panorgan.preparation.batch import Batch
from panorgan.preparation.teacher_predictions import TeacherPredictions
from panorgan.settings import Settings


def published(default: object, paper: str, description: str, **limits: Any) -> Any:
    """A setting, and the value that the method's paper states for it."""
    return Field(default, description=description, json_schema_extra={"paper": paper}, **limits)


class MethodConfig(Settings):
    """Numbers every method has."""

    dice_weight: float = Field(1.0, ge=0, description="weight of the Dice loss")
    ce_weight: float = Field(1.0, ge=0, description="weight of the cross-entropy loss")
    weighting: Literal["cases", "uniform"] = Field("cases", description="a site's weight in the mean: n_i, or 1")
    dice_over: Literal["batch", "sample"] = Field(
        "batch",
        description="the Dice loss of an organ: over the batch, where the batch shows the organ; or per sample, absent "
        "organs included",
    )
    unlabelled: Literal["received", "marginal"] = Field(
        "marginal",
        description="what a voxel is that the annotation leaves open: what the model received in this round makes of "
        "it (EM; for sigmoid channels, distillation), or what the model in training makes of it (marginal loss)",
    )
    organ_parts: Literal["owners", "everyone"] = Field(
        "owners",
        description="who trains and averages what serves single organs (rows of the output layer, or the parts that "
        "network.organs names): the sites that annotate the organ, or every site",
    )
    server_step: PositiveFloat | Literal["fedexp"] = Field(
        "fedexp",
        description="how far the server goes along the mean of the updates; fedexp: the farther, the less sites agree",
        json_schema_extra={"paper": "1"},
    )


class SiteRule:
    """Runs where the data is."""

    def __init__(self, config: MethodConfig, facts: SiteInfo, federation: Federation, tools: SiteTools) -> None:
        self.config = config
        self.facts = facts
        self.federation = federation
        self.model = tools.model
        self.tools = tools
        self.received = Payload()
        self.received_model: SegmentationNetwork | None = None
        """Frozen; for `unlabelled: received`, and only where something is unlabelled."""
        self.round_info = RoundInfo("", 1, 1)

    # -- hooks ---------------------------------------------------------------------------------------------

    def before_round(self) -> None:
        """Called once `self.received` and `self.round_info` are set; takes over the received weights.

        Other tensors that came along (control variates, masks) stay in `self.received` for the method to use.
        """
        own = self.model.state_dict().keys()
        self.model.load_state_dict({key: value for key, value in self.received.tensors.items() if key in own})
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(self.trains(name))
        self.received_model = copy.deepcopy(self.model).requires_grad_(False).eval() if self.held_organs else None

    def trains(self, parameter: str) -> bool:
        """Whether this site trains a parameter, by its name: not the parts that only other sites may change."""
        if self.config.organ_parts == "everyone":
            return True
        return group_of_key(parameter) in (None, *groups_of(self.own_organs))

    def teacher_predictions(self) -> TeacherPredictions | None:
        """Teachers' predictions for the training cases, cut and moved with them: `batch.soft_targets`.

        Asked once per round, after `before_round`.
        """
        return None

    @property
    def in_training(self) -> bool:
        """Whether this round trains the global model; not so where sites first train teachers."""
        return True

    def prepare(self, batch: Batch) -> None:
        """What a batch is to be taught with: made once per training step, however often its loss is asked for."""

    def loss(self, batch: Batch) -> torch.Tensor:
        """The scalar to minimise on one batch."""
        return self.supervision(batch).mean()

    def step(self, batch: Batch) -> dict[str, torch.Tensor]:
        """One optimiser step; returns scalars to log, left on their device."""
        if self.in_training:
            self.prepare(batch)
        loss = self.compute_gradients(batch)
        self.apply_gradients()
        return {"loss": loss}

    def after_round(self) -> None:
        """Called after the last step of a round, before `update`."""

    def update(self) -> Payload:
        """What leaves the site: the weights that it trains."""
        weights = self.model.state_dict()
        if self.config.organ_parts == "owners":
            weights = weights_for(weights, self.own_organs)
        return Payload(weights, {"cases": float(self.facts.train_cases)})

    def state(self) -> Payload:
        """What must survive until the next round. It stays on the site's disk and never travels.

        Parts of the model that `before_round` does not take over belong here too.
        """
        return Payload()

    def load_state(self, state: Payload) -> None:
        """Take back what `state` gave; its tensors lie on the model's device."""

    # -- shared by methods ---------------------------------------------------------------------------------

    @property
    def own_organs(self) -> tuple[str, ...]:
        """The organs that this site teaches, in vocabulary order."""
        return self.federation.organs_of(self.facts.name)

    @property
    def sometimes_unlabelled(self) -> tuple[str, ...]:
        """Organs that some case of this site has no label for, and that another site annotates."""
        whole, counts = self.federation.vocabulary, self.facts.annotated
        always = {
            organ
            for structure, count in counts.items()
            if count == self.facts.train_cases
            for organ in whole.members(structure)
            if organ not in whole.inside(structure)
        }
        return tuple(organ for organ in self.federation.labelled_organs() if organ not in always)

    @property
    def held_organs(self) -> tuple[str, ...]:
        """Organs on which the received model speaks wherever an annotation does not; none outside of training."""
        if self.config.unlabelled != "received" or not self.in_training:
            return ()
        return tuple(organ for organ in self.sometimes_unlabelled if organ in self.model.vocabulary)

    def compute_gradients(self, batch: Batch) -> torch.Tensor:
        """The first half of a step: fresh gradients of the loss, which is returned."""
        self.tools.optimizer.zero_grad(set_to_none=True)
        with self.tools.autocast():
            loss = self.loss(batch)
        loss.backward()
        return loss.detach()

    def apply_gradients(self) -> None:
        """The second half: clip the gradients, let the optimiser move."""
        optimizer = self.tools.optimizer
        if self.tools.clip_norm is not None:
            # The optimiser has them in a list; to ask the model is to search all its modules, in every step.
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            nn.utils.clip_grad_norm_(parameters, self.tools.clip_norm)
        self.move()

    def move(self) -> None:
        """The step itself, on gradients that are clipped; for methods with an optimiser of their own."""
        self.tools.optimizer.step()

    def supervision(self, batch: Batch) -> torch.Tensor:
        """Per-sample partial Dice + cross-entropy of the model on what the batch annotates, [B].

        Where the received model speaks (`held_organs`), it says what the annotation leaves open.
        """
        own, held = self.own_organs, () if self.received_model is None else self.held_organs
        logits, vocabulary = self.model.channels_for(batch.image, {*own, *held})
        if self.received_model is None:
            return self.supervised(logits, vocabulary, batch)
        with torch.no_grad():
            received, organs = self.received_model.channels_for(batch.image, held)
        if self.model.activation == "softmax":
            return self.supervised(logits, vocabulary, batch, received)
        # Own channels alone: a union's mask would else reach for outputs that it does not show, such as a tumour's.
        loss = self.supervised(select_channels(logits, vocabulary, own), Vocabulary(own), batch)
        chosen = select_channels(logits, vocabulary, organs.organs)
        return loss + self.config.ce_weight * distil_unlabelled(chosen, received, batch, organs)

    def supervised(
        self, logits: torch.Tensor, vocabulary: Vocabulary, batch: Batch, received: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The same for given logits [B, channels, *S] of a vocabulary, and perhaps those of the received model."""
        loss = partial_dice_ce(
            logits,
            batch,
            vocabulary,
            self.model.activation,
            dice_weight=self.config.dice_weight,
            ce_weight=self.config.ce_weight if received is None else 0.0,
            dice_over=self.config.dice_over,
        )
        if received is None or not self.config.ce_weight:
            return loss
        return loss + self.config.ce_weight * expected_cross_entropy(logits, received, batch, vocabulary)


class ServerRule:
    """Runs at the coordinator. Its types cannot hold an image."""

    def __init__(
        self,
        config: MethodConfig,
        federation: Federation,
        weights: Mapping[str, torch.Tensor],
        tensor_store: TensorStore | None = None,
    ) -> None:
        self.config = config
        self.federation = federation
        self.weights = dict(weights)
        self.tensor_store: TensorStore = tensor_store if tensor_store is not None else MemoryTensorStore()
        self.round_info = RoundInfo("", 1, 1)
        self.starts_from_model = False
        """Whether the first weights are those of another model, so that sites training alone should begin with them."""

    # -- hooks ---------------------------------------------------------------------------------------------

    @property
    def in_training(self) -> bool:
        """Whether this round trains the global model; not so where sites first train teachers."""
        return True

    def broadcast(self, site: str) -> Payload:
        """What a site receives at the start of a round: the weights that it trains.

        With `unlabelled: received` also the parts of other sites' organs, for the received model to speak about them.
        """
        return Payload(self.weights if self.config.unlabelled == "received" else self.weights_of(site))

    def aggregate(self, updates: Updates) -> None:
        """Turn the answers of a round into new global weights: per key, the mean over the sites that sent it.

        What a method sends besides weights (see `expects`) is no business of the mean: read it from `updates`.
        """
        means = updates.mean(lambda site, key: self.weight(site, key) if key in self.weights else 0.0)
        rows = {}
        if self.config.organ_parts == "owners":
            rows = owner_rows(updates, self.weights, self.federation, self.weight)
        if self.config.server_step != 1:
            means |= self._stepped(updates, {key: means[key] for key in shared_keys(updates, means) if key not in rows})
        self.weights.update(means | rows)

    def _stepped(self, updates: Updates, means: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        step = self.config.server_step
        if step == "fedexp":
            step = self.extrapolated(updates, means)
        return stepped(self.weights, means, step)

    def extrapolated(self, updates: Updates, means: Mapping[str, torch.Tensor]) -> float:
        """How far `server_step: fedexp` goes along the means."""
        return extrapolation(updates, self.weights, means)

    def weight(self, site: str, key: str) -> float:
        """How much a site counts in the mean of a key."""
        return float(self.federation.sites[site].train_cases) if self.config.weighting == "cases" else 1.0

    def validated(self, scores: Mapping[str, Scalars]) -> None:
        """Called after a validated round: by site, the Dice of `delivered()` on each structure it annotates."""

    def delivered(self) -> Mapping[str, torch.Tensor]:
        """The weights that are validated and delivered; not those of `broadcast` when a method averages over rounds."""
        return self.weights

    def expects(self, site: str) -> Mapping[str, torch.Tensor]:
        """Keys a site may send, each with an example of its shape and type; anything else is refused.

        An example on the `meta` device has no values to compare with, and may be left out: where nothing else is
        expected, an answer of numbers alone is accepted.
        """
        return self.weights_of(site)

    def notices(self) -> tuple[Notice, ...]:
        """What people should know. Asked before every round; the log tells each sentence once."""
        return ()

    def weights_of(self, site: str) -> dict[str, torch.Tensor]:
        """The weights that a site trains: all, but for parts of single organs that are none of its own."""
        if self.config.organ_parts == "everyone":
            return self.weights
        return weights_for(self.weights, self.federation.organs_of(site))

    def numbers(self) -> Scalars:
        """What the log tells about the round that was just averaged. They are the server's own; no site sends them."""
        return {}

    def state(self) -> Payload:
        """What the coordinator must keep besides the weights."""
        return Payload()

    def load_state(self, state: Payload) -> None:
        """Take back what `state` gave."""


class Method:
    """A published system or a baseline: two rules and what they need around them."""

    name: ClassVar[str]
    Config: ClassVar[type[MethodConfig]] = MethodConfig
    Site: ClassVar[type[SiteRule]] = SiteRule
    Server: ClassVar[type[ServerRule]] = ServerRule

    text: ClassVar[str] = ""
    """What it is: `Title — what it does`, then more. Where empty, it is the docstring of the method's file."""
    group: ClassVar[str] = "rules"
    """Where lists of methods show it, one of `about.words.GROUPS`."""
    paper: ClassVar[str] = ""
    """Where it was published: a title, or a link that stays."""
    equations: ClassVar[Mapping[str, str]] = {}
    """Equation number in that paper → the field, function or hook that computes it."""
    recipe: ClassVar[Mapping[str, object]] = {}
    """How the paper trained, as settings of an experiment file: `training.rounds` → 1000."""
    organs: ClassVar[OrganParts | None] = None
    """How its network tells organs apart, where the method itself decides that (`network.organs` else)."""
    activation: ClassVar[Activation | None] = None
    """Softmax or sigmoid channels, where the method itself decides that (`network.activation` else)."""
    pooled: ClassVar[bool] = False
    """All sites' cases in one place. Possible only on a benchmark."""
    labels: ClassVar[Literal["annotated", "withheld"]] = "annotated"
    """`withheld`: train on the full labels that a benchmark holds back for scoring."""
    numbers: ClassVar[Mapping[str, str]] = {
        "loss": "mean loss of the round",
        "cases": "how many cases a result rests on",
    }
    """The numbers in a site's updates, what `step` logs and `update` adds: name or pattern (`loss/*`) → what it is, in
    plain words for the hospital that reads its policy. A method that sends more begins with `**Method.numbers`."""
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {}
    """Of those that the server rule computes with, the least and the most that they can be: name or pattern → range.
    An update with a number outside is refused before the rule sees it, so that no site gains weight with one."""
    tensors: ClassVar[Mapping[str, str]] = {}
    """What leaves a site besides weights: key or pattern → a plain sentence for the hospital that reads its policy."""
    report_section: ClassVar[str] = ""
    """A module with a section of its own for a run's page: `section(record, cases)`, see `report.sections`. Only the
    report imports it, so that it may know what lies above this room."""
    ablation: ClassVar[tuple[AblationRow, ...]] = ()
    """The paper's module table, plainest row first: what `panorgan ablate` runs."""

    def __init__(self, config: MethodConfig) -> None:
        self.config = config

    def stages(self, rounds: int) -> tuple[Stage, ...]:
        """What happens in which order; `rounds` is the experiment's number of training rounds."""
        return (Stage("train", rounds),)

    def module_starts(self, rounds: int) -> Mapping[str, int]:
        """The training round, of `rounds`, in which each module that is on acts first, where that is not the first one.

        A run that delivers an earlier round says so.
        """
        return {}

    def network_settings(self, settings: UNetSettings) -> UNetSettings:
        """The experiment's `network` section as this method uses it."""
        decided = {"organs": self.organs, "activation": self.activation}
        return settings.model_copy(update={name: value for name, value in decided.items() if value is not None})

    def build_network(
        self, settings: UNetSettings, federation: Federation, site: str | None = None
    ) -> SegmentationNetwork:
        """The network that a site trains, or with `site=None` the one that the federation delivers.

        Where organs have parts of their own, a site that trains only its own needs no others, and not even their names;
        but for `unlabelled: received`, where the received model speaks about the others.
        """
        settings = self.network_settings(settings)
        if settings.organs == "channels":
            return UNet(federation.vocabulary, settings)
        if site is not None and self.config.organ_parts == "owners" and self.config.unlabelled == "marginal":
            return organ_network(Vocabulary(federation.organs_of(site)), settings)
        return organ_network(federation.vocabulary, settings, federation.labelled_organs())

    def rate_factors(self, optimizer: str) -> Mapping[str, float]:
        """How much faster or slower parts of the network learn than the experiment's learning rate says.

        By the beginning of their parameters' names, for the optimiser of that name (`adamw`, `sgd`).
        """
        return {}

    def own_models(self, delivered: SegmentationNetwork) -> Mapping[str, SegmentationNetwork]:
        """Models of single sites inside the delivered network, by site; scored one by one besides the whole."""
        return {}


LOSS_IN_PARTS: Mapping[str, str] = {
    "loss": Method.numbers["loss"],
    "loss/*": "parts of that loss",
    **Method.numbers,
}
"""`Method.numbers` where `step` logs the parts of the loss too, in the order in which people read them."""


__all__ = [
    "LOSS_IN_PARTS",
    "Federation",
    "Method",
    "MethodConfig",
    "Notice",
    "Payload",
    "RoundInfo",
    "Scalars",
    "ServerRule",
    "SiteInfo",
    "SiteRule",
    "SiteTools",
    "Stage",
    "TensorStore",
    "Updates",
    "published",
]
