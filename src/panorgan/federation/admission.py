"""Who takes part: the first sites, those that come later, and the plan and first weights that follow from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from panorgan.anatomy import Vocabulary
from panorgan.cases.planning import PlanSettings, SiteStatistics
from panorgan.cases.preprocess import Plan
from panorgan.cases.seeds import derive_seed
from panorgan.errors import ConfigError, DataError, MessageError
from panorgan.federation.checks import read_introduction
from panorgan.federation.limits import LimitSettings, check_counts, check_statistics
from panorgan.federation.tasks import Task
from panorgan.methods.base import Method
from panorgan.methods.protocol import Federation, SiteInfo
from panorgan.networks import UNetSettings


class Introductions:
    """Reads the answers to *join*; who claims more than `limits` allow is refused."""

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
                told = SiteStatistics.from_numbers(measured, site)
            except DataError as error:
                raise MessageError(error.what, code="bad-statistics", why=error.why) from error
            check_statistics(told, facts, self._limits)
            self.statistics[site] = told
        self.facts[site] = facts


def agreed_plan(plan: Plan | PlanSettings | None, statistics: Mapping[str, SiteStatistics]) -> dict[str, object] | None:
    """The plan that everybody follows: the one given, or what follows from the sites' numbers."""
    if isinstance(plan, PlanSettings):
        return plan.resolve(dict(sorted(statistics.items()))).as_json()
    return None if plan is None else plan.as_json()


def first_weights(
    method: Method, network: UNetSettings, federation: Federation, seed: int, *names: object
) -> dict[str, torch.Tensor]:
    """The weights that the federation's network begins with, drawn from the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "first weights", *names))
        built = method.build_network(network, federation)
    return {key: value.detach().clone() for key, value in built.state_dict().items()}


def check_coverage(vocabulary: Vocabulary, sites: Mapping[str, SiteInfo], awaited: Sequence[str] = ()) -> None:
    """Every site annotates something, and every organ is annotated by somebody, or may be once the `awaited` join."""
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
            f"Nobody annotates {', '.join(orphans)}.",
            code="unlabelled-organ",
            where="vocabulary",
            why="a model cannot learn an organ that no site labels",
            fix="Remove the organ from the vocabulary, or add a site that annotates it.",
        )


def lacks(facts: SiteInfo) -> str:
    """What a site lacks to take part in training; empty if nothing."""
    if not facts.train_cases:
        return "has no training cases"
    return "" if facts.annotated else "annotates nothing of the vocabulary"
