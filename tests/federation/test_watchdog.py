"""Organs that a federation is losing are named, once, and not for an accident."""

from __future__ import annotations

import pytest

from panorgan.federation.watchdog import Watchdog

FINE = {"north": {"liver": 0.8}, "south": {"spleen": 0.7}}
LOST = {"north": {"liver": 0.8}, "south": {"spleen": 0.01}}
NORMAL = {"north": {"liver": 1.1}, "south": {"spleen": 0.9}}
FLOODED = {"north": {"liver": 1.1}, "south": {"spleen": 8.0}}


def named(told: list[str]) -> list[str]:
    return [sentence.split()[0] for sentence in told]


@pytest.mark.parametrize(("dice", "volume"), [(LOST, NORMAL), (FINE, FLOODED)])
def test_an_organ_in_trouble_twice_in_a_row_is_named_once(dice: dict, volume: dict) -> None:
    dog = Watchdog()
    told = [named(dog.look(progress, dice, volume)) for progress in (0.3, 0.4, 0.5, 0.6)]
    assert told == [[], ["spleen"], [], []]


def test_the_sites_that_annotate_it_are_named() -> None:
    dog = Watchdog()
    dog.look(0.5, LOST, NORMAL)
    (sentence,) = dog.look(0.6, LOST, NORMAL)
    assert "south" in sentence
    assert "north" not in sentence


def test_one_bad_validation_is_an_accident() -> None:
    dog = Watchdog()
    for dice in (LOST, FINE, LOST, FINE):
        assert dog.look(0.5, dice, NORMAL) == []


def test_early_rounds_are_not_judged() -> None:
    dog = Watchdog()
    assert [dog.look(progress, LOST, FLOODED) for progress in (0.05, 0.1, 0.2)] == [[], [], []]


def test_it_is_not_lost_where_one_owner_finds_it() -> None:
    dog = Watchdog()
    both = {"south": {"spleen": 0.0}, "north": {"spleen": 0.6}}
    assert [dog.look(0.5, both, {}) for _ in range(3)] == [[], [], []]


def test_a_model_that_knows_nothing_yet_has_lost_nothing() -> None:
    dog = Watchdog()
    assert [dog.look(0.5, {"north": {"liver": 0.0}, "south": {"spleen": 0.0}}, {}) for _ in range(3)] == [[], [], []]


def test_an_organ_that_came_back_and_went_again_is_named_again() -> None:
    dog = Watchdog()
    told = [named(dog.look(0.5, dice, {})) for dice in (LOST, LOST, FINE, LOST, LOST)]
    assert told == [[], ["spleen"], [], [], ["spleen"]]
