"""Summaries and the organ × site table against hand-computed numbers."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from panorgan.errors import ConfigError, DataError
from panorgan.evaluation.statistics import bootstrap_interval, organ_site_table, summarise

# --- bootstrap ---


def exact_quantiles(values: list[float], probabilities: list[float]) -> list[float]:
    """Quantiles of the mean over all nⁿ equally likely resamples."""
    means = [np.mean(draw) for draw in itertools.product(values, repeat=len(values))]
    return [float(q) for q in np.quantile(means, probabilities)]


def test_interval_matches_the_full_enumeration_of_resamples() -> None:
    values = [0.1, 0.4, 0.5, 0.7, 0.95]  # 5⁵ = 3125 resamples
    low, high = bootstrap_interval(values, level=0.9, resamples=40_000)
    assert [low, high] == pytest.approx(exact_quantiles(values, [0.05, 0.95]), abs=0.012)


def test_interval_of_many_values_is_near_the_normal_one() -> None:
    values = np.random.default_rng(1).normal(0.8, 0.1, 400)
    low, high = bootstrap_interval(values)
    half_width = 1.96 * values.std(ddof=1) / math.sqrt(400)
    assert low == pytest.approx(values.mean() - half_width, abs=0.001)
    assert high == pytest.approx(values.mean() + half_width, abs=0.001)


def test_interval_does_not_depend_on_the_block_size(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(1).normal(0.8, 0.1, 30)
    whole = bootstrap_interval(values)
    monkeypatch.setattr("panorgan.evaluation.statistics._DRAWS_PER_BLOCK", 30 * 300)
    assert bootstrap_interval(values) == pytest.approx(whole, abs=1e-9)


def test_interval_is_deterministic_and_follows_the_seed() -> None:
    values = [0.3, 0.6, 0.65, 0.7, 0.9, 0.91]
    assert bootstrap_interval(values) == bootstrap_interval(values)
    assert bootstrap_interval(values, seed=1) != bootstrap_interval(values, seed=2)


def test_interval_of_no_value_and_of_one() -> None:
    assert all(math.isnan(end) for end in bootstrap_interval([]))
    assert all(math.isnan(end) for end in bootstrap_interval([math.nan, math.nan]))
    assert bootstrap_interval([0.7]) == (0.7, 0.7)
    assert bootstrap_interval([math.nan, 0.7]) == (0.7, 0.7)


def test_nan_is_ignored() -> None:
    assert bootstrap_interval([0.2, math.nan, 0.4, 0.9]) == bootstrap_interval([0.2, 0.4, 0.9])


def test_values_of_one_group_are_drawn_together() -> None:
    # Two cases of two organs: the mean of a resample of cases is 0.1, 0.5 or 0.9 (chance ¼, ½, ¼). Single
    # values would give 0.1 and 0.9 a chance of 1/16 each, and 0.3, 0.5, 0.7 of 4/16, 6/16, 4/16.
    values, cases = [0.1, 0.1, 0.9, 0.9], ["a", "a", "b", "b"]
    assert bootstrap_interval(values, level=0.8, groups=cases) == pytest.approx((0.1, 0.9))
    assert bootstrap_interval(values, level=0.8) == pytest.approx((0.3, 0.7))
    assert bootstrap_interval(values, level=0.4, groups=cases) == pytest.approx((0.5, 0.5))


def test_a_group_weighs_by_its_values() -> None:
    # Case a has three organs, case b one. Resample means: 0 (aa), 1 (bb) and ¼ (ab), not the plain mean ½.
    values, cases = [0.0, 0.0, 0.0, 1.0], ["a", "a", "a", "b"]
    assert bootstrap_interval(values, level=0.4, groups=cases) == pytest.approx((0.25, 0.25))


def test_a_single_group_gives_its_mean_twice() -> None:
    assert bootstrap_interval([0.2, 0.4], groups=["a", "a"]) == pytest.approx((0.3, 0.3))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0, 1, allow_subnormal=False), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_interval_lies_within_the_values_whatever_their_order(values, shuffler) -> None:
    low, high = bootstrap_interval(values, resamples=200)
    assert min(values) - 1e-9 <= low <= high <= max(values) + 1e-9
    shuffled = list(values)
    shuffler.shuffle(shuffled)
    assert bootstrap_interval(shuffled, resamples=200) == (low, high)


def test_senseless_settings_are_refused() -> None:
    with pytest.raises(ConfigError) as level:
        bootstrap_interval([0.1, 0.2], level=95)
    with pytest.raises(ConfigError) as resamples:
        bootstrap_interval([0.1, 0.2], resamples=0)
    with pytest.raises(DataError) as groups:
        bootstrap_interval([0.1, 0.2], groups=["a"])
    codes = [error.value.code for error in (level, resamples, groups)]
    assert codes == ["bad-interval-level", "bad-resamples", "lengths-differ"]


# --- summarise ---


def test_summary_by_hand() -> None:
    result = summarise([0.5, 0.7, math.nan, 0.9])
    assert result.mean == pytest.approx(0.7)
    assert result.sd == pytest.approx(0.2)  # √((0.2² + 0 + 0.2²) / 2)
    assert (result.n, result.missed) == (3, 1)
    assert (result.low, result.high) == bootstrap_interval([0.5, 0.7, 0.9])


def test_summary_of_no_value_and_of_one() -> None:
    nothing = summarise([])
    assert (nothing.n, nothing.missed) == (0, 0)
    assert all(math.isnan(x) for x in (nothing.mean, nothing.sd, nothing.low, nothing.high))
    one = summarise([0.4], missed=1)
    assert (one.mean, one.n, one.low, one.high, one.missed) == (0.4, 1, 0.4, 0.4, 1)
    assert math.isnan(one.sd)


# --- the table ---


def row(split: str, site: str, case: str, organ: str, dice: object, missed: object = False) -> dict[str, object]:
    return {"split": split, "site": site, "case": case, "organ": organ, "dice": dice, "missed": missed}


ROWS = [
    row("test", "north", "1", "liver", 0.9),
    row("test", "north", "2", "liver", "0.7"),
    row("test", "north", "1", "spleen", "0.5", "False"),
    row("test", "south", "1", "liver", 0.0, "True"),
    row("test", "south", "2", "liver", "nan", "True"),
    row("test", "south", "3", "liver", "", ""),
    row("test", "south", "4", "liver", 0.6, 0),
    row("external", "abroad", "1", "liver", 0.4),
    row("external", "abroad", "2", "liver", 0.2),
    row("validation", "north", "9", "liver", 0.01),
]


def test_table_by_hand() -> None:
    table = organ_site_table(ROWS)
    assert table.metric == "dice"
    assert {key: (round(cell.mean, 9), cell.n, cell.missed) for key, cell in table.cells.items()} == {
        ("liver", "abroad"): (0.3, 2, 0),
        ("liver", "north"): (0.8, 2, 0),
        ("liver", "south"): (0.3, 2, 2),
        ("spleen", "north"): (0.5, 1, 0),
    }
    # Over the federation only: 0.9, 0.7, 0.0, 0.6.
    assert table.organs["liver"].mean == pytest.approx(2.2 / 4)
    assert table.organs["liver"].missed == 2
    assert table.organs["spleen"].mean == pytest.approx(0.5)
    assert list(table.organs) == ["liver", "spleen"]
    # Over all organs of a site.
    assert table.sites["north"].mean == pytest.approx(2.1 / 3)
    assert table.sites["abroad"].mean == pytest.approx(0.3)
    assert list(table.sites) == ["abroad", "north", "south"]
    # Over rows, not over cells (which would be (0.8 + 0.3 + 0.5) / 3).
    assert table.overall.mean == pytest.approx(2.7 / 5)
    assert (table.overall.n, table.overall.missed) == (5, 2)
    assert (table.external.mean, table.external.n) == (pytest.approx(0.3), 2)


def test_intervals_over_several_organs_draw_whole_cases() -> None:
    # Both organs of a case agree, so two cases are all the evidence there is, however many organs they have.
    rows = [row("test", "north", case, organ, value) for case, value in (("1", 0.1), ("2", 0.9)) for organ in "abcdef"]
    site = organ_site_table(rows).sites["north"]
    assert (site.low, site.high) == pytest.approx((0.1, 0.9))


def test_equal_case_names_at_two_sites_are_two_cases() -> None:
    rows = [row("test", "north", "1", "liver", 0.2), row("test", "south", "1", "liver", 0.8)]
    overall = organ_site_table(rows).overall
    assert (overall.low, overall.high) == pytest.approx((0.2, 0.8))


def test_table_does_not_change_with_the_order_of_the_rows() -> None:
    generator = random.Random(3)
    rows = [
        row(split, site, str(case), organ, generator.random())
        for split, site in (("test", "north"), ("test", "south"), ("external", "abroad"))
        for case in range(5)
        for organ in ("liver", "spleen")
    ]
    expected = organ_site_table(rows, resamples=100)
    for _ in range(3):
        generator.shuffle(rows)
        assert organ_site_table(rows, resamples=100) == expected


def test_a_cell_does_not_change_when_other_cells_are_added() -> None:
    few = [r for r in ROWS if r["site"] == "north"]
    assert organ_site_table(few).cells["liver", "north"] == organ_site_table(ROWS).cells["liver", "north"]


def test_without_a_missed_column_nan_is_a_miss() -> None:
    rows = [{k: v for k, v in r.items() if k != "missed"} for r in ROWS]
    assert organ_site_table(rows).cells["liver", "south"].missed == 2


def test_another_metric_can_be_chosen() -> None:
    rows = [{**r, "hd95": 10.0} for r in ROWS]
    assert organ_site_table(rows, metric="hd95").overall.mean == 10


def test_no_rows_give_an_empty_table() -> None:
    table = organ_site_table([])
    assert (table.cells, table.organs, table.sites) == ({}, {}, {})
    assert (table.overall.n, table.external.n) == (0, 0)
    assert math.isnan(table.overall.mean)


def test_unknown_column_names_the_near_one() -> None:
    with pytest.raises(DataError) as error:
        organ_site_table(ROWS, metric="dyce")
    assert error.value.code == "no-column"
    assert "'dice'" in error.value.fix


@pytest.mark.parametrize("bad", ["high", "inf", math.inf, [0.1]])
def test_a_value_that_is_no_score_is_refused(bad: object) -> None:
    with pytest.raises(DataError) as error:
        organ_site_table([ROWS[0], row("test", "north", "2", "liver", bad)])
    assert error.value.code == "not-a-score"
    assert error.value.where == "metrics row 2"


def test_an_unreadable_miss_is_refused() -> None:
    with pytest.raises(DataError) as error:
        organ_site_table([row("test", "north", "1", "liver", 0.5, "maybe")])
    assert error.value.code == "not-a-flag"


def test_rows_that_would_count_twice_are_refused() -> None:
    with pytest.raises(DataError) as twice:
        organ_site_table([ROWS[0], ROWS[0]])
    with pytest.raises(DataError) as mixed:
        organ_site_table([ROWS[0], row("external", "north", "7", "liver", 0.5)])
    assert (twice.value.code, mixed.value.code) == ("scored-twice", "mixed-splits")
