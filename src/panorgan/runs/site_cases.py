"""What lies in the sites' folders, as an experiment reads it: cases by split, nothing opened but lists and headers."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from panorgan.anatomy import Vocabulary
from panorgan.cases.case import Case
from panorgan.cases.layouts import read_cases
from panorgan.cases.phantom import recipe, withheld_folder, write_federation
from panorgan.cases.splits import split_cases
from panorgan.config import Experiment, SiteSettings
from panorgan.errors import ConfigError, DataError, did_you_mean
from panorgan.runs.parallel import OnProgress


@dataclass(frozen=True)
class SiteCases:
    """A site's cases by split, as they are read. `test` cases carry the labels they are scored with."""

    name: str
    external: bool
    train: tuple[Case, ...]
    validation: tuple[Case, ...]
    test: tuple[Case, ...]
    annotated: tuple[str, ...]


def cache_folder() -> Path:
    """Where prepared cases and phantoms are kept: `PANORGAN_CACHE`, or the user's cache."""
    if "PANORGAN_CACHE" in os.environ:
        return Path(os.environ["PANORGAN_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "panorgan"


def read_sites(experiment: Experiment, cache: Path, progress: OnProgress) -> tuple[SiteCases, ...]:
    """What lies in the sites' folders, by split; phantom sites are generated first."""
    vocabulary = Vocabulary(experiment.vocabulary)
    settings = site_settings(experiment, cache, progress)
    labels = experiment.build_method().labels
    read = {name: read_site(name, site, vocabulary, labels) for name, site in sorted(settings.items())}
    if all(site.external for site in settings.values()):
        raise ConfigError("No site trains.", where="sites", why="all of them are external", fix="Add a training site.")
    sites = []
    for name, (cases, scored) in read.items():
        if settings[name].external:
            sites.append(SiteCases(name, True, (), (), tuple(scored.values()), ()))
            continue
        splits = split_cases(cases, experiment.splits, experiment.seed)
        test = tuple(scored[case.id] for case in splits["test"])
        annotated = tuple(sorted({structure for case in cases for structure in case.annotated}))
        train, validation = tuple(splits["train"]), tuple(splits["validation"])
        sites.append(SiteCases(name, False, train, validation, test, annotated))
    return tuple(sites)


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


def read_site(name: str, site: SiteSettings, vocabulary: Vocabulary, labels: str) -> tuple[list[Case], dict[str, Case]]:
    """The cases to train with, and by id the cases as they are scored (withheld labels where there are any)."""

    def read(withheld: Path | None = None, restrict: tuple[str, ...] | None = None) -> list[Case]:
        cases = read_cases(
            site.folder, name, vocabulary, withheld, restrict, site.layout, rename=site.labels, ignore=site.ignore
        )
        # Parts first: leaving a patient out must not move the others to another site.
        return _without(_part_of(cases, site.part), site.leave_out, _names(cases), f"sites.{name}.leave_out")

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


def _names(cases: Sequence[Case]) -> set[str]:
    return {case.id for case in cases} | {case.patient for case in cases}


def _without(cases: list[Case], left_out: tuple[str, ...], names: set[str], where: str) -> list[Case]:
    """The cases that stay; a name that nothing in the folder bears is a slip of the pen."""
    for name in left_out:
        if name not in names:
            raise ConfigError(
                f"There is no case or patient {name!r} to leave out.",
                where=where,
                why=did_you_mean(name, names),
                fix="Correct the name, or remove it from the list.",
            )
    return [case for case in cases if case.id not in left_out and case.patient not in left_out]


def _part_of(cases: list[Case], part: tuple[int, int] | None) -> list[Case]:
    """Every n-th patient, beginning with the i-th: one data set makes several sites that share no patient."""
    if part is None:
        return cases
    patients = part_of_patients((case.patient for case in cases), part)
    return [case for case in cases if case.patient in patients]


def part_of_patients(patients: Iterable[str], part: tuple[int, int]) -> list[str]:
    """The patients of part i of n."""
    index, count = part
    return sorted(set(patients))[index - 1 :: count]
