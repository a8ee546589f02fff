"""Splits by patient: deterministic, disjoint, fair to small sites, and the same when patients are added."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from refusing import refused

from panorgan.data.case import Case
from panorgan.data.splits import SplitSettings, split_cases
from panorgan.errors import DataError
from panorgan.seeds import derive_seed


def case(number: int, patient: int, site: str = "north") -> Case:
    return Case(f"case{number:03d}", f"patient{patient:02d}", site, Path("image.nii"), ())


def one_scan_each(count: int) -> list[Case]:
    return [case(number, number) for number in range(count)]


def ids(split: list[Case]) -> list[str]:
    return [each.id for each in split]


case_lists = st.lists(st.integers(0, 12), max_size=40).map(lambda ps: [case(n, p) for n, p in enumerate(ps)])
seeds = st.integers(0, 2**32)
pairs = st.tuples(st.floats(0, 0.98), st.floats(0, 0.98)).filter(lambda pair: sum(pair) < 1)
stable = pairs.map(lambda pair: SplitSettings(validation=pair[0], test=pair[1]))
balanced = pairs.map(lambda pair: SplitSettings(validation=pair[0], test=pair[1], balanced=True))
grown = st.tuples(st.sets(st.integers(0, 99), min_size=2, max_size=12), st.sets(st.integers(0, 99), max_size=6))


def named(cases: list[Case], shares: SplitSettings, seed: int) -> dict[str, str] | None:
    """Split by patient; None if no patient is left to train on."""
    try:
        shared = split_cases(cases, shares, seed)
    except DataError as error:
        if error.code != "nobody-to-train-on":
            raise
        return None
    return {each.patient: split for split, own in shared.items() for each in own}


@given(case_lists, stable | balanced, seeds)
def test_splits_partition_the_cases_by_patient(cases, shares, seed) -> None:
    if named(cases, shares, seed) is None:
        return
    splits = split_cases(cases, shares, seed)
    assert sorted(ids([each for split in splits.values() for each in split])) == ids(cases)
    patients = [{each.patient for each in split} for split in splits.values()]
    assert sum(map(len, patients)) == len({each.patient for each in cases})


@given(case_lists, stable | balanced, seeds, st.randoms(use_true_random=False))
def test_the_order_of_cases_does_not_matter(cases, shares, seed, random) -> None:
    shuffled = list(cases)
    random.shuffle(shuffled)
    assert named(shuffled, shares, seed) == named(cases, shares, seed)
    if named(cases, shares, seed) is not None:
        assert split_cases(shuffled, shares, seed) == split_cases(cases, shares, seed)


@given(st.integers(0, 40), balanced, seeds)
def test_every_share_gets_a_patient_as_long_as_one_is_left_to_train(count, shares, seed) -> None:
    splits = split_cases(one_scan_each(count), shares, seed)
    wanted = (shares.validation > 0) + (shares.test > 0)
    assert bool(splits["train"]) == (count > 0)
    assert (len(splits["validation"]) > 0) + (len(splits["test"]) > 0) == min(wanted, max(count - 1, 0))
    for name, share in (("validation", shares.validation), ("test", shares.test)):
        assert len(splits[name]) <= max(share * count + 0.5, share > 0)


@given(st.integers(2, 40), stable, seeds)
def test_a_stable_split_leaves_no_share_empty_that_it_can_fill(count, shares, seed) -> None:
    """Nobody of the test share is lent to another split, so validation needs two patients outside of it."""
    found = named(one_scan_each(count), shares, seed)
    if found is None:
        assert shares.test > 0
        return
    sizes = {split: list(found.values()).count(split) for split in ("train", "validation", "test")}
    assert sizes["train"] > 0
    assert (sizes["test"] > 0) == (shares.test > 0)
    assert (sizes["validation"] > 0) == (shares.validation > 0 and count - sizes["test"] > 1)


@settings(max_examples=500)
@given(grown, stable, seeds)
def test_whoever_was_trained_on_is_never_tested_when_patients_are_added(patients, shares, seed) -> None:
    before, added = patients
    small = named([case(n, n) for n in before], shares, seed)
    large = named([case(n, n) for n in before | added], shares, seed)
    if small is None or large is None:
        return  # refused: no model, so nothing that was trained on
    tested = {patient for patient, split in large.items() if split == "test"}
    assert tested & small.keys() <= {patient for patient, split in small.items() if split == "test"}


@settings(max_examples=300)
@given(st.sets(st.integers(0, 99), min_size=20, max_size=60), st.integers(0, 99), seeds)
def test_a_new_patient_moves_nobody_where_every_share_has_somebody(before, new, seed) -> None:
    shares = SplitSettings()
    small = named([case(n, n) for n in before], shares, seed)
    large = named([case(n, n) for n in before | {new}], shares, seed)
    moved = {patient for patient in small if small[patient] != large[patient]}
    sizes = [list(small.values()).count(split) for split in ("validation", "test")]
    assert not moved or min(sizes) == 1, "only who filled an empty split may be moved"


def test_one_more_patient_among_forty_moves_nobody() -> None:
    for seed in range(20):
        before = named(one_scan_each(40), SplitSettings(), seed)
        after = named(one_scan_each(41), SplitSettings(), seed)
        assert {patient: after[patient] for patient in before} == before


@settings(max_examples=500)
@given(st.sets(st.integers(0, 99), min_size=2, max_size=30), st.integers(0, 99), balanced, seeds)
def test_one_addition_to_a_balanced_split_takes_nobody_from_training_to_test(before, new, shares, seed) -> None:
    small = named([case(n, n) for n in before], shares, seed)
    large = named([case(n, n) for n in before | {new}], shares, seed)
    moved = {patient for patient in small if small[patient] == "train" and large[patient] == "test"}
    assert not moved or shares.validation == 0


def test_a_balanced_split_does_move_others() -> None:
    """The trade-off is real: it is why stable splits are the default."""
    moves = 0
    for seed in range(20):
        shares = SplitSettings(balanced=True)
        before, after = (named(one_scan_each(count), shares, seed) for count in (40, 41))
        moves += sum(before[patient] != after[patient] for patient in before)
    assert moves > 0


def test_stable_shares_are_right_on_average() -> None:
    found = [named(one_scan_each(50), SplitSettings(validation=0.15, test=0.25), seed) for seed in range(100)]
    everyone = [split for names in found for split in names.values()]
    assert everyone.count("test") / len(everyone) == pytest.approx(0.25, abs=0.02)
    assert everyone.count("validation") / len(everyone) == pytest.approx(0.15, abs=0.02)


def test_a_site_whose_patients_all_fall_into_test_is_refused_with_ways_out() -> None:
    shares = SplitSettings(test=0.9, validation=0.0)
    seed = next(seed for seed in range(50) if named(one_scan_each(3), shares, seed) is None)
    with refused("nobody-to-train-on") as caught:
        split_cases(one_scan_each(3), shares, seed)
    assert "splits.seed" in caught.value.fix
    assert named(one_scan_each(3), shares.model_copy(update={"balanced": True}), seed) is not None


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
def test_balanced_sizes_by_hand(count, validation, test, sizes) -> None:
    splits = split_cases(one_scan_each(count), SplitSettings(validation=validation, test=test, balanced=True), seed=0)
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
