"""From an experiment to the input of the doctor. Unreadable folders are left for the doctor to report."""

from __future__ import annotations

from pathlib import Path

from panorgan.agreement import Agreement
from panorgan.anatomy import Vocabulary
from panorgan.config import Experiment, SiteSettings
from panorgan.data.layouts import find_layout
from panorgan.data.splits import split_cases
from panorgan.data_doctor import Finding, Source
from panorgan.data_doctor.codes import finding
from panorgan.errors import PanorganError
from panorgan.workflows.parallel import OnProgress
from panorgan.workflows.site_cases import cache_folder, part_of_patients, read_site, read_sites, site_settings

_UNREADABLE = (PanorganError, OSError, ValueError, KeyError, TypeError)
"""Errors that a damaged folder may raise before the doctor checks it (a broken dataset.json, a bad row of a table)."""


def sources_of(
    experiment: Experiment, cache: Path | None = None, progress: OnProgress | None = None
) -> tuple[Source, ...]:
    """Every site of an experiment, as training would read it; phantom sites are generated first.

    Two sites that use different parts of one folder are two sources. Where a folder cannot be read, its splits stay
    empty.
    """
    settings = site_settings(experiment, cache or cache_folder(), progress or (lambda what, done, total: None))
    return tuple(source_of(name, site, experiment) for name, site in sorted(settings.items()))


def refusal_of(experiment: Experiment, cache: Path | None = None) -> Finding | None:
    """Training's error for the experiment before it reads a single scan, as a finding."""
    try:
        read_sites(experiment, cache or cache_folder(), lambda what, done, total: None)
    except PanorganError as error:
        return finding("experiment-refused", experiment.name, "", error.what, error.why, error.fix, error.where)
    return None


def source_of(name: str, site: SiteSettings, experiment: Agreement) -> Source:
    """One site, as training would read it."""
    return Source(
        site=name,
        folder=site.folder,
        layout=site.layout,
        vocabulary=Vocabulary(experiment.vocabulary),
        rename=site.labels,
        ignore=site.ignore,
        restrict=site.annotated,
        splits=_splits(name, site, experiment),
        patients=_patients(site),
        external=site.external,
        leave_out=site.leave_out,
        channels=experiment.channels,
        channel_names=site.channels,
        modality=_modality(experiment),
    )


def _modality(experiment: Agreement) -> str:
    """A window of Hounsfield units implies CT; otherwise it follows from the scans."""
    plan = experiment.plan
    windowed = plan.intensity == "window" or (plan.intensity != "zscore" and plan.window_hu != "pooled")
    return "CT" if windowed else ""


def _patients(site: SiteSettings) -> frozenset[str] | None:
    """The patients of the site's part. Only scans are counted, so that bad labels change nothing."""
    if site.part is None:
        return None
    try:
        found = find_layout(site.folder, site.layout).images(site.folder)
    except _UNREADABLE:
        return None
    return frozenset(part_of_patients((image.patient for image in found.values()), site.part))


def _splits(name: str, site: SiteSettings, experiment: Agreement) -> dict[str, str]:
    """Split by case id, drawn as for training; empty where training could not begin either."""
    if not site.external:
        # Withheld labels score the test cases; they decide nothing here, and may be unreadable without harm.
        site = site.model_copy(update={"withheld": None})
    try:
        read = read_site(name, site, Vocabulary(experiment.vocabulary), "annotated", experiment.channels)
        if site.external:
            return dict.fromkeys(read.scored, "test")
        shared = split_cases(read.own, experiment.splits, experiment.seed)
    except _UNREADABLE:
        return {}
    return {case.id: split for split, own in shared.items() for case in own}
