"""The base classes of a method: its config, a rule that runs at each site, and a rule that runs at the server.

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
    """A config field, with the value that the method's paper states for it."""
    return Field(default, description=description, json_schema_extra={"paper": paper}, **limits)


class MethodConfig(Settings):
    """Settings that every method has."""

    dice_weight: float = Field(1.0, ge=0, description="weight of the Dice loss")
    ce_weight: float = Field(1.0, ge=0, description="weight of the cross-entropy loss")
    weighting: Literal["cases", "uniform"] = Field("cases", description="a site's weight in the mean: n_i, or 1")
    dice_over: Literal["batch", "sample"] = Field(
        "batch",
        description="an organ's Dice loss is computed over the batch, if the organ is in it; or over each sample, also "
        "where the organ is absent",
    )
    unlabelled: Literal["received", "marginal"] = Field(
        "marginal",
        description="which model decides the voxels that the annotation leaves open: the one received in this round "
        "(EM; for sigmoid channels, distillation), or the one in training (marginal loss)",
    )
    organ_parts: Literal["owners", "everyone"] = Field(
        "owners",
        description="who trains and averages the parameters of a single organ (its row of the output layer, or the "
        "parts that network.organs names): the sites that annotate the organ, or every site",
    )
    server_step: PositiveFloat | Literal["fedexp"] = Field(
        "fedexp",
        description="length of the server's step along the mean update; fedexp: longer where sites' updates disagree",
        json_schema_extra={"paper": "1"},
    )


