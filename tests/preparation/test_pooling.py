"""Numbers of several sites become one: no single site decides, and honest ones are taken as they are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from panorgan.preparation.pooling import capped, weighted_median, without_extremes


@pytest.mark.parametrize(
    ("weights", "share", "expected"),
    [
        ([3.0, 2.0, 1.0], 0.5, [3.0, 2.0, 1.0]),  # exactly half is allowed, and nothing is touched
        ([6.0, 2.0, 1.0], 0.5, [0.5, 1 / 3, 1 / 6]),  # the others share the other half as 2 to 1
        ([90.0, 9.0, 1.0], 0.4, [0.4, 0.4, 0.2]),  # what is taken from one makes the next too large
        ([1e15, 1.0, 1.0, 1.0], 0.25, [0.25] * 4),
        ([1e15, 1.0, 1.0], 0.1, [1 / 3] * 3),  # less than an equal share is nobody's
        ([1e15, 1.0], 0.5, [1e15, 1.0]),  # two cannot tell which of them is wrong
        ([1e15, 1.0, 0.0], 0.5, [1e15, 1.0, 0.0]),  # who does not count does not make three
        ([8.0, 1.0, 1.0, 0.0], 0.5, [0.5, 0.25, 0.25, 0.0]),
        ([5.0, 3.0, 2.0], 1.0, [5.0, 3.0, 2.0]),
        ([], 0.5, []),
    ],
)
def test_capped_by_hand(weights, share, expected):
    assert capped(weights, share) == pytest.approx(expected, rel=1e-12)


@given(st.lists(st.floats(0, 1e15), min_size=3, max_size=8), st.floats(0.05, 1.0))
def test_nobody_has_more_than_the_share_and_nobody_changes_places(weights, share):
    result = capped(weights, share)
    counting = [weight for weight in weights if weight > 0]
    assert [weight == 0 for weight in weights] == [found == 0 for found in result] or min(counting) < 1e-290
    if len(counting) >= 3:
        assert max(result) <= max(share, 1 / len(counting)) * sum(result) * (1 + 1e-9)
    for first in range(len(weights)):
        for second in range(len(weights)):
            if weights[first] <= weights[second]:
                assert result[first] <= result[second] * (1 + 1e-9)


@pytest.mark.parametrize(
    ("values", "weights", "median"),
    [
        ([1.0, 2.0, 3.0], [1.0, 1.0, 1.0], 2.0),
        ([3.0, 1.0], [1.0, 1.0], 1.0),  # halves: the smaller of the two
        ([1.0, 2.0], [1.0, 3.0], 2.0),
        ([5.0], [0.0], 5.0),
    ],
)
def test_weighted_median_by_hand(values, weights, median):
    assert weighted_median(values, weights) == median


def test_the_one_that_reaches_farthest_is_left_out_once_there_are_three():
    assert without_extremes([-100.0, -1024.0], [200.0, 150.0]) == (-1024.0, 200.0)
    assert without_extremes([-100.0, -1024.0, -90.0], [200.0, 3072.0, 150.0]) == (-100.0, 200.0)
