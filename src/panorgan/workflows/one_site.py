"""A single site's folder as a source of cases: read, counted, measured, and prepared when the plan is known."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from panorgan.agreement import Agreement
from panorgan.anatomy import Vocabulary
from panorgan.config import SiteSettings
from panorgan.federation.site import SiteData
from panorgan.preparation.plan import Plan
from panorgan.preparation.site_statistics import SiteStatistics
from panorgan.preparation.store import Store
from panorgan.workflows.cache import trim_cache
from panorgan.workflows.data_watch import DataWatch
from panorgan.workflows.parallel import InParallel, OnProgress
from panorgan.workflows.shared_scans import check_shared_scans
from panorgan.workflows.site_cases import SiteCases, by_split, facts_of, read_site


class SiteFolder:
    """Implements `federation.site.SiteSource` for a folder on this machine."""

    def __init__(
        self,
        name: str,
        settings: SiteSettings,
        agreement: Agreement,
        cache: Path,
        workers: int | None = None,
        on_progress: OnProgress | None = None,
        cache_limit_gb: float | None = None,
    ) -> None:
        self.name, self.settings, self.agreement = name, settings, agreement
        self._cache, self._cache_limit_gb = cache, cache_limit_gb
        self._store = Store(cache / "store")
        self._work = InParallel(workers, on_progress or (lambda what, done, total: None))

    @cached_property
    def cases(self) -> SiteCases:
        """The site's cases by split, as in the folder."""
        vocabulary = Vocabulary(self.agreement.vocabulary)
        read = read_site(self.name, self.settings, vocabulary, "annotated", self.agreement.channels)
        cases = by_split(self.name, False, read, self.agreement)
        # A site sees only its own cases, so only these can be checked for scans that are used twice.
        check_shared_scans([cases], self._store, self._work, self.agreement.allow_shared_scans)
        return cases

    @cached_property
    def _watch(self) -> DataWatch:
        cases = self.cases
        return DataWatch(self._store, {"train": cases.train, "validation": cases.validation, "test": cases.test})

    def contents(self) -> Mapping[str, str]:
        """The current content of the cases, by split."""
        return self._watch()

    def counts(self) -> tuple[int, Mapping[str, int]]:
        """Number of training cases, and per structure of those that annotate it."""
        facts = facts_of(self.cases)
        return facts.train_cases, facts.annotated

    def statistics(self) -> Mapping[str, float]:
        """The site's measurements for the plan, if any are needed."""
        plan = self.agreement.plan
        if not plan.measures:
            return {}
        measured = self._work(
            "measuring cases", [partial(self._store.measure, case, plan) for case in self.cases.measured]
        )
        return SiteStatistics.of(list(measured)).as_numbers()

    def prepared(self, plan: Mapping[str, Any] | None) -> SiteData:
        """The cases, prepared by the plan; those already in the store cost nothing."""
        assert plan is not None, "a request to train says how cases are prepared"
        agreed, cases = Plan(**plan), self.cases
        self._store.sweep()
        todo = [partial(self._store.add, case, agreed) for case in (*cases.train, *cases.validation)]
        done = list(self._work("preparing cases", todo))
        trim_cache(self._cache, self._cache_limit_gb)
        return SiteData(done[: len(cases.train)], done[len(cases.train) :])
