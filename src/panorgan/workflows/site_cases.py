"""The sites' folders as an experiment reads them: cases by split; only lists and headers are opened."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_cache_path

from panorgan.agreement import Agreement
from panorgan.anatomy import Vocabulary
from panorgan.config import Experiment, SiteSettings
from panorgan.data.case import Case
from panorgan.data.layouts import read_cases
from panorgan.data.splits import split_cases
from panorgan.errors import ConfigError, DataError, did_you_mean
from panorgan.federation.admission import check_coverage
from panorgan.methods.protocol import SiteInfo
from panorgan.phantom import recipe, withheld_folder, write_federation
from panorgan.preparation.cache_files import mark_used
from panorgan.preparation.cache_use import mark_in_use
from panorgan.workflows.parallel import OnProgress


@dataclass(frozen=True)
class SiteCases:
    """A site's cases by split, as they are read.

    `measured` are the training cases with the site's own labels, `train` the same with the labels that the method
    trains on (the full ones for `central_full`). `test` cases carry the labels they are scored with.
    """

    name: str
    external: bool
    measured: tuple[Case, ...]
    train: tuple[Case, ...]
    validation: tuple[Case, ...]
    test: tuple[Case, ...]
    annotated: tuple[str, ...]

    def splits(self) -> dict[str, tuple[Case, ...]]:
        """The cases for training, validation and test."""
        return {"train": self.train, "validation": self.validation, "test": self.test}

    def sizes(self) -> dict[str, int]:
        """Patients per split."""
        return {split: len({case.patient for case in cases}) for split, cases in self.splits().items()}


def cache_folder() -> Path:
    """The folder of prepared cases and phantoms: `PANORGAN_CACHE`, or the user's cache."""
    if "PANORGAN_CACHE" in os.environ:
        return Path(os.environ["PANORGAN_CACHE"])
    return user_cache_path("panorgan", appauthor=False)


def read_sites(experiment: Experiment, cache: Path, progress: OnProgress) -> tuple[SiteCases, ...]:
    """The sites' cases by split; phantom sites are generated first."""
    vocabulary = Vocabulary(experiment.vocabulary)
    settings = site_settings(experiment, cache, progress)
    labels, channels = experiment.build_method().labels, experiment.channels
    read = {name: read_site(name, site, vocabulary, labels, channels) for name, site in sorted(settings.items())}
    if all(site.external for site in settings.values()):
        raise ConfigError(
            "No site trains.",
            code="no-training-site",
            where="sites",
            why="all of them are external",
            fix="Add a training site.",
        )
    sites = tuple(by_split(name, settings[name].external, own, experiment) for name, own in read.items())
    check_coverage(vocabulary, {site.name: facts_of(site) for site in sites if not site.external})
    return sites


def facts_of(site: SiteCases) -> SiteInfo:
    """A site's description of its training cases."""
    annotated = Counter(structure for case in site.train for structure in case.annotated)
    return SiteInfo(site.name, len(site.train), annotated)


def by_split(name: str, external: bool, read: ReadSite, experiment: Agreement) -> SiteCases:
    """A site's cases, split by patient."""
    if external:
        return SiteCases(name, True, (), (), (), tuple(read.scored.values()), ())
    # Split by the site's own cases, whatever labels a method trains on: all methods test on the same cases.
    splits = split_cases(read.own, experiment.splits, experiment.seed)
    trained = {case.id: case for case in read.trained}
    return SiteCases(
        name,
        False,
        measured=tuple(splits["train"]),
        train=tuple(trained[case.id] for case in splits["train"]),
        validation=tuple(trained[case.id] for case in splits["validation"]),
        test=tuple(read.scored[case.id] for case in splits["test"]),
        annotated=tuple(sorted({structure for case in read.trained for structure in case.annotated})),
    )


