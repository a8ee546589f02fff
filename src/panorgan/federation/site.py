"""The site's half of a round: load what was received, train, answer. Knows no formula and no network."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, Protocol

import torch

from panorgan.anatomy import Vocabulary
from panorgan.cases.augment import Draws, augment
from panorgan.cases.companions import Companions
from panorgan.cases.labels import structures_of
from panorgan.cases.sampling import PackedBatch, PatchSampler, prefetched
from panorgan.cases.seeds import derive_seed
from panorgan.cases.store import StoredCase
from panorgan.errors import RunError
from panorgan.evaluation.inference import InferenceSettings, predict_probabilities
from panorgan.federation.checks import is_finite
from panorgan.federation.failures import DIVERGED, WrongExperimentError
from panorgan.federation.local_state import LocalState, SavedRound
from panorgan.federation.message import Message
from panorgan.federation.optimizers import load_optimizer_state, make_optimizer, optimizer_state
from panorgan.federation.settings import TrainingSettings
from panorgan.federation.tasks import Task, answer_meta, failure_meta
from panorgan.federation.validation import validation_dice
from panorgan.federation.vault import DiskVault, RunVaults
from panorgan.methods.base import Method, SiteRule, SiteTools
from panorgan.methods.exchange import Content, Federation, Moment, Numbers, SiteFacts
from panorgan.networks import SegmentationNetwork, UNetSettings
from panorgan.networks.replay import replays_of, with_room

OnStep = Callable[[str, int, int], None]


class SiteSource(Protocol):
    """A site's cases: counted and measured before there is a plan, prepared when there is one."""

    def counts(self) -> tuple[int, Mapping[str, int]]:
        """Number of training cases, and per structure of those that annotate it."""

    def statistics(self) -> Numbers:
        """What the site tells for the plan (`SiteStatistics.as_numbers`); empty where nothing has to be measured."""

    def prepared(self, plan: Mapping[str, Any] | None) -> SiteData:
        """The cases, prepared by the plan."""


@dataclass(frozen=True)
class SiteData:
    """A site's cases, prepared for training. As a source: everything is done already."""

    train: Sequence[StoredCase]
    validation: Sequence[StoredCase] = ()

    def counts(self) -> tuple[int, Mapping[str, int]]:
        """Number of training cases, and per structure of those that annotate it."""
        structures = structures_of([case.structures for case in self.train])
        return len(self.train), {s: sum(s in case.structures for case in self.train) for s in structures}

    def statistics(self) -> Numbers:
        """Nothing: the plan is made."""
        return {}

    def prepared(self, plan: Mapping[str, Any] | None) -> SiteData:
        """Itself."""
        return self


@dataclass(frozen=True)
class SiteSetup:
    """Everything a site must agree on with the others, and where it computes."""

    vocabulary: Vocabulary
    method: Method
    network: UNetSettings
    training: TrainingSettings
    seed: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    experiment: str = ""
    """Fingerprint of what the site agreed to; requests of another experiment are refused."""
    steps_factor: int = 1
    """`local_steps` are multiplied by this: a pooled site does the work of the sites it stands for."""


