"""Several methods on the same cases: means over seeds, intervals over patients, paired tests against a reference.

Everything here is deterministic and does not depend on the order of the scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import rankdata, wilcoxon

from panorgan.errors import DataError
from panorgan.evaluation.metrics import LEADING, METRICS, is_missed
from panorgan.evaluation.statistics import EXTERNAL_SPLIT, TEST_SPLIT, bootstrap_interval, stable_seed

FEWEST_PAIRS = 6
"""With five pairs the smallest two-sided p value is 0.0625: a test could never find anything."""
_MOST_EXACT = 50
ALL_ORGANS = ""
"""Stands for all organs together."""


class Score(NamedTuple):
    """One organ in one case, by one method trained with one seed.

    `values` are the metrics by name, NaN where one is not defined. `labelled`: the site annotates the organ.
    """

    seed: int
    split: str
    site: str
    patient: str
    case: str
    organ: str
    values: Mapping[str, float]
    labelled: bool

    @property
    def dice(self) -> float:
        """The metric used for comparison."""
        return self.values[LEADING]

    @property
    def missed(self) -> bool:
        """Exactly one of truth and prediction is empty."""
        return is_missed(self.values)


class Place(NamedTuple):
    """Where scores are taken: one `site`, or over several.

    `kind` is `site`, `federation` (all that trained), `labelled` or `not_labelled` (those of the federation that
    annotate the organ, or do not), or `external` (all that did not train).
    """

    kind: str
    site: str = ""

    def holds(self, score: Score) -> bool:
        """Whether a score was taken here."""
        if self.kind == "site":
            return score.site == self.site
        if self.kind == "external":
            return score.split == EXTERNAL_SPLIT
        inside = score.split == TEST_SPLIT
        return inside and (self.kind == "federation" or score.labelled == (self.kind == "labelled"))


FEDERATION, EXTERNAL = Place("federation"), Place("external")
LABELLED, NOT_LABELLED = Place("labelled"), Place("not_labelled")


@dataclass(frozen=True)
class Figure:
    """One figure of the comparison.

    Attributes
    ----------
    mean : mean over seeds of each seed's mean over its scores; NaN when there is none.
    sd : over the seeds' means (n − 1); NaN for one seed, which says nothing about spread.
    low, high : 95 % bootstrap interval of the mean of all scores; patients are drawn, with all their cases and seeds.
    seeds, cases, missed : numbers of seeds and of different cases, and of missed organs (Dice 0).
    difference : mean over patients of method − reference; NaN for the reference itself.
    pairs : patients in that difference.
    p, p_holm : paired Wilcoxon signed-rank test over these patients, before and after Holm's correction; NaN for none.
    """

    mean: float
    sd: float
    low: float
    high: float
    seeds: int
    cases: int
    missed: int
    difference: float = math.nan
    pairs: int = 0
    p: float = math.nan
    p_holm: float = math.nan

    @property
    def differs(self) -> bool:
        """Whether it differs from the reference at the usual level, after correction."""
        return self.p_holm < 0.05


Key = tuple[str, str, Place]
"""Method, organ (or all of them), place."""


@dataclass(frozen=True)
class Comparison:
    """All figures. `organs` in the order in which they were given; external sites are the last single `places`."""

    methods: tuple[str, ...]
    reference: str
    organs: tuple[str, ...]
    places: tuple[Place, ...]
    external_sites: frozenset[str]
    figures: Mapping[Key, Figure]

    def figure(self, method: str, organ: str = ALL_ORGANS, place: Place | None = None) -> Figure | None:
        """One of them, at the first place by default; None where nothing was scored."""
        return self.figures.get((method, organ, place or self.first_place))

    def scored_at(self, place: Place) -> bool:
        """Whether there is a figure of any method."""
        return any(there == place for _, _, there in self.figures)

    @property
    def first_place(self) -> Place:
        """The main place: the federation, or external sites where only these were scored."""
        return EXTERNAL if self.scored_at(EXTERNAL) and not self.scored_at(FEDERATION) else FEDERATION


def read_scores(
    rows: Iterable[Mapping[str, Any]],
    seed: int,
    labelled: Callable[[str, str], bool],
    patients: Mapping[tuple[str, str], str],
) -> list[Score]:
    """Scores from the rows of a run's metrics.csv.

    `labelled(site, organ)` says whether the site annotates the organ; `patients` names the patient of a (site, case)
    that is not the only one of its patient.
    """
    return [
        Score(
            seed,
            row["split"],
            row["site"],
            patients.get((row["site"], row["case"]), row["case"]),
            row["case"],
            row["organ"],
            {name: float(row[name]) for name in METRICS if name in row},
            labelled(row["site"], row["organ"]),
        )
        for row in rows
    ]


def compare_scores(
    scores: Mapping[str, Sequence[Score]], reference: str, organs: Sequence[str], resamples: int = 2000
) -> Comparison:
    """Compare methods organ by organ, at each site, in the federation and outside.

    `scores` of each method over all of its seeds. p values are corrected within each table: over all methods × organs
    of a kind of place (and sites, for single sites), and over the methods for all organs together.
    """
    ordered = {method: in_order(some) for method, some in scores.items()}
    places = _places(score for some in ordered.values() for score in some)
    figures: dict[Key, Figure] = {}
    for place in places:
        for organ in (*organs, ALL_ORGANS):
            chosen = {m: taken_at(some, organ, place) for m, some in ordered.items()}
            for method, some in chosen.items():
                if some:
                    name = (method, organ, *place)
                    figure = _figure(some, resamples, stable_seed(0, *name))
                    figures[method, organ, place] = _test_against(
                        figure, some, chosen.get(reference, []), method == reference
                    )
    outside = frozenset(s.site for some in ordered.values() for s in some if s.split == EXTERNAL_SPLIT)
    return Comparison(tuple(scores), reference, tuple(organs), places, outside, _correct(figures))


def _places(scores: Iterable[Score]) -> tuple[Place, ...]:
    sites = sorted({(score.split == EXTERNAL_SPLIT, score.site) for score in scores})
    outside = (EXTERNAL,) if any(external for external, _ in sites) else ()
    return (*(Place("site", site) for _, site in sites), FEDERATION, LABELLED, NOT_LABELLED, *outside)


def in_order(scores: Iterable[Score]) -> list[Score]:
    """By seed, place, case and organ, so that sums do not depend on the order in which scores were read."""
    return sorted(scores, key=lambda score: score[:6])


def taken_at(scores: Sequence[Score], organ: str, place: Place) -> list[Score]:
    """The scores of one organ, or of all of them, at one place."""
    return [score for score in scores if organ in (ALL_ORGANS, score.organ) and place.holds(score)]


def _figure(scores: Sequence[Score], resamples: int, seed: int) -> Figure:
    mean, sd = over_seeds(scores)
    low, high = bootstrap_interval(
        [score.dice for score in scores],
        resamples=resamples,
        seed=seed,
        groups=[(score.site, score.patient) for score in scores],
    )
    return Figure(
        mean,
        sd,
        low,
        high,
        seeds=len({score.seed for score in scores}),
        cases=len({(score.site, score.case) for score in scores}),
        missed=sum(score.missed for score in scores),
    )


def over_seeds(scores: Sequence[Score]) -> tuple[float, float]:
    """Mean and standard deviation (n − 1) of the seeds' means."""
    means = np.array([np.mean(values) for values in _by(scores, lambda score: score.seed).values()])
    return float(means.mean()), float(means.std(ddof=1)) if len(means) > 1 else math.nan


