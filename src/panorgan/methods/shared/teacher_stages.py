"""Runs with teachers: pretrain → exchange → train. The two rules that FLKD and the pseudo-label methods extend.

*pretrain*: every site trains a model alone on its own organs; nothing travels until it is done. *exchange*: every site
receives the others' teachers and predicts its own training scans once. *train*: the method itself. The server asks for
a teacher that did not arrive in time in every later round, and then passes it on; a site that was interrupted in
pretrain sends its last good one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from panorgan.anatomy import Vocabulary
from panorgan.methods.base import Federation, Notice, Payload, ServerRule, SiteRule, Stage, Updates
from panorgan.methods.shared.teachers import ServerTeachers, SiteTeachers, as_teacher
from panorgan.networks import OrganNetwork, SegmentationNetwork, organ_network
from panorgan.networks.organ_parts import weights_for
from panorgan.preparation.store import StoredCase

PRETRAIN, EXCHANGE, TRAIN = "pretrain", "exchange", "train"
TEACHERS = {
    "teacher/*": "a model trained at this site alone on its own organs, sent once; every other site receives it."
}
"""What leaves a site besides weights, for `Method.tensors`."""
BEST = "best_round"
"""Name in a site's tensor store: the teacher during pre-training, after its best validated round."""
_BEST_DICE = "teacher_dice"


def stages_with_teachers(rounds: int, pretrain: float) -> tuple[Stage, ...]:
    """Pre-training for a share of the training rounds, the exchange, training."""
    alone = Stage(PRETRAIN, max(1, round(pretrain * rounds)), validate=False)
    return alone, Stage(EXCHANGE, 1, validate=False, local_steps=0), Stage(TRAIN, rounds)


class TeacherSite(SiteRule):
    """Trains a teacher, keeps those of other sites, then takes part in training."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.alone = False
        """Whether the model is this site's own: a teacher, possibly still in training."""
        self.best_dice = -1.0
        """The best mean validation Dice of the teacher during pre-training; its model is in the tensor store."""
        self.teachers = SiteTeachers(self.tools, self._empty_teacher, {})

    @property
    def in_training(self) -> bool:
        """Whether this is a round of the last stage."""
        return self.round_info.stage == TRAIN

    @property
    def selects_teacher(self) -> bool:
        """Whether the teacher is the model of its best validated round instead of the last one."""
        return False

    def before_round(self) -> None:
        """Pretrain: continue alone. Exchange: keep the teachers. Train: take over the global model."""
        self.received = self.teachers.receive(self.received)
        if self.teachers.asked and self.facts.name not in self.teachers.sites:
            self._keep_teacher()  # interrupted in pretrain: the last good one is better than none
        self.teachers.owners = organs_by_teacher(self.federation, self.teachers.sites)
        self.teachers.taught = {site: self.federation.organs_of(site) for site in self.teachers.owners}
        if self.in_training:
            super().before_round()
            self.alone = False
        elif self.round_info.stage == PRETRAIN and self.round_info.round == 1:
            self._begin_with(self.received.tensors)

    def _begin_with(self, first: Mapping[str, torch.Tensor]) -> None:
        """A run that starts from a model sends it: the teacher begins with it too."""
        own = self.model.state_dict()
        self.model.load_state_dict({**own, **{key: value for key, value in first.items() if key in own}})

    def after_round(self) -> None:
        """At the end of pretrain, the model becomes the teacher, or its best round does."""
        if self.round_info.stage == PRETRAIN:
            self.alone = True
            if self.selects_teacher:
                self._remember_if_best()
            if self.round_info.is_last:
                self._keep_teacher()

    def update(self) -> Payload:
        """The teacher when it is done or requested, the model in training, otherwise numbers alone."""
        whole = super().update()
        if self.round_info.stage == PRETRAIN:
            return Payload(as_teacher(self._own_part()) if self.round_info.is_last else {}, whole.scalars)
        model = whole.tensors if self.in_training else {}
        return Payload({**model, **self.teachers.requested(self.facts.name)}, whole.scalars)

    def state(self) -> Payload:
        """During pre-training no other process holds its weights."""
        if self.round_info.stage != PRETRAIN:
            return Payload()
        return Payload(self._own_part(), {_BEST_DICE: self.best_dice} if self.best_dice >= 0 else {})

    def load_state(self, state: Payload) -> None:
        """Continue with the teacher in training; a head that another site has added since is not part of it."""
        own = self.model.state_dict()
        kept = {key: value for key, value in state.tensors.items() if key in own}
        self.model.load_state_dict({**own, **kept})
        self.alone = bool(kept)
        self.best_dice = state.scalars.get(_BEST_DICE, -1.0)

    def organs_without_label(self, case: StoredCase) -> tuple[str, ...]:
        """The organs of a case that need some site's teacher."""
        whole = self.federation.vocabulary
        labelled = {o for s in case.structures for o in whole.members(s) if o not in whole.inside(s)}
        return tuple(organ for organ in self.teachers.known() if organ not in labelled)

    def _own_part(self) -> dict[str, torch.Tensor]:
        """The model without the parts of organs that this site does not annotate."""
        return weights_for(self.model.state_dict(), self.own_organs)

    def _remember_if_best(self) -> None:
        """Score the teacher in training on the site's own validation cases, as often as the global model."""
        every = self.tools.validate_every
        due = every > 0 and (self.round_info.round % every == 0 or self.round_info.is_last)
        scores = self.tools.validate(self.model, self.own_organs) if due else {}
        dice = sum(scores.values()) / len(scores) if scores else -1.0
        own = self._own_part()
        if dice > self.best_dice and _is_finite(own):
            self.best_dice = dice
            self.tools.tensor_store.put(BEST, own)

    def _keep_teacher(self) -> None:
        """Keep the model as this site's teacher, unless it was not trained here or has diverged."""
        if self.alone and self.best_dice >= 0:
            self.model.load_state_dict({**self.model.state_dict(), **self.tools.tensor_store.get(BEST)})
        own = self._own_part()
        if self.alone and _is_finite(own):
            self.teachers.keep(self.facts.name, own)

    def _empty_teacher(self, site: str) -> SegmentationNetwork:
        if isinstance(self.model, OrganNetwork):
            return organ_network(Vocabulary(self.federation.organs_of(site)), self.model.settings)
        return self.tools.network_of(site)


