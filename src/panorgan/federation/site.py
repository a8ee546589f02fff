"""The site's half of a round: load the request, train, answer. No formula, no network connection."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from panorgan.anatomy import Vocabulary
from panorgan.data.labels import structures_of
from panorgan.errors import RunError
from panorgan.evaluation.inference import InferenceSettings, predict_probabilities
from panorgan.federation.agreement_checks import check_model, check_received, check_request, network_outline
from panorgan.federation.checks import is_finite
from panorgan.federation.failures import DIVERGED, WrongExperimentError
from panorgan.federation.local_state import LocalState, SavedRound
from panorgan.federation.message import Message
from panorgan.federation.optimizers import load_optimizer_state, make_optimizer, optimizer_state, set_rate
from panorgan.federation.run_record import RunRecord
from panorgan.federation.settings import TrainingSettings
from panorgan.federation.site_data import SiteData, SiteSource
from panorgan.federation.site_memory import SiteMemory
from panorgan.federation.tasks import Task, answer_meta, failure_meta
from panorgan.federation.tensor_store import DiskTensorStore, RunTensorStores
from panorgan.federation.validation import validation_scores
from panorgan.methods.base import Method, SiteRule, SiteTools
from panorgan.methods.protocol import Federation, Payload, RoundInfo, SiteInfo, Tensors
from panorgan.networks import SegmentationNetwork, UNetSettings
from panorgan.networks.cuda_graphs import graph_cache_for, retry_without_graphs
from panorgan.preparation.augment import Draws, augment
from panorgan.preparation.batch import PackedBatch
from panorgan.preparation.plan import PlanSettings
from panorgan.preparation.prefetch import prefetched
from panorgan.preparation.sampling import PatchSampler, patches_per_pass
from panorgan.preparation.store import StoredCase
from panorgan.preparation.teacher_predictions import TeacherPredictions
from panorgan.seeds import derive_seed

OnStep = Callable[[str, int, int], None]


@dataclass(frozen=True)
class SiteSetup:
    """What a site has in common with the others, and where it computes."""

    vocabulary: Vocabulary
    method: Method
    network: UNetSettings
    training: TrainingSettings
    seed: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    experiment: str = ""
    """Fingerprint of the site's agreement; requests of another experiment are refused."""
    plan: PlanSettings | None = None
    """How the agreement determines the plan; None where the cases are prepared already."""
    steps_factor: int = 1
    """Factor for `local_steps`: a pooled site does the work of the sites it replaces."""


