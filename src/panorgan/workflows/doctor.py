"""Check data folders and experiments before training. Imports torch only for experiments."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from panorgan.data_doctor import Checkup, Finding, Severity, Source, examine
from panorgan.errors import DataError

if TYPE_CHECKING:
    from panorgan.config import Experiment

_EXPERIMENT_ENDINGS = (".yaml", ".yml")

OnProgress = Callable[[str, int, int], None]
"""Called with what is done, how much of it, and the total."""


def doctor(
    *subjects: str | os.PathLike[str] | Experiment,
    layout: str = "auto",
    workers: int | None = None,
    on_progress: OnProgress | None = None,
) -> Checkup:
    """Read every scan and label and report what would make training fail or corrupt it.

    Changes nothing.

    Parameters
    ----------
    subjects : data folders, tables of cases (.csv), experiment files (.yaml: all of their sites), or experiments.
    layout : how a folder is laid out; detected by default.
    workers : cases read at the same time; by default from the number of cores.
    on_progress : called with (what, done, total).

    Returns
    -------
    Checkup : `findings` with code, cases, reason and fix; `worst` is their worst severity.
    """
    show = on_progress or (lambda what, done, total: None)
    given = [Path(subject) if isinstance(subject, str | os.PathLike) else subject for subject in subjects]
    sources = find_sources(given, layout, show)
    checkup = examine(sources, workers, lambda done, total: show("reading cases", done, total))
    if checkup.worst == Severity.error:  # errors in the data say more than training would
        return checkup
    return replace(checkup, findings=(*_refusals(given), *checkup.findings))


def find_sources(
    subjects: Sequence[Path | Experiment], layout: str = "auto", on_progress: OnProgress | None = None
) -> tuple[Source, ...]:
    """The sources to check: data folders, tables of cases, and all sites of experiments."""
    found: list[Source] = []
    for subject in subjects:
        if isinstance(subject, Path) and not subject.exists():
            raise DataError(
                "There is no such file or folder.", code="path-missing", where=str(subject), fix="Check the path."
            )
        if (experiment := _experiment(subject)) is not None:
            from panorgan.workflows.sources import sources_of

            found += sources_of(experiment, progress=on_progress)
        elif isinstance(subject, Path) and (subject.is_dir() or subject.suffix == ".csv"):
            found.append(folder_source(subject, layout))
        else:
            raise DataError(
                "The doctor cannot check this.",
                code="not-examinable",
                where=str(subject),
                why="it takes a data folder, a table of cases (.csv) or an experiment file (.yaml)",
                fix="Give the folder that holds the scans and labels.",
            )
    return with_unique_names(found)


def folder_source(path: Path, layout: str = "auto") -> Source:
    """A data folder, or the CSV file that lists its cases, named after the folder."""
    place = path.resolve()
    return Source(site=(place.parent if place.suffix == ".csv" else place).name or "data", folder=path, layout=layout)


def with_unique_names(sources: Sequence[Source]) -> tuple[Source, ...]:
    """The same sources under different names: a repeated name gets a number, `liver`, `liver-2`."""
    taken: set[str] = set()
    found = []
    for source in sources:
        name, number = source.site, 1
        while name in taken:
            number += 1
            name = f"{source.site}-{number}"
        taken.add(name)
        found.append(replace(source, site=name))
    return tuple(found)


def _refusals(subjects: Sequence[Path | Experiment]) -> Iterator[Finding]:
    """Errors that training would raise although every folder is fine: an unlabelled organ, a misspelled case."""
    for subject in subjects:
        if (experiment := _experiment(subject)) is not None:
            from panorgan.workflows.sources import refusal_of

            if refusal := refusal_of(experiment):
                yield refusal


def _experiment(subject: Path | Experiment) -> Experiment | None:
    """The given experiment, or the one in the file; None for data."""
    if not isinstance(subject, Path):
        return subject
    if not subject.is_file() or subject.suffix not in _EXPERIMENT_ENDINGS:
        return None
    from panorgan.config import load_experiment

    return load_experiment(subject)