class SiteWorker:
    """Answers a coordinator's requests with the site's data."""

    def __init__(
        self, name: str, source: SiteSource, setup: SiteSetup, folder: Path, on_step: OnStep | None = None
    ) -> None:
        self.name, self.source, self.setup = name, source, setup
        self._local, self._run = LocalState(folder), ""
        self._on_step = on_step or (lambda site, step, steps: None)
        self._data: SiteData | None = None
        self._plan: Mapping[str, Any] | None = None
        self._rule: SiteRule | None = None
        self._delivered: SegmentationNetwork | None = None
        self._delivered_to: set[str] = set()
        # Saved stage and round that the rule in memory continues from (None: nothing saved yet).
        self._in_memory: tuple[str, int] | None = None

    def handle(self, request: bytes) -> bytes:
        """Do what a request asks and return the answer."""
        message = Message.from_bytes(request)
        task = Task.from_meta(message.meta)
        self._refuse_another_experiment(task)
        if task.kind == "join":
            return self._answer(task, self._describe(measured=task.plan is None)).to_bytes()
        content = Content(message.arrays, message.numbers)
        if task.kind == "deliver":
            raise RunError("A delivered model is kept by the site's machine, not by its worker.")
        self._use_plan(task.plan)
        federation = Federation(self.setup.vocabulary, task.sites)
        if task.kind == "evaluate":
            return self._answer(task, self._evaluate(content, federation)).to_bytes()
        return self._train(task, content, federation)

    @property
    def data(self) -> SiteData:
        """The prepared cases."""
        if self._data is None:
            self._data = self.source.prepared(self._plan)
        return self._data

    def facts(self) -> SiteFacts:
        """What the site tells about itself."""
        train_cases, annotated = self.source.counts()
        return SiteFacts(self.name, train_cases, annotated)

    def _use_plan(self, plan: Mapping[str, Any] | None) -> None:
        if plan != self._plan:
            self._plan, self._data = plan, None

    def _refuse_another_experiment(self, task: Task) -> None:
        if task.experiment != self.setup.experiment:
            raise WrongExperimentError(
                f"Site {self.name} is asked to take part in another experiment.",
                why=f"the request says {task.experiment!r:.100}, the site agreed to {self.setup.experiment!r}",
                fix="Give every participant the same experiment file (and the same panorgan version).",
            )

    def _answer(self, task: Task, content: Content) -> Message:
        return Message(content.arrays, content.numbers, answer_meta(task, self.name))

    def _describe(self, measured: bool) -> Content:
        """Counts, and what the plan is made from unless there is one already."""
        facts = self.facts()
        numbers = {f"annotated/{name}": float(count) for name, count in facts.annotated.items()}
        statistics = self.source.statistics() if measured else {}
        return Content(numbers={"train_cases": float(facts.train_cases), **numbers, **statistics})

    # -- one round of training -----------------------------------------------------------------------------

    def _train(self, task: Task, received: Content, federation: Federation) -> bytes:
        finished = self._local.finished(task.run)
        if finished == (task.moment.stage, task.moment.round):
            return self._saved_answer(task)
        self._refuse_the_past(task, finished)
        if finished != self._in_memory or task.run != self._run:
            self._drop_rule()  # never train on from a round that broke off, or from another run
        self._run = task.run
        rule = self._ready_rule(federation)
        rule.moment = task.moment
        if finished is not None and finished != self._in_memory:
            saved = self._local.load()
            rule.load_state(self._on_device(saved.rule))
            load_optimizer_state(rule.tools.optimizer, saved.optimizer)
        self._in_memory = ("under way", 0)
        if not self.setup.training.optimizer.keep_state or (finished and finished[0] != task.moment.stage):
            rule.tools.optimizer.state.clear()  # a stage has its own schedule, and moments of its own
        rule.received = self._on_device(received)
        means = self._run_steps(rule, task)
        content, state = rule.update(), rule.state()
        numbers = {name: mean for name, mean in means.items() if isfinite(mean)}
        message = self._answer(task, Content(content.arrays, {**numbers, **content.numbers}))
        # What diverged will be refused; the next round starts from the last good state.
        if not _all_finite(content):
            answer = message.to_bytes()
        elif not (_all_finite(state) and isfinite(means.get("loss", 0.0))):
            answer = Message(meta=failure_meta(task, self.name, DIVERGED)).to_bytes()  # nothing that is sent shows it
        else:
            answer = message.to_bytes()
            self._remember(rule, task, answer, state, has_state=finished is not None)
        self._put_away(rule)
        return answer

    def _on_device(self, content: Content) -> Content:
        return Content({k: v.to(self.setup.device) for k, v in content.arrays.items()}, content.numbers)

    def _put_away(self, rule: SiteRule) -> None:
        """Let go of what the next round does not need: many simulated sites share one device."""
        rule.received = Content()
        rule.tools.optimizer.zero_grad(set_to_none=True)
        if not self.setup.training.optimizer.keep_state:
            rule.tools.optimizer.state.clear()

    def _saved_answer(self, task: Task) -> bytes:
        """Asked again for the round it has just finished: the same answer."""
        answer = self._local.answer_to(task.run, task.label)
        if answer is None:
            raise RunError(
                f"Site {self.name} has finished {task.label}, but its answer is gone.",
                where=str(self._local.folder),
                fix="Restore the site's folder from a backup, or start a new run.",
            )
        return answer

    def _refuse_the_past(self, task: Task, finished: tuple[str, int] | None) -> None:
        stage, round_ = task.moment.stage, task.moment.round
        order = [known.name for known in self.setup.method.stages(self.setup.training.rounds)]
        if stage not in order:
            raise RunError(
                f"Site {self.name} is asked for a stage it does not know: {stage}.",
                why=f"its method has {', '.join(order)}",
                fix="Give the site the coordinator's experiment file.",
            )
        if finished is not None and (order.index(finished[0]), finished[1]) > (order.index(stage), round_):
            raise RunError(
                f"Site {self.name} is asked for round {round_} of {stage}, "
                f"but has already finished round {finished[1]} of {finished[0]}.",
                where=str(self._local.folder),
                why="the coordinator went back to an older checkpoint",
                fix="Restore the coordinator's newest checkpoint, or start a new run.",
            )

    def _ready_rule(self, federation: Federation) -> SiteRule:
        if self._rule is None:
            self._rule = self._make_rule(federation)
        elif self._rule.federation.sites.keys() != federation.sites.keys():
            # Somebody joined: a method may build its network by who takes part, so it starts as after a restart.
            self._drop_rule()
            self._rule, self._in_memory = self._make_rule(federation), None
        self._rule.federation = federation
        return self._rule

    def _drop_rule(self) -> None:
        if self._rule is not None:
            self._rule.model.replays = None  # a rule and its teachers may hold on to each other for a while
        self._rule = None

    def _make_rule(self, federation: Federation) -> SiteRule:
        setup = self.setup
        with self._random_draws("first weights"):  # of the parts that no message brings
            model = self._placed(setup.method.build_network(setup.network, federation, site=self.name))
            model.replays = replays_of(model, setup.device)
            settings = setup.training.optimizer
            tools = SiteTools(
                model,
                make_optimizer(model, settings),
                settings.clip_norm,
                self._autocast,
                vault=self._vault_of_this_run(),
                cases=self.data.train,
                predict=self._predict,
                inference_key=f"{self._inference.model_dump_json()} {setup.training.precision}",
                network_of=lambda site: setup.method.build_network(setup.network, federation, site=site),
                patch_size=setup.training.sampling.patch_size,
                validate=lambda network, organs: validation_dice(network, self.data.validation, self._predict, organs),
                validate_every=setup.training.validate_every,
            )
            return setup.method.Site(setup.method.config, self.facts(), federation, tools)

    def _vault_of_this_run(self) -> DiskVault:
        """Like its state, a site's vault is that of one run: an older run's goes when a new one begins."""
        vaults = RunVaults(self._local.folder)
        vaults.remove(but=self._run)
        return vaults.of(self._run)

    def _placed(self, network: SegmentationNetwork) -> SegmentationNetwork:
        """The network where it computes, in the layout that is fastest there."""
        network = network.to(self.setup.device)
        if self.setup.device.type == "cpu" and self.setup.network.dimensions == 3:
            network = network.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
        return network

    @property
    def _inference(self) -> InferenceSettings:
        training = self.setup.training
        return InferenceSettings(patch_size=training.sampling.patch_size, overlap=training.overlap)

    def _predict(self, network: SegmentationNetwork, image: torch.Tensor) -> torch.Tensor:
        """What a rule's own networks say about a prepared image [X, Y, Z]: probabilities [channels, X, Y, Z]."""

        def predicted() -> torch.Tensor:
            with self._autocast():
                return predict_probabilities(self._placed(network), image, self._inference)

        return with_room(self.setup.device, predicted)

    @contextmanager
    def _random_draws(self, *names: object) -> Iterator[int]:
        """Draws that depend on (seed, site, names) alone, and leave no trace outside; yields the seed."""
        seed = derive_seed(self.setup.seed, self.name, *names)
        kind = self.setup.device.type
        devices = [] if kind == "cpu" else [self.setup.device]
        with torch.random.fork_rng(devices, device_type=kind if devices else "cuda"):
            torch.manual_seed(seed)
            yield seed

    def _autocast(self) -> AbstractContextManager[object]:
        if self.setup.training.precision == "float32":
            return nullcontext()
        return torch.autocast(self.setup.device.type, dtype=torch.bfloat16)

    def _run_steps(self, rule: SiteRule, task: Task) -> dict[str, float]:
        """All local steps of a round; every random draw depends on (seed, site, stage, round) alone.

        Returns the means of what the steps logged; they may be NaN.
        """
        setup, moment = self.setup, task.moment
        steps = self._steps_of(moment)
        totals: dict[str, torch.Tensor] = {}
        with self._random_draws(moment.stage, moment.round) as seed:
            draws = Draws(seed, setup.device)
            rule.model.train()
            rule.before_round()
            for step, packed in enumerate(self._batches(steps, seed, rule.companions())):
                packed = packed.to(setup.device)
                if setup.training.augment is not None:
                    packed = augment(packed, setup.training.augment, draws)
                rate = setup.training.optimizer.rate((moment.round - 1 + step / steps) / moment.rounds)
                for group in rule.tools.optimizer.param_groups:
                    group["lr"] = rate
                for name, value in rule.step(packed.unpack()).items():
                    totals[name] = totals[name] + value if name in totals else value
                self._on_step(self.name, step + 1, steps)
            rule.after_round()
        return {name: float(total) / steps for name, total in totals.items()}

    def _steps_of(self, moment: Moment) -> int:
        """Optimiser steps in a round: the stage's own number, or the experiment's."""
        setup = self.setup
        own = {stage.name: stage.local_steps for stage in setup.method.stages(setup.training.rounds)}[moment.stage]
        if own is not None:
            return own * setup.steps_factor
        return setup.training.steps_per_round(len(self.data.train), setup.steps_factor)

    def _batches(self, steps: int, seed: int, companions: Companions | None) -> Iterator[PackedBatch]:
        """Patches of the training cases, with companions that are predicted first where they are missing."""
        device = self.setup.device.type
        cases, settings = self.data.train, self.setup.training.sampling
        if companions is not None:
            companions.ensure(lambda done, total: self._on_step(self.name, 0, steps))
        sampler = PatchSampler(cases, structures_of([case.structures for case in cases]), settings, companions)
        batches = sampler.batches(steps, seed)
        # What is predicted for every patch is predicted here: a background thread would compete for the device.
        if device != "cpu" and (companions is None or companions.cached):
            batches = prefetched(batches, pin=device == "cuda")
        yield from batches
        if companions is not None:
            companions.release()

    def _remember(self, rule: SiteRule, task: Task, answer: bytes, state: Content, has_state: bool) -> None:
        """Save state and answer, unless there is no state: then the same request simply gives the same answer.

        A state that was emptied replaces the one on disk (`has_state`), lest the older one come back.
        """
        keep_optimizer = self.setup.training.optimizer.keep_state
        self._in_memory = None
        if keep_optimizer or has_state or state.arrays or state.numbers:
            optimizer = optimizer_state(rule.tools.optimizer) if keep_optimizer else {}
            saved = SavedRound(task.moment.stage, task.moment.round, state, optimizer)
            self._local.save(task.run, saved, answer)
            self._in_memory = (saved.stage, saved.round)

    # -- validation ----------------------------------------------------------------------------------------

    def _evaluate(self, content: Content, federation: Federation) -> Content:
        """Mean Dice per annotated structure over the validation cases, on the prepared grid."""
        setup = self.setup
        if not self.data.validation:
            return Content(numbers={"cases": 0.0})
        if self._delivered is None or self._delivered_to != set(federation.sites):
            self._delivered_to = set(federation.sites)
            self._delivered = setup.method.build_network(setup.network, federation).to(setup.device)
        network = self._delivered
        network.load_state_dict(dict(content.arrays))

        def predict(network: SegmentationNetwork, image: torch.Tensor) -> torch.Tensor:
            return with_room(setup.device, lambda: predict_probabilities(network, image, self._inference))

        scores = validation_dice(network, self.data.validation, predict)
        numbers = {f"dice/{name}": value for name, value in scores.items()}
        return Content(numbers={**numbers, "cases": float(len(self.data.validation))})


def _all_finite(content: Content) -> bool:
    """Whether none of the tensors holds NaN or infinity."""
    return all(is_finite(value) for value in content.arrays.values())
