"""The costs of a method: optimiser steps, time per step, traffic, parameters, time to segment a scan."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from panorgan.checksums import read_json
from panorgan.config import parse_experiment
from panorgan.errors import PanorganError, RunError
from panorgan.evaluation.inference import predict_probabilities
from panorgan.federation.events import DAMAGED, read_events
from panorgan.preparation.preprocess import Grid, prepare_image
from panorgan.preparation.sampling import sliced_axis
from panorgan.workflows.compare import ComparisonPlan, Planned
from panorgan.workflows.compare_at_once import shared_machine
from panorgan.workflows.execute import setup_device
from panorgan.workflows.model_bundle import Model, load_model
from panorgan.workflows.run import Run
from panorgan.workflows.site_cases import SiteCases, cache_folder, read_sites

_REPEATS = 3
_TRAIN = "train"


@dataclass(frozen=True)
class Cost:
    """The costs of one method, over its finished seeds.

    Attributes
    ----------
    steps : optimiser steps of one run, all sites and stages together (mean over seeds).
    step_seconds : median over the rounds of the train stage of the sites' time divided by the steps of that round,
        messages and reading of patches included. The first round warms up and is left out where there are several.
    step_ratio : the same relative to the reference; NaN where times cannot be compared. Machines differ, ratios hardly
        do.
    shared : the times are of runs that shared the machine with others.
    bytes_per_round : both directions, all sites, mean over the rounds of the train stage; validation does not count.
    bytes_per_run : all messages of all rounds and stages, validation included (mean over seeds).
    parameters : of the delivered model.
    pooled : all cases are in one place: the traffic is that of one simulated participant.
    """

    steps: float
    step_seconds: float
    step_ratio: float
    shared: bool
    bytes_per_round: float
    bytes_per_run: float
    parameters: int | None
    pooled: bool


@dataclass(frozen=True)
class InferenceTimes:
    """Seconds per method to run the model over one prepared scan: median of three, after a warm-up.

    `runs` are the ids of the runs whose models were timed: other models must be timed again.
    """

    device: str
    voxels: tuple[int, ...]
    seconds: Mapping[str, float]
    runs: Mapping[str, str]

    def as_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)


def measure_costs(plan: ComparisonPlan) -> dict[str, Cost]:
    """Costs of every method that has a finished run, from the files of its runs."""
    by_label = {label: [r for r in plan.finished if r.entry.label == label] for label in plan.labels}
    found = {label: _cost(runs) for label, runs in by_label.items() if runs}
    if plan.reference not in found:
        return found
    usual, machine = found[plan.reference], _machine(by_label[plan.reference])
    for label, cost in found.items():
        alike = not cost.shared and not usual.shared and _machine(by_label[label]) == machine
        if alike and usual.step_seconds:
            found[label] = replace(cost, step_ratio=cost.step_seconds / usual.step_seconds)
    return found


def _cost(runs: Sequence[Planned]) -> Cost:
    rounds = {run.seed: _Rounds.read(run.folder) for run in runs}
    timed = [seconds for run in _comparable_times(runs) for seconds in rounds[run.seed].step_seconds]
    traffic = [count for r in rounds.values() for count in r.training_bytes]
    return Cost(
        steps=sum(r.steps for r in rounds.values()) / len(runs),
        step_seconds=statistics.median(timed) if timed else math.nan,
        step_ratio=math.nan,
        shared=all(shared_machine(run.folder) for run in runs),
        bytes_per_round=sum(traffic) / len(traffic) if traffic else math.nan,
        bytes_per_run=sum(r.all_bytes for r in rounds.values()) / len(runs),
        parameters=_parameters(runs[0].folder),
        pooled=runs[0].experiment.build_method().pooled,
    )


def _comparable_times(runs: Sequence[Planned]) -> Sequence[Planned]:
    """The runs whose times count: those that had the machine to themselves, if any."""
    return [run for run in runs if not shared_machine(run.folder)] or runs


def _machine(runs: Sequence[Planned]) -> set[tuple[Any, ...]]:
    """What the times of these runs depend on besides the method."""
    machines = [run.folder.manifest.get("hardware", {}) for run in _comparable_times(runs)]
    return {tuple(one.get(key) for key in ("machine", "device", "cores", "threads")) for one in machines}


@dataclass(frozen=True)
class _Rounds:
    """The rounds of one run: times per step and training messages of each round of the train stage."""

    steps: int
    step_seconds: tuple[float, ...]
    training_bytes: tuple[int, ...]
    all_bytes: int

    @classmethod
    def read(cls, folder: Run) -> _Rounds:
        """From events.jsonl. Of a round repeated after a kill, the last one counts."""
        cases: dict[str, int] = {}
        rounds: dict[int, dict[str, Any]] = {}
        for event in read_events(folder.events_file):
            if event.kind == DAMAGED:
                raise RunError(
                    "The log of a run is damaged: its costs are unknown.",
                    code="log-damaged",
                    where=f"{folder.events_file}, line {event.facts['line']}",
                    fix="Restore the file from a backup, or train this run again.",
                )
            if event.kind == "joined":
                cases |= {site: facts["train_cases"] for site, facts in event.facts["sites"].items()}
            elif event.kind == "late_join":
                cases[event.facts["site"]] = event.facts["train_cases"]
            elif event.kind == "round":
                rounds[int(event.facts["number"])] = event.facts
        count = _StepCount(folder, cases)
        steps = {n: sum(count.of(f["stage"], site) for site in f["sites"]) for n, f in sorted(rounds.items())}
        trained = {n: rounds[n] for n in steps if rounds[n]["stage"] == _TRAIN}
        times = [facts["seconds"]["sites"] / steps[n] for n, facts in trained.items() if steps[n]]
        messages = [_training_bytes(facts) for facts in trained.values()]
        return cls(
            sum(steps.values()),
            tuple(times[1:] or times),
            tuple(count for count in messages if count is not None),
            sum(_all_bytes(facts) for facts in rounds.values()),
        )


def _all_bytes(facts: Mapping[str, Any]) -> int:
    """Bytes of all messages of a round, in both directions."""
    return int(facts["bytes_sent"]) + int(facts["bytes_received"])


def _training_bytes(facts: Mapping[str, Any]) -> int | None:
    """The same without validation; None where a log of an older version does not separate them."""
    if "bytes_training" in facts:
        return int(facts["bytes_training"])
    return None if facts.get("validation") is not None else _all_bytes(facts)


class _StepCount:
    """Optimiser steps of a site in a round of a stage, from the settings of the run."""

    def __init__(self, folder: Run, cases: Mapping[str, int]) -> None:
        manifest = folder.manifest
        experiment = parse_experiment(manifest["experiment"], str(folder.manifest_file))
        method = experiment.build_method()
        sites = {name: site for name, site in manifest["sites"].items() if not site["external"]}
        self._training, self._cases = experiment.training, cases
        self._pooled_sites = len(sites) if method.pooled else 1
        axis = sliced_axis(experiment.training.sampling.patch_size)
        # Manifests of older versions do not state it; then an epoch counted cases.
        slices = {} if axis is None else {n: s["train_slices"][axis] for n, s in sites.items() if "train_slices" in s}
        self._slices = dict.fromkeys(cases, sum(slices.values())) if method.pooled and slices else slices
        self._stages = {stage.name: stage.local_steps for stage in method.stages(experiment.training.rounds)}

    def of(self, stage: str, site: str) -> int:
        """Optimiser steps of one site in one round: the stage's own number, or the experiment's."""
        own = self._stages.get(stage)
        if own is not None:
            return own * self._pooled_sites
        one_pass = self._slices.get(site, self._cases.get(site, 0))
        return self._training.steps_per_round(one_pass, self._pooled_sites)


def _parameters(folder: Run) -> int | None:
    """From the model's card; None when the model was removed."""
    try:
        return int(read_json((folder.model_folder / "model.json").read_bytes())["parameters"])
    except (OSError, ValueError, KeyError):
        return None


