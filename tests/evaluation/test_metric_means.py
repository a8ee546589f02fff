"""Surface distances over seeds, and what has none, against numbers worked out by hand."""

from __future__ import annotations

import math
import random

import pytest
from made_comparison import made_scores

from panorgan.evaluation.comparison import ALL_ORGANS, EXTERNAL, FEDERATION, LABELLED, Place, compare_scores
from panorgan.evaluation.metric_means import MetricMean, compare_means, mean_of


def made_distances() -> dict:
    scores = made_scores()
    return compare_means(scores, compare_scores(scores, "care_ful", ["liver", "spleen"], resamples=10), "assd")


def test_means_over_seeds() -> None:
    """Liver: seed means (1 + 3) / 2 = 2 and (2 + 4) / 2 = 3, so 2.5 with a spread of 1 / √2."""
    liver = made_distances()["care_ful", "liver", FEDERATION]
    assert liver == MetricMean(2.5, pytest.approx(1 / math.sqrt(2)), seeds=2, cases=2, scores=4, missed=0)


def test_what_was_missed_is_counted_and_not_in_the_mean() -> None:
    """Spleen: 4 alone in seed 0 and (6 + 8) / 2 = 7 in seed 1."""
    found = made_distances()
    spleen = found["care_ful", "spleen", FEDERATION]
    assert spleen == MetricMean(5.5, pytest.approx(3 / math.sqrt(2)), seeds=2, cases=2, scores=4, missed=1)
    whole = found["care_ful", ALL_ORGANS, FEDERATION]  # (1 + 3 + 4) / 3 = 8/3 and (2 + 4 + 6 + 8) / 4 = 5
    assert whole.mean == pytest.approx((8 / 3 + 5) / 2)
    assert whole.sd == pytest.approx((5 - 8 / 3) / math.sqrt(2))
    assert (whole.scores, whole.missed) == (8, 1)


def test_an_organ_that_was_never_found_has_no_distance() -> None:
    found = made_distances()
    spleen = found["blind", "spleen", FEDERATION]
    assert math.isnan(spleen.mean)
    assert math.isnan(spleen.sd)
    assert (spleen.seeds, spleen.cases, spleen.scores, spleen.missed) == (0, 2, 4, 4)
    assert found["blind", ALL_ORGANS, FEDERATION] == MetricMean(1.0, 0.0, seeds=2, cases=2, scores=8, missed=4)


def test_a_seed_that_missed_all_is_not_in_the_mean() -> None:
    outside = made_distances()["blind", "liver", EXTERNAL]
    assert (outside.mean, outside.seeds, outside.missed) == (20.0, 1, 1)
    assert math.isnan(outside.sd)


def test_places_are_those_of_dice() -> None:
    found = made_distances()
    assert found["care_ful", ALL_ORGANS, EXTERNAL].mean == 11.0  # external cases do not count in the federation
    assert found["care_ful", ALL_ORGANS, Place("site", "island")].mean == 11.0
    assert found["care_ful", ALL_ORGANS, LABELLED].mean == 2.5  # the liver
    assert ("care_ful", "spleen", EXTERNAL) not in found  # never scored


def test_order_does_not_matter() -> None:
    scores = made_scores()
    shuffled = {method: random.Random(1).sample(some, len(some)) for method, some in scores.items()}
    comparison = compare_scores(scores, "care_ful", ["liver", "spleen"], resamples=10)
    key = ("care_ful", ALL_ORGANS, FEDERATION)
    assert compare_means(shuffled, comparison, "assd")[key] == compare_means(scores, comparison, "assd")[key]


def test_nothing_scored() -> None:
    nothing = mean_of([], "assd")
    assert math.isnan(nothing.mean)
    assert (nothing.seeds, nothing.missed) == (0, 0)
