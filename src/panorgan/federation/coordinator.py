"""The server's half of a round: send requests, check answers, aggregate, validate, save. No formula, no image."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from panorgan.federation.admission import Admission
from panorgan.federation.aggregation import Aggregation, SpooledUpdates
from panorgan.federation.agreement_checks import validation_due
from panorgan.federation.checkpoint import Checkpoints, CoordinatorState
from panorgan.federation.checks import check_numbers, read_scores
from panorgan.federation.collector import Collector, Request, SitesMissingError, Traffic
from panorgan.federation.coordinator_setup import CoordinatorSetup
from panorgan.federation.events import EventLog, read_events
from panorgan.federation.local_models import round_to_keep, write_global_model, write_local_models
from panorgan.federation.message import MessageFile
from panorgan.federation.notices import NoticeBoard, early_delivery_notice, fallback_notice
from panorgan.federation.remedies import Remedies
from panorgan.federation.starting_weights import Taken
from panorgan.federation.tasks import Kind, Task
from panorgan.federation.tensor_store import DiskTensorStore
from panorgan.federation.transports.base import Transport
from panorgan.methods.base import ServerRule
from panorgan.methods.protocol import Federation, Payload, RoundInfo, SiteInfo

BySite = dict[str, dict[str, float]]
"""Site → structure → number."""


class Coordinator:
    """Drives a run from its newest checkpoint to its last round."""

    def __init__(
        self,
        setup: CoordinatorSetup,
        folder: Path,
        events: EventLog,
        collector: Collector,
        admission: Admission,
        checkpoints: Checkpoints,
        state: CoordinatorState,
    ) -> None:
        self.setup, self.events, self.checkpoints, self.state = setup, events, checkpoints, state
        self.tensor_store = DiskTensorStore(folder / "vault")
        self._spool = folder / "spool"
        training = setup.training
        self._aggregation = Aggregation(training.aggregation, training.trimmed_share, setup.limits.largest_share)
        self._collector, self._admission = collector, admission
        self._board = NoticeBoard(events, Remedies.of(setup.method, setup.network))
        facts = {name: SiteInfo.from_json(name, content) for name, content in state.sites.items()}
        self.federation = Federation(setup.vocabulary, facts)
        self.rule = self._rule_of(state)
        self._stages = setup.method.stages(training.rounds)
        self.schedule = [
            RoundInfo(stage.name, round_, stage.rounds)
            for stage in self._stages
            for round_ in range(1, stage.rounds + 1)
        ]
        self._kept_round = round_to_keep(self._stages, setup.local_models_after)

    @classmethod
    def begin(cls, setup: CoordinatorSetup, transport: Transport, folder: Path, events: EventLog) -> Coordinator:
        """Continue from the newest checkpoint in a run folder; without any, admit the sites and write checkpoint 0."""
        collector = Collector(transport, events, setup.patience)
        admission = Admission(setup, transport, collector)
        checkpoints = Checkpoints(folder / "checkpoints")
        state = checkpoints.load_latest()
        if state is None:
            state = admission.first_state()
            if admission.taken is not None:
                events.record("start_from", **_start_facts(setup, admission.taken))
            checkpoints.save(state)
            events.record("joined", sites=state.sites, plan=state.plan)
        coordinator = cls(setup, folder, events, collector, admission, checkpoints, state)
        coordinator._write_missed_events()
        coordinator._note_fallback()
        return coordinator

    @property
    def finished(self) -> bool:
        """Whether all rounds are done."""
        return self.state.rounds_done >= len(self.schedule)

    def run(self, rounds: int | None = None, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Run the remaining rounds, or the next `rounds` of them; `should_stop` is called before each."""
        left = self.schedule[self.state.rounds_done :]
        for round_info in left if rounds is None else left[:rounds]:
            if should_stop():
                return
            self._admit_newcomers()
            self._round(round_info)
        delivered, every = self._best_of_last_stage or self.state.rounds_done, self.setup.training.validate_every
        if self.finished and (notice := early_delivery_notice(self.setup.method, self.schedule, delivered, every)):
            self._board.note(len(self.schedule), notice)

    @property
    def members(self) -> list[str]:
        """Sites that joined and have not left."""
        listed = self.setup.listed
        return sorted(site for site in self.federation.sites if listed is None or site in listed)

    def deliver(self, card: Mapping[str, Any], sites: Sequence[str]) -> list[str]:
        """Send the delivered model with its card to sites; returns the sites that have it now."""
        number, weights = self.delivered_weights()
        payload = Payload(weights)
        have: list[str] = []

        def read(site: str, answer: bytes) -> None:
            read_scores(answer, task, site, self.setup.vocabulary)
            have.append(site)

        task = self._task("deliver", self.schedule[-1], card)
        self._collector.ask(sorted(sites), Request(task, lambda site: payload, number), read)
        return sorted(have)

    def delivered_weights(self) -> tuple[int, dict[str, torch.Tensor]]:
        """Round and weights of the model that the run delivers; the best round is one of the last stage."""
        chosen = self.state if self._best_of_last_stage is None else self.checkpoints.load_best(self.state)
        return chosen.rounds_done, dict(self._rule_of(chosen).delivered())

    @property
    def _best_of_last_stage(self) -> int | None:
        """The round that is delivered because it is the best; None where the last one is delivered."""
        best = self.state.best
        if self.setup.training.select == "last" or best is None or not self._is_of(self.schedule[-1].stage, best):
            return None
        return int(best["round"])

    def _rule_of(self, state: CoordinatorState) -> ServerRule:
        """The method's server rule as it was in a state."""
        method = self.setup.method
        rule = method.Server(method.config, self.federation, state.weights, self.tensor_store)
        rule.starts_from_model = self.setup.start is not None
        rule.load_state(state.rule)
        return rule

    def _is_of(self, stage: str, best: Mapping[str, float]) -> bool:
        return self.schedule[int(best["round"]) - 1].stage == stage

    # -- who takes part ------------------------------------------------------------------------------------

    def _admit_newcomers(self) -> None:
        """Admit sites that were absent at the start; they take part from the next round. The plan stays."""
        found = self._admission.newcomers(self.state.rounds_done, self.federation.sites, self.state.plan)
        for site, facts in found.items():
            self._admit(site, facts)

    def _admit(self, site: str, facts: SiteInfo) -> None:
        setup, state = self.setup, self.state
        self.federation = Federation(setup.vocabulary, {**self.federation.sites, site: facts})
        # Parts that come with the newcomer (its own member, its own head) start fresh; all others stay.
        fresh = self._admission.weights_of(self.federation, "late", site)
        state.weights = {**fresh, **state.weights}
        state.best = None  # no earlier round includes the newcomer's organs, or was scored by it
        state.sites = {name: known.as_json() for name, known in sorted(self.federation.sites.items())}
        self.rule = self._rule_of(state)
        self.checkpoints.save(state)
        self.events.record("late_join", number=state.rounds_done + 1, site=site, **facts.as_json())

    def _write_missed_events(self) -> None:
        """Write the last checkpoint's line into the log, if a kill came in between; the checkpoint holds the line."""
        if self.events.path is None:
            return
        state, last_round = self.state, self.state.last_round
        happened = list(read_events(self.events.path))
        joined = [event.facts["sites"] for event in happened if event.kind == "joined"]
        if not joined:
            joined = [state.sites]
            self.events.record("joined", sites=state.sites, plan=state.plan)
        if last_round is not None and last_round["number"] not in {
            e.facts["number"] for e in happened if e.kind == "round"
        }:
            self.events.record("round", **last_round)
        self._board.recall(read_events(self.events.path))
        known = {site for sites in joined for site in sites}
        known |= {event.facts["site"] for event in happened if event.kind == "late_join"}
        for site in sorted(state.sites.keys() - known):
            self.events.record("late_join", number=state.rounds_done + 1, site=site, **state.sites[site])

    def _note_fallback(self) -> None:
        if passed := self.checkpoints.unreadable:
            self._board.repeat(self.state.rounds_done + 1, fallback_notice(self.state.rounds_done, passed))

    # -- one round -----------------------------------------------------------------------------------------

    def _round(self, round_info: RoundInfo) -> None:
        number = self.state.rounds_done + 1
        began = time.perf_counter()
        self.rule.round_info = round_info
        self.events.transient(
            "round_started", number=number, stage=round_info.stage, round=round_info.round, total=len(self.schedule)
        )
        for notice in self.rule.notices():
            self._board.note(number, notice)
        traffic = Traffic()
        files = self._collect(round_info, number, traffic)
        trained, for_training = time.perf_counter(), traffic.sent + traffic.received
        updates = SpooledUpdates(files, self._aggregation)
        keep = self.setup.keep_local_models if number == self._kept_round else None
        if keep is not None:
            write_local_models(keep, self.rule, updates)
        self.rule.aggregate(updates)
        if keep is not None:
            write_global_model(keep, self.rule)
        numbers = {site: dict(file.scalars) for site, file in sorted(files.items())}
        of_server = dict(self.rule.numbers())
        self.state.weights = self.rule.weights
        self.state.rule = self.rule.state()
        self.state.rounds_done = number
        aggregated = time.perf_counter()
        validation, volume = self._validate(round_info, traffic) if self._validates_now(round_info) else (None, {})
        if validation is not None:
            self.rule.validated(validation)
            self.state.rule = self.rule.state()
        validated = time.perf_counter()
        event: dict[str, Any] = {
            "number": number,
            "stage": round_info.stage,
            "round": round_info.round,
            "rounds": round_info.rounds,
            "total": len(self.schedule),
            "sites": numbers,
            **({"server": of_server} if of_server else {}),
            "validation": validation,
            **({"volume": volume} if volume else {}),
            "best": self.state.best,
            "bytes_sent": traffic.sent,
            "bytes_received": traffic.received,
            "bytes_training": for_training,  # of both directions; the rest is validation
            "seconds": {
                "sites": round(trained - began, 4),
                "aggregate": round(aggregated - trained, 4),
                "validate": round(validated - aggregated, 4),
            },
        }
        self.state.last_round = event
        self.checkpoints.save(self.state)
        shutil.rmtree(self._spool, ignore_errors=True)
        seconds = {**event["seconds"], "checkpoint": round(time.perf_counter() - validated, 4)}
        self.events.record("round", **{**event, "seconds": seconds})
        self._board.check_organs(event)

    def _task(self, kind: Kind, round_info: RoundInfo, card: Mapping[str, Any] | None = None) -> Task:
        state, setup = self.state, self.setup
        known = self.federation.sites
        return Task(kind, setup.run, round_info, known, setup.experiment, state.plan, card, state.answered)

    def _collect(self, round_info: RoundInfo, number: int, traffic: Traffic) -> dict[str, MessageFile]:
        """Collect the updates of one round. If there are too few, the run stops, but nothing is lost."""
        task, training = self._task("train", round_info), self.setup.training
        files, responses = self._collector.collect(
            self.members,
            Request(task, self.rule.broadcast, number, traffic),
            self.rule.expects,
            self._spool / f"{number:05d}",
            training.outlier_factor,
            lambda site, numbers: check_numbers(numbers, self.federation.sites[site], self.setup.method.ranges),
        )
        self._collector.require_all(responses, number, f"round {number} cannot end")
        if len(files) < training.min_sites:
            raise SitesMissingError(
                f"Only {len(files)} usable answers in round {number}, {training.min_sites} are needed.",
                sorted(set(self.members) - files.keys()),
                code="too-few-answers",
                why="see the 'refused' lines in events.jsonl",
                fix="Training has diverged: start again with a lower training.optimizer.learning_rate."
                if responses.diverged
                else "Repair the sites that were refused or did not answer, then resume. Nothing is lost.",
            )
        self.state.answered |= dict.fromkeys(responses.sound, (round_info.stage, round_info.round))
        return files

    # -- validation ----------------------------------------------------------------------------------------

    def _validates_now(self, round_info: RoundInfo) -> bool:
        return validation_due(self.setup.training, self._stages, round_info)

    def _validate(self, round_info: RoundInfo, traffic: Traffic) -> tuple[BySite, BySite]:
        """Let every site score the new global model on its own annotations; records the stage's best round.

        Returns Dice and volume ratios. A site that does not answer counts with its last scores, so that its absence
        cannot make a round look better.
        """
        state = self.state
        scores: BySite = {}
        volume: BySite = {}
        task = self._task("evaluate", round_info)

        def read(site: str, answer: bytes) -> None:
            answered = read_scores(answer, task, site, self.setup.vocabulary)
            scores[site] = dict(answered.dice)
            if answered.volume:
                volume[site] = dict(answered.volume)

        payload = Payload(self.rule.delivered())
        request = Request(task, lambda site: payload, state.rounds_done, traffic)
        responses = self._collector.ask(self.members, request, read)
        self._collector.require_all(responses, state.rounds_done, f"round {state.rounds_done} cannot be validated")
        state.scores |= {site: sum(values.values()) / len(values) for site, values in scores.items() if values}
        scorers = [site for site in self.members if site in state.scores]
        if scorers != state.scorers:  # a mean over other sites is not comparable
            state.scorers, state.best = scorers, None
        if scores and scorers:
            mean = sum(state.scores[site] for site in scorers) / len(scorers)
            best = state.best
            if best is None or not self._is_of(round_info.stage, best) or mean > best["dice"]:
                state.best = {"round": float(state.rounds_done), "dice": mean}
        return dict(sorted(scores.items())), dict(sorted(volume.items()))


def _start_facts(setup: CoordinatorSetup, taken: Taken) -> dict[str, Any]:
    """Facts for the log: the model that training starts from, and what was taken from it."""
    start = setup.training.start_from
    name, sha256 = (start.name, start.sha256) if start is not None else ("", "")
    text = f"Training starts from the model {name!r} (SHA-256 {sha256[:12]}…). {taken.in_words()}"
    return {"name": name, "sha256": sha256, **taken.as_json(), "text": text}


__all__ = ["Coordinator", "CoordinatorSetup", "SitesMissingError"]
