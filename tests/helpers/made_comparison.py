"""Two methods with distances made by hand, as a comparison that was never run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from panorgan.evaluation.comparison import Score, compare_scores
from panorgan.report.comparison_results import Results, metric_means
from panorgan.workflows.compare import ComparisonPlan
from panorgan.workflows.compare_entries import Entry

MISSED = math.nan
# Per method and organ: what seed 0 and seed 1 found in the cases c1 and c2 of the site north.
INSIDE = {
    "care_ful": {"liver": ((1.0, 3.0), (2.0, 4.0)), "spleen": ((4.0, MISSED), (6.0, 8.0))},
    "blind": {"liver": ((1.0, 1.0), (1.0, 1.0)), "spleen": ((MISSED, MISSED), (MISSED, MISSED))},
}
# Per method: the liver of the one case of the external site island.
OUTSIDE = {"care_ful": (10.0, 12.0), "blind": (20.0, MISSED)}


def made_scores(external: bool = True, inside: bool = True) -> dict[str, list[Score]]:
    """The scores of both methods, of the federation (`inside`) and of the `external` site.

    Dice is 0.5, and 0 where the organ was missed.
    """

    def score(seed: int, split: str, site: str, case: str, organ: str, assd: float) -> Score:
        values = {"dice": 0.0 if math.isnan(assd) else 0.5, "assd": assd}
        return Score(seed, split, site, case, case, organ, values, organ == "liver")

    found = {
        method: [
            score(seed, "test", "north", f"c{number}", organ, assd)
            for organ, seeds in (organs.items() if inside else ())
            for seed, cases in enumerate(seeds)
            for number, assd in enumerate(cases, start=1)
        ]
        for method, organs in INSIDE.items()
    }
    if external:
        for method, seeds in OUTSIDE.items():
            found[method] += [score(s, "external", "island", "x1", "liver", assd) for s, assd in enumerate(seeds)]
    return found


def made_results(external: bool = True, organs: tuple[str, ...] = ("liver", "spleen"), inside: bool = True) -> Results:
    """What a comparison would have read. Organs without a score are allowed, to see wide tables."""
    scores = made_scores(external, inside)
    entries = tuple(Entry(label, "fedavg", {}) for label in scores)
    return results_of(ComparisonPlan("made", Path("nowhere"), entries, (0, 1), "care_ful", ()), scores, organs)


def results_of(plan: ComparisonPlan, scores: Mapping[str, Sequence[Score]], organs: Sequence[str]) -> Results:
    """The results of a comparison of these scores, without runs, costs and local models."""
    comparison = compare_scores(scores, plan.reference, organs, resamples=10)
    return Results(
        plan=plan,
        runs={},
        scores={label: tuple(some) for label, some in scores.items()},
        comparison=comparison,
        means=metric_means(scores, comparison),
        costs={},
        inference=None,
        forgetting={},
        failures={},
        patients_known=True,
        labelled=frozenset({("north", "liver")}),
    )
