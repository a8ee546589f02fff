"""UFPS — unified labels from the other sites' teachers, and flat minima that all sites share.

Jiang et al., "UFPS: A unified framework for partially annotated federated segmentation in heterogeneous data
distribution". Every module is one switch; with all of them off it is FedAvg* (`fedavg_pl`). By default

- *PL* (eq. 4): teachers label what a site does not; ground truth always wins;
- *WS* (eq. 8), early: samples are weighted by the certainty of their teachers, relative to the site's other cases;
- *aRCE* (eq. 9), after that: reverse cross-entropy, in which the prediction discounts the label, with growing weight;
- *GMT* (eq. 5), late: the round's global model becomes the main teacher of the organs that it knows;
- *UA* (eq. 7), late: sites whose teachers are certain have a larger weight in the mean of the decoder;
- *sUSAM* (eqs. 11 to 14), late: step by the gradient at a perturbed point, w + ε. ε follows the gradient on images that
  look as if from another scanner (CMIDG), and perturbs only some weights: those with the largest gradients (M_L), and a
  few on which sites disagree (M_E, from M_G).

Starts and ends are shares of the rounds; `phases` lists them in one table. Decisions where the paper says nothing, or
its text and formulas disagree:

- By Note 5, GMT begins when training has converged; in the paper that was after 300 of 500 rounds. Here it begins
  organ by organ, not before `main_teacher_start`, once the global model's validation Dice has settled above
  `main_teacher_dice` (`readiness`; at least two validations, or one with `main_teacher_gain: 1`). Organs it does not
  know are left to the teachers: otherwise it would erase them at every site that does not label them. Without
  validation GMT never begins, and a notice says so; `main_teacher_dice: 0` needs no validation.
- Eq. 5 intersects one-hot labels: a voxel on which they differ has no class. It is left out of the loss, except for
  what ground truth says (which organs it is not, which union it is in). `disagreement: background` makes it
  background. Agreement is measured where ground truth leaves several channels possible.
- Eq. 6 uses all teachers, the site's own included, as Algorithm 3 does (lines 3 and 4), although labels do not need
  it: otherwise a site would appear more certain the more organs it annotates, and UA would reward it for that.
- R in eq. 8 is the last round of WS. The text calls R all rounds; the shift would then stop at 0.4 when WS ends, base
  decrement would never make samples equal, and the round-trip Gaussian would not return as Note 8 draws it.
- WS waits for at least one round, whatever share of a short run that is: it compares cases of a bank that must not be
  empty. Runs of five rounds or fewer have no WS by default. Its weights end at 0; the bank holds one value per case.
- Masks are made in the first round of sUSAM and where r mod r_fre = 1 (Algorithm 3). Eq. 11 takes magnitudes: signed
  gradients that oscillate would cancel. T = |w| + η for all weights; `scale_biases: false` follows ASAM's released
  code, T = 1 for biases.
- Encoder supervision is off: the paper has it, without its weight. With it, every level of the encoder but the finest
  and the bottleneck has an output (four in the paper's network of six levels); teachers are trained without.
- Figure 8 (7) augments in both steps: the same images. Its (6) fuses gradients: 0.2 of that at the perturbed point.
- A teacher is the model of its best validated round, like the global model; the paper does not say which it takes.
- Dice is computed over the batch, of channels that it shows: per sample, as one may read the paper, an organ that is
  absent from most patches is pushed to 0 in all of them. The recipe computes it per sample.
- The predefined sequence in which foreground classes are merged is large to small, by volumes that sites measure
  (`larger_first` overrules them).
- The recipe: restarts at equal distances (the paper names a warm-up restart scheduler without numbers), so that 40 %
  of the learning-rate mass lies after 0.6 R, and moments are kept. Crops are centred on tissue, HU > 0, as often as
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
from panorgan.methods.base import Federation, Notice, Payload, Scalars, Updates
from panorgan.methods.registry import register
from panorgan.methods.shared.ablation import AblationRow
from panorgan.methods.shared.pseudo_labels import PseudoLabelMethod, PseudoLabelServer, PseudoLabelSite
from panorgan.methods.shared.readiness import READY, Readiness
from panorgan.methods.shared.sharpness import ascend, flat_gradient, preserve_statistics
from panorgan.methods.shared.teacher_stages import TEACHERS
from panorgan.methods.ufps.cmidg import cmidg
from panorgan.methods.ufps.encoder_supervision import HEADS, add_encoder_heads, encoder_logits
from panorgan.methods.ufps.phases import Module, active, fills_bank, has_bank, refreshes_masks, rounds_of, starts
from panorgan.methods.ufps.reverse_ce import adaptive_rce
from panorgan.methods.ufps.settings import UFPSConfig
from panorgan.methods.ufps.sparse_masks import GLOBAL, LOCAL, ServerMasks, SiteMasks, parameter_count
from panorgan.methods.ufps.table_3 import TABLE_3
from panorgan.methods.ufps.uncertainty import sample_uncertainty, teacher_logits, voxel_entropy
from panorgan.methods.ufps.uncertainty_bank import UncertaintyBank
from panorgan.methods.ufps.uncertainty_weights import SiteUncertainty, uncertainty_weights
from panorgan.methods.ufps.weight_schedules import sample_weights
from panorgan.networks import SegmentationNetwork, UNet, UNetSettings
from panorgan.preparation.batch import Batch
from panorgan.preparation.store import StoredCase

MEAN, VARIANCE = "uncertainty/mean", "uncertainty/variance"
_PARTS: dict[str, tuple[str, ...]] = {"decoder": ("decoder", "head"), "encoder": ("encoder", "bottleneck", HEADS)}


@register("ufps", config=UFPSConfig)
class UFPS(PseudoLabelMethod):
    """Unified label learning and sparse unified sharpness-aware minimisation."""

    group: ClassVar[str] = "systems"
    paper: ClassVar[str] = (
        "Jiang et al., UFPS: A unified framework for partially annotated federated segmentation in heterogeneous data "
        "distribution"
    )
    equations: ClassVar[Mapping[str, str]] = {
        "eq. 4": "`Site.prepare`: `losses.unified_label.merge`",
        "eq. 5": "`Site.prepare`: `losses.main_teacher.global_main_teacher`; `readiness` says for which organs",
        "eq. 6": "`Site.uncertainty`: `uncertainty`, of all teachers",
        "eq. 7": "`Server.aggregate`: `uncertainty_weights`, on the decoder",
        "eq. 8": "`Site.prepare`: `weight_schedules.tail_shift`, R the last round of WS; Note 8's others too",
        "eq. 9": "`Site.sample_losses`: `reverse_ce`",
        "eqs. 11, 13": "`Site.at_perturbed_point`: `sparse_masks.SiteMasks.refresh`",
        "eq. 12": "`Server.broadcast`: `masks.global_mask`",
        "eq. 14": "`Site.step`",
        "Algorithms 2 to 4": "`phases.PHASES`: the modules by round",
    }
    recipe: ClassVar[Mapping[str, object]] = {
        "plan.crop": "body",
        "plan.intensity": "window",
        "plan.window_hu": [-500, 500],
        "method.dice_over": "sample",
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
        MEAN: "mean uncertainty of the teachers about the site's training cases",
        VARIANCE: "its variance between them",
    }
    # An entropy over N classes, divided by N, is ln N / N at most: below 0.37, and its variance far below that.
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {MEAN: (0.0, 1.0), VARIANCE: (0.0, 1.0)}
    tensors: ClassVar[Mapping[str, str]] = {
        **TEACHERS,
        LOCAL: "every `mask_every` rounds, a bit per weight: whether it is among the most important ones at this site.",
    }

    config: UFPSConfig

    def module_starts(self, rounds: int) -> Mapping[str, int]:
        """From the table of phases."""
        return starts(self.config, rounds)

    def build_network(
        self, settings: UNetSettings, federation: Federation, site: str | None = None
    ) -> SegmentationNetwork:
        """A U-Net, with outputs after the encoder's levels where these are supervised."""
        network = super().build_network(settings, federation, site)
        if self.config.encoder_supervision:
            add_encoder_heads(network, self.network_settings(settings))
        return network

    class Site(PseudoLabelSite):
        """Labels, sample weights, and steps by the gradient at a perturbed point."""

        config: UFPSConfig

        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)
            self.active: frozenset[Module] = frozenset()
            """The modules that are active in this round."""
            self.lacks_labels = False
            """Whether some training case needs a teacher."""
            self.filling = False
            """Whether the bank is used in this round or later."""
            self.last_of_schedule = 0
            """WS's R: its last round, 0 if it has none."""
            self.global_model: SegmentationNetwork | None = None
            self.taught_by_main: tuple[str, ...] = ()
            """The organs for which the global model is the main teacher."""
            self.weights: torch.Tensor | None = None
            """[B], weights of the samples of the current batch; equal if None."""
            self.bank = self._bank_from(Payload())
            self.masks = SiteMasks(self.config.local_share, self.config.global_share, self.config.gradient_momentum)
            self.refreshing = False
            """Whether this round makes new masks."""

        def before_round(self) -> None:
            """In training, load the global model; once it knows an organ, keep a frozen copy as main teacher."""
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
            # Separate random streams: drawing masks changes no image, and neither changes the dropout.
            device = next(self.model.parameters()).device
            seed = torch.initial_seed()
            self.image_draws = torch.Generator().manual_seed(seed ^ 1)  # few numbers, drawn on the CPU
            self.mask_draws = torch.Generator(device).manual_seed(seed ^ 2)

        @property
        def _is_sparse(self) -> bool:
            return "SAM" in self.active and self.config.sharpness in ("topk", "susam")

        def organs_asked(self, case: StoredCase) -> tuple[str, ...]:
            """Eq. 6 uses all teachers, the site's own included; a label needs only those of the organs that it lacks.

            If no case lacks any organ, there are no pseudo labels, and so no uncertainty about them.
            """
            if not has_bank(self.config):
                return super().organs_asked(case)
            return self.teachers.known() if self.lacks_labels else ()

        # -- labels and weights of a batch

        def prepare(self, batch: Batch) -> None:
            """The unified label (eqs. 4, 5), and the sample weights (eq. 8)."""
            config = self.config
            main = None
            if self.global_model is not None:
                with torch.no_grad(), self.tools.autocast():
                    scores = self.global_model(batch.image)
                main = MainTeacher(scores, config.main_teacher_share, self.taught_by_main, config.disagreement)
            without_own = without_own_teachers(batch, self.federation.vocabulary)
            self.label = merge(without_own, self.federation.vocabulary, self.order, config.merge, main)
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
            """Eq. 6, [B]: the uncertainty of the teachers, regardless of the annotation."""
            assert batch.soft_targets is not None
            assert batch.soft_targets_valid is not None
            vocabulary = self.federation.vocabulary
            classes = len(vocabulary) + 1
            said = pseudo_label(batch, vocabulary, self.order, self.config.merge)
            entropy = voxel_entropy(teacher_logits(batch.soft_targets, batch.soft_targets_valid), classes)
            return sample_uncertainty(entropy, said, classes)

        def loss(self, batch: Batch) -> torch.Tensor:
            """Inherited; with encoder supervision, plus the mean loss of the encoder's outputs over its levels."""
            weight = self.config.encoder_supervision
            if not weight or not self.in_training:
                return super().loss(batch)
            assert isinstance(self.model, UNet)
            logits, features = self.model.logits_and_features(batch.image)
            losses = [self.sample_losses(outputs) for outputs in encoder_logits(self.model, features)]
            return (self.sample_losses(logits) + weight * torch.stack(losses).mean(0)).mean()

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
            """Eq. 14: apply the gradient at the perturbed point to w; before sUSAM begins, take a plain step."""
            if "SAM" not in self.active:
                return super().step(batch)
            self.prepare(batch)
            if self.config.sharpness == "augmented":
                loss = self.compute_gradients(self.augmented(batch))
            else:
                with self.at_perturbed_point(batch) as batch:
                    loss = self.compute_gradients(batch)
                self.add_plain_gradient(batch)
            self.apply_gradients()
            return {"loss": loss}

        def augmented(self, batch: Batch) -> Batch:
            """The batch with images as if from another scanner; their labels still hold."""
            return replace(batch, image=cmidg(batch.image, self.config.augmentation, self.image_draws))

        @contextmanager
        def at_perturbed_point(self, batch: Batch) -> Iterator[Batch]:
            """The weights at w + ε ⊙ (M_L ∪ M_E), ε along the gradient on augmented images with the same label.

            Yields the batch on which to compute the step's gradient.
            """
            config = self.config
            perturbing = batch if config.sharpness in ("asam", "random") else self.augmented(batch)
            with preserve_statistics(self.model):  # running statistics come from real images, in the pass that follows
                self.compute_gradients(perturbing)
            if self.refreshing:
                global_bits = self.received.tensors.get(GLOBAL) if config.sharpness == "susam" else None
                self.masks.refresh(flat_gradient(self.model), global_bits, self.mask_draws)
            mask = self.masks.current if self._is_sparse else None
            draws = self.mask_draws if config.sharpness == "random" else None
            with ascend(self.model, config.rho, config.eta, mask=mask, scale_biases=config.scale_biases, draws=draws):
                yield perturbing if config.sharpness == "both" else batch

        def add_plain_gradient(self, batch: Batch) -> None:
            """Figure 8 (6): the gradient at the perturbed point counts `perturbed_share`, that at w the rest."""
            share = self.config.perturbed_share
            if share == 1:
                return
            perturbed = [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]
            with preserve_statistics(self.model):
                self.compute_gradients(batch)
            for parameter, gradient in zip(self.model.parameters(), perturbed, strict=True):
                if parameter.grad is not None and gradient is not None:
                    parameter.grad.lerp_(gradient, share)

        # -- updates and state

        def after_round(self) -> None:
            """Release the copy of the global model."""
            super().after_round()
            self.global_model, self.weights = None, None

        def update(self) -> Payload:
            """The model; late, mean and variance of the bank, and new masks."""
            whole = super().update()
            tensors, numbers = dict(whole.tensors), dict(whole.scalars)
            if self.refreshing and self.config.sharpness == "susam":
                tensors[LOCAL] = self.masks.long_term_bits()
            if "UA" in self.active and len(self.bank):
                statistics = self.bank.statistics()
                numbers |= {MEAN: float(statistics.mean), VARIANCE: float(statistics.variance)}
            return Payload(tensors, numbers)

        def state(self) -> Payload:
            """The bank and the masks, besides a teacher in training."""
            whole = super().state()
            return Payload({**whole.tensors, **self.masks.state()}, {**whole.scalars, **self.bank.as_payload().scalars})

        def load_state(self, state: Payload) -> None:
            """Restore them."""
            super().load_state(state)
            self.masks.load(state.tensors)
            self.bank = self._bank_from(state)

        def _bank_from(self, state: Payload) -> UncertaintyBank:
            device = next(self.model.parameters()).device
            return UncertaintyBank.from_payload(state, (case.id for case in self.tools.cases), device)

    class Server(PseudoLabelServer):
        """FedAvg's mean, weighted by certainty under UA. Decides for which organs the global model is ready, and
        computes M_G, the weights on which sites disagree."""

        config: UFPSConfig

        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)
            self.masks = ServerMasks()
            self.readiness = Readiness(self.config.main_teacher_dice, self.config.main_teacher_gain)
            self.certainty: Mapping[str, float] = {}
            """Eq. 7's weights of this round; empty before UA begins."""

        def broadcast(self, site: str) -> Payload:
            """The model, the organs for which it is the main teacher, and M_G: also between refreshes, for sites
            without a mask."""
            whole = super().broadcast(site)
            tensors, numbers = dict(whole.tensors), dict(whole.scalars)
            if "GMT" in active(self.config, self.round_info):
                numbers |= {f"{READY}{organ}": 1.0 for organ in self.readiness.ready(self.federation)}
            global_bits = self.masks.global_bits(parameter_count(self.weights)) if self._masks_travel else None
            return Payload(tensors if global_bits is None else {**tensors, GLOBAL: global_bits}, numbers)

        def validated(self, scores: Mapping[str, Scalars]) -> None:
            """Use the sites' scores on the organs that they annotate to decide which organs the global model knows."""
            self.readiness.validated(scores, self.federation)

        def notices(self) -> tuple[Notice, ...]:
            """Inherited; and the organs for which GMT does not begin."""
            found = super().notices()
            if "GMT" not in active(self.config, self.round_info):
                return found
            ready, scored = self.readiness.ready(self.federation), self.readiness.dice(self.federation)
            waiting = [organ for organ in self.federation.labelled_organs() if organ not in ready]
            unscored = ", ".join(organ.replace("_", " ") for organ in waiting if organ not in scored)
            unknown = ", ".join(organ.replace("_", " ") for organ in waiting if organ in scored)
            if unscored:
                text = (
                    f"GMT leaves {unscored} to the teachers: no site has scored the global model on it. It needs "
                    "validation cases and training.validate_every, unless method.main_teacher_dice is 0."
                )
                found += (Notice("main-teacher-unscored", text),)
            if unknown:
                text = f"GMT leaves {unknown} to the teachers: the global model does not know it well enough yet."
                found += (Notice("main-teacher-waits", text),)
            return found

        def expects(self, site: str) -> Mapping[str, torch.Tensor]:
            """The model, and in some rounds a mask."""
            expected = super().expects(site)
            if not self._masks_travel:
                return expected
            bits = -(-parameter_count(self.weights) // 8)
            return {**expected, LOCAL: torch.empty(bits, dtype=torch.uint8, device="meta")}

        def aggregate(self, updates: Updates) -> None:
            """Collect the masks, compute the weights of sites (eq. 7), average."""
            self.masks.collect({s: updates.tensor(s, LOCAL) for s in updates.sites if LOCAL in updates.keys(s)})
            self.certainty = {}
            if "UA" in active(self.config, self.round_info):
                self.certainty = uncertainty_weights(
                    {site: self._uncertainty_of(site, updates.scalars(site)) for site in updates.sites},
                    self.config.mean_temperature,
                    self.config.variance_temperature,
                )
            super().aggregate(updates)

        def weight(self, site: str, key: str) -> float:
            """A site's weight in the mean of a key."""
            part = self.config.uncertainty_aware
            if site in self.certainty and (part == "all" or key.split(".", 1)[0] in _PARTS[part]):
                return self.certainty[site]
            return super().weight(site, key)

        def _uncertainty_of(self, site: str, numbers: Scalars) -> SiteUncertainty:
            mean, variance = (numbers.get(name, math.nan) for name in (MEAN, VARIANCE))
            return SiteUncertainty(super().weight(site, ""), mean, variance)

        @property
        def _masks_travel(self) -> bool:
            return "SAM" in active(self.config, self.round_info) and self.config.sharpness == "susam"

        def state(self) -> Payload:
            """Which sites have the teachers, the newest masks, and the scores of the global model."""
            whole = super().state()
            return Payload({**whole.tensors, **self.masks.state()}, {**whole.scalars, **self.readiness.numbers()})

        def load_state(self, state: Payload) -> None:
            """Restore them."""
            super().load_state(state)
            self.masks.load(state.tensors)
            self.readiness.load(state.scalars)
