"""UFPS — unified labels from the others' teachers, and flat minima that all sites share.

Jiang et al., "UFPS: A unified framework for partially annotated federated segmentation in heterogeneous data
distribution". Every module is one switch; with all of them off it is FedAvg* (`fedavg_pl`). By default

- *PL* (eq. 4): teachers label what a site does not; ground truth always wins;
- *WS* (eq. 8), early: a sample counts by how sure the teachers are of it, compared with the site's other cases;
- *aRCE* (eq. 9), after that: the prediction judges the label, more and more;
- *GMT* (eq. 5), late: the round's global model becomes the main teacher;
- *UA* (eq. 7), late: sites whose teachers are sure count more in the mean of the decoder;
- *sUSAM* (eqs. 11 to 14), late: step by the gradient at the worst point nearby. That point is looked for on images as
  another scanner might have shown them (CMIDG), and only some weights move there: the largest gradients, and a few
  that the sites disagree on.

Starts and ends are shares of the rounds. Settled where the paper is silent, or its text and formulas disagree: eq. 11
takes magnitudes (signed gradients that swing would cancel), the bank holds one value per case, WS's weights end at 0,
and eq. 5 measures agreement where ground truth leaves something open.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator

from panorgan.cases.cmidg import CMIDGSettings, cmidg
from panorgan.cases.sampling import Batch
from panorgan.errors import ConfigError
from panorgan.losses.reverse_ce import adaptive_rce
from panorgan.losses.uncertainty import sample_uncertainty, teacher_logits, voxel_entropy
from panorgan.losses.unified_label import merge, pseudo_label
from panorgan.methods.ablation import AblationRow
from panorgan.methods.asam_step import statistics_kept
from panorgan.methods.base import Content, Moment, Numbers, Updates, stated
from panorgan.methods.pseudo_labels import PseudoLabelConfig, PseudoLabelMethod, PseudoLabelSite
from panorgan.methods.registry import register
from panorgan.methods.sharpness import ascend, flat_gradient
from panorgan.methods.sparse_masks import GLOBAL, LOCAL, ServerMasks, SiteMasks, parameter_count
from panorgan.methods.teaching import TEACHERS, TaughtServer
from panorgan.methods.ufps_table import TABLE_3
from panorgan.methods.uncertainty_bank import UncertaintyBank
from panorgan.methods.uncertainty_weights import SiteUncertainty, uncertainty_weights
from panorgan.methods.weight_schedules import sample_weights
from panorgan.networks import SegmentationNetwork

MEAN, VARIANCE = "uncertainty/mean", "uncertainty/variance"
_PARTS: dict[str, tuple[str, ...]] = {"decoder": ("decoder", "head"), "encoder": ("encoder", "bottleneck")}


def _has_come(share: float, moment: Moment) -> bool:
    """Whether a share of the rounds has come."""
    return moment.progress >= share


class UFPSConfig(PseudoLabelConfig):
    """A switch for every module, and its numbers."""

    # WS
    weight_schedule: Literal["none", "tail_shift", "base_decrement", "round_trip_gaussian"] = stated(
        "tail_shift", "tail_shift", "WS: how samples are weighted (eq. 8)"
    )
    schedule_start: float = stated(0.02, "10/500", "WS from this share of the rounds on", ge=0, le=1)
    schedule_end: float = stated(0.4, "200/500", "WS up to this share of the rounds", ge=0, le=1)
    schedule_tail: float = stated(0.7, "0.7", "the quantile above which a case is in the tail, U_T", ge=0, le=1)
    # aRCE
    reverse_ce: bool = stated(True, "on", "aRCE: reverse cross-entropy that grows with time (eq. 9)")
    reverse_ce_weight: float = stated(0.01, "0.01", "its weight", ge=0)
    reverse_ce_start: float = stated(0.4, "200/500", "aRCE from this share of the rounds on", ge=0, le=1)
    # GMT
    main_teacher: bool = stated(True, "on", "GMT: the global model as the main teacher (eq. 5)")
    main_teacher_start: float = stated(0.6, "300/500", "GMT from this share of the rounds on", ge=0, le=1)
    main_teacher_share: float = stated(0.8, "0.8", "v: with less agreement the main teacher decides alone", ge=0, le=1)
    # UA
    uncertainty_aware: Literal["none", "decoder", "encoder", "all"] = stated(
        "decoder", "decoder", "UA: the part of the network that is averaged by certainty too (eq. 7)"
    )
    uncertainty_start: float = stated(0.6, "300/500", "UA from this share of the rounds on", ge=0, le=1)
    mean_temperature: float = stated(0.05, "0.05", "τ^μ", gt=0)
    variance_temperature: float = stated(0.001, "0.001", "τ^σ", gt=0)
    # sUSAM
    sharpness: Literal["none", "asam", "usam", "topk", "susam"] = stated(
        "susam",
        "susam",
        "asam: look for the worst point on the same images; usam: on augmented ones; topk: and move the largest "
        "gradients only; susam: and some that sites disagree on",
    )
    sharpness_start: float = stated(0.6, "300/500", "from this share of the rounds on", ge=0, le=1)
    rho: float = stated(0.7, "0.7", "how far the worst point is looked for, ρ; 0 for plain steps", ge=0)
    eta: float = stated(
        0.001, "0.001", "what keeps weights near zero mobile: the scale is the size of a weight plus η", ge=0
    )
    local_share: float = stated(0.4, "0.4", "T_L: the share of weights in M_L", ge=0, le=1)
    global_share: float = stated(0.1, "0.1", "T_G: the largest share of weights in M_E", ge=0, le=1)
    mask_every: int = stated(5, "5", "rounds from one refresh of the masks to the next, r_fre", ge=1)
    gradient_momentum: float = stated(0.9, "0.9", "α_mo of eq. 11", ge=0, lt=1)
    augmentation: CMIDGSettings = Field(
        CMIDGSettings(), description="CMIDG of the images on which the worst point is looked for"
    )

    @model_validator(mode="after")
    def _schedule_has_rounds(self) -> UFPSConfig:
        if self.weight_schedule != "none" and self.schedule_start >= self.schedule_end:
            raise ConfigError(
                f"WS would begin at {self.schedule_start} of the rounds and end at {self.schedule_end}.",
                where="method.schedule_start",
                fix="Let it begin before it ends, or set weight_schedule: none.",
            )
        return self


@register("ufps", config=UFPSConfig)
class UFPS(PseudoLabelMethod):
    """Unified label learning and sparse unified sharpness-aware minimisation."""

    paper: ClassVar[str] = (
        "Jiang et al., UFPS: A unified framework for partially annotated federated segmentation in heterogeneous data "
        "distribution"
    )
    equations: ClassVar[Mapping[str, str]] = {
        "eq. 4": "`Site.prepare`: `losses.unified_label.merge`",
        "eq. 5": "`losses.unified_label.global_main_teacher`",
        "eq. 6": "`Site.uncertainty`: `losses.uncertainty`",
        "eq. 7": "`Server.aggregate`: `uncertainty_weights`, on the decoder",
        "eq. 8": "`Site.prepare`: `weight_schedules.tail_shift`; Note 8's others beside it",
        "eq. 9": "`Site.sample_losses`: `losses.reverse_ce`",
        "eqs. 11, 13": "`Site.worst_point_nearby`: `sparse_masks.SiteMasks.refresh`",
        "eq. 12": "`Server.broadcast`: `sharpness.global_mask`",
        "eq. 14": "`Site.step`",
    }
    recipe: ClassVar[Mapping[str, object]] = {
        "plan.intensity": "window",
        "plan.window_hu": [-500, 500],
        "training.rounds": 500,
        "training.local_epochs": 1,
        "training.overlap": 0.5,
        "training.optimizer.name": "adamw",
        "training.optimizer.learning_rate": 0.0001,
        "training.optimizer.weight_decay": 0.000001,
        "training.optimizer.warmup": 0.02,
        "training.optimizer.schedule": "cosine",
        "training.sampling.patch_size": [192, 192, 80],
        "training.sampling.batch_size": 2,
        "training.sampling.foreground": 0.5,
    }
    ablation: ClassVar[tuple[AblationRow, ...]] = TABLE_3
    numbers: ClassVar[Mapping[str, str]] = {
        **PseudoLabelMethod.numbers,
        MEAN: "how unsure teachers are of the site's training cases, on average",
        VARIANCE: "and how much that varies between them",
    }
    # An entropy over N classes, divided by N, is ln N / N at most: below 0.37, and its variance far below that.
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {MEAN: (0.0, 1.0), VARIANCE: (0.0, 1.0)}
    tensors: ClassVar[Mapping[str, str]] = {
        **TEACHERS,
        LOCAL: "every `mask_every` rounds, a bit per weight: whether it is among those that matter most to this site.",
    }

    class Site(PseudoLabelSite):
        """Labels, how much each sample counts, and steps by the gradient at the worst point nearby."""

        config: UFPSConfig

        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)
            self.global_model: SegmentationNetwork | None = None
            self.weights: torch.Tensor | None = None
            """[B], how much the samples of the batch at hand count; all alike if None."""
            self.bank = self._bank_from(Content())
            self.masks = SiteMasks(self.config.local_share, self.config.global_share, self.config.gradient_momentum)
            self.refreshing = False
            """Whether this round makes new masks."""

        # -- what is active when

        def before_round(self) -> None:
            """In training, take over the global model; late, keep a frozen copy as the main teacher."""
            super().before_round()
            if not self.in_training:
                return
            if self.config.main_teacher and _has_come(self.config.main_teacher_start, self.moment):
                self.global_model = copy.deepcopy(self.model).requires_grad_(False).eval()
            rounds = (replace(self.moment, round=r) for r in range(1, self.moment.rounds + 1))
            first = next(moment.round for moment in rounds if _has_come(self.config.sharpness_start, moment))
            due = (self.moment.round - first) % self.config.mask_every == 0
            self.refreshing = self._is_sparse and (due or self.masks.current is None)
            # Streams of their own: masks that are drawn change no image, and neither changes the dropout.
            device = next(self.model.parameters()).device
            seed = torch.initial_seed()
            self.image_draws = torch.Generator().manual_seed(seed ^ 1)  # few numbers, for the CPU to draw
            self.mask_draws = torch.Generator(device).manual_seed(seed ^ 2)

        @property
        def _is_sharp(self) -> bool:
            chosen = self.config.sharpness != "none" and self.config.rho > 0
            return chosen and self.in_training and _has_come(self.config.sharpness_start, self.moment)

        @property
        def _is_sparse(self) -> bool:
            return self._is_sharp and self.config.sharpness in ("topk", "susam")

        @property
        def _is_weighted(self) -> bool:
            early = self.config.schedule_start <= self.moment.progress < self.config.schedule_end
            return self.config.weight_schedule != "none" and early

        # -- what a batch is taught with

        def prepare(self, batch: Batch) -> None:
            """The unified label (eqs. 4, 5), and how much each sample counts (eq. 8)."""
            config, vocabulary = self.config, self.federation.vocabulary
            main = None
            if self.global_model is not None:
                with torch.no_grad(), self.tools.autocast():
                    main = self.global_model(batch.image)
            self.label = merge(batch, vocabulary, config.larger_first, config.merge, main, config.main_teacher_share)
            self.weights = None
            schedule_ended = config.weight_schedule == "none" or _has_come(config.schedule_end, self.moment)
            if batch.extra is None or (schedule_ended and config.uncertainty_aware == "none"):
                return  # nobody will ask the bank
            uncertainty = self.uncertainty(batch)
            self.bank.put(batch.cases, uncertainty)
            if self._is_weighted and config.weight_schedule != "none":
                self.weights = sample_weights(
                    config.weight_schedule,
                    uncertainty,
                    self.bank,
                    self.moment.round,
                    self.moment.rounds,
                    config.schedule_tail,
                )

        def uncertainty(self, batch: Batch) -> torch.Tensor:
            """Eq. 6, [B]: of the teachers alone, whatever the annotation says."""
            assert batch.extra is not None
            assert batch.extra_known is not None
            vocabulary = self.federation.vocabulary
            classes = len(vocabulary) + 1
            said = pseudo_label(batch, vocabulary, self.config.larger_first, self.config.merge)
            entropy = voxel_entropy(teacher_logits(batch.extra, batch.extra_known), classes)
            return sample_uncertainty(entropy, said, classes)

        def sample_losses(self, logits: torch.Tensor) -> torch.Tensor:
            """Dice + BCE, weighted early (eq. 8), joined by aRCE later (eq. 9), [B]."""
            losses = super().sample_losses(logits)
            if self.weights is not None:
                losses = losses * self.weights
            if self.config.reverse_ce and _has_come(self.config.reverse_ce_start, self.moment):
                rce = adaptive_rce(logits, self.label, self.moment.round, self.moment.rounds)
                losses = losses + self.config.reverse_ce_weight * rce
            return losses

        # -- steps

        def step(self, batch: Batch) -> dict[str, torch.Tensor]:
            """Eq. 14: the gradient at the worst point nearby, applied where the weights are; early, a plain step."""
            if not self._is_sharp:
                return super().step(batch)
            self.prepare(batch)
            with self.worst_point_nearby(batch):
                loss = self.compute_gradients(batch)
            self.apply_gradients()
            return {"loss": loss}

        @contextmanager
        def worst_point_nearby(self, batch: Batch) -> Iterator[None]:
            """The weights at w + ε ⊙ (M_L ∪ M_E), ε along the gradient on augmented images with the same label."""
            config = self.config
            if config.sharpness != "asam":
                image = cmidg(batch.image, config.augmentation, self.image_draws)
                batch = replace(batch, image=image)
            with statistics_kept(self.model):  # running statistics are those of real images, of the pass to come
                self.compute_gradients(batch)
            if self.refreshing:
                contested = self.received.arrays.get(GLOBAL) if config.sharpness == "susam" else None
                self.masks.refresh(flat_gradient(self.model), contested, self.mask_draws)
            mask = self.masks.current if self._is_sparse else None
            with ascend(self.model, config.rho, config.eta, mask=mask):
                yield

        # -- what travels, and what stays

        def after_round(self) -> None:
            """The copy of the global model has served."""
            super().after_round()
            self.global_model, self.weights = None, None

        def update(self) -> Content:
            """The model; late, mean and variance of the bank, and fresh masks."""
            whole = super().update()
            arrays, numbers = dict(whole.arrays), dict(whole.numbers)
            if self.refreshing and self.config.sharpness == "susam":
                arrays[LOCAL] = self.masks.to_send()
            aware = self.config.uncertainty_aware != "none" and _has_come(self.config.uncertainty_start, self.moment)
            if self.in_training and aware and len(self.bank):
                statistics = self.bank.statistics()
                numbers |= {MEAN: float(statistics.mean), VARIANCE: float(statistics.variance)}
            return Content(arrays, numbers)

        def state(self) -> Content:
            """The bank and the masks, besides a teacher in the making."""
            whole = super().state()
            return Content({**whole.arrays, **self.masks.state()}, {**whole.numbers, **self.bank.as_content().numbers})

        def load_state(self, state: Content) -> None:
            """Take all of it back."""
            super().load_state(state)
            self.masks.load(state.arrays)
            self.bank = self._bank_from(state)

        def _bank_from(self, state: Content) -> UncertaintyBank:
            device = next(self.model.parameters()).device
            return UncertaintyBank.from_content(state, (case.id for case in self.tools.cases), device)

    class Server(TaughtServer):
        """FedAvg's mean, by certainty too where UA says so; and the mask that sites disagree on."""

        config: UFPSConfig

        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)
            self.masks = ServerMasks()
            self.certainty: Mapping[str, float] = {}
            """Eq. 7's weights of this round; empty before UA begins."""

        def broadcast(self, site: str) -> Content:
            """With the model goes M_G: also between refreshes, for whoever has no mask yet."""
            whole = super().broadcast(site)
            contested = self.masks.contested(parameter_count(self.weights)) if self._masks_travel else None
            return whole if contested is None else Content({**whole.arrays, GLOBAL: contested}, whole.numbers)

        def expects(self, site: str) -> Mapping[str, torch.Tensor]:
            """A mask may come along."""
            expected = super().expects(site)
            if not self._masks_travel:
                return expected
            bits = -(-parameter_count(self.weights) // 8)
            return {**expected, LOCAL: torch.empty(bits, dtype=torch.uint8, device="meta")}

        def aggregate(self, updates: Updates) -> None:
            """Collect the masks, work out who counts how much (eq. 7), average."""
            self.masks.collect({s: updates.array(s, LOCAL) for s in updates.sites if LOCAL in updates.keys(s)})
            self.certainty = {}
            aware = self.config.uncertainty_aware != "none" and self.in_training
            if aware and _has_come(self.config.uncertainty_start, self.moment):
                self.certainty = uncertainty_weights(
                    {site: self._certainty_of(site, updates.numbers(site)) for site in updates.sites},
                    self.config.mean_temperature,
                    self.config.variance_temperature,
                )
            super().aggregate(updates)

        def weight(self, site: str, key: str) -> float:
            """How much a site counts in the mean of a key."""
            part = self.config.uncertainty_aware
            if site in self.certainty and (part == "all" or key.split(".", 1)[0] in _PARTS[part]):
                return self.certainty[site]
            return super().weight(site, key)

        def _certainty_of(self, site: str, numbers: Numbers) -> SiteUncertainty:
            mean, variance = (numbers.get(name, math.nan) for name in (MEAN, VARIANCE))
            return SiteUncertainty(super().weight(site, ""), mean, variance)

        @property
        def _masks_travel(self) -> bool:
            config = self.config
            sparse = config.sharpness == "susam" and config.rho > 0 and self.in_training
            return sparse and _has_come(config.sharpness_start, self.moment)

        def state(self) -> Content:
            """Who has the teachers, and the newest masks."""
            whole = super().state()
            return Content({**whole.arrays, **self.masks.state()}, whole.numbers)

        def load_state(self, state: Content) -> None:
            """Take that back."""
            super().load_state(state)
            self.masks.load(state.arrays)