def site_settings(experiment: Experiment, cache: Path, progress: OnProgress) -> dict[str, SiteSettings]:
    """The experiment's sites; phantom ones are generated first, once per config."""
    if experiment.phantom is None:
        return dict(experiment.sites)
    key = hashlib.sha256(json.dumps(recipe(experiment.phantom)).encode()).hexdigest()[:16]
    folder = cache / "phantom" / key
    mark_in_use(folder)
    folders = write_federation(
        experiment.phantom,
        folder,
        on_case=lambda case, done, total: progress("generating phantoms", done, total),
        remake=True,
    )
    mark_used(folder)
    return {
        site.name: SiteSettings(
            folder=folders[site.name],
            external=site.external,
            joins_at=site.joins_at,
            withheld=withheld_folder(folder, site.name),
        )
        for site in experiment.phantom.sites
    }


@dataclass(frozen=True)
class ReadSite:
    """A site's cases with its `own` labels, with those that are `trained` on, and by id with those that score them."""

    own: list[Case]
    trained: list[Case]
    scored: dict[str, Case]


def read_site(
    name: str, site: SiteSettings, vocabulary: Vocabulary, labels: str, channels: tuple[str, ...] = ()
) -> ReadSite:
    """Read a site's folder.

    `labels`: `annotated` or `withheld`, what a method trains on; `channels`: those that every scan must have.
    """

    def read(withheld: Path | None = None, restrict: tuple[str, ...] | None = None) -> list[Case]:
        cases = read_cases(
            site.folder,
            name,
            vocabulary,
            withheld,
            restrict,
            site.layout,
            rename=site.labels,
            ignore=site.ignore,
            channels=channels,
            channel_names=site.channels,
            leave_out=site.leave_out,
        )
        # Parts first: leaving a patient out must not move the others to another site.
        return _without(_part_of(cases, site.part), site, _names(cases), f"sites.{name}.leave_out")

    scored = {case.id: case for case in read(site.withheld)} if site.withheld else None
    if site.external:
        return ReadSite([], [], scored if scored is not None else {case.id: case for case in read()})
    if labels == "withheld" and scored is None:
        raise ConfigError(
            "This method needs full labels, and the site has none.",
            code="full-labels-missing",
            where=f"sites.{name}.withheld",
            fix="Give a folder with full labels, or choose another method.",
        )
    own = [case for case in read(restrict=site.annotated) if case.annotated]
    if not own:
        raise ConfigError(
            f"Site {name} annotates nothing of the vocabulary.",
            code="nothing-annotated",
            where=f"sites.{name}",
            why=f"the vocabulary is {', '.join(vocabulary)}",
            fix="Correct 'vocabulary', or mark the site 'external: true'.",
        )
    if len({case.patient for case in own}) < 2:
        raise DataError(
            f"Site {name} has too few patients to train and test on.",
            code="too-few-patients",
            where=str(site.folder),
            fix="Give it at least two, or mark it 'external: true'.",
        )
    scored = scored or {case.id: case for case in own}
    return ReadSite(own, [scored[case.id] for case in own] if labels == "withheld" else own, scored)


def _names(cases: Sequence[Case]) -> set[str]:
    return {case.id for case in cases} | {case.patient for case in cases}


def _without(cases: list[Case], site: SiteSettings, names: set[str], where: str) -> list[Case]:
    """The cases that stay. A name that matches nothing at the site is a mistake, or belongs to another part."""
    for name in site.leave_out:
        if name in _names(cases):
            continue
        elsewhere = f"it is in the folder, but not in part {list(site.part or ())} that this site uses"
        raise ConfigError(
            f"There is no case or patient {name!r} to leave out.",
            code="unknown-case",
            where=where,
            why=elsewhere if name in names else did_you_mean(name, names),
            fix="Name it under the site that uses it." if name in names else "Correct the name, or remove it.",
        )
    return [case for case in cases if case.id not in site.leave_out and case.patient not in site.leave_out]


def _part_of(cases: list[Case], part: tuple[int, int] | None) -> list[Case]:
    """Every n-th patient, beginning with the i-th: one data set makes several sites without a common patient."""
    if part is None:
        return cases
    patients = part_of_patients((case.patient for case in cases), part)
    return [case for case in cases if case.patient in patients]


def part_of_patients(patients: Iterable[str], part: tuple[int, int]) -> list[str]:
    """The patients of part i of n."""
    index, count = part
    return sorted(set(patients))[index - 1 :: count]
