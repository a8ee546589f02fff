"""FLKD — the global model and the other sites' teachers stand in for the labels that a site lacks.

Kim et al., "Federated learning with knowledge distillation for multi-organ segmentation with partially labeled
datasets". Local training on a few organs makes a site's model forget the others. Two distillation losses hold it:
*global KD* towards the round's frozen global model (eq. 7), *local KD* towards models of single sites, trained alone
beforehand and exchanged once (eqs. 9 and 10). The network has a head per organ (section 3.5) and every site sends all
of it, since every head is now trained everywhere; the mean is unweighted (eq. 6).

Stages: *pretrain* (each site trains its teacher, nothing travels until it is done), *exchange* (every site receives
the others' teachers and predicts its own training scans once), *train*. A teacher that did not arrive in time is asked
for in every later round, and handed on; a site that broke off in pretrain sends the last good one it has.

Two settings of the paper cannot be written down exactly. It scales patches by 0.7 to 1.4; `training.augment.scale` is
symmetric, and 0.3 is 0.7 to 1.3. It mirrors every axis, which suits its organs (`kidney`, both sides in one); with
`kidney_left` and `kidney_right` leave axis 0 out of `mirror_axes`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field

from panorgan.anatomy import Vocabulary
from panorgan.cases.companions import Companions
from panorgan.cases.sampling import Batch
from panorgan.cases.store import StoredCase
from panorgan.losses import soft_bce, unlabelled
from panorgan.methods.base import Content, Federation, Method, MethodConfig, ServerRule, SiteRule, Stage, Updates
from panorgan.methods.registry import register
from panorgan.methods.teachers import ServerTeachers, SiteTeachers, as_teacher
from panorgan.networks import OrganNetwork, SegmentationNetwork, organ_network, organ_probabilities
from panorgan.networks.organ_parts import serving
from panorgan.networks.settings import OrganParts

PRETRAIN, EXCHANGE, TRAIN = "pretrain", "exchange", "train"


class FLKDConfig(MethodConfig):
    """FLKD's numbers."""

    weighting: Literal["cases", "uniform"] = Field(
        "uniform", description="a site's weight in the mean: n_i, or 1 (eq. 6)", json_schema_extra={"paper": "uniform"}
    )
    organ_parts: Literal["everyone"] = Field(
        "everyone",
        description="every site trains and averages every head: distillation teaches those it has no label for (eq. 6)",
        json_schema_extra={"paper": "everyone"},
    )
    global_weight: float = Field(
        1.0, ge=0, description="weight of global KD (eq. 7); 0 for none", json_schema_extra={"paper": "1"}
    )
    local_weight: float = Field(
        1.0, ge=0, description="weight of local KD (eqs. 9, 10); 0 for none", json_schema_extra={"paper": "1"}
    )
    n_sampled_teachers: int | None = Field(
        1,
        ge=1,
        description="organs drawn per step for local KD (eq. 10); null for all of them (eq. 9)",
        json_schema_extra={"paper": "1"},
    )
    pretrain: float = Field(
        0.5,
        gt=0,
        description="rounds that a site trains its teacher, as a share of training.rounds",
        json_schema_extra={"paper": "not told"},
    )
    teacher_cache: bool = Field(
        True,
        description="predict every scan once and keep it in 8 bit; off predicts anew for every patch, for checking",
        json_schema_extra={"paper": "off"},
    )