def time_inference(
    plan: ComparisonPlan, known: InferenceTimes | None = None, cache: Path | None = None
) -> InferenceTimes | None:
    """Time every method's model on the same test case; None where models or scans are missing.

    All are timed in turns in this process. `known` times are kept if they are of the same models.
    """
    chosen = {run.entry.label: run for run in reversed(plan.finished)}  # of each method the first seed
    chosen = {label: chosen[label] for label in plan.labels if label in chosen}
    try:
        runs = {label: str(run.folder.manifest["run"]) for label, run in chosen.items()}
        if not runs or (known is not None and runs == dict(known.runs)):
            return known
        experiment = next(iter(chosen.values())).experiment
        device = setup_device(experiment)
        sites = read_sites(experiment, cache or cache_folder(), lambda what, done, total: None)
        volume = next(case for site in sites for case in site.test).read_image()
        models = {label: load_model(run.folder.model_folder, device) for label, run in chosen.items()}
    except (PanorganError, OSError, StopIteration):
        return None
    images = {label: prepare_image(volume, m.plan, Grid.of(volume, m.plan)) for label, m in models.items()}
    times: dict[str, list[float]] = {label: [] for label in models}
    for _ in range(1 + _REPEATS):  # the first pass warms up; taking turns spreads other load on the machine
        for label, model in models.items():
            times[label].append(_seconds(model, images[label], device))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_words()
    seconds = {label: statistics.median(some[1:]) for label, some in times.items()}
    return InferenceTimes(name, tuple(next(iter(images.values())).shape[-3:]), seconds, runs)


def _seconds(model: Model, image: torch.Tensor, device: torch.device) -> float:
    """Time of one pass over a prepared scan."""
    began = time.perf_counter()
    predict_probabilities(model.network, image, model.inference)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def _cpu_words() -> str:
    threads = torch.get_num_threads()
    return f"CPU ({threads} thread{'' if threads == 1 else 's'})"


def patients_of(plan: ComparisonPlan, cache: Path | None = None) -> dict[tuple[str, str], str] | None:
    """(site, case) → patient of all test cases; None when the data can no longer be read."""
    found: dict[tuple[str, str], str] = {}
    for seed in plan.seeds:
        run = next((r for r in plan.finished if r.seed == seed), None)
        if run is None:
            continue
        try:
            sites: tuple[SiteCases, ...] = read_sites(
                run.experiment, cache or cache_folder(), lambda what, done, total: None
            )
        except (PanorganError, OSError):
            return None
        found |= {(site.name, case.id): case.patient for site in sites for case in site.test}
    return found