def pair_patients(ours: Sequence[Score], theirs: Sequence[Score]) -> list[tuple[float, float]]:
    """(ours, theirs) per patient, each the mean over its cases, organs and seeds.

    Only seeds and organs that both have count. Within these both must have scored exactly the same cases.
    """
    seeds = {score.seed for score in ours} & {score.seed for score in theirs}
    organs = {score.organ for score in ours} & {score.organ for score in theirs}
    shared = [[s for s in some if s.seed in seeds and s.organ in organs] for some in (ours, theirs)]
    keys = [{(s.seed, s.site, s.case, s.organ) for s in some} for some in shared]
    if keys[0] != keys[1]:
        seed, site, case, organ = min(keys[0] ^ keys[1])
        raise DataError(
            "Two methods were not scored on the same cases.",
            code="other-cases",
            where=f"seed {seed}, site {site}, case {case}, {organ}",
            why="one of them has no score there, so the two cannot be paired",
            fix="Score both runs again with 'panorgan evaluate', or train them in a new folder.",
        )
    mine, other = (_by(some, lambda s: (s.site, s.patient)) for some in shared)
    return [(float(np.mean(mine[unit])), float(np.mean(other[unit]))) for unit in sorted(mine)]


def _test_against(figure: Figure, ours: Sequence[Score], theirs: Sequence[Score], is_reference: bool) -> Figure:
    pairs = [] if is_reference else pair_patients(ours, theirs)
    if not pairs:
        return figure
    differences = [a - b for a, b in pairs]
    return replace(figure, difference=float(np.mean(differences)), pairs=len(pairs), p=signed_rank(differences))


