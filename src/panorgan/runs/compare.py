"""Several methods × several seeds in one folder: read what is asked for, check it, run what is missing."""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from panorgan.config import Experiment, parse_experiment
from panorgan.errors import ConfigError, PanorganError, RunError, did_you_mean
from panorgan.federation.events import Listener
from panorgan.runs.execute import check_run, train
from panorgan.runs.folder import RunFolder
from panorgan.runs.prepare import prepare

SECTIONS = ("network", "training")
"""Sections of an experiment that a method entry may set besides the method's own numbers."""
_USUAL_REFERENCE = "fedavg"
_LABEL = r"[A-Za-z0-9][A-Za-z0-9_. -]*"


@dataclass(frozen=True)
class Entry:
    """One method of a comparison, as written: `flkd`, `flkd+local_weight=0`, `global_only=flkd+local_weight=0`."""

    label: str
    method: str
    settings: Mapping[str, Any]

    @property
    def folder(self) -> str:
        """A name for the file system."""
        return re.sub(r"[^A-Za-z0-9_.+=-]", "_", self.label)

    def applied_to(self, experiment: Experiment) -> Experiment:
        """The experiment with this method; the file's own settings hold where it names the same method."""
        content = experiment.model_dump()
        same = experiment.method if experiment.method["name"] == self.method else {}
        content["method"] = {**same, "name": self.method}
        for key, value in self.settings.items():
            section, dot, rest = key.partition(".")
            place, last = (content[section], rest) if dot and section in SECTIONS else (content["method"], key)
            *parents, last = last.split(".")
            for name in parents:
                place[name] = dict(place[name]) if isinstance(place.get(name), Mapping) else {}
                place = place[name]
            place[last] = value
        return parse_experiment(content, f"--methods {self.label}")


@dataclass(frozen=True)
class Planned:
    """One run of a comparison."""

    entry: Entry
    seed: int
    experiment: Experiment
    folder: RunFolder

    @property
    def title(self) -> str:
        """`flkd · seed 1`."""
        return f"{self.entry.label} · seed {self.seed}"


@dataclass(frozen=True)
class Failure:
    """A run that could not be finished, and why."""

    run: Planned
    error: PanorganError


@dataclass(frozen=True)
class Plan:
    """A comparison as asked for: all runs, seed by seed, and the method that the others are tested against."""

    name: str
    folder: Path
    entries: tuple[Entry, ...]
    seeds: tuple[int, ...]
    reference: str
    runs: tuple[Planned, ...]

    @property
    def labels(self) -> tuple[str, ...]:
        """The methods as the tables call them."""
        return tuple(entry.label for entry in self.entries)

    @property
    def finished(self) -> tuple[Planned, ...]:
        """The runs that are trained and scored."""
        return tuple(run for run in self.runs if run.folder.complete)

    @property
    def missing(self) -> tuple[Planned, ...]:
        """The runs that are not."""
        return tuple(run for run in self.runs if not run.folder.complete)


def plan_comparison(
    experiment: Experiment, methods: str, seeds: str, reference: str | None = None, folder: Path | None = None
) -> Plan:
    """Everything that a comparison will run, checked as far as it can be without data.

    `methods` and `seeds` are lists as on the command line. Only the seed differs between the runs of a method: phantoms
    stay the same.
    """
    entries, numbers = parse_methods(methods), parse_seeds(seeds)
    labels = [entry.label for entry in entries]
    if reference is None:
        reference = _USUAL_REFERENCE if _USUAL_REFERENCE in labels else labels[0]
    if reference not in labels:
        raise ConfigError(
            f"The reference {reference!r} is not among the methods.",
            where="--reference",
            why=did_you_mean(reference, labels),
            fix=f"Use one of: {', '.join(labels)}.",
        )
    folder = folder or Path("runs") / f"{experiment.name}-compare"
    applied = {entry.label: entry.applied_to(experiment) for entry in entries}
    _refuse_twins(applied)
    runs = tuple(
        Planned(
            entry,
            seed,
            applied[entry.label].model_copy(update={"seed": seed}),
            RunFolder(folder / entry.folder / f"seed-{seed}"),
        )
        for seed in numbers
        for entry in entries
    )
    return Plan(experiment.name, folder, tuple(entries), numbers, reference, runs)


def parse_methods(text: str) -> list[Entry]:
    """`a,b+key=value,label=c` as entries. Commas inside brackets belong to a value."""
    pieces = [piece.strip() for piece in _split_at_commas(text) if piece.strip()]
    if not pieces:
        raise ConfigError(
            "No method is named.", where="--methods", fix="Write them with commas: --methods solo,fedavg."
        )
    entries = [_parse_entry(piece) for piece in pieces]
    taken: dict[str, str] = {}
    for entry in entries:
        folder = entry.folder.lower()  # some file systems do not tell cases apart
        if folder in taken:
            raise ConfigError(
                f"Two methods are called {entry.label!r}."
                if taken[folder] == entry.label
                else f"{taken[folder]!r} and {entry.label!r} would share a folder.",
                where="--methods",
                fix="Leave one out, or give it a name of its own: name=method+setting=value.",
            )
        taken[folder] = entry.label
    return entries


def _split_at_commas(text: str) -> list[str]:
    pieces, depth = [""], 0
    for character in text:
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += character
    return pieces


