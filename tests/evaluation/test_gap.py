"""Gap closed, worst site and worst organ, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest

from panorgan.evaluation.comparison import Score
from panorgan.evaluation.gap import gain_over

CASES = ("c1", "c2", "c3")


def scores(values: dict[tuple[int, str, str], float], split: str = "test", step: float = 0.0) -> list[Score]:
    """By seed, site and organ: the Dice of the first case; the next cases have `step` more. North labels the liver."""
    return [
        Score(seed, split, site, case, case, organ, {"dice": dice + step * number}, (site, organ) == ("north", "liver"))
        for (seed, site, organ), dice in values.items()
        for number, case in enumerate(CASES)
    ]


def test_gap_closed_by_hand():
    """Seed means: alone 0.5 and 0.6, full 0.9 and 0.8, method 0.7 and 0.6: (0.65 − 0.55) / (0.85 − 0.55)."""
    alone = scores({(0, "north", "liver"): 0.5, (1, "north", "liver"): 0.6})
    full = scores({(0, "north", "liver"): 0.9, (1, "north", "liver"): 0.8})
    method = scores({(0, "north", "liver"): 0.7, (1, "north", "liver"): 0.6})
    gain = gain_over(method, alone, full)
    assert gain.inside.closed == pytest.approx(1 / 3)
    # A draw takes the seeds (0, 0), (0, 1), (1, 0) or (1, 1): shares 1/2, 1/3, 1/3 and 0.
    assert (gain.inside.low, gain.inside.high) == pytest.approx((0.0, 0.5))
    assert gain.outside is None


def test_seeds_count_the_same_and_only_shared_ones():
    alone = scores({(0, "north", "liver"): 0.5, (0, "north", "spleen"): 0.5, (1, "north", "liver"): 0.5})
    full = scores({(0, "north", "liver"): 0.9, (0, "north", "spleen"): 0.9, (1, "north", "liver"): 0.9})
    method = scores({(0, "north", "liver"): 0.7, (0, "north", "spleen"): 0.7, (1, "north", "liver"): 0.9})
    assert gain_over(method, alone, full).inside.closed == pytest.approx((0.5 + 1.0) / 2)
    only_first = [score for score in full if score.seed == 0]
    assert gain_over(method, alone, only_first).inside.closed == pytest.approx(0.5)
    assert gain_over([s for s in method if s.seed == 1], [s for s in alone if s.seed == 0], full) is None


def test_patients_widen_the_interval():
    alone, full = scores({(0, "north", "liver"): 0.4}), scores({(0, "north", "liver"): 0.8})
    steady, unsteady = scores({(0, "north", "liver"): 0.6}), scores({(0, "north", "liver"): 0.5}, step=0.1)
    narrow, wide = (gain_over(method, alone, full).inside for method in (steady, unsteady))
    assert narrow.closed == pytest.approx(wide.closed) == pytest.approx(0.5)
    assert (narrow.low, narrow.high) == pytest.approx((0.5, 0.5))
    assert (wide.low, wide.high) == pytest.approx((0.25, 0.75))


@pytest.mark.parametrize("full", [0.5, 0.4])
def test_without_a_gap_there_is_no_share(full):
    alone = scores({(0, "north", "liver"): 0.5})
    gain = gain_over(scores({(0, "north", "liver"): 0.6}), alone, scores({(0, "north", "liver"): full}))
    assert math.isnan(gain.inside.closed)
    assert math.isnan(gain.inside.low)


def test_a_doubtful_gap_gives_no_share():
    """With all labels one seed is better and one is worse: in a quarter of the draws there is no gap."""
    alone = scores({(0, "north", "liver"): 0.5, (1, "north", "liver"): 0.5})
    full = scores({(0, "north", "liver"): 0.9, (1, "north", "liver"): 0.4})
    assert math.isnan(gain_over(alone, alone, full).inside.closed)


def test_external_sites_have_a_share_of_their_own():
    inside = [scores({(0, "north", "liver"): dice}) for dice in (0.5, 0.5, 0.9)]
    outside = [scores({(0, "island", "liver"): dice}, split="external") for dice in (0.8, 0.4, 0.8)]
    gain = gain_over(*(a + b for a, b in zip(inside, outside, strict=True)))
    assert (gain.inside.closed, gain.outside.closed) == pytest.approx((0.0, 1.0))


def test_the_worst_site_is_judged_by_its_own_organs():
    alone = scores({(0, "north", "liver"): 0.8, (0, "north", "spleen"): 0.8})
    method = scores({(0, "north", "liver"): 0.75, (0, "north", "spleen"): 0.1})
    gain = gain_over(method, alone)
    assert (gain.worst_site, gain.site_difference) == ("north", pytest.approx(-0.05))
    assert (gain.worst_organ, gain.organ_ratio, gain.organ_seed) == ("spleen", pytest.approx(0.125), 0)
    assert gain.inside is None


def test_the_worst_organ_is_that_of_the_worst_seed():
    alone = scores({(0, "north", "liver"): 0.8, (1, "north", "liver"): 0.5})
    method = scores({(0, "north", "liver"): 0.8, (1, "north", "liver"): 0.2})
    gain = gain_over(method, alone)
    assert (gain.organ_ratio, gain.organ_seed) == (pytest.approx(0.4), 1)


def test_the_order_of_scores_does_not_matter():
    some = [scores({(s, "north", o): 0.1 * s + d for s in (0, 1) for o in "ab"}, step=0.03) for d in (0.5, 0.4, 0.7)]
    assert gain_over(*some) == gain_over(*(list(reversed(one)) for one in some))
