"""UFPS — unified labels from the others' teachers, and flat minima that all sites share.

Jiang et al., "UFPS: A unified framework for partially annotated federated segmentation in heterogeneous data
distribution". Every module is one switch; with all of them off it is FedAvg* (`fedavg_pl`). By default

- *PL* (eq. 4): teachers label what a site does not; ground truth always wins;
- *WS* (eq. 8), early: a sample counts by how sure the teachers are of it, compared with the site's other cases;
- *aRCE* (eq. 9), after that: the prediction judges the label, more and more;
- *GMT* (eq. 5), late: the round's global model becomes the main teacher of the organs that it knows;
- *UA* (eq. 7), late: sites whose teachers are sure count more in the mean of the decoder;
- *sUSAM* (eqs. 11 to 14), late: step by the gradient at the worst point nearby. That point is looked for on images as
  another scanner might have shown them (CMIDG), and only some weights move there: the largest gradients, and a few
  that the sites disagree on.

Starts and ends are shares of the rounds; `phases` has them in one table. Settled where the paper is silent, or its
text and formulas disagree:

- GMT begins when training has converged, says Note 5; 300 of 500 rounds is where that was. Here it begins organ by
  organ, not before `main_teacher_start`, once the global model's validation Dice has settled above
  `main_teacher_dice` (`readiness`; two validations at least, or one with `main_teacher_gain: 1`). Organs it does not
  know are left to the teachers: it would erase them at every site without a label of them. Without validation GMT
  never begins, and a notice says so; `main_teacher_dice: 0` asks for none.
- Eq. 5 intersects one-hot labels: a voxel on which they differ has no class. It is left out of the loss, but for
  what ground truth says of it (which organs it is not, which union it is in). `disagreement: background`
  calls it background. Agreement is measured where ground truth leaves something open.
- Eq. 6 hears all teachers, the site's own too, as Algorithm 3 does (lines 3 and 4), while labels do not need that one:
  else a site would look the surer the more organs it annotates, and UA would reward it for that.
- R in eq. 8 is the last round of WS. The text calls R all rounds; the shift would then stop at 0.4 when WS ends, base
  decrement would never make samples equal, and the round-trip Gaussian would not come back as Note 8 draws it.
- WS waits for one round at least, whatever share of a short run that is: it compares cases of a bank that must have
  some. Runs of five rounds or fewer have no WS by default. Its weights end at 0; the bank holds one value per case.
- Masks are made in the first round of sUSAM and where r mod r_fre = 1 (Algorithm 3). Eq. 11 takes magnitudes: signed
  gradients that swing would cancel. T = |w| + η for all weights; `scale_biases: false` is ASAM's own code, T = 1 there.
- Teachers are those of their best validated round, like the global model; the paper does not say.
- The predefined sequence in which foreground classes are merged is large to small, by volumes that sites measure
  (`larger_first` overrules them).
- The recipe: restarts at equal distances (the paper has a warm-up restart scheduler and no numbers), so that 40 % of
  the learning-rate mass lies after 0.6 R, and moments that are kept. Crops are centred on tissue, HU > 0, as often as
  elsewhere. Scans are cropped to the body, where the paper takes the box of all voxels with HU > 0, table included.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar

import torch

from panorgan.losses.main_teacher import MainTeacher
from panorgan.losses.unified_label import merge, pseudo_label, without_own_teachers
from panorgan.methods.base import Notice, Payload, Scalars, Updates
from panorgan.methods.registry import register
from panorgan.methods.shared.ablation import AblationRow
from panorgan.methods.shared.pseudo_labels import PseudoLabelMethod, PseudoLabelServer, PseudoLabelSite
from panorgan.methods.shared.sharpness import ascend, flat_gradient, statistics_kept
from panorgan.methods.shared.teacher_stages import TEACHERS
from panorgan.methods.ufps.cmidg import cmidg
from panorgan.methods.ufps.phases import Module, active, fills_bank, has_bank, refreshes_masks, rounds_of, starts
from panorgan.methods.ufps.readiness import READY, Readiness
from panorgan.methods.ufps.reverse_ce import adaptive_rce
from panorgan.methods.ufps.settings import UFPSConfig
from panorgan.methods.ufps.sparse_masks import GLOBAL, LOCAL, ServerMasks, SiteMasks, parameter_count
from panorgan.methods.ufps.table_3 import TABLE_3
from panorgan.methods.ufps.uncertainty import sample_uncertainty, teacher_logits, voxel_entropy
from panorgan.methods.ufps.uncertainty_bank import UncertaintyBank
from panorgan.methods.ufps.uncertainty_weights import SiteUncertainty, uncertainty_weights
from panorgan.methods.ufps.weight_schedules import sample_weights
from panorgan.networks import SegmentationNetwork
from panorgan.preparation.batch import Batch
from panorgan.preparation.store import StoredCase

MEAN, VARIANCE = "uncertainty/mean", "uncertainty/variance"
_PARTS: dict[str, tuple[str, ...]] = {"decoder": ("decoder", "head"), "encoder": ("encoder", "bottleneck")}


@register("ufps", config=UFPSConfig)
class UFPS(PseudoLabelMethod):
    """Unified label learning and sparse unified sharpness-aware minimisation."""

    paper: ClassVar[str] = (
        "Jiang et al., UFPS: A unified framework for partially annotated federated segmentation in heterogeneous data "
        "distribution"
    )
    equations: ClassVar[Mapping[str, str]] = {
        "eq. 4": "`Site.prepare`: `losses.unified_label.merge`",
        "eq. 5": "`Site.prepare`: `losses.main_teacher.global_main_teacher`; `readiness` says for which organs",
        "eq. 6": "`Site.uncertainty`: `uncertainty`, of all teachers",
        "eq. 7": "`Server.aggregate`: `uncertainty_weights`, on the decoder",
        "eq. 8": "`Site.prepare`: `weight_schedules.tail_shift`, R the last round of WS; Note 8's others beside it",
        "eq. 9": "`Site.sample_losses`: `reverse_ce`",
        "eqs. 11, 13": "`Site.worst_point_nearby`: `sparse_masks.SiteMasks.refresh`",
        "eq. 12": "`Server.broadcast`: `masks.global_mask`",
        "eq. 14": "`Site.step`",
        "Algorithms 2 to 4": "`phases.PHASES`: who is active when",
    }
    recipe: ClassVar[Mapping[str, object]] = {
        "plan.crop": "body",
        "plan.intensity": "window",
        "plan.window_hu": [-500, 500],
        "training.rounds": 500,
        "training.local_epochs": 1,
        "training.overlap": 0.5,
        "training.optimizer.name": "adamw",
        "training.optimizer.learning_rate": 0.0001,
        "training.optimizer.weight_decay": 0.000001,
        "training.optimizer.warmup": 0.02,
        "training.optimizer.schedule": "cosine_restarts",
        "training.optimizer.restarts": 4,
        "training.optimizer.keep_state": True,
        "training.sampling.patch_size": [192, 192, 80],
        "training.sampling.batch_size": 2,
        "training.sampling.foreground": 0.5,
        "training.sampling.foreground_is": "tissue",
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

    config: UFPSConfig

    def module_starts(self, rounds: int) -> Mapping[str, int]:
        """From the table of phases."""
        return starts(self.config, rounds)

    class Site(PseudoLabelSite):
        """Labels, how much each sample counts, and steps by the gradient at the worst point nearby."""

        config: UFPSConfig

        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)
            self.active: frozenset[Module] = frozenset()
            """The modules that act in this round."""
            self.lacks_labels = False
            """Whether some training case needs a teacher."""
            self.filling = False
            """Whether the bank is asked in this round or later."""
            self.last_of_schedule = 0
            """WS's R: its last round, 0 if it has none."""
            self.global_model: SegmentationNetwork | None = None
            self.taught_by_main: tuple[str, ...] = ()
            """The organs that the global model is ready to teach."""
            self.weights: torch.Tensor | None = None
            """[B], how much the samples of the batch at hand count; all alike if None."""
            self.bank = self._bank_from(Payload())
            self.masks = SiteMasks(self.config.local_share, self.config.global_share, self.config.gradient_momentum)
            self.refreshing = False
            """Whether this round makes new masks."""

        def before_round(self) -> None:
            """In training, take over the global model; once it knows an organ, keep a frozen copy as main teacher."""
            super().before_round()
            self.active = active(self.config, self.round_info)
            self.lacks_labels = any(self.organs_without_label(case) for case in self.tools.cases)
            self.filling = fills_bank(self.config, self.round_info)
            self.last_of_schedule = max(rounds_of("WS", self.config, self.round_info.rounds), default=0)
            if not self.in_training:
                return
            ready = {name.removeprefix(READY) for name in self.received.scalars if name.startswith(READY)}
            self.taught_by_main = tuple(organ for organ in self.federation.vocabulary if organ in ready)
            if "GMT" in self.active and self.taught_by_main:
                self.global_model = copy.deepcopy(self.model).requires_grad_(False).eval()
            due = self._is_sparse and refreshes_masks(self.config, self.round_info)
            self.refreshing = due or (self._is_sparse and self.masks.current is None)
            # Streams of their own: masks that are drawn change no image, and neither changes the dropout.
            device = next(self.model.parameters()).device
            seed = torch.initial_seed()
            self.image_draws = torch.Generator().manual_seed(seed ^ 1)  # few numbers, for the CPU to draw
            self.mask_draws = torch.Generator(device).manual_seed(seed ^ 2)

        @property
        def _is_sparse(self) -> bool:
            return "SAM" in self.active and self.config.sharpness in ("topk", "susam")

        def organs_asked(self, case: StoredCase) -> tuple[str, ...]:
            """Eq. 6 hears every teacher, the site's own too; a label needs those of the organs it lacks alone.

            Where no case lacks any there is no pseudo label to be unsure of.
            """
            if not has_bank(self.config):
                return super().organs_asked(case)
            return self.teachers.known() if self.lacks_labels else ()

        # -- what a batch is taught with

        def prepare(self, batch: Batch) -> None:
            """The unified label (eqs. 4, 5), and how much each sample counts (eq. 8)."""
            config = self.config
            main = None
            if self.global_model is not None:
                with torch.no_grad(), self.tools.autocast():
                    scores = self.global_model(batch.image)
                main = MainTeacher(scores, config.main_teacher_share, self.taught_by_main, config.disagreement)
            heard = without_own_teachers(batch, self.federation.vocabulary)
            self.label = merge(heard, self.federation.vocabulary, self.order, config.merge, main)
            self.weights = None
            if batch.soft_targets is None or not self.filling:
                return
            uncertainty = self.uncertainty(batch)
            self.bank.put(batch.cases, uncertainty)
            if "WS" in self.active and config.weight_schedule != "none":
                self.weights = sample_weights(
                    config.weight_schedule,
                    uncertainty,
                    self.bank,
                    self.round_info.round,
                    self.last_of_schedule,
                    config.schedule_tail,
                )

        def uncertainty(self, batch: Batch) -> torch.Tensor:
            """Eq. 6, [B]: of the teachers alone, whatever the annotation says."""
            assert batch.soft_targets is not None
            assert batch.soft_targets_valid is not None
            vocabulary = self.federation.vocabulary
            classes = len(vocabulary) + 1
            said = pseudo_label(batch, vocabulary, self.order, self.config.merge)
            entropy = voxel_entropy(teacher_logits(batch.soft_targets, batch.soft_targets_valid), classes)
            return sample_uncertainty(entropy, said, classes)

        def sample_losses(self, logits: torch.Tensor) -> torch.Tensor:
            """Dice + BCE, weighted early (eq. 8), joined by aRCE later (eq. 9), [B]."""
            losses = super().sample_losses(logits)
            if self.weights is not None:
                losses = losses * self.weights
            if "aRCE" in self.active:
                rce = adaptive_rce(logits, self.label, self.round_info.round, self.round_info.rounds)
                losses = losses + self.config.reverse_ce_weight * rce
            return losses

        # -- steps

        def step(self, batch: Batch) -> dict[str, torch.Tensor]:
            """Eq. 14: the gradient at the worst point nearby, applied where the weights are; early, a plain step."""
            if "SAM" not in self.active:
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
                contested = self.received.tensors.get(GLOBAL) if config.sharpness == "susam" else None
                self.masks.refresh(flat_gradient(self.model), contested, self.mask_draws)
            mask = self.masks.current if self._is_sparse else None
            with ascend(self.model, config.rho, config.eta, mask=mask, scale_biases=config.scale_biases):
                yield

        # -- what travels, and what stays

        def after_round(self) -> None:
            """The copy of the global model has served."""
            super().after_round()
            self.global_model, self.weights = None, None

        def update(self) -> Payload:
            """The model; late, mean and variance of the bank, and fresh masks."""
            whole = super().update()
            tensors, numbers = dict(whole.tensors), dict(whole.scalars)
            if self.refreshing and self.config.sharpness == "susam":
                tensors[LOCAL] = self.masks.to_send()
            if "UA" in self.active and len(self.bank):
                statistics = self.bank.statistics()
                numbers |= {MEAN: float(statistics.mean), VARIANCE: float(statistics.variance)}
            return Payload(tensors, numbers)

        def state(self) -> Payload:
            """The bank and the masks, besides a teacher in the making."""
            whole = super().state()
            return Payload({**whole.tensors, **self.masks.state()}, {**whole.scalars, **self.bank.as_payload().scalars})

        def load_state(self, state: Payload) -> None:
            """Take all of it back."""
            super().load_state(state)
            self.masks.load(state.tensors)
            self.bank = self._bank_from(state)

        def _bank_from(self, state: Payload) -> UncertaintyBank:
            device = next(self.model.parameters()).device
            return UncertaintyBank.from_payload(state, (case.id for case in self.tools.cases), device)

    class Server(PseudoLabelServer):
        """FedAvg's mean, by certainty too where UA says so; what the global model may teach; the mask that sites
        disagree on."""

        config: UFPSConfig

        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)
            self.masks = ServerMasks()
            self.readiness = Readiness(self.config.main_teacher_dice, self.config.main_teacher_gain)
            self.certainty: Mapping[str, float] = {}
            """Eq. 7's weights of this round; empty before UA begins."""

        def broadcast(self, site: str) -> Payload:
            """With the model go the organs that it may teach, and M_G: also between refreshes, for whoever has no mask
            yet."""
            whole = super().broadcast(site)
            tensors, numbers = dict(whole.tensors), dict(whole.scalars)
            if "GMT" in active(self.config, self.round_info):
                numbers |= {f"{READY}{organ}": 1.0 for organ in self.readiness.ready(self.federation)}
            contested = self.masks.contested(parameter_count(self.weights)) if self._masks_travel else None
            return Payload(tensors if contested is None else {**tensors, GLOBAL: contested}, numbers)

        def validated(self, scores: Mapping[str, Scalars]) -> None:
            """What sites say of the organs they annotate shows which of them the global model knows."""
            self.readiness.validated(scores, self.federation)

        def notices(self) -> tuple[Notice, ...]:
            """Inherited; and for which organs GMT does not begin."""
            told = super().notices()
            if "GMT" not in active(self.config, self.round_info):
                return told
            ready, scored = self.readiness.ready(self.federation), self.readiness.dice(self.federation)
            waiting = [organ for organ in self.federation.labelled_organs() if organ not in ready]
            unscored = ", ".join(organ.replace("_", " ") for organ in waiting if organ not in scored)
            unknown = ", ".join(organ.replace("_", " ") for organ in waiting if organ in scored)
            if unscored:
                text = (
                    f"GMT leaves {unscored} to the teachers: no site has scored the global model on it. It needs "
                    "validation cases and training.validate_every; method.main_teacher_dice: 0 does without."
                )
                told += (Notice("main-teacher-unscored", text),)
            if unknown:
                text = f"GMT leaves {unknown} to the teachers: the global model does not know it well enough yet."
                told += (Notice("main-teacher-waits", text),)
            return told

        def expects(self, site: str) -> Mapping[str, torch.Tensor]:
            """A mask may come along."""
            expected = super().expects(site)
            if not self._masks_travel:
                return expected
            bits = -(-parameter_count(self.weights) // 8)
            return {**expected, LOCAL: torch.empty(bits, dtype=torch.uint8, device="meta")}

        def aggregate(self, updates: Updates) -> None:
            """Collect the masks, work out who counts how much (eq. 7), average."""
            self.masks.collect({s: updates.tensor(s, LOCAL) for s in updates.sites if LOCAL in updates.keys(s)})
            self.certainty = {}
            if "UA" in active(self.config, self.round_info):
                self.certainty = uncertainty_weights(
                    {site: self._certainty_of(site, updates.scalars(site)) for site in updates.sites},
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

        def _certainty_of(self, site: str, numbers: Scalars) -> SiteUncertainty:
            mean, variance = (numbers.get(name, math.nan) for name in (MEAN, VARIANCE))
            return SiteUncertainty(super().weight(site, ""), mean, variance)

        @property
        def _masks_travel(self) -> bool:
            return "SAM" in active(self.config, self.round_info) and self.config.sharpness == "susam"

        def state(self) -> Payload:
            """Who has the teachers, the newest masks, and what is known of the global model."""
            whole = super().state()
            return Payload({**whole.tensors, **self.masks.state()}, {**whole.scalars, **self.readiness.numbers()})

        def load_state(self, state: Payload) -> None:
            """Take that back."""
            super().load_state(state)
            self.masks.load(state.tensors)
            self.readiness.load(state.scalars)