class SiteRule:
    """The half of a method that runs at a site, where the data is."""

    def __init__(self, config: MethodConfig, facts: SiteInfo, federation: Federation, tools: SiteTools) -> None:
        self.config = config
        self.facts = facts
        self.federation = federation
        self.model = tools.model
        self.tools = tools
        self.received = Payload()
        self.received_model: SegmentationNetwork | None = None
        """A frozen copy of the received model, for `unlabelled: received`; None if the site labels every organ."""
        self.round_info = RoundInfo("", 1, 1)

    # -- hooks ---------------------------------------------------------------------------------------------

    def before_round(self) -> None:
        """Load the received weights. Called once `self.received` and `self.round_info` are set.

        Other received tensors (control variates, masks) stay in `self.received`, where the method finds them.
        """
        own = self.model.state_dict().keys()
        self.model.load_state_dict({key: value for key, value in self.received.tensors.items() if key in own})
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(self.trains(name))
        self.received_model = copy.deepcopy(self.model).requires_grad_(False).eval() if self.held_organs else None

    def trains(self, parameter: str) -> bool:
        """Whether this site trains the parameter of this name. Parts of organs of other sites stay frozen."""
        if self.config.organ_parts == "everyone":
            return True
        return group_of_key(parameter) in (None, *groups_of(self.own_organs))

    def teacher_predictions(self) -> TeacherPredictions | None:
        """Teachers' predictions for the training cases; they become `batch.soft_targets`, augmented like the images.

        Called once per round, after `before_round`.
        """
        return None

    @property
    def in_training(self) -> bool:
        """Whether this round trains the global model; False while sites train their teachers."""
        return True

    def prepare(self, batch: Batch) -> None:
        """Compute the targets of a batch. Called once per training step, even if `loss` is called several times."""

    def loss(self, batch: Batch) -> torch.Tensor:
        """The scalar to minimise on one batch."""
        return self.supervision(batch).mean()

    def step(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Take one optimiser step; returns scalars to log, as tensors on their device."""
        if self.in_training:
            self.prepare(batch)
        loss = self.compute_gradients(batch)
        self.apply_gradients()
        return {"loss": loss}

    def after_round(self) -> None:
        """Called after the last step of a round, before `update`."""

    def update(self) -> Payload:
        """The payload that the site sends: the weights that it trains."""
        weights = self.model.state_dict()
        if self.config.organ_parts == "owners":
            weights = weights_for(weights, self.own_organs)
        return Payload(weights, {"cases": float(self.facts.train_cases)})

    def state(self) -> Payload:
        """What the rule needs in the next round. It is stored on the site's disk and never sent.

        It must include those parts of the model that `before_round` does not load.
        """
        return Payload()

    def load_state(self, state: Payload) -> None:
        """Restore what `state` returned; its tensors are on the model's device."""

    # -- shared by methods ---------------------------------------------------------------------------------

    @property
    def own_organs(self) -> tuple[str, ...]:
        """The organs that this site's annotation covers, in vocabulary order."""
        return self.federation.organs_of(self.facts.name)

    @property
    def sometimes_unlabelled(self) -> tuple[str, ...]:
        """Organs that at least one case of this site does not label, and that some site annotates."""
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
        """Organs that the received model supervises where the annotation does not; none while teachers are trained."""
        if self.config.unlabelled != "received" or not self.in_training:
            return ()
        return tuple(organ for organ in self.sometimes_unlabelled if organ in self.model.vocabulary)

    def compute_gradients(self, batch: Batch) -> torch.Tensor:
        """The first half of a step: clear the gradients, compute the loss and its gradients, return the loss."""
        self.tools.optimizer.zero_grad(set_to_none=True)
        with self.tools.autocast():
            loss = self.loss(batch)
        loss.backward()
        return loss.detach()

    def apply_gradients(self) -> None:
        """The second half of a step: clip the gradients and update the weights."""
        optimizer = self.tools.optimizer
        if self.tools.clip_norm is not None:
            # From the optimiser's lists: `model.parameters()` would walk all modules in every step.
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            nn.utils.clip_grad_norm_(parameters, self.tools.clip_norm)
        self.move()

    def move(self) -> None:
        """Update the weights from the clipped gradients. Methods with an optimiser of their own override it."""
        self.tools.optimizer.step()

    def supervision(self, batch: Batch) -> torch.Tensor:
        """Partial Dice + cross-entropy of each sample on its annotated structures, [B].

        For `held_organs`, the received model decides the voxels that the annotation leaves open.
        """
        own, held = self.own_organs, () if self.received_model is None else self.held_organs
        logits, vocabulary = self.model.channels_for(batch.image, {*own, *held})
        if self.received_model is None:
            return self.supervised(logits, vocabulary, batch)
        with torch.no_grad():
            received, organs = self.received_model.channels_for(batch.image, held)
        if self.model.activation == "softmax":
            return self.supervised(logits, vocabulary, batch, received)
        # Own channels only: otherwise a union's mask would supervise outputs that it does not show, such as a tumour's.
        loss = self.supervised(select_channels(logits, vocabulary, own), Vocabulary(own), batch)
        chosen = select_channels(logits, vocabulary, organs.organs)
        return loss + self.config.ce_weight * distil_unlabelled(chosen, received, batch, organs)

    def supervised(
        self, logits: torch.Tensor, vocabulary: Vocabulary, batch: Batch, received: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The same loss for given logits [B, channels, *S], optionally with those of the received model."""
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
    """The half of a method that runs at the coordinator. None of its types can hold an image."""

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
        """Whether the first weights come from an earlier model; models of single sites then start from them too."""

    # -- hooks ---------------------------------------------------------------------------------------------

    @property
    def in_training(self) -> bool:
        """Whether this round trains the global model; not so where sites first train teachers."""
        return True

    def broadcast(self, site: str) -> Payload:
        """The payload that a site receives at the start of a round: the weights that it trains.

        With `unlabelled: received`, also the parts of other sites' organs, which the received model predicts.
        """
        return Payload(self.weights if self.config.unlabelled == "received" else self.weights_of(site))

    def aggregate(self, updates: Updates) -> None:
        """Compute the new global weights: per key, the mean over the sites that sent it.

        The mean leaves out tensors other than weights (see `expects`); a method reads those from `updates`.
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
        """The length of the step that `server_step: fedexp` takes along the mean update."""
        return extrapolation(updates, self.weights, means)

    def weight(self, site: str, key: str) -> float:
        """A site's weight in the mean of a key."""
        return float(self.federation.sites[site].train_cases) if self.config.weighting == "cases" else 1.0

    def validated(self, scores: Mapping[str, Scalars]) -> None:
        """Called after a validation, with each site's Dice of `delivered()` on the structures that it annotates."""

    def delivered(self) -> Mapping[str, torch.Tensor]:
        """The weights to validate and deliver; not those of `broadcast` if a method averages over rounds."""
        return self.weights

    def expects(self, site: str) -> Mapping[str, torch.Tensor]:
        """The keys that a site may send, each with an example of its shape and type; anything else is refused.

        An example on the `meta` device has no values to compare with, and its key is optional: if all are, an answer
        may consist of numbers only.
        """
        return self.weights_of(site)

    def notices(self) -> tuple[Notice, ...]:
        """Notices for the user. Called before every round; the log records each of them once."""
        return ()

    def weights_of(self, site: str) -> dict[str, torch.Tensor]:
        """The weights that a site trains: all except the parts of organs that are not its own."""
        if self.config.organ_parts == "everyone":
            return self.weights
        return weights_for(self.weights, self.federation.organs_of(site))

    def numbers(self) -> Scalars:
        """The server's own numbers for the log, about the round that was just averaged."""
        return {}

    def state(self) -> Payload:
        """What the rule needs besides the weights; it is stored in the coordinator's checkpoint."""
        return Payload()

    def load_state(self, state: Payload) -> None:
        """Restore what `state` returned."""


class Method:
    """A published system or a baseline: its two rules, and how they are described and set up."""

    name: ClassVar[str]
    Config: ClassVar[type[MethodConfig]] = MethodConfig
    Site: ClassVar[type[SiteRule]] = SiteRule
    Server: ClassVar[type[ServerRule]] = ServerRule

    text: ClassVar[str] = ""
    """The description: `Title — what it does`, then details. If empty, the docstring of the method's file."""
    group: ClassVar[str] = "rules"
    """Its group in lists of methods, one of `about.words.GROUPS`."""
    paper: ClassVar[str] = ""
    """The publication: a title, or a permanent link."""
    equations: ClassVar[Mapping[str, str]] = {}
    """Equation number in the paper → the setting, function or hook that implements it."""
    recipe: ClassVar[Mapping[str, object]] = {}
    """The paper's training, as settings of an experiment file: `training.rounds` → 1000."""
    organs: ClassVar[OrganParts | None] = None
    """How its network separates organs, if the method fixes that; otherwise `network.organs` decides."""
    activation: ClassVar[Activation | None] = None
    """Softmax or sigmoid channels, if the method fixes that; otherwise `network.activation` decides."""
    pooled: ClassVar[bool] = False
    """Whether all sites' cases are pooled in one place, which is possible only on a benchmark."""
    labels: ClassVar[Literal["annotated", "withheld"]] = "annotated"
    """`withheld`: train on the full labels that a benchmark holds back for scoring."""
    numbers: ClassVar[Mapping[str, str]] = {
        "loss": "mean loss of the round",
        "cases": "number of cases behind a result",
    }
    """The numbers in a site's updates, logged by `step` or added by `update`: name or pattern (`loss/*`) → meaning, in
    plain words for the hospital that reads its policy. A method that sends more starts from `**Method.numbers`."""
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {}
    """Smallest and largest possible value of the numbers that the server rule computes with, by name or pattern. An
    update with a number outside its range is refused, so that no site can gain weight by sending one."""
    tensors: ClassVar[Mapping[str, str]] = {}
    """Tensors that a site sends besides weights: key or pattern → a plain sentence for the hospital's policy."""
    report_section: ClassVar[str] = ""
    """A module whose `section(record, cases)` adds a section to a run's report, see `report.sections`. Only the report
    imports it, so it may itself import rooms above this one."""
    ablation: ClassVar[tuple[AblationRow, ...]] = ()
    """The paper's ablation table, simplest row first, for `panorgan ablate`."""

    def __init__(self, config: MethodConfig) -> None:
        self.config = config

    def stages(self, rounds: int) -> tuple[Stage, ...]:
        """The stages in order; `rounds` is the experiment's number of training rounds."""
        return (Stage("train", rounds),)

    def module_starts(self, rounds: int) -> Mapping[str, int]:
        """The training round, out of `rounds`, in which each active module starts, unless it is the first round.

        A run that delivers an earlier round reports that.
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

        If organs have parts of their own, a site that trains only those of its own organs gets no others and need not
        know their names; except with `unlabelled: received`, where the received model predicts the other organs too.
        """
        settings = self.network_settings(settings)
        if settings.organs == "channels":
            return UNet(federation.vocabulary, settings)
        if site is not None and self.config.organ_parts == "owners" and self.config.unlabelled == "marginal":
            return organ_network(Vocabulary(federation.organs_of(site)), settings)
        return organ_network(federation.vocabulary, settings, federation.labelled_organs())

    def rate_factors(self, optimizer: str) -> Mapping[str, float]:
        """Factors on the experiment's learning rate for parts of the network, by the prefix of their parameters' names.

        `optimizer` is the optimiser's name (`adamw`, `sgd`).
        """
        return {}

    def own_models(self, delivered: SegmentationNetwork) -> Mapping[str, SegmentationNetwork]:
        """Models of single sites inside the delivered network, by site; each is scored, as is the whole network."""
        return {}


LOSS_IN_PARTS: Mapping[str, str] = {
    "loss": Method.numbers["loss"],
    "loss/*": "terms of that loss",
    **Method.numbers,
}
"""`Method.numbers` for methods whose `step` also logs the terms of the loss, in the order in which they are shown."""


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
