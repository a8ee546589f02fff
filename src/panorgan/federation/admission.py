"""Which sites take part: the first sites, those that join later, and the plan and first weights that follow."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from panorgan.anatomy import Vocabulary
from panorgan.errors import ConfigError, DataError, MessageError
from panorgan.federation.checkpoint import CoordinatorState
from panorgan.federation.checks import read_introduction
from panorgan.federation.collector import Collector, Request, SitesMissingError
from panorgan.federation.coordinator_setup import CoordinatorSetup
from panorgan.federation.limits import LimitSettings, check_counts, check_statistics
from panorgan.federation.starting_weights import Taken, take_over
from panorgan.federation.tasks import Task
from panorgan.federation.transports.base import Transport
from panorgan.methods.base import Method
from panorgan.methods.protocol import Federation, Payload, SiteInfo
from panorgan.networks import SegmentationNetwork, UNetSettings
from panorgan.preparation.plan import PlanSettings
from panorgan.preparation.site_statistics import SiteStatistics
from panorgan.seeds import derive_seed

_NEWCOMERS_ANSWER_WITHIN = 300.0
"""Seconds. All other sites wait meanwhile; a newcomer only counts its cases, and may try again in the next segment."""


class Introductions:
    """Reads the answers to *join*; a site that claims more than `limits` allow is refused."""

    def __init__(self, task: Task, vocabulary: Vocabulary, measures: bool, limits: LimitSettings) -> None:
        self.facts: dict[str, SiteInfo] = {}
        self.statistics: dict[str, SiteStatistics] = {}
        self._task, self._vocabulary, self._measures, self._limits = task, vocabulary, measures, limits

    def read(self, site: str, answer: bytes) -> None:
        """Take a site's introduction, or refuse it."""
        facts, measured = read_introduction(answer, self._task, site, self._vocabulary)
        check_counts(facts, self._limits)
        if self._measures:
            try:
                statistics = SiteStatistics.from_numbers(measured, site)
            except DataError as error:
                raise MessageError(error.what, code="bad-statistics", why=error.why) from error
            check_statistics(statistics, facts, self._limits)
            self.statistics[site] = statistics
        self.facts[site] = facts


