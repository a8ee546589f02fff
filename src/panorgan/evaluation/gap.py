"""How much of the gap between every site alone and all labels in one place a method closes, and who loses by it.

Alone are the sites' own models together, as `solo` delivers them: where several sites label an organ, their mean.

Gap closed = (method − alone) / (full − alone), of mean Dice. Everything is paired: the same seeds and the same scores.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from panorgan.evaluation.comparison import EXTERNAL, FEDERATION, Place, Score
from panorgan.evaluation.statistics import stable_seed

_SURE = 0.975
"""Share of the draws in which there must be a gap: else a share of it has no interval, and says nothing."""


@dataclass(frozen=True)
class Share:
    """The part of a gap that is closed: 0 is as good as alone, 1 as good as with all labels.

    `low`, `high`: 95 % interval of a hierarchical bootstrap, which draws seeds, and in each seed patients. All three
    are NaN where it is not clear that there is a gap.
    """

    closed: float
    low: float
    high: float


@dataclass(frozen=True)
class Gain:
    """What a method brings against every site alone.

    Attributes
    ----------
    inside, outside : gap closed in the federation and at external sites; None without a method that has all labels.
    worst_site, site_difference : the site that gains least on the organs that it labels itself (Dice, mean over seeds).
    worst_organ, organ_ratio, organ_seed : the organ with the lowest Dice relative to alone, in any seed.
    """

    inside: Share | None
    outside: Share | None
    worst_site: str
    site_difference: float
    worst_organ: str
    organ_ratio: float
    organ_seed: int


def gain_over(
    method: Sequence[Score],
    alone: Sequence[Score],
    full: Sequence[Score] | None = None,
    resamples: int = 2000,
    name: str = "",
) -> Gain | None:
    """Compare a method with every site alone, and with all labels in one place; None if they share no seed.

    `name` seeds the draws, so that a figure does not depend on the other methods.
    """
    ours, theirs = _values(method, FEDERATION), _values(alone, FEDERATION)
    both = sorted(ours.keys() & theirs.keys())
    if not both:
        return None
    inside, outside = (
        None if full is None else _share([_values(some, place) for some in (method, alone, full)], resamples, name)
        for place in (FEDERATION, EXTERNAL)
    )
    own = {(s.site, s.organ) for s in method if s.labelled}
    site, difference = _worst_site({u: ours[u] - theirs[u] for u in both if (u[1], u[4]) in own})
    ratio, organ, seed = _worst_organ([(u, ours[u], theirs[u]) for u in both])
    return Gain(inside, outside, site, difference, organ, ratio, seed)


_Unit = tuple[int, str, str, str, str]


def _values(scores: Sequence[Score], place: Place) -> dict[_Unit, float]:
    """Dice at a place, by seed, site, patient, case and organ."""
    return {(s.seed, s.site, s.patient, s.case, s.organ): s.dice for s in scores if place.holds(s)}


def _share(values: Sequence[Mapping[_Unit, float]], resamples: int, name: str) -> Share | None:
    """Of method, alone and full, over all scores that the three share; seeds count the same, as in every mean."""
    units = sorted(values[0].keys() & values[1].keys() & values[2].keys())
    if not units:
        return None
    seeds = [_sums([u for u in units if u[0] == seed], values) for seed in sorted({u[0] for u in units})]
    method, alone, full = np.mean([sums[:, :3].sum(0) / sums[:, 3].sum() for sums in seeds], axis=0)
    generator = np.random.default_rng(stable_seed(0, "gap", name))
    drawn = np.array([_draw(seeds, generator) for _ in range(resamples)])
    gaps = drawn[:, 2] - drawn[:, 1]
    there = gaps > 0
    if full <= alone or there.mean() < _SURE:
        return Share(math.nan, math.nan, math.nan)
    low, high = np.quantile((drawn[there, 0] - drawn[there, 1]) / gaps[there], [0.025, 0.975])
    return Share(float((method - alone) / (full - alone)), float(low), float(high))


def _sums(units: Sequence[_Unit], values: Sequence[Mapping[_Unit, float]]) -> NDArray[np.float64]:
    """Per patient of one seed: the sums of Dice of the three, and how many scores they are. [patients, 4]"""
    patients: dict[tuple[str, str], list[float]] = {}
    for unit in units:
        total = patients.setdefault(unit[1:3], [0.0, 0.0, 0.0, 0.0])
        for index, some in enumerate(values):
            total[index] += some[unit]
        total[3] += 1
    return np.array(list(patients.values()))


def _draw(seeds: Sequence[NDArray[np.float64]], generator: np.random.Generator) -> NDArray[np.float64]:
    """One draw: seeds with replacement, in each of them patients with replacement; the three means. [3]"""
    means = []
    for chosen in generator.integers(0, len(seeds), size=len(seeds)):
        sums = seeds[chosen]
        total = sums[generator.integers(0, len(sums), size=len(sums))].sum(0)
        means.append(total[:3] / total[3])
    return np.mean(means, axis=0)


def _worst_site(differences: Mapping[_Unit, float]) -> tuple[str, float]:
    """The site that gains least; seeds count the same."""
    means = {}
    for site in sorted({unit[1] for unit in differences}):
        here = {unit: value for unit, value in differences.items() if unit[1] == site}
        seeds = sorted({unit[0] for unit in here})
        means[site] = float(np.mean([np.mean([v for u, v in here.items() if u[0] == seed]) for seed in seeds]))
    return min(((means[site], site) for site in means), default=(math.nan, ""))[::-1]


def _worst_organ(pairs: Sequence[tuple[_Unit, float, float]]) -> tuple[float, str, int]:
    """The lowest ratio of an organ's Dice to that organ alone, with organ and seed."""
    sums: dict[tuple[str, int], tuple[float, float]] = {}
    for unit, ours, theirs in pairs:
        mine, other = sums.get((unit[4], unit[0]), (0.0, 0.0))
        sums[unit[4], unit[0]] = (mine + ours, other + theirs)
    ratios = [(mine / other, organ, seed) for (organ, seed), (mine, other) in sums.items() if other > 0]
    return min(ratios, default=(math.nan, "", 0))


__all__ = ["Gain", "Share", "gain_over"]
