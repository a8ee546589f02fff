"""Several methods on the same cases: means over seeds of one metric besides Dice.

Dice is defined for an organ that was not found (0), a distance is not. So every mean comes with the number of scores
that it leaves out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from panorgan.evaluation.comparison import Comparison, Key, Score, in_order, taken_at


@dataclass(frozen=True)
class MetricMean:
    """One metric of one method over some scores.

    Attributes
    ----------
    mean : mean over seeds of each seed's mean over the scores that have a value; NaN when none has.
    sd : over the seeds' means (n − 1); NaN for one seed.
    seeds : number of seeds in the mean. A seed without any value is not among them.
    cases : different cases, those without a value included.
    scores : one per seed, case and organ, those without a value included.
    missed : number of scores without a value. For a distance: exactly one of truth and prediction is empty.
    """

    mean: float
    sd: float
    seeds: int
    cases: int
    scores: int
    missed: int


Means = Mapping[str, Mapping[Key, MetricMean]]
"""By the name of the metric, then as the figures of the comparison."""


def compare_means(scores: Mapping[str, Sequence[Score]], comparison: Comparison, metric: str) -> dict[Key, MetricMean]:
    """One for each figure of the comparison: the same methods, organs and places, independent of the order."""
    ordered = {method: in_order(some) for method, some in scores.items()}
    return {key: mean_of(taken_at(ordered[key[0]], *key[1:]), metric) for key in comparison.figures}


def mean_of(scores: Sequence[Score], metric: str) -> MetricMean:
    """The metric of one method over these scores."""
    by_seed: dict[int, list[float]] = {}
    for score in scores:
        if not math.isnan(value := score.values[metric]):
            by_seed.setdefault(score.seed, []).append(value)
    means = [float(np.mean(values)) for values in by_seed.values()]
    return MetricMean(
        mean=float(np.mean(means)) if means else math.nan,
        sd=float(np.std(means, ddof=1)) if len(means) > 1 else math.nan,
        seeds=len(means),
        cases=len({(score.site, score.case) for score in scores}),
        scores=len(scores),
        missed=len(scores) - sum(len(values) for values in by_seed.values()),
    )
