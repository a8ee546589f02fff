"""How long a simulated federation will take on this machine: training, validation, scoring."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from panorgan.config import Experiment
from panorgan.federation.agreement_checks import validation_due
from panorgan.federation.site import SiteWorker
from panorgan.methods.protocol import RoundInfo, Stage
from panorgan.preparation.sampling import patches_per_pass
from panorgan.workflows.prepare import PreparedFederation
from panorgan.workflows.rehearsal import Speed

LONG_SECONDS = 2 * 3600.0
"""Above this, it is worth looking for settings that suit the machine better."""
_PER_SCORED_CASE = 2.0
"""Seconds for reading, resampling and the metrics of one test case; the network's time comes on top."""


@dataclass(frozen=True)
class Estimate:
    """Seconds by kind of work; `steps` are those of all sites, which take turns on the machine."""

    training: float
    validation: float
    scoring: float
    steps: int
    rounds: int
    speed: Speed

    @property
    def seconds(self) -> float:
        """The total."""
        return self.training + self.validation + self.scoring

    @property
    def is_long(self) -> bool:
        """Whether it takes hours."""
        return self.seconds > LONG_SECONDS

    def as_json(self) -> dict[str, Any]:
        """Plain JSON types, for the log."""
        return {
            "seconds": round(self.seconds, 3),
            "training": round(self.training, 3),
            "validation": round(self.validation, 3),
            "scoring": round(self.scoring, 3),
            "steps": self.steps,
            "rounds": self.rounds,
            "step_seconds": round(self.speed.step, 5),
            "long": self.is_long,
        }


@dataclass(frozen=True)
class Work:
    """The work of a run: training steps per round, and windows per validation and for scoring."""

    sites: int
    steps_per_round: int
    validation_windows: float
    scoring_windows: float
    scored_cases: int

    @classmethod
    def of(cls, experiment: Experiment, prepared: PreparedFederation, workers: Mapping[str, SiteWorker]) -> Work:
        """Count it from the prepared cases; test cases are assumed to be as large as the site's other cases."""
        training = experiment.training
        patch, overlap = training.sampling.patch_size, training.overlap
        steps = sum(
            training.steps_per_round(patches_per_pass(worker.data.train, patch), worker.setup.steps_factor)
            for worker in workers.values()
        )
        windows = {
            site.name: [count_windows(case.shape, patch, overlap) for case in (*site.train, *site.validation)]
            for site in prepared.sites
        }
        usual = _mean([count for counts in windows.values() for count in counts])
        validation = sum(sum(windows[site.name][len(site.train) :]) for site in prepared.sites)
        scored = sum(len(site.test) * (_mean(windows[site.name]) or usual) for site in prepared.sites)
        return cls(len(workers), steps, validation, scored, sum(len(site.test) for site in prepared.sites))


def estimate(experiment: Experiment, work: Work, speed: Speed, rounds_done: int = 0) -> Estimate:
    """The time that the remaining rounds take."""
    training = experiment.training
    stages = experiment.build_method().stages(training.rounds)
    left = _schedule(stages)[rounds_done:]
    own = {stage.name: stage.local_steps for stage in stages}
    steps = sum(
        work.steps_per_round if own[info.stage] is None else int(own[info.stage] or 0) * work.sites for info in left
    )
    validations = sum(validation_due(training, stages, info) for info in left)
    return Estimate(
        training=steps * speed.step,
        validation=validations * work.validation_windows * speed.window,
        scoring=work.scoring_windows * speed.window + work.scored_cases * _PER_SCORED_CASE,
        steps=steps,
        rounds=len(left),
        speed=speed,
    )


def count_windows(shape: Sequence[int], patch: Sequence[int], overlap: float) -> int:
    """The number of windows that cover a scan."""
    step = [max(1, int(size * (1 - overlap))) for size in patch]
    along = (math.ceil(max(n - p, 0) / s) + 1 for n, p, s in zip(shape, patch, step, strict=True))
    return math.prod(along)


def _schedule(stages: Sequence[Stage]) -> list[RoundInfo]:
    return [RoundInfo(stage.name, number, stage.rounds) for stage in stages for number in range(1, stage.rounds + 1)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
