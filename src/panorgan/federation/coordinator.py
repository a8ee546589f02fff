"""The server's half of a round: ask, check, aggregate, validate, checkpoint. Knows no formula and no image."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from panorgan.anatomy import Vocabulary
from panorgan.cases.seeds import derive_seed
from panorgan.errors import ConfigError, MessageError, RunError
from panorgan.federation.aggregation import SpooledUpdates
from panorgan.federation.checkpoint import Checkpoints, CoordinatorState
from panorgan.federation.checks import check_answer, read_introduction, read_scores
from panorgan.federation.events import EventLog
from panorgan.federation.files import write_atomically
from panorgan.federation.message import Message, MessageFile
from panorgan.federation.settings import TrainingSettings
from panorgan.federation.tasks import Task
from panorgan.federation.transports.base import Transport
from panorgan.methods.base import Method, ServerRule
from panorgan.methods.exchange import Content, Federation, Moment, SiteFacts
from panorgan.networks import UNetSettings


@dataclass(frozen=True)
class CoordinatorSetup:
    """What the federation trains, and how."""

    run: str
    vocabulary: Vocabulary
    method: Method
    network: UNetSettings
    training: TrainingSettings
    seed: int = 0


class Coordinator:
    """Drives a run from its newest checkpoint to its last round."""

    def __init__(self, setup: CoordinatorSetup, transport: Transport, folder: Path, events: EventLog) -> None:
        self.setup, self.transport, self.events = setup, transport, events
        self.checkpoints = Checkpoints(folder / "checkpoints")
        self._spool = folder / "spool"
        self.state = self.checkpoints.load_latest() or self._start()
        facts = {name: SiteFacts.from_json(name, content) for name, content in self.state.sites.items()}
        self.federation = Federation(setup.vocabulary, facts)
        self.rule = self._rule_of(self.state)
        stages = setup.method.stages(setup.training.rounds)
        self.moments = [
            Moment(stage.name, round_, stage.rounds) for stage in stages for round_ in range(1, stage.rounds + 1)
        ]
        self._validated_stages = {stage.name for stage in stages if stage.validate}

    def run(self, rounds: int | None = None) -> None:
        """Do the rounds that are left, or the next `rounds` of them."""
        left = self.moments[self.state.rounds_done :]
        for moment in left if rounds is None else left[:rounds]:
            self._round(moment)

    def delivered_weights(self) -> tuple[int, dict[str, torch.Tensor]]:
        """Round and weights of the model that the run delivers; the best round is one of the last stage."""
        best, chosen = self.state.best, self.state
        if self.setup.training.select == "best" and best is not None and self._is_of(self.moments[-1].stage, best):
            chosen = self.checkpoints.load_best(self.state)
        return chosen.rounds_done, dict(self._rule_of(chosen).delivered())

    def _rule_of(self, state: CoordinatorState) -> ServerRule:
        """The method's server rule as it was in a state."""
        method = self.setup.method
        rule = method.Server(method.config, self.federation, state.weights)
        rule.load_state(state.rule)
        return rule

    def _is_of(self, stage: str, best: Mapping[str, float]) -> bool:
        return self.moments[int(best["round"]) - 1].stage == stage

    # -- start ---------------------------------------------------------------------------------------------

    def _start(self) -> CoordinatorState:
        """Ask who takes part, draw the first weights, and write checkpoint 0."""
        setup = self.setup
        facts: dict[str, SiteFacts] = {}

        task = Task("join", setup.run)

        def on_reply(site: str, answer: bytes) -> None:
            try:
                facts[site] = read_introduction(answer, task, site)
            except MessageError as error:
                self._refuse(0, site, error)

        join = Message(meta=task.to_meta()).to_bytes()
        self.transport.exchange(sorted(self.transport.sites), lambda site: join, on_reply)
        if len(facts) < setup.training.min_sites:
            raise RunError(
                f"Only {len(facts)} {'site' if len(facts) == 1 else 'sites'} joined, "
                f"{setup.training.min_sites} are needed.",
                why="the others are absent, or were refused (see events.jsonl)",
                fix="Start the missing sites, or lower training.min_sites.",
            )
        check_coverage(setup.vocabulary, facts)
        federation = Federation(setup.vocabulary, facts)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(setup.seed, "first weights"))
            network = setup.method.build_network(setup.network, federation)
        weights = {key: value.detach().clone() for key, value in network.state_dict().items()}
        sites = {name: facts[name].as_json() for name in sorted(facts)}
        state = CoordinatorState(weights, sites=sites)
        self.checkpoints.save(state)
        self.events.record("joined", sites=sites)
        return state

    # -- one round -----------------------------------------------------------------------------------------

    def _round(self, moment: Moment) -> None:
        number = self.state.rounds_done + 1
        began = time.perf_counter()
        self.rule.moment = moment
        self.events.transient(
            "round_started", number=number, stage=moment.stage, round=moment.round, total=len(self.moments)
        )
        task = Task("train", self.setup.run, moment, self.federation.sites)
        traffic = {"sent": 0, "received": 0}
        files = self._collect(task, number, traffic)
        trained = time.perf_counter()
        self.rule.aggregate(SpooledUpdates(files))
        numbers = {site: dict(file.numbers) for site, file in sorted(files.items())}
        self.state.weights = self.rule.weights
        self.state.rule = self.rule.state()
        self.state.rounds_done = number
        aggregated = time.perf_counter()
        validation = self._validate(moment, traffic) if self._validates_now(moment) else None
        validated = time.perf_counter()
        self.checkpoints.save(self.state)
        shutil.rmtree(self._spool, ignore_errors=True)
        self.events.record(
            "round",
            number=number,
            stage=moment.stage,
            round=moment.round,
            rounds=moment.rounds,
            total=len(self.moments),
            sites=numbers,
            validation=validation,
            best=self.state.best,
            bytes_sent=traffic["sent"],
            bytes_received=traffic["received"],
            seconds={
                "sites": round(trained - began, 4),
                "aggregate": round(aggregated - trained, 4),
                "validate": round(validated - aggregated, 4),
                "checkpoint": round(time.perf_counter() - validated, 4),
            },
        )

    def _collect(self, task: Task, number: int, traffic: dict[str, int]) -> dict[str, MessageFile]:
        """Ask every site that has no accepted answer on disk yet; refuse bad answers by name."""
        folder = self._spool / f"{number:05d}"
        accepted: dict[str, MessageFile] = {}

        def accept(site: str, path: Path) -> None:
            try:
                file = MessageFile(path)
                check_answer(file, task, site, self.rule.expects(site))
                accepted[site] = file
            except MessageError as error:
                path.unlink(missing_ok=True)
                self._refuse(number, site, error)

        def on_reply(site: str, answer: bytes) -> None:
            traffic["received"] += len(answer)
            path = folder / f"{site}.safetensors"
            write_atomically(path, answer)
            accept(site, path)

        for site in self.federation.sites:
            # Left by a coordinator that was killed in this round: no need to train twice.
            if (path := folder / f"{site}.safetensors").is_file():
                accept(site, path)
        waiting = [site for site in sorted(self.federation.sites) if site not in accepted]
        self._exchange(waiting, task, self.rule.broadcast, on_reply, traffic)
        if len(accepted) < self.setup.training.min_sites:
            raise RunError(
                f"Only {len(accepted)} usable answers in round {number}, {self.setup.training.min_sites} are needed.",
                why="see the 'refused' lines in events.jsonl",
                fix="Mend the sites that were refused or did not answer, then resume. Nothing is lost.",
            )
        return accepted

    def _refuse(self, number: int, site: str, error: MessageError) -> None:
        self.events.record("refused", number=number, site=site, reason=error.what, why=error.why)

    def _exchange(
        self,
        sites: list[str],
        task: Task,
        content_for: Callable[[str], Content],
        on_reply: Callable[[str, bytes], None],
        traffic: dict[str, int],
    ) -> None:
        """Send each site its content; the same tensors are serialised once."""
        meta = task.to_meta()
        last: Content | None = None
        request = b""

        def make_request(site: str) -> bytes:
            nonlocal last, request
            content = content_for(site)
            if last is None or not _same(last, content):
                request = Message(content.arrays, content.numbers, meta).to_bytes()
                last = Content(dict(content.arrays), dict(content.numbers))  # the rule may fill its own anew
            traffic["sent"] += len(request)
            return request

        self.transport.exchange(sites, make_request, on_reply)

    # -- validation ----------------------------------------------------------------------------------------

    def _validates_now(self, moment: Moment) -> bool:
        every = self.setup.training.validate_every
        due = every > 0 and (moment.round % every == 0 or moment.round == moment.rounds)
        return due and moment.stage in self._validated_stages

    def _validate(self, moment: Moment, traffic: dict[str, int]) -> dict[str, dict[str, float]]:
        """Every site scores the new global model on what it annotates itself; a stage's best round is remembered."""
        scores: dict[str, dict[str, float]] = {}
        task = Task("evaluate", self.setup.run, moment, self.federation.sites)

        def on_reply(site: str, answer: bytes) -> None:
            traffic["received"] += len(answer)
            try:
                scores[site] = read_scores(answer, task, site)
            except MessageError as error:
                self._refuse(self.state.rounds_done, site, error)

        content = Content(self.rule.delivered())
        self._exchange(sorted(self.federation.sites), task, lambda site: content, on_reply, traffic)
        means = [sum(values.values()) / len(values) for values in scores.values() if values]
        if means:
            mean = sum(means) / len(means)
            best = self.state.best
            if best is None or not self._is_of(moment.stage, best) or mean > best["dice"]:
                self.state.best = {"round": float(self.state.rounds_done), "dice": mean}
        return dict(sorted(scores.items()))