def signed_rank(differences: Sequence[float]) -> float:
    """Two-sided p value of the Wilcoxon signed-rank test; 1 when all are zero, NaN for fewer than six pairs.

    Pairs without a difference are left out of the ranks, as Wilcoxon did; equal differences share their mean rank.
    Exact for up to 50 pairs that differ, with ties too; SciPy's normal approximation above. What SciPy itself does with
    fewer pairs depends on its version, and an approximation gives five of them p < 0.05, which no exact test does.
    """
    if len(differences) < FEWEST_PAIRS:
        return math.nan
    # Dice of equal masks may differ in the last bit after averaging.
    differing = [d for d in np.round(differences, 12) if d]
    if not differing:
        return 1.0
    return _exact_signed_rank(differing) if len(differing) <= _MOST_EXACT else float(wilcoxon(differing).pvalue)


def _exact_signed_rank(differences: Sequence[float]) -> float:
    """Over all 2ⁿ possible signs: the share whose rank sum is at least as far from the centre."""
    ranks = np.round(2 * rankdata(np.abs(differences))).astype(int)  # doubled, so that shared ranks are integers
    share = np.zeros(ranks.sum() + 1)  # of the signs, by the rank sum of the positive ones
    share[0] = 1.0
    for rank in ranks:
        share = (share + np.concatenate([np.zeros(rank), share[:-rank]])) / 2
    positive = int(ranks[np.asarray(differences) > 0].sum())
    middle = ranks.sum() / 2
    distances = np.abs(np.arange(len(share)) - middle)
    return min(1.0, float(share[distances >= abs(positive - middle)].sum()))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction. NaN stays NaN and does not count."""
    tested = [(p, index) for index, p in enumerate(p_values) if not math.isnan(p)]
    corrected = [math.nan] * len(p_values)
    highest = 0.0
    for rank, (p, index) in enumerate(sorted(tested)):
        highest = max(highest, min(1.0, (len(tested) - rank) * p))
        corrected[index] = highest
    return corrected


def _correct(figures: Mapping[Key, Figure]) -> dict[Key, Figure]:
    """Holm within each family: one kind of place, single organs apart from all organs together."""
    families: dict[tuple[str, bool], list[Key]] = {}
    for key in figures:
        _, organ, place = key
        families.setdefault((place.kind, organ == ALL_ORGANS), []).append(key)
    result = dict(figures)
    for keys in families.values():
        for key, p in zip(keys, holm([figures[key].p for key in keys]), strict=True):
            result[key] = replace(figures[key], p_holm=p)
    return result


def _by(scores: Sequence[Score], key: Callable[[Score], Any]) -> dict[Any, list[float]]:
    groups: dict[Any, list[float]] = {}
    for score in scores:
        groups.setdefault(key(score), []).append(score.dice)
    return groups