def _parse_entry(text: str) -> Entry:
    head, *changes = re.split(r"\+(?=[A-Za-z_])", text)  # not the plus of 1e+3
    label, equals, method = head.partition("=")
    if equals and (not re.fullmatch(_LABEL, label) or not method):
        raise ConfigError(
            f"A method cannot be written {text!r}.",
            where="--methods",
            fix="Use method, method+setting=value or name=method+setting=value.",
        )
    settings = {}
    for change in changes:
        key, equals_here, value = change.partition("=")
        if not key or not equals_here:
            raise ConfigError(
                f"A setting must look like name=value, not {change!r}.",
                where=f"--methods {text}",
                fix="Write it without spaces: flkd+local_weight=0.",
            )
        try:
            settings[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(
                f"The value of a setting is not valid YAML: {value!r}.",
                where=f"--methods {text}",
                why=str(error),
                fix="Close its brackets and quotes.",
            ) from error
    return Entry(label if equals else text, method if equals else head, settings)


def parse_seeds(text: str) -> tuple[int, ...]:
    """`0,1,2` as numbers."""
    pieces = [piece.strip() for piece in text.split(",") if piece.strip()]
    if not pieces or not all(piece.isdecimal() for piece in pieces) or len(set(map(int, pieces))) < len(pieces):
        raise ConfigError(
            f"Seeds cannot be written {text!r}.",
            where="--seeds",
            why="they are different whole numbers from 0 on",
            fix="Write them with commas: --seeds 0,1,2.",
        )
    return tuple(int(piece) for piece in pieces)


def _refuse_twins(experiments: Mapping[str, Experiment]) -> None:
    """Two names for one and the same thing are a slip of the pen."""
    known: dict[str, str] = {}
    for label, experiment in experiments.items():
        other = known.setdefault(experiment.fingerprint(), label)
        if other != label:
            raise ConfigError(
                f"{other!r} and {label!r} are the same.",
                where="--methods",
                why="all of their settings are equal",
                fix="Leave one out.",
            )


def check_comparison(plan: Plan, cache: Path | None = None, data: bool = True) -> None:
    """What can be known to be wrong before hours of training: folders, settings, lists of cases, other test cases.

    Without `data`, only finished runs are checked.
    """
    for run in plan.finished:
        train(run.experiment, run.folder.path, resume=True)  # a finished run is only read, if it is the same experiment
    for run in plan.missing if data else ():
        check_run(run.experiment, run.folder.path, resume=True, cache=cache)
    for seed in plan.seeds:
        _check_same_cases([run for run in plan.runs if run.seed == seed and run.folder.started])


def _check_same_cases(runs: Sequence[Planned]) -> None:
    """Within a seed, every method must be scored on the same cases."""
    tested = {run.title: run.folder.read_manifest().get("test_fingerprint") for run in runs}
    usual = max(tested.values(), key=list(tested.values()).count, default=None)
    odd = [title for title, fingerprint in tested.items() if fingerprint is None or fingerprint != usual]
    if odd:
        raise RunError(
            f"These runs are not scored on the same cases as the others: {', '.join(odd)}.",
            where=", ".join(str(run.folder.path) for run in runs if run.title in odd),
            why="the data has changed in between, or they are of an older panorgan version",
            fix="Remove their folders to train them again, or compare in a new folder with --run.",
        )


Watch = Callable[[Planned, int, int], AbstractContextManager[Listener]]
"""Called with a run, its number and the number of all runs, before it trains."""


def run_missing(plan: Plan, watch: Watch, cache: Path | None = None) -> list[Failure]:
    """Train what is not finished, seed by seed. A run that fails is passed over and told of at the end."""
    failures = []
    for number, run in enumerate(plan.runs, start=1):
        if run.folder.complete:
            continue
        try:
            with watch(run, number, len(plan.runs)) as listener:
                train(run.experiment, run.folder.path, True, (listener,), cache, beside=_beside(plan, run))
        except PanorganError as error:
            failures.append(Failure(run, error))
    return failures


OnRun = Callable[[Planned, PanorganError | None], None]
"""Told of a run that has ended, and why it failed if it did."""


def run_missing_at_once(plan: Plan, at_once: int, on_run: OnRun, cache: Path | None = None) -> list[Failure]:
    """The same with several runs at a time, each in a process of its own.

    Cases are prepared first, once for each seed, so that the processes find them ready.
    """
    failures = []
    for run in {run.seed: run for run in plan.missing}.values():
        prepare(run.experiment, cache)
    # A forked process could not use CUDA.
    with ProcessPoolExecutor(at_once, mp_context=multiprocessing.get_context("spawn")) as pool:
        started = {
            pool.submit(_train_alone, run.experiment, run.folder.path, cache, _beside(plan, run)): run
            for run in plan.missing
        }
        try:
            for future in as_completed(started):
                told = future.result()
                error = RunError(told[0], where=told[1], why=told[2], fix=told[3]) if told else None
                if error is not None:
                    failures.append(Failure(started[future], error))
                on_run(started[future], error)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return failures


def _train_alone(
    experiment: Experiment, folder: Path, cache: Path | None, beside: RunFolder | None
) -> tuple[str, str, str, str] | None:
    """One run, in a process that shares the machine with others: one thread, unless the experiment says otherwise.

    What went wrong comes back as words: not every error finds its way through a pipe.
    """
    if experiment.hardware.threads is None:
        hardware = experiment.hardware.model_copy(update={"threads": 1})
        experiment = experiment.model_copy(update={"hardware": hardware})
    try:
        train(experiment, folder, True, cache=cache, beside=beside)
    except PanorganError as error:
        return error.what, error.where, error.why, error.fix
    return None


def _beside(plan: Plan, run: Planned) -> RunFolder | None:
    """A finished run of the same seed: the new one must be scored on the same cases."""
    return next((other.folder for other in plan.finished if other.seed == run.seed), None)