class Admission:
    """Asks sites to introduce themselves, and admits those that are listed and have training data."""

    def __init__(self, setup: CoordinatorSetup, transport: Transport, collector: Collector) -> None:
        self.setup, self.transport, self._collector = setup, transport, collector
        self._turned_away: set[str] = set()
        self.taken: Taken | None = None
        """What `weights_of` took last from the model to start from; None where there is none."""

    def first_state(self) -> CoordinatorState:
        """Collect introductions, settle the plan, draw the first weights."""
        setup = self.setup
        invited = self._invited(0)
        # Late sites join after the run has begun: the plan must not depend on whether they are connected already.
        joined = self._introductions([site for site in invited if not setup.required or site in setup.required])
        facts = self._able(joined.facts, 0) if setup.listed is not None else joined.facts
        if absent := sorted(set(setup.required) - facts.keys()):
            raise SitesMissingError(
                f"The run cannot begin without {', '.join(absent)}.",
                absent,
                code="cannot-begin",
                why="they are absent, or were refused (see events.jsonl)",
                fix="Start them, or mark them as joining later.",
            )
        if len(facts) < setup.training.min_sites:
            raise SitesMissingError(
                f"Only {len(facts)} {'site' if len(facts) == 1 else 'sites'} joined, "
                f"{setup.training.min_sites} are needed.",
                (),
                code="too-few-sites",
                why="the others are absent, or were refused (see events.jsonl)",
                fix="Start the missing sites.",
            )
        check_coverage(setup.vocabulary, facts, sorted({*setup.awaited, *setup.joins_at} - facts.keys()))
        plan = agreed_plan(setup.plan, joined.statistics)
        weights = self.weights_of(Federation(setup.vocabulary, facts))
        sites = {name: facts[name].as_json() for name in sorted(facts)}
        return CoordinatorState(weights, sites=sites, plan=plan)

    def weights_of(self, federation: Federation, *names: object) -> dict[str, torch.Tensor]:
        """First weights of the federation's network: drawn from the seed, or those of the model to start from."""
        setup = self.setup
        drawn = drawn_network(setup.method, setup.network, federation, setup.seed, *names)
        if setup.start is None:
            return _copied(drawn.state_dict())
        weights, self.taken = take_over(drawn, setup.start())
        return weights

    def newcomers(self, number: int, known: Collection[str], plan: dict[str, Any] | None) -> dict[str, SiteInfo]:
        """Sites that are not known yet and take part after `number` rounds; they follow the existing plan."""
        unknown = [site for site in self._invited(number) if site not in known]
        if not unknown or self.setup.method.pooled:
            return {}
        joined = self._introductions(unknown, plan, _NEWCOMERS_ANSWER_WITHIN).facts
        self._turned_away |= set(unknown) - joined.keys()
        return self._able(joined, number)

    def _invited(self, number: int) -> list[str]:
        """Reachable sites that may take part after `number` rounds; unlisted ones are refused by name, once."""
        early = {site for site, first in self.setup.joins_at.items() if first > number + 1}
        found = set(self.transport.sites) - self._turned_away - early
        listed = found if self.setup.listed is None else self.setup.listed
        for site in sorted(found - listed):
            error = MessageError(
                f"Site {site} is not in this federation.",
                code="site-not-listed",
                why="it is not on the coordinator's list",
            )
            self._collector.refuse(number, site, error)
            self._turned_away.add(site)
        return sorted(found & listed)

    def _introductions(
        self, sites: Sequence[str], plan: dict[str, Any] | None = None, deadline: float | None = None
    ) -> Introductions:
        """Ask sites to introduce themselves, and for the measurements of the plan if there is none yet."""
        settings = self.setup.plan
        measures = plan is None and settings is not None and settings.measures
        task = Task("join", self.setup.run, experiment=self.setup.experiment, plan=plan)
        introductions = Introductions(task, self.setup.vocabulary, measures, self.setup.limits)
        self._collector.ask(sites, Request(task, lambda site: Payload(), 0), introductions.read, deadline)
        return introductions

    def _able(self, facts: Mapping[str, SiteInfo], number: int) -> dict[str, SiteInfo]:
        """Sites with something to train on; the others are refused by name, unless the run cannot begin without
        them."""
        able = {}
        for site, info in sorted(facts.items()):
            if (missing := lacks(info)) and site not in self.setup.required:
                error = MessageError(
                    f"Site {site} cannot join.",
                    code="annotates-nothing" if info.train_cases else "no-training-cases",
                    why=f"it {missing}",
                )
                self._collector.refuse(number, site, error)
                self._turned_away.add(site)
            else:
                able[site] = info
        return able


def agreed_plan(plan: PlanSettings | None, statistics: Mapping[str, SiteStatistics]) -> dict[str, object] | None:
    """The plan of the run: the given one, or the one that follows from the sites' measurements."""
    return None if plan is None else plan.resolve(dict(sorted(statistics.items()))).as_json()


def drawn_network(
    method: Method, network: UNetSettings, federation: Federation, seed: int, *names: object
) -> SegmentationNetwork:
    """The federation's network with its initial weights, drawn from the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "first weights", *names))
        return method.build_network(network, federation)


def first_weights(
    method: Method, network: UNetSettings, federation: Federation, seed: int, *names: object
) -> dict[str, torch.Tensor]:
    """The initial weights of that network."""
    return _copied(drawn_network(method, network, federation, seed, *names).state_dict())


def _copied(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value.detach().clone() for key, value in weights.items()}


def check_coverage(vocabulary: Vocabulary, sites: Mapping[str, SiteInfo], awaited: Sequence[str] = ()) -> None:
    """Every site annotates something, and some site annotates every organ, or may once the `awaited` join."""
    for site, facts in sorted(sites.items()):
        if missing := lacks(facts):
            raise ConfigError(
                f"Site {site} {missing}.",
                code="annotates-nothing" if facts.train_cases else "no-training-cases",
                where=f"sites.{site}",
                fix="Correct its folder or its 'annotated' list, mark it 'external: true', or remove it.",
            )
    federation = Federation(vocabulary, sites)
    known = {organ for site in sites for organ in federation.organs_of(site)}
    orphans = [organ for organ in vocabulary if organ not in known]
    if orphans and not awaited:
        raise ConfigError(
            f"No site annotates {', '.join(orphans)}.",
            code="unlabelled-organ",
            where="vocabulary",
            why="a model cannot learn an organ that no site labels",
            fix="Remove the organ from the vocabulary, or add a site that annotates it.",
        )


def lacks(facts: SiteInfo) -> str:
    """Why a site cannot take part in training; empty if it can."""
    if not facts.train_cases:
        return "has no training cases"
    return "" if facts.annotated else "annotates nothing of the vocabulary"
