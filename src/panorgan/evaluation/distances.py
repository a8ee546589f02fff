"""Several methods on the same cases: how far their surfaces lie from the true ones, means over seeds.

Dice has a value for an organ that was not found (0), a distance has none. So every mean is told with the number of
scores that are not in it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from panorgan.evaluation.comparison import Comparison, Key, Score, taken_at


@dataclass(frozen=True)
class Distance:
    """Average symmetric surface distance in mm; lower is better.

    Attributes
    ----------
    mean : mean over seeds of each seed's mean over the scores that have a distance; NaN when none has.
    sd : over the seeds' means (n − 1); NaN for one seed.
    seeds : how many seeds the mean rests on. A seed in which everything was missed is not among them.
    cases : different cases, those that were missed included.
    scores : one per seed, case and organ, those that were missed included.
    missed : how many of these scores have no distance: exactly one of truth and prediction is empty.
    """

    mean: float
    sd: float
    seeds: int
    cases: int
    scores: int
    missed: int


def compare_distances(scores: Mapping[str, Sequence[Score]], comparison: Comparison) -> dict[Key, Distance]:
    """One for each figure of the comparison: the same methods, organs and places. The order does not matter."""
    ordered = {method: sorted(some) for method, some in scores.items()}
    return {key: distance_of(taken_at(ordered[key[0]], *key[1:])) for key in comparison.figures}


def distance_of(scores: Sequence[Score]) -> Distance:
    """The distance of one method over these scores."""
    by_seed: dict[int, list[float]] = {}
    for score in scores:
        if not score.missed:
            by_seed.setdefault(score.seed, []).append(score.assd)
    means = [float(np.mean(values)) for values in by_seed.values()]
    return Distance(
        mean=float(np.mean(means)) if means else math.nan,
        sd=float(np.std(means, ddof=1)) if len(means) > 1 else math.nan,
        seeds=len(means),
        cases=len({(score.site, score.case) for score in scores}),
        scores=len(scores),
        missed=sum(score.missed for score in scores),
    )
