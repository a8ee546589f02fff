"""Several methods × several seeds in one folder: plan the runs, check them, run what is missing."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch

from panorgan.config import Experiment
from panorgan.errors import ConfigError, PanorganError, RunError, did_you_mean
from panorgan.federation.events import Listener
from panorgan.federation.files import write_atomically
from panorgan.workflows.compare_entries import COMPARISON, Entry, Kind, parse_methods, parse_seeds
from panorgan.workflows.execute import check_folder, check_run, train
from panorgan.workflows.run import Run

_USUAL_REFERENCE = "fedavg"


@dataclass(frozen=True)
class Planned:
    """One run of a comparison."""

    entry: Entry
    seed: int
    experiment: Experiment
    folder: Run

    @property
    def title(self) -> str:
        """`flkd · seed 1`."""
        return f"{self.entry.label} · seed {self.seed}"

    @property
    def traceback(self) -> Path:
        """The file for the traceback of an unforeseen error, next to the run's folder."""
        return self.folder.path.with_name(f"{self.folder.path.name}.traceback.txt")

    @property
    def begun_with(self) -> int | None:
        """CPU threads with which the run began; None if it has not begun."""
        return self.folder.manifest.get("hardware", {}).get("threads") if self.folder.started else None

    def with_threads(self, otherwise: int | None = None) -> Experiment:
        """The experiment with the number of threads that the run began with: another would change its bits.

        A new run takes those of the experiment, or `otherwise`.
        """
        hardware = self.experiment.hardware
        threads = self.begun_with or hardware.threads or otherwise
        return self.experiment.model_copy(update={"hardware": hardware.model_copy(update={"threads": threads})})


@dataclass(frozen=True)
class Failure:
    """A run that could not be finished, and why."""

    run: Planned
    error: PanorganError

    @classmethod
    def of(cls, run: Planned, error: Exception) -> Failure:
        """A failure with the error as text: the exception itself would keep the memory of its run alive."""
        if isinstance(error, PanorganError):
            return cls(run, RunError(error.what, code=error.code, where=error.where, why=error.why, fix=error.fix))
        message = str(error).strip()
        no_memory = isinstance(error, MemoryError) or "out of memory" in message.lower()
        fix = "Give it more memory (fewer runs --at-once, a smaller training.sampling.batch_size)" if no_memory else ""
        try:
            write_atomically(run.traceback, "".join(traceback.format_exception(error)))
        except OSError:  # a full disk may be the cause
            where = str(run.folder.path)
        else:
            where = f"{run.folder.path}; all of it in {run.traceback}"
        return cls(
            run,
            RunError(
                f"{type(error).__name__}: {message.splitlines()[0]}" if message else f"{type(error).__name__}.",
                code="out-of-memory" if no_memory else "unexpected-error",
                where=where,
                why="" if no_memory else "an unexpected error: of the machine, or a defect",
                fix=f"{fix or 'Fix the cause'}, then give the same command again: the run continues where it stopped.",
            ),
        )