class SiteWorker:
    """Answers a coordinator's requests with the site's data."""

    def __init__(
        self,
        name: str,
        source: SiteSource,
        setup: SiteSetup,
        folder: Path,
        on_step: OnStep | None = None,
        on_validated: OnStep | None = None,
    ) -> None:
        self.name, self.source, self.setup = name, source, setup
        self._local, self._run = LocalState(folder), ""
        self._outline: tuple[set[str], Tensors] | None = None
        self._on_step = on_step or (lambda site, step, steps: None)
        self._on_validated = on_validated or (lambda site, done, total: None)
        self._data: SiteData | None = None
        self._plan: Mapping[str, Any] | None = None
        self._rule: SiteRule | None = None
        self._delivered: SegmentationNetwork | None = None
        self._delivered_to: set[str] = set()
        # Saved stage and round from which the rule in memory continues (None: nothing saved yet).
        self._in_memory: tuple[str, int] | None = None

    def handle(self, request: bytes) -> bytes:
        """Carry out a request and return the answer."""
        message = Message.from_bytes(request)
        task = Task.from_meta(message.meta)
        self.check(task)
        if task.kind == "join":
            return self._answer(task, self._describe(measured=task.plan is None)).to_bytes()
        payload = Payload(message.tensors, message.scalars)
        if task.kind == "deliver":
            raise RunError("A delivered model is kept by the site's machine, not by its worker.", code="not-for-worker")
        record = self._recall(task)
        self._use_plan(task.plan)
        federation = Federation(self.setup.vocabulary, task.sites)
        if task.kind == "evaluate":
            scores = self._memory.scores(task, request, record, lambda: self._evaluate(payload, federation))
            return self._answer(task, Payload(scalars=scores)).to_bytes()
        answer = self._train(task, payload, federation)
        if self._local.finished(task.run) == (task.round_info.stage, task.round_info.round):
            self._memory.recovered()
        return answer

    def check(self, task: Task) -> None:
        """Refuse a request that does not follow from the agreement."""
        self._refuse_another_experiment(task)
        check_request(task, self.name, self.setup)

    @property
    def data(self) -> SiteData:
        """The prepared cases."""
        if self._data is None:
            self._data = self.source.prepared(self._plan)
        return self._data

    def facts(self) -> SiteInfo:
        """The site's description of itself."""
        train_cases, annotated = self.source.counts()
        return SiteInfo(self.name, train_cases, annotated)

    @property
    def _memory(self) -> SiteMemory:
        training = self.setup.training
        return SiteMemory(self.name, self._local.folder, self.setup.method.stages(training.rounds), training)

    def _recall(self, task: Task) -> RunRecord:
        """The site's record of the run, if the request and the data match it."""
        return self._memory.recall(task, self._local.finished(task.run), self.source.contents)

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

    def _answer(self, task: Task, payload: Payload) -> Message:
        return Message(payload.tensors, payload.scalars, answer_meta(task, self.name))

    def _describe(self, measured: bool) -> Payload:
        """The site's counts, and the measurements for the plan unless there is a plan already."""
        facts = self.facts()
        numbers = {f"annotated/{name}": float(count) for name, count in facts.annotated.items()}
        statistics = self.source.statistics() if measured else {}
        return Payload(scalars={"train_cases": float(facts.train_cases), **numbers, **statistics})

    # -- one round of training -----------------------------------------------------------------------------

    def _train(self, task: Task, received: Payload, federation: Federation) -> bytes:
        finished, has_state = self._local.finished(task.run), self._local.has_state(task.run)
        if has_state and finished == (task.round_info.stage, task.round_info.round):
            return self._saved_answer(task)
        if has_state and finished is not None and self._memory.is_past(task, finished):
            # A coordinator whose newest checkpoint is damaged repeats the round before.
            return self._local.answer_to(task.run, task.label) or self._memory.refuse_the_past(task, finished)
        if finished != self._in_memory or task.run != self._run:
            self._drop_rule()  # never continue from an interrupted round, or from another run
        self._run = task.run
        rule = self._ready_rule(federation)
        check_received(received.tensors, rule.model.state_dict(), self._whole_network(federation))
        rule.round_info = task.round_info
        if has_state and finished != self._in_memory:
            saved = self._local.load()
            rule.load_state(self._on_device(saved.rule))
            load_optimizer_state(rule.tools.optimizer, saved.optimizer)
        self._in_memory = ("under way", 0)
        if not self.setup.training.optimizer.keep_state or (finished and finished[0] != task.round_info.stage):
            rule.tools.optimizer.state.clear()  # a stage has its own schedule, and its own moments
        rule.received = self._on_device(received)
        means = self._run_steps(rule, task)
        payload, state = rule.update(), rule.state()
        numbers = {name: mean for name, mean in means.items() if isfinite(mean)}
        message = self._answer(task, Payload(payload.tensors, {**numbers, **payload.scalars}))
        # A diverged update will be refused; the next round starts from the last good state.
        if not _all_finite(payload):
            answer = message.to_bytes()
        elif not (_all_finite(state) and isfinite(means.get("loss", 0.0))):
            answer = Message(meta=failure_meta(task, self.name, DIVERGED)).to_bytes()  # the update would not show it
        else:
            answer = message.to_bytes()
            self._remember(rule, task, answer, state, has_state)
        self._put_away(rule)
        return answer

    def _on_device(self, payload: Payload) -> Payload:
        return Payload({k: v.to(self.setup.device) for k, v in payload.tensors.items()}, payload.scalars)

    def _put_away(self, rule: SiteRule) -> None:
        """Release what the next round does not need: many simulated sites share one device."""
        rule.received = Payload()
        rule.tools.optimizer.zero_grad(set_to_none=True)
        if not self.setup.training.optimizer.keep_state:
            rule.tools.optimizer.state.clear()

    def _saved_answer(self, task: Task) -> bytes:
        """The stored answer of the round that was just finished."""
        if (answer := self._local.answer_to(task.run, task.label)) is None:
            raise RunError(
                f"Site {self.name} has finished {task.label}, but its answer is gone or damaged.",
                code="saved-answer-lost",
                where=str(self._local.folder),
                fix="Restore the site's folder from a backup, or start a new run.",
            )
        return answer

    def _ready_rule(self, federation: Federation) -> SiteRule:
        if self._rule is None:
            self._rule = self._make_rule(federation)
        elif self._rule.federation.sites.keys() != federation.sites.keys():
            # A site joined: a method may build its network by the sites that take part, so it starts as after a
            # restart.
            self._drop_rule()
            self._rule, self._in_memory = self._make_rule(federation), None
        self._rule.federation = federation
        return self._rule

    def _whole_network(self, federation: Federation) -> Tensors:
        """Keys and shapes of the network that the federation delivers."""
        sites = set(federation.sites)
        if self._outline is None or self._outline[0] != sites:
            self._outline = sites, network_outline(self.setup.method, self.setup.network, federation)
        return self._outline[1]

    def _drop_rule(self) -> None:
        if self._rule is not None:
            self._rule.model.graphs = None  # a rule and its teachers may keep each other alive for a while
        self._rule = None

    def _make_rule(self, federation: Federation) -> SiteRule:
        setup = self.setup
        with self._random_draws("first weights"):  # of the parts that are in no message
            model = self._place_on_device(setup.method.build_network(setup.network, federation, site=self.name))
            model.graphs = graph_cache_for(model, setup.device)
            settings = setup.training.optimizer
            tools = SiteTools(
                model,
                make_optimizer(model, settings, setup.method.rate_factors(settings.name)),
                settings.clip_norm,
                self._autocast,
                tensor_store=self._store_of_this_run(),
                cases=self.data.train,
                predict=self._predict,
                inference_key=f"{self._inference.model_dump_json()} {setup.training.precision}",
                network_of=lambda site: setup.method.build_network(setup.network, federation, site=site),
                patch_size=setup.training.sampling.patch_size,
                validate=self._validate_teacher,
                validate_every=setup.training.validate_every,
            )
            return setup.method.Site(setup.method.config, self.facts(), federation, tools)

    def _store_of_this_run(self) -> DiskTensorStore:
        """The tensor store of this run; like the state it belongs to one run, and those of older runs are removed."""
        stores = RunTensorStores(self._local.folder)
        stores.remove(but=self._run)
        return stores.of(self._run)

    def _place_on_device(self, network: SegmentationNetwork) -> SegmentationNetwork:
        """The network on its device, in the fastest memory layout there."""
        network = network.to(self.setup.device)
        if self.setup.device.type == "cpu" and self.setup.network.dimensions == 3:
            network = network.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
        return network

    @property
    def _inference(self) -> InferenceSettings:
        training = self.setup.training
        return InferenceSettings(patch_size=training.sampling.patch_size, overlap=training.overlap)

    def _predict(self, network: SegmentationNetwork, image: torch.Tensor) -> torch.Tensor:
        """Predictions of a rule's own networks for a prepared image [X, Y, Z]: probabilities [channels, X, Y, Z]."""

        def predicted() -> torch.Tensor:
            with self._autocast():
                return predict_probabilities(self._place_on_device(network), image, self._inference)

        return retry_without_graphs(self.setup.device, predicted)

    @contextmanager
    def _random_draws(self, *names: object) -> Iterator[int]:
        """Random draws that depend on (seed, site, names) alone and do not affect others; yields the seed."""
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
        setup, round_info = self.setup, task.round_info
        steps = self._steps_of(round_info)
        totals: dict[str, torch.Tensor] = {}
        with self._random_draws(round_info.stage, round_info.round) as seed:
            draws = Draws(seed, setup.device)
            rule.model.train()
            rule.before_round()
            for step, packed in enumerate(self._batches(steps, seed, rule.teacher_predictions())):
                packed = packed.to(setup.device)
                if setup.training.augment is not None:
                    packed = augment(packed, setup.training.augment, draws)
                rate = setup.training.optimizer.rate((round_info.round - 1 + step / steps) / round_info.rounds)
                set_rate(rule.tools.optimizer, rate)
                for name, value in rule.step(packed.unpack()).items():
                    totals[name] = totals[name] + value if name in totals else value
                self._on_step(self.name, step + 1, steps)
            rule.after_round()
        return {name: float(total) / steps for name, total in totals.items()}

    def _steps_of(self, round_info: RoundInfo) -> int:
        """Optimiser steps in a round: the stage's own number, or the experiment's."""
        setup = self.setup
        own = {stage.name: stage.local_steps for stage in setup.method.stages(setup.training.rounds)}[round_info.stage]
        if own is not None:
            return own * setup.steps_factor
        one_pass = patches_per_pass(self.data.train, setup.training.sampling.patch_size)
        return setup.training.steps_per_round(one_pass, setup.steps_factor)

    def _batches(self, steps: int, seed: int, predictions: TeacherPredictions | None) -> Iterator[PackedBatch]:
        """Patches of the training cases, with teachers' predictions, computed first where they are missing."""
        device = self.setup.device.type
        cases, settings = self.data.train, self.setup.training.sampling
        if predictions is not None:
            predictions.ensure(lambda done, total: self._on_step(self.name, 0, steps))
        sampler = PatchSampler(cases, structures_of([case.structures for case in cases]), settings, predictions)
        batches = sampler.batches(steps, seed)
        # Predictions per patch are computed here: a background thread would compete for the device.
        if device != "cpu" and (predictions is None or predictions.cached):
            batches = prefetched(batches, pin=device == "cuda")
        yield from batches
        if predictions is not None:
            predictions.release()

    def _remember(self, rule: SiteRule, task: Task, answer: bytes, state: Payload, has_state: bool) -> None:
        """Save state and answer. Without a state, the round's name is enough: the same request gives the same answer.

        An empty state also replaces the one on disk (`has_state`); otherwise an old state would be restored.
        """
        keep_optimizer = self.setup.training.optimizer.keep_state
        optimizer = optimizer_state(rule.tools.optimizer) if keep_optimizer else {}
        saved = SavedRound(task.round_info.stage, task.round_info.round, state, optimizer)
        counts = keep_optimizer or has_state or state.tensors or state.scalars
        self._local.save(task.run, saved, answer if counts else None)
        self._in_memory = (saved.stage, saved.round)

    # -- validation ----------------------------------------------------------------------------------------

    def _validation_cases(self) -> Iterator[StoredCase]:
        """Yield the validation cases, reporting progress."""
        cases = self.data.validation
        for done, case in enumerate(cases):
            self._on_validated(self.name, done, len(cases))
            yield case
        self._on_validated(self.name, len(cases), len(cases))

    def _evaluate(self, payload: Payload, federation: Federation) -> dict[str, float]:
        """Dice and volume ratio per annotated structure over the validation cases, on the prepared grid."""
        setup = self.setup
        check_model(payload.tensors, self._whole_network(federation))
        if not self.data.validation:
            return {"cases": 0.0}
        if self._delivered is None or self._delivered_to != set(federation.sites):
            self._delivered_to = set(federation.sites)
            self._delivered = setup.method.build_network(setup.network, federation).to(setup.device)
        network = self._delivered
        network.load_state_dict(dict(payload.tensors))

        def predict(network: SegmentationNetwork, image: torch.Tensor) -> torch.Tensor:
            return retry_without_graphs(setup.device, lambda: predict_probabilities(network, image, self._inference))

        scores = validation_scores(network, self._validation_cases(), predict)
        return {**scores.numbers(), "cases": float(len(self.data.validation))}

    def _validate_teacher(self, network: SegmentationNetwork, organs: Collection[str]) -> Mapping[str, float]:
        """Mean Dice of a model of this site alone; it does not leave the site."""
        return validation_scores(network, self.data.validation, self._predict, organs).dice


def _all_finite(payload: Payload) -> bool:
    """Whether none of the tensors holds NaN or infinity."""
    return all(is_finite(value) for value in payload.tensors.values())


__all__ = ["SiteData", "SiteSetup", "SiteSource", "SiteWorker"]