@register("flkd", config=FLKDConfig)
class FLKD(Method):
    """Multi-head network with global and local knowledge distillation."""

    paper: ClassVar[str] = (
        "Kim et al., Federated learning with knowledge distillation for multi-organ segmentation with partially "
        "labeled datasets"
    )
    equations: ClassVar[Mapping[str, str]] = {
        "eq. 3": "`Site.loss`: cross-entropy + Dice on what is annotated",
        "eq. 6": "`Server.aggregate`: the unweighted mean of everything",
        "eq. 7": "`Site.global_distillation`",
        "eq. 8": "`Site.loss`: the sum",
        "eqs. 9, 10": "`Site.local_distillation`, over all or `n_sampled_teachers` organs",
        "section 3.5": "`networks.organ_parts.MultiHead`: heads of 162 parameters",
    }
    recipe: ClassVar[Mapping[str, object]] = {
        "network.features": [32, 64, 128, 256],
        "network.norm": "group",
        "network.groups": 16,
        "network.weight_standardisation": True,
        "plan.spacing_mm": [1.5, 1.5, 3.0],
        "plan.intensity": "window",
        "plan.window_hu": [-325, 325],
        "training.rounds": 1000,
        "training.local_steps": 80,
        "training.optimizer.name": "sgd",
        "training.optimizer.learning_rate": 0.01,
        "training.optimizer.momentum": 0.99,
        "training.optimizer.weight_decay": 0,
        "training.optimizer.clip_norm": None,
        "training.optimizer.schedule": "poly",
        "training.sampling.patch_size": [128, 128, 64],
        "training.sampling.batch_size": 2,
        "training.sampling.foreground": 0.8,
        "training.augment.rotation_degrees": 0,
        "training.augment.scale": 0.3,
        "training.augment.geometry_probability": 1,
        "training.augment.mirror_axes": [0, 1, 2],
        "training.augment.brightness": 0,
        "training.augment.contrast": 0,
        "training.augment.gamma": 0,
        "training.augment.noise": 0,
        "training.augment.blur_probability": 0,
    }
    organs: ClassVar[OrganParts] = "heads"
    numbers: ClassVar[tuple[str, ...]] = ("loss", "loss/*", "cases")
    tensors: ClassVar[Mapping[str, str]] = {
        "teacher/*": "a model trained at this site alone on its own organs, sent once; every other site receives it."
    }

    class Site(SiteRule):
        """Supervision on what is annotated, distillation for the rest."""

        config: FLKDConfig

        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)  # type: ignore[arg-type]
            self.global_model: SegmentationNetwork | None = None
            self.held: tuple[str, ...] = ()
            """Organs that global KD holds in this round; none outside of training."""
            self.logged: dict[str, torch.Tensor] = {}
            self.alone = False
            """Whether the model is what this site trained by itself: a teacher, or on its way to be one."""
            self.teachers = SiteTeachers(self.tools, self._empty_teacher, {})

        # -- what happens in which stage

        def before_round(self) -> None:
            """Pretrain: go on alone. Exchange: keep the teachers. Train: take over the global model and copy it."""
            self.received = self.teachers.receive(self.received)
            if self.teachers.asked and self.facts.name not in self.teachers.sites:
                self._keep_teacher()  # it broke off in pretrain: better the last good one than none
            self.teachers.owners = _who_teaches(self.federation, self.teachers.sites)
            if self.moment.stage != TRAIN:
                return
            super().before_round()
            self.alone = False
            self.held = self._sometimes_unlabelled() if self.config.global_weight else ()
            if self.held:
                self.global_model = copy.deepcopy(self.model).requires_grad_(False).eval()

        def companions(self) -> Companions | None:
            """Exchange: predict every scan. Train: the predictions, cut and moved with the labels."""
            if self.moment.stage == PRETRAIN or not self.config.local_weight or not self.teachers.known():
                return None
            return self.teachers.predictions(
                self._organs_without_label, self.config.teacher_cache, self.config.n_sampled_teachers
            )

        def after_round(self) -> None:
            """At the end of its stage, the model is the teacher. The copy of the global model has served."""
            self.global_model, self.held = None, ()
            if self.moment.stage == PRETRAIN:
                self.alone = True
                if self.moment.is_last:
                    self._keep_teacher()

        def update(self) -> Content:
            """The teacher when it is done or asked for, the model in training, otherwise numbers alone."""
            whole = super().update()
            if self.moment.stage == PRETRAIN:
                return Content(as_teacher(self._own_part()) if self.moment.is_last else {}, whole.numbers)
            model = whole.arrays if self.moment.stage == TRAIN else {}
            return Content({**model, **self.teachers.wanted(self.facts.name)}, whole.numbers)

        def state(self) -> Content:
            """While it pre-trains nobody else holds its weights."""
            return Content(self._own_part() if self.moment.stage == PRETRAIN else {})

        def load_state(self, state: Content) -> None:
            """Go on with the teacher that was being trained; a head that somebody else brought since is not of it."""
            self.model.load_state_dict({**self.model.state_dict(), **state.arrays})
            self.alone = bool(state.arrays)

        # -- formulas

        def step(self, batch: Batch) -> dict[str, torch.Tensor]:
            """One optimiser step; the parts of the loss are logged beside it."""
            self.logged = {}
            return {**super().step(batch), **self.logged}

        def loss(self, batch: Batch) -> torch.Tensor:
            """Eq. 8: supervision, and distillation of what is held and of what teachers came along with the batch."""
            own = self.own_organs
            logits, vocabulary = self.model.channels_for(batch.image, {*own, *self.held, *batch.extra_names})
            # Own channels alone: a union's mask would else reach for outputs that it does not show, such as a tumour's.
            loss = self.supervised(_channels(logits, vocabulary, own), Vocabulary(own), batch).mean()
            if self.held:
                part = self.global_distillation(logits, vocabulary, batch).mean()
                self.logged["loss/global_kd"] = part.detach()
                loss = loss + self.config.global_weight * part
            if batch.extra is not None:
                part = self.local_distillation(logits, vocabulary, batch).mean()
                self.logged["loss/local_kd"] = part.detach()
                loss = loss + self.config.local_weight * part
            return loss

        def global_distillation(self, logits: torch.Tensor, vocabulary: Vocabulary, batch: Batch) -> torch.Tensor:
            """Eq. 7, [B]: cross-entropy to the frozen global model on the organs that a sample does not label."""
            assert self.global_model is not None
            with torch.no_grad():
                frozen, organs = self.global_model.channels_for(batch.image, self.held)
                targets = organ_probabilities(frozen.float(), self.global_model.convention)
            chosen = _channels(logits, vocabulary, organs.organs)
            return soft_bce(chosen, targets, unlabelled(batch, organs))

        def local_distillation(self, logits: torch.Tensor, vocabulary: Vocabulary, batch: Batch) -> torch.Tensor:
            """Eq. 10 (eq. 9 with every organ), [B]: cross-entropy to the teachers of the organs that were drawn."""
            assert batch.extra is not None
            assert batch.extra_known is not None
            return soft_bce(_channels(logits, vocabulary, batch.extra_names), batch.extra, batch.extra_known)

        # -- details

        def _sometimes_unlabelled(self) -> tuple[str, ...]:
            """Organs that some case of this site has no label for, and somebody teaches."""
            whole, counts = self.federation.vocabulary, self.facts.annotated
            always = {
                organ
                for structure, count in counts.items()
                if count == self.facts.train_cases
                for organ in whole.members(structure)
                if organ not in whole.inside(structure)
            }
            return tuple(organ for organ in self.federation.taught() if organ not in always)

        def _organs_without_label(self, case: StoredCase) -> tuple[str, ...]:
            whole = self.federation.vocabulary
            told = {o for s in case.structures for o in whole.members(s) if o not in whole.inside(s)}
            return tuple(organ for organ in self.teachers.known() if organ not in told)

        def _own_part(self) -> dict[str, torch.Tensor]:
            """The model without the heads of organs that this site does not teach."""
            return serving(self.model.state_dict(), self.own_organs)

        def _keep_teacher(self) -> None:
            """The model becomes this site's teacher, unless nobody has trained it here, or it has diverged."""
            own = self._own_part()
            if self.alone and all(bool(value.isfinite().all()) for value in own.values()):
                self.teachers.keep(self.facts.name, own)

        def _empty_teacher(self, site: str) -> SegmentationNetwork:
            assert isinstance(self.model, OrganNetwork)
            return organ_network(Vocabulary(self.federation.organs_of(site)), self.model.settings)

    class Server(ServerRule):
        """The unweighted mean of everything (eq. 6); before that, the exchange of teachers."""

        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)  # type: ignore[arg-type]
            self.teachers = ServerTeachers(self.vault)

        def broadcast(self, site: str) -> Content:
            """Train: the global model. Whoever has no teachers yet gets them when they are there."""
            if self.moment.stage == PRETRAIN:
                return Content()
            arrays = super().broadcast(site).arrays if self.moment.stage == TRAIN else {}
            return Content({**arrays, **self.teachers.for_site(site)}, self.teachers.wishes(site))

        def expects(self, site: str) -> Mapping[str, torch.Tensor]:
            """The teacher at the end of pre-training, or when it is owed; everything in training."""
            model = super().expects(site) if self.moment.stage == TRAIN else {}
            due = self.moment.stage == PRETRAIN and self.moment.is_last
            if not due and site not in self.teachers.owing:
                return model
            own = serving(self.weights, self.federation.organs_of(site))
            return {**model, **self.teachers.expects(own)}

        def aggregate(self, updates: Updates) -> None:
            """Keep the teachers; average the models."""
            if self.moment.stage != PRETRAIN:
                self.teachers.were_given_to(updates.sites)
            elif self.moment.is_last:
                self.teachers.owed_by(self.federation.sites)
            self.teachers.collect(updates)
            if self.moment.stage == TRAIN:
                super().aggregate(updates)

        def notices(self) -> tuple[str, ...]:
            """Training without a teacher for some organ is not what was asked for."""
            assert isinstance(self.config, FLKDConfig)
            if self.moment.stage != TRAIN or not self.config.local_weight:
                return ()
            heard = _who_teaches(self.federation, self.teachers.sites).values()
            known = {organ for organs in heard for organ in organs}
            lacking = [organ for organ in self.federation.taught() if organ not in known]
            names = ", ".join(organ.replace("_", " ") for organ in lacking)
            return (f"No teacher knows {names}. Local distillation does without, until one arrives.",) if names else ()

        def state(self) -> Content:
            """Who has the teachers."""
            return Content(numbers=self.teachers.numbers())

        def load_state(self, state: Content) -> None:
            """Take that back."""
            self.teachers.load(state.numbers)

    def stages(self, rounds: int) -> tuple[Stage, ...]:
        """Teachers are needed for local KD only."""
        assert isinstance(self.config, FLKDConfig)
        if not self.config.local_weight:
            return (Stage(TRAIN, rounds),)
        pretrain = Stage(PRETRAIN, max(1, round(self.config.pretrain * rounds)), validate=False)
        return pretrain, Stage(EXCHANGE, 1, validate=False, local_steps=0), Stage(TRAIN, rounds)


def _who_teaches(federation: Federation, teachers: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The organs on which each of some sites' teachers is heard.

    One that was taught a union (`kidney`) draws no line between its parts: it is heard on them only where no teacher
    knows them by name.
    """
    annotated = {site: federation.sites[site].annotated for site in teachers if site in federation.sites}
    named = {organ for own in annotated.values() for organ in own}
    return {
        site: tuple(organ for organ in federation.organs_of(site) if organ in own or organ not in named)
        for site, own in annotated.items()
    }


def _channels(logits: torch.Tensor, vocabulary: Vocabulary, organs: tuple[str, ...]) -> torch.Tensor:
    """The channels [B, len(organs), *S] of some organs."""
    places = [vocabulary.index(organ) for organ in organs]
    if places == list(range(places[0], places[0] + len(places))):
        return logits[:, places[0] : places[0] + len(places)]  # a view
    return logits[:, places]
