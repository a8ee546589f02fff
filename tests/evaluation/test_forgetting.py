"""What local models forget: hand-computed means over owned and other organs."""

from __future__ import annotations

import math

import pytest

from panorgan.anatomy import Vocabulary
from panorgan.evaluation.forgetting import GLOBAL_MODEL, covered_organs, forgetting

OWNED = {"north": {"liver"}, "south": {"spleen", "pancreas"}}


def row(model: str, organ: str, dice: float, split: str = "test") -> dict[str, object]:
    return {"model": model, "split": split, "site": "north", "case": "a", "organ": organ, "dice": dice}


def rows_of(model: str, liver: float, spleen: float, pancreas: float) -> list[dict[str, object]]:
    return [row(model, "liver", liver), row(model, "spleen", spleen), row(model, "pancreas", pancreas)]


def test_means_on_owned_and_other_organs_by_hand():
    rows = [
        *rows_of("south", 0.1, 0.7, 0.5),
        *rows_of("north", 0.9, 0.2, 0.0),
        *rows_of(GLOBAL_MODEL, 0.8, 0.6, 0.4),
    ]
    found = forgetting(rows, OWNED)
    assert list(found.local) == ["north", "south"]
    assert (found.local["north"].on_owned, found.local["north"].on_others) == pytest.approx((0.9, 0.1))
    assert (found.local["south"].on_owned, found.local["south"].on_others) == pytest.approx((0.6, 0.1))
    assert (found.on_owned, found.on_others) == pytest.approx((0.75, 0.1))
    # The global model over the sites: owned (0.8 + (0.6 + 0.4) / 2) / 2, others ((0.6 + 0.4) / 2 + 0.8) / 2.
    assert found.averaged is not None
    assert (found.averaged.on_owned, found.averaged.on_others) == pytest.approx((0.65, 0.65))
    assert found.averaged.organs == {"liver": 0.8, "pancreas": 0.4, "spleen": 0.6}


def test_every_organ_counts_the_same_however_many_cases_show_it():
    rows = [row("north", "spleen", 0.0), row("north", "spleen", 0.4), row("north", "spleen", 0.5)]
    rows += [row("north", "pancreas", 0.9)]
    assert forgetting(rows, OWNED).local["north"].on_others == pytest.approx((0.3 + 0.9) / 2)


def test_other_splits_do_not_count():
    rows = [row("north", "liver", 0.5), row("north", "liver", 1.0, "external")]
    assert forgetting(rows, OWNED).on_owned == pytest.approx(0.5)
    assert forgetting(rows, OWNED, "external").on_owned == pytest.approx(1.0)


def test_what_nobody_scored_has_no_mean():
    found = forgetting([row("north", "liver", 0.5)], OWNED)
    assert found.averaged is None
    assert math.isnan(found.local["north"].on_others)
    assert math.isnan(found.on_others)
    assert math.isnan(forgetting([], OWNED).on_owned)


def test_a_union_teaches_its_parts_and_an_organ_not_its_tumours():
    vocabulary = Vocabulary(["liver", "liver_tumour", "kidney_left", "kidney_right"])
    assert covered_organs(["liver"], vocabulary) == {"liver"}
    assert covered_organs(["kidney"], vocabulary) == {"kidney", "kidney_left", "kidney_right"}
    assert covered_organs(["liver_tumour", "kidney_left"], vocabulary) == {"liver_tumour", "kidney_left"}