class TeacherServer(ServerRule):
    """Before training, the exchange of teachers; then the mean of the models."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.teachers = ServerTeachers(self.tensor_store)

    @property
    def in_training(self) -> bool:
        """Whether this is a round of the last stage."""
        return self.round_info.stage == TRAIN

    @property
    def teachers_are_needed(self) -> bool:
        """Whether to report organs that no teacher knows."""
        return True

    def broadcast(self, site: str) -> Payload:
        """Train: the global model. A site without teachers gets them as soon as they are available.

        A run that starts from another model sends it before pre-training too.
        """
        if self.round_info.stage == PRETRAIN:
            begins = self.starts_from_model and self.round_info.round == 1
            return super().broadcast(site) if begins else Payload()
        tensors = super().broadcast(site).tensors if self.in_training else {}
        return Payload({**tensors, **self.teachers.for_site(site)}, self.teachers.request_flags(site))

    def expects(self, site: str) -> Mapping[str, torch.Tensor]:
        """The teacher at the end of pre-training, or when it is due; everything in training."""
        model = super().expects(site) if self.in_training else {}
        due = self.round_info.stage == PRETRAIN and self.round_info.is_last
        if not due and site not in self.teachers.due_sites:
            return model
        own = weights_for(self.weights, self.federation.organs_of(site))
        return {**model, **self.teachers.expects(own)}

    def aggregate(self, updates: Updates) -> None:
        """Keep the teachers; average the models."""
        if self.round_info.stage != PRETRAIN:
            self.teachers.mark_delivered(updates.sites)
        elif self.round_info.is_last:
            self.teachers.mark_due(self.federation.sites)
        self.teachers.collect(updates)
        if self.in_training:
            super().aggregate(updates)

    def notices(self) -> tuple[Notice, ...]:
        """Report training without a teacher for some organ."""
        if not self.in_training or not self.teachers_are_needed:
            return ()
        by_teacher = organs_by_teacher(self.federation, self.teachers.sites).values()
        known = {organ for organs in by_teacher for organ in organs}
        lacking = [organ for organ in self.federation.labelled_organs() if organ not in known]
        names = ", ".join(organ.replace("_", " ") for organ in lacking)
        text = f"No teacher knows {names}. Training continues without one until it arrives."
        return (Notice("no-teacher", text),) if names else ()

    def state(self) -> Payload:
        """Which sites have the teachers."""
        return Payload(scalars=self.teachers.numbers())

    def load_state(self, state: Payload) -> None:
        """Restore that."""
        self.teachers.load(state.scalars)


def _is_finite(weights: Mapping[str, torch.Tensor]) -> bool:
    return all(bool(value.isfinite().all()) for value in weights.values())


def organs_by_teacher(federation: Federation, teachers: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The organs for which each of these sites' teachers is used.

    A teacher trained on a union (`kidney`) cannot separate its parts: it is used for them only where no teacher knows
    them by name.
    """
    annotated = {site: federation.sites[site].annotated for site in teachers if site in federation.sites}
    named = {organ for own in annotated.values() for organ in own}
    return {
        site: tuple(organ for organ in federation.organs_of(site) if organ in own or organ not in named)
        for site, own in annotated.items()
    }