@dataclass(frozen=True)
class ComparisonPlan:
    """A comparison as requested: all runs, seed by seed, and the reference of the tests."""

    name: str
    folder: Path
    entries: tuple[Entry, ...]
    seeds: tuple[int, ...]
    reference: str
    runs: tuple[Planned, ...]
    kind: Kind = COMPARISON

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the methods in tables."""
        return tuple(entry.label for entry in self.entries)

    @property
    def finished(self) -> tuple[Planned, ...]:
        """The runs that are trained and scored."""
        return tuple(run for run in self.runs if run.folder.complete)

    @property
    def missing(self) -> tuple[Planned, ...]:
        """The runs that are not finished."""
        return tuple(run for run in self.runs if not run.folder.complete)


def plan_comparison(
    experiment: Experiment,
    methods: str | Sequence[str],
    seeds: str | Sequence[int],
    reference: str | None = None,
    folder: Path | None = None,
) -> ComparisonPlan:
    """Plan all runs of a comparison, and check them as far as possible without data.

    `methods` and `seeds` are lists, or separated by commas as on the command line. Only the seed differs between the
    runs of a method: phantoms stay the same.
    """
    entries = parse_methods(methods)
    if reference is None:
        labels = [entry.label for entry in entries]
        reference = _USUAL_REFERENCE if _USUAL_REFERENCE in labels else labels[0]
    folder = folder or Path("runs") / f"{experiment.name}-compare"
    return plan_runs(experiment, entries, parse_seeds(seeds), reference, folder)


def plan_runs(
    experiment: Experiment,
    entries: Sequence[Entry],
    seeds: tuple[int, ...],
    reference: str,
    folder: Path,
    kind: Kind = COMPARISON,
) -> ComparisonPlan:
    """Plan every entry with every seed, and check them as far as possible without data."""
    labels = [entry.label for entry in entries]
    if reference not in labels:
        raise ConfigError(
            f"The reference {reference!r} is not among the {kind.thing}s.",
            code="unknown-reference",
            where="--reference",
            why=did_you_mean(reference, labels),
            fix=f"Use one of: {', '.join(labels)}.",
        )
    if Run(folder).started:
        raise RunError(
            f"{folder} is the folder of a single run.",
            code="folder-is-a-run",
            where="--run",
            why=f"the runs of {kind.name} have their own folders inside one",
            fix="Name another folder, which need not exist.",
        )
    _refuse_shared_folders(entries, kind)
    applied = {entry.label: entry.applied_to(experiment, kind.option) for entry in entries}
    _refuse_twins(applied, kind)
    runs = tuple(
        Planned(
            entry,
            seed,
            applied[entry.label].model_copy(update={"seed": seed}),
            Run(folder / entry.folder / f"seed-{seed}"),
        )
        for seed in seeds
        for entry in entries
    )
    return ComparisonPlan(experiment.name, folder, tuple(entries), seeds, reference, runs, kind)


def _refuse_shared_folders(entries: Sequence[Entry], kind: Kind) -> None:
    taken: dict[str, str] = {}
    for entry in entries:
        folder = entry.folder.lower()  # some file systems are case-insensitive
        if folder in taken:
            raise ConfigError(
                f"Two {kind.thing}s are called {entry.label!r}."
                if taken[folder] == entry.label
                else f"{taken[folder]!r} and {entry.label!r} would share a folder.",
                code="same-folder",
                where=kind.option,
                fix=f"Leave one out, or give it its own name{kind.naming}.",
            )
        taken[folder] = entry.label


def _refuse_twins(experiments: Mapping[str, Experiment], kind: Kind) -> None:
    """Refuse two entries with equal settings."""
    known: dict[str, str] = {}
    for label, experiment in experiments.items():
        # A setting that the method overrides makes no difference.
        network = experiment.build_method().network_settings(experiment.network)
        other = known.setdefault(experiment.model_copy(update={"network": network}).fingerprint(), label)
        if other != label:
            raise ConfigError(
                f"{other!r} and {label!r} are the same.",
                code="same-experiment",
                where=kind.option,
                why="all of their settings are equal",
                fix=kind.mend,
            )


def check_comparison(plan: ComparisonPlan, cache: Path | None = None, data: bool = True) -> None:
    """Find errors before hours of training: in folders, settings and lists of cases, and differing test cases.

    Without `data`, only finished runs are checked.
    """
    for run in plan.finished:
        check_folder(run.folder, run.experiment, resume=True)
        train(run.experiment, run.folder.path, resume=True)  # reads a finished run, if it is the same experiment
    for run in plan.missing if data else ():
        check_run(run.experiment, run.folder.path, resume=True, cache=cache)
        _check_threads(run)
    for seed in plan.seeds:
        _check_same_cases([run for run in plan.runs if run.seed == seed and run.folder.started])


def _check_threads(run: Planned) -> None:
    """A run continues with the threads that it began with; a different setting must not be ignored silently."""
    begun, wished = run.begun_with, run.experiment.hardware.threads
    if None not in (begun, wished) and begun != wished:
        raise RunError(
            f"{run.title} was begun with {begun} CPU thread{'' if begun == 1 else 's'}, "
            f"hardware.threads now says {wished}.",
            code="other-threads",
            where=str(run.folder.path),
            why="with another number it would not end in the same bits",
            fix=f"Leave hardware.threads out or set it to {begun}, or remove the folder to begin that run again.",
        )


def _check_same_cases(runs: Sequence[Planned]) -> None:
    """Within a seed, every method must be scored on the same cases."""
    tested = {run.title: run.folder.manifest.get("test_fingerprint") for run in runs}
    usual = max(tested.values(), key=list(tested.values()).count, default=None)
    odd = [title for title, fingerprint in tested.items() if fingerprint is None or fingerprint != usual]
    if odd:
        raise RunError(
            f"These runs are not scored on the same cases as the others: {', '.join(odd)}.",
            code="other-test-cases",
            where=", ".join(str(run.folder.path) for run in runs if run.title in odd),
            why="the data has changed in between, or they are from an older panorgan version",
            fix="Remove their folders to train them again, or compare in a new folder with --run.",
        )


Watch = Callable[[Planned, int, int], AbstractContextManager[Listener]]
"""Called with a run, its number and the total, before it trains."""


def run_missing(plan: ComparisonPlan, watch: Watch, cache: Path | None = None) -> list[Failure]:
    """Train what is not finished, seed by seed. A run that fails for any reason is skipped and reported."""
    failures = []
    threads = torch.get_num_threads()
    for number, run in enumerate(plan.runs, start=1):
        if run.folder.complete:
            continue
        run.traceback.unlink(missing_ok=True)
        try:
            with watch(run, number, len(plan.runs)) as listener:
                train(
                    run.with_threads(),
                    run.folder.path,
                    True,
                    (listener,),
                    cache,
                    compared_with=finished_of_seed(plan, run),
                )
        except Exception as error:
            failures.append(Failure.of(run, error))
        finally:
            torch.set_num_threads(threads)  # the next run must not inherit those of a resumed one
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return failures


def finished_of_seed(plan: ComparisonPlan, run: Planned) -> Run | None:
    """A finished run of the same seed: a new run must be scored on the same cases."""
    return next((other.folder for other in plan.finished if other.seed == run.seed), None)