def _same(first: Content, second: Content) -> bool:
    """Whether two contents are made of the very same tensors, under the same keys, and equal numbers."""
    arrays, others = first.arrays, second.arrays
    equal_keys = first.numbers == second.numbers and arrays.keys() == others.keys()
    return equal_keys and all(arrays[key] is others[key] for key in arrays)


def check_coverage(vocabulary: Vocabulary, sites: Mapping[str, SiteFacts]) -> None:
    """Every site annotates something, and every organ is annotated by somebody."""
    for site, facts in sorted(sites.items()):
        if not facts.train_cases or not facts.annotated:
            missing = "has no training cases" if not facts.train_cases else "annotates nothing of the vocabulary"
            raise ConfigError(
                f"Site {site} {missing}.",
                where=f"sites.{site}",
                fix="Correct its folder or its 'annotated' list, mark it 'external: true', or remove it.",
            )
    federation = Federation(vocabulary, sites)
    known = {organ for site in sites for organ in federation.organs_of(site)}
    orphans = [organ for organ in vocabulary if organ not in known]
    if orphans:
        raise ConfigError(
            f"Nobody annotates {', '.join(orphans)}.",
            where="vocabulary",
            why="a model cannot learn an organ that no site labels",
            fix="Remove the organ from the vocabulary, or add a site that annotates it.",
        )
