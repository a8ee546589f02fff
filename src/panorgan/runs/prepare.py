"""From an experiment to prepared cases: read the folders, split by patient, fill the store."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from panorgan.anatomy import Vocabulary
from panorgan.cases.case import Case
from panorgan.cases.layouts import read_cases
from panorgan.cases.phantom import recipe, withheld_folder, write_federation
from panorgan.cases.preprocess import Plan
from panorgan.cases.splits import split_cases
from panorgan.cases.store import Store, StoredCase
from panorgan.config import Experiment, SiteSettings
from panorgan.errors import ConfigError, DataError

Result = TypeVar("Result")
OnProgress = Callable[[str, int, int], None]
"""What is being done, how many are done, how many there are."""


@dataclass(frozen=True)
class PreparedSite:
    """A site's cases by split. `test` cases carry the labels they are scored with; `test_keys` name their content."""

    name: str
    external: bool
    train: Sequence[StoredCase]
    validation: Sequence[StoredCase]
    test: Sequence[Case]
    test_keys: Sequence[str]
    annotated: tuple[str, ...]

    def describe(self) -> dict[str, Any]:
        """Counts and annotated structures, for the manifest."""
        counts = {"train": len(self.train), "validation": len(self.validation), "test": len(self.test)}
        return {"external": self.external, "annotated": list(self.annotated), "cases": counts}


@dataclass(frozen=True)
class PreparedFederation:
    """All sites, sorted by name."""

    sites: tuple[PreparedSite, ...]

    @property
    def training(self) -> tuple[PreparedSite, ...]:
        """The sites that train."""
        return tuple(site for site in self.sites if not site.external)


def cache_folder() -> Path:
    """Where prepared cases and phantoms are kept: `PANORGAN_CACHE`, or the user's cache."""
    if "PANORGAN_CACHE" in os.environ:
        return Path(os.environ["PANORGAN_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "panorgan"


def prepare(
    experiment: Experiment, cache: Path | None = None, on_progress: OnProgress | None = None
) -> PreparedFederation:
    """Read and check every site, then preprocess what the store does not hold yet."""
    cache = cache or cache_folder()
    progress: OnProgress = on_progress or (lambda what, done, total: None)
    vocabulary = Vocabulary(experiment.vocabulary)
    settings = site_settings(experiment, cache, progress)
    labels = experiment.build_method().labels
    read = {name: _read_site(name, site, vocabulary, labels) for name, site in sorted(settings.items())}
    if all(site.external for site in settings.values()):
        raise ConfigError("No site trains.", where="sites", why="all of them are external", fix="Add a training site.")
    store = Store(cache / "store")
    total = sum(len(cases) for cases, _ in read.values())
    done = 0

    def counted(work: Callable[[Case, Plan], Result], cases: Sequence[Case]) -> tuple[Result, ...]:
        nonlocal done
        results = []
        for case in cases:
            results.append(work(case, experiment.plan))
            done += 1
            progress("preparing cases", done, total)
        return tuple(results)

    sites = []
    for name, (cases, scored) in read.items():
        if settings[name].external:
            test = tuple(scored.values())
            sites.append(PreparedSite(name, True, (), (), test, counted(store.check, test), ()))
            continue
        splits = split_cases(cases, experiment.splits, experiment.seed)
        train = counted(store.add, splits["train"])
        validation = counted(store.add, splits["validation"])
        test = tuple(scored[case.id] for case in splits["test"])
        annotated = tuple(sorted({structure for case in cases for structure in case.annotated}))
        sites.append(PreparedSite(name, False, train, validation, test, counted(store.check, test), annotated))
    return PreparedFederation(tuple(sites))


def site_settings(experiment: Experiment, cache: Path, progress: OnProgress) -> dict[str, SiteSettings]:
    """The experiment's sites; phantom ones are generated first, once per config."""
    if experiment.phantom is None:
        return dict(experiment.sites)
    key = hashlib.sha256(json.dumps(recipe(experiment.phantom)).encode()).hexdigest()[:16]
    folder = cache / "phantom" / key
    folders = write_federation(
        experiment.phantom,
        folder,
        on_case=lambda case, done, total: progress("generating phantoms", done, total),
    )
    return {
        site.name: SiteSettings(
            folder=folders[site.name], external=site.external, withheld=withheld_folder(folder, site.name)
        )
        for site in experiment.phantom.sites
    }


def _read_site(
    name: str, site: SiteSettings, vocabulary: Vocabulary, labels: str
) -> tuple[list[Case], dict[str, Case]]:
    """The cases to train with, and by id the cases as they are scored (withheld labels where there are any)."""

    def read(withheld: Path | None = None, restrict: tuple[str, ...] | None = None) -> list[Case]:
        cases = read_cases(
            site.folder, name, vocabulary, withheld, restrict, site.layout, rename=site.labels, ignore=site.ignore
        )
        return _part_of(cases, site.part)

    scored = read(site.withheld) if site.withheld else None
    if site.external:
        cases = scored if scored is not None else read()
        return cases, {case.id: case for case in cases}
    if labels == "withheld":
        if scored is None:
            raise ConfigError(
                "This method needs full labels, and the site has none.",
                where=f"sites.{name}.withheld",
                fix="Give a folder with full labels, or choose another method.",
            )
        cases = scored
    else:
        cases = [case for case in read(restrict=site.annotated) if case.annotated]
        if not cases:
            raise ConfigError(
                f"Site {name} annotates nothing of the vocabulary.",
                where=f"sites.{name}",
                why=f"the vocabulary is {', '.join(vocabulary)}",
                fix="Correct 'vocabulary', or mark the site 'external: true'.",
            )
    if len({case.patient for case in cases}) < 2:
        raise DataError(
            f"Site {name} has too few patients to train and test on.",
            where=str(site.folder),
            fix="Give it at least two, or mark it 'external: true'.",
        )
    return cases, {case.id: case for case in scored or cases}


def _part_of(cases: list[Case], part: tuple[int, int] | None) -> list[Case]:
    """Every n-th patient, beginning with the i-th: one data set makes several sites that share no patient."""
    if part is None:
        return cases
    index, count = part
    patients = sorted({case.patient for case in cases})[index - 1 :: count]
    return [case for case in cases if case.patient in patients]
