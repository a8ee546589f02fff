"""Splits by patient: deterministic, disjoint, and fair to small sites."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from panorgan.cases.case import Case
from panorgan.cases.seeds import derive_seed
from panorgan.cases.splits import SplitSettings, split_cases


def case(number: int, patient: int, site: str = "north") -> Case:
    return Case(f"case{number:03d}", f"patient{patient:02d}", site, Path("image.nii"), ())


def one_scan_each(count: int) -> list[Case]:
    return [case(number, number) for number in range(count)]


def ids(split: list[Case]) -> list[str]:
    return [each.id for each in split]


case_lists = st.lists(st.integers(0, 12), max_size=40).map(lambda ps: [case(n, p) for n, p in enumerate(ps)])
shares = (
    st.tuples(st.floats(0, 0.98), st.floats(0, 0.98))
    .filter(lambda pair: sum(pair) < 1)
    .map(lambda pair: SplitSettings(validation=pair[0], test=pair[1]))
)
seeds = st.integers(0, 2**32)


@given(case_lists, shares, seeds)
def test_splits_partition_the_cases_by_patient(cases, settings, seed) -> None:
    splits = split_cases(cases, settings, seed)
    assert sorted(ids([each for split in splits.values() for each in split])) == ids(cases)
    patients = [{each.patient for each in split} for split in splits.values()]
    assert sum(map(len, patients)) == len({each.patient for each in cases})


@given(case_lists, shares, seeds, st.randoms(use_true_random=False))
def test_the_order_of_cases_does_not_matter(cases, settings, seed, random) -> None:
    shuffled = list(cases)
    random.shuffle(shuffled)
    assert split_cases(shuffled, settings, seed) == split_cases(cases, settings, seed)


@given(st.integers(0, 40), shares, seeds)
def test_every_share_gets_a_patient_as_long_as_one_is_left_to_train(count, settings, seed) -> None:
    splits = split_cases(one_scan_each(count), settings, seed)
    wanted = (settings.validation > 0) + (settings.test > 0)
    assert bool(splits["train"]) == (count > 0)
    assert (len(splits["validation"]) > 0) + (len(splits["test"]) > 0) == min(wanted, max(count - 1, 0))
    for name, share in (("validation", settings.validation), ("test", settings.test)):
        assert len(splits[name]) <= max(share * count + 0.5, share > 0)


@pytest.mark.parametrize(
    ("count", "validation", "test", "sizes"),
    [
        (20, 0.15, 0.25, (12, 3, 5)),
        (10, 0.0, 0.25, (8, 0, 2)),  # 2.5 rounds to the even 2
        (10, 0.2, 0.0, (8, 2, 0)),
        (4, 0.15, 0.25, (2, 1, 1)),
        (3, 0.15, 0.25, (1, 1, 1)),
        (3, 0.45, 0.5, (1, 1, 1)),  # test alone would round to 2
        (2, 0.15, 0.25, (1, 0, 1)),
        (1, 0.15, 0.25, (1, 0, 0)),
        (0, 0.15, 0.25, (0, 0, 0)),
    ],
)
def test_sizes_by_hand(count, validation, test, sizes) -> None:
    splits = split_cases(one_scan_each(count), SplitSettings(validation=validation, test=test), seed=0)
    assert tuple(len(splits[name]) for name in ("train", "validation", "test")) == sizes


def test_the_seed_and_the_site_decide() -> None:
    settings = SplitSettings(validation=0.2, test=0.3)
    cases = one_scan_each(30)
    elsewhere = [case(number, number, site="south") for number in range(30)]
    first = split_cases(cases, settings, seed=1)
    assert split_cases(cases, settings, seed=1) == first
    assert ids(split_cases(cases, settings, seed=2)["test"]) != ids(first["test"])
    assert ids(split_cases(elsewhere, settings, seed=1)["test"]) != ids(first["test"])


def test_a_split_is_more_than_a_prefix() -> None:
    chosen = {tuple(ids(split_cases(one_scan_each(8), SplitSettings(), seed)["test"])) for seed in range(20)}
    assert len(chosen) > 10


@pytest.mark.parametrize("shares", [(0.5, 0.5), (-0.1, 0.2), (0.2, 1.0)])
def test_impossible_shares_are_refused(shares) -> None:
    with pytest.raises(ValidationError):
        SplitSettings(validation=shares[0], test=shares[1])


def test_derived_seeds_depend_on_every_name_and_fit_torch_and_numpy() -> None:
    names = [("north", "train", 1), ("north", "train", 2), ("south", "train", 1), ("north", "pretrain", 1)]
    values = {derive_seed(seed, *name) for seed in (0, 1) for name in names}
    assert len(values) == 8
    assert all(0 <= value < 2**63 for value in values)
    assert derive_seed(0, "north", "train", 1) == derive_seed(0, "north", "train", 1)


def test_a_seed_of_the_split_goes_before_that_of_the_experiment() -> None:
    cases = one_scan_each(20)
    pinned = SplitSettings(seed=7)
    assert split_cases(cases, pinned, 0) == split_cases(cases, pinned, 1) == split_cases(cases, SplitSettings(), 7)
    assert split_cases(cases, SplitSettings(), 0) != split_cases(cases, SplitSettings(), 7)
