"""From an experiment to prepared cases: read the folders, split by patient, settle the plan, fill the store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from panorgan.config import Experiment
from panorgan.data.case import Case
from panorgan.errors import DataError
from panorgan.preparation.plan import Plan
from panorgan.preparation.site_statistics import SiteStatistics
from panorgan.preparation.store import Store, StoredCase
from panorgan.workflows.cache import trim_cache
from panorgan.workflows.data_watch import DataWatch
from panorgan.workflows.parallel import InParallel, OnProgress
from panorgan.workflows.shared_scans import check_shared_scans
from panorgan.workflows.site_cases import SiteCases, cache_folder, read_sites


@dataclass(frozen=True)
class PreparedSite:
    """A site's cases by split. `test` cases carry the labels they are scored with; `content` has a key per case."""

    name: str
    external: bool
    train: Sequence[StoredCase]
    validation: Sequence[StoredCase]
    test: Sequence[Case]
    annotated: tuple[str, ...]
    content: Mapping[str, Mapping[str, str]]
    watch: Callable[[], Mapping[str, str]] = field(default=dict, repr=False)
    """The current content of the cases."""

    def describe(self) -> dict[str, Any]:
        """Counts and annotated structures, for the manifest; `train_slices` are those across R, A and S."""
        counts = {"train": len(self.train), "validation": len(self.validation), "test": len(self.test)}
        slices = [sum(case.shape[axis] for case in self.train) for axis in range(3)]
        return {
            "external": self.external,
            "annotated": list(self.annotated),
            "cases": counts,
            "train_slices": slices,
        }


@dataclass(frozen=True)
class PreparedFederation:
    """All sites, sorted by name, their plan, and the measurements for it (empty where everything was given).

    `shared_scans` names scans that are used twice, where the experiment allows it.
    """

    sites: tuple[PreparedSite, ...]
    plan: Plan
    statistics: Mapping[str, SiteStatistics]
    shared_scans: tuple[str, ...] = ()

    @property
    def training(self) -> tuple[PreparedSite, ...]:
        """The sites that train."""
        return tuple(site for site in self.sites if not site.external)

    @property
    def largest_scan(self) -> tuple[int, ...]:
        """Voxels of the largest training case along each axis."""
        shapes = [case.shape[-3:] for site in self.training for case in site.train]
        return tuple(map(max, zip(*shapes, strict=True)))


def prepare(
    experiment: Experiment, cache: Path | None = None, on_progress: OnProgress | None = None
) -> PreparedFederation:
    """Read and check every site, then preprocess what is not in the store yet."""
    cache = cache or cache_folder()
    progress: OnProgress = on_progress or (lambda what, done, total: None)
    sites = read_sites(experiment, cache, progress)
    store = Store(cache / "store")
    store.sweep()
    work = InParallel(experiment.hardware.workers, progress)
    shared = check_shared_scans(sites, store, work, experiment.allow_shared_scans)
    # Values in the experiment file are not measured.
    statistics = measure_sites(experiment, sites, store, work) if experiment.plan.measures else {}
    plan = experiment.plan.resolve(statistics)
    todo: list[Callable[[], Any]] = []
    for site in sites:
        todo += [partial(store.add, case, plan) for case in (*site.train, *site.validation)]
        todo += [partial(store.check, case) for case in site.test]
    done = iter(work("preparing cases", todo))
    trim_cache(cache)
    return PreparedFederation(tuple(_assemble(site, done, store) for site in sites), plan, statistics, shared)


def _assemble(site: SiteCases, done: Iterator[Any], store: Store) -> PreparedSite:
    """Takes as many results as the site has cases, in the order of submission."""
    train, validation = ([next(done) for _ in cases] for cases in (site.train, site.validation))
    for _ in site.test:
        next(done)
    content = {split: {case.id: store.content_of(case) for case in cases} for split, cases in site.splits().items()}
    watch = DataWatch(store, site.splits())
    return PreparedSite(site.name, site.external, train, validation, site.test, site.annotated, content, watch)


def make_plan(
    experiment: Experiment, cache: Path | None = None, on_progress: OnProgress | None = None
) -> tuple[Plan, dict[str, SiteStatistics]]:
    """The plan that training would use, and the sites' measurements, without preparing anything."""
    cache = cache or cache_folder()
    progress: OnProgress = on_progress or (lambda what, done, total: None)
    sites = read_sites(experiment, cache, progress)
    work = InParallel(experiment.hardware.workers, progress)
    statistics = measure_sites(experiment, sites, Store(cache / "store"), work)
    return experiment.plan.resolve(statistics), statistics


def measure_sites(
    experiment: Experiment, sites: Sequence[SiteCases], store: Store, work: InParallel
) -> dict[str, SiteStatistics]:
    """Each training site's measurements for the plan, except sites that join later.

    They pass through the numbers that would cross the network, so that a plan can depend on nothing else.
    """
    late = experiment.late_sites()
    training = [site for site in sites if not site.external and site.name not in late]
    todo = [partial(store.measure, case, experiment.plan) for site in training for case in site.measured]
    try:
        measured = iter(work("measuring cases", todo))
    except DataError:
        # Only training cases are measured, but one message should name every bad case.
        everything = [case for site in sites for case in (*site.train, *site.validation, *site.test)]
        work("checking cases", [partial(store.check, case) for case in everything])
        raise
    numbers_of = {
        site.name: SiteStatistics.of([next(measured) for _ in site.measured]).as_numbers() for site in training
    }
    return {name: SiteStatistics.from_numbers(numbers, name) for name, numbers in numbers_of.items()}
