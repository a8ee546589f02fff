"""How a federation trains: the experiment's `training` section."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from panorgan.errors import ConfigError
from panorgan.federation.start_settings import StartSettings
from panorgan.preparation.augment import AugmentSettings
from panorgan.preparation.sampling import SamplingSettings
from panorgan.settings import Settings


class OptimizerSettings(Settings):
    """The optimiser at each site."""

    name: Literal["adamw", "sgd"] = "adamw"
    learning_rate: float = Field(1e-3, gt=0)
    weight_decay: float = Field(1e-5, ge=0)
    momentum: float = Field(0.9, ge=0, lt=1, description="for sgd (Nesterov)")
    keep_state: bool = Field(
        True, description="carry the optimiser's moments over rounds, on the site's disk; they are never sent"
    )
    clip_norm: float | None = Field(12.0, gt=0, description="largest gradient norm; null for none")
    schedule: Literal["constant", "poly", "cosine", "cosine_restarts"] = Field(
        "poly", description="over all steps of a stage"
    )
    restarts: int = Field(
        4, ge=0, description="for cosine_restarts: number of restarts of the rate, at equal distances after the warm-up"
    )
    warmup: float = Field(0.0, ge=0, lt=1, description="share of the stage with a linearly rising learning rate")

    def rate(self, progress: float) -> float:
        """Learning rate at `progress` in [0, 1) of a stage."""
        if progress < self.warmup:
            return self.learning_rate * (progress + 1e-3) / (self.warmup + 1e-3)
        if self.schedule == "poly":
            return float(self.learning_rate * (1 - progress) ** 0.9)
        if self.schedule == "cosine":
            return self.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))
        if self.schedule == "cosine_restarts":
            cycles = (progress - self.warmup) / (1 - self.warmup) * (self.restarts + 1)
            return self.learning_rate * 0.5 * (1 + math.cos(math.pi * (cycles % 1)))
        return self.learning_rate


class TrainingSettings(Settings):
    """Rounds, local work, and the handling of answers."""

    rounds: int = Field(100, ge=1)
    local_steps: int = Field(20, ge=1, description="optimiser steps per site and round")
    local_epochs: int | None = Field(
        None,
        ge=1,
        description="passes over a site's own training cases per round, instead of local_steps: as many patches as "
        "there are cases or, where patches are slices, as their cases have slices",
    )
    optimizer: OptimizerSettings = OptimizerSettings()
    sampling: SamplingSettings = SamplingSettings()
    augment: AugmentSettings | None = Field(AugmentSettings(), description="null for none")
    precision: Literal["float32", "bfloat16"] = "float32"
    validate_every: int = Field(5, ge=0, description="rounds between validations; 0 for never")
    select: Literal["best", "last"] = Field("best", description="which round's model is delivered")
    overlap: float = Field(0.5, ge=0, lt=1, description="of neighbouring windows at inference")
    min_sites: int = Field(1, ge=1, description="a round with fewer usable answers is an error")
    outlier_factor: float | None = Field(
        10.0, gt=1, description="an update this many times larger than the median of three or more is refused"
    )

    aggregation: Literal["mean", "trimmed_mean", "median"] = Field(
        "mean",
        description="how the sites' weights become one model: their weighted mean, or value by value without the "
        "extremes. For five sites or more",
    )
    trimmed_share: float = Field(
        0.2, gt=0, lt=0.5, description="for trimmed_mean: the share of sites left out at either end, at least one site"
    )
    start_from: StartSettings | None = Field(
        None,
        description="a run folder or a model folder to take first weights from; they are drawn at random if left out. "
        "Organs are matched by name, and what the model does not have begins as usual",
    )

    @model_serializer(mode="wrap")
    def _without_a_start(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what was added later and is not used: fingerprints of older experiments stay as they are."""
        content: dict[str, Any] = write(self)
        return {key: value for key, value in content.items() if key != "start_from" or value}

    def steps_per_round(self, one_pass: int, pooled_sites: int = 1) -> int:
        """Optimiser steps of a site: as set, or epochs × ⌈patches of one pass / batch size⌉ (`patches_per_pass`).

        A pooled site does the work of the sites it replaces. An epoch over all of their cases is that already.
        """
        if self.local_epochs is None:
            return self.local_steps * pooled_sites
        return self.local_epochs * math.ceil(one_pass / self.sampling.batch_size)


FEWEST_FOR_ROBUST = 5
"""Sites that a robust aggregation needs: with fewer, leaving out the extremes discards most of what was learned."""


def refuse_few_sites(training: TrainingSettings, sites: int, where: str) -> None:
    """Refuse a robust aggregation with too few sites."""
    if training.aggregation != "mean" and sites < FEWEST_FOR_ROBUST:
        raise ConfigError(
            f"training.aggregation: {training.aggregation} needs {FEWEST_FOR_ROBUST} training sites or more.",
            code="too-few-for-robust",
            where=where,
            why=f"there {'is' if sites == 1 else 'are'} {sites}",
            fix="Leave it out (mean), or add sites.",
        )


@dataclass(frozen=True)
class Patience:
    """How a coordinator handles sites that do not answer. It changes no formula.

    `deadline`: seconds for one request. `on_missing`: `wait` never ends a round without a site that joined (the rounds
    stop, and continue when it is back); `proceed` needs `training.min_sites` only. `retries`: how often a site that
    reports a failure is asked again in the same round.
    """

    deadline: float | None = None
    on_missing: Literal["wait", "proceed"] = "proceed"
    retries: int = 0
