"""Means over seeds, pairing, the signed-rank test and Holm's correction, against numbers worked out by hand."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
from scipy.stats import wilcoxon

from panorgan.errors import DataError
from panorgan.evaluation.comparison import (
    ALL_ORGANS,
    EXTERNAL,
    FEDERATION,
    LABELLED,
    NOT_LABELLED,
    Comparison,
    Place,
    Score,
    compare_scores,
    holm,
    over_seeds,
    pair_patients,
    read_scores,
    signed_rank,
)


def score(dice: float, case: str = "c1", seed: int = 0, organ: str = "liver", **changes: object) -> Score:
    values = {"dice": dice, "assd": 1.0}
    plain = Score(seed, "test", "north", str(changes.get("patient", case)), case, organ, values, True)
    return plain._replace(**changes)  # type: ignore[arg-type]


def test_holm_by_hand() -> None:
    """Sorted: 0.005·4 = 0.02, 0.01·3 = 0.03, 0.03·2 = 0.06, 0.04·1 = 0.04, which must not fall below 0.06."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    assert holm([]) == []


def test_holm_does_not_count_what_was_not_tested() -> None:
    first, untested, last = holm([0.01, math.nan, 0.03])
    assert (first, last) == pytest.approx((0.02, 0.03))
    assert math.isnan(untested)


def test_mean_and_spread_over_seeds() -> None:
    """Seed means 0.6 and 0.9: mean 0.75, sample standard deviation 0.3 / √2."""
    scores = [score(0.5), score(0.7, "c2"), score(0.8, seed=1), score(1.0, "c2", seed=1)]
    assert over_seeds(scores) == pytest.approx((0.75, 0.3 / math.sqrt(2)))
    assert math.isnan(over_seeds(scores[:2])[1])


def test_seeds_count_the_same_whatever_they_tested() -> None:
    """One score 0.2 in seed 0, three of 0.8 in seed 1: (0.2 + 0.8) / 2, not the mean of the four."""
    scores = [score(0.2), *(score(0.8, case, seed=1) for case in "abc")]
    assert over_seeds(scores)[0] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("differences", "p"),
    [
        ([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], 2 / 64),  # all above: one of the 2⁶ signs, and its mirror image
        ([-0.1, 0.2, 0.3, 0.4, 0.5, 0.6], 4 / 64),  # rank sums 0 and 1 below, and their mirror images
        ([0.1, -0.2, 0.3, 0.4, 0.5, 0.6, 0.7], 6 / 128),  # rank sum 2 below: {}, {1}, {2}
        ([0.0] * 8, 1.0),
        ([0.1, 0.2, 0.3, 0.4, 0.5, 0.0], 2 / 32),  # five that differ: a normal approximation says 0.043
        ([0.2, 0.1, 0.1, 0.1, 0.1, 0.1], 2 / 64),  # ties too: 0.033 by the approximation
        ([0.1, 0.1, -0.1, 0.1, 0.1, 0.1], 14 / 64),  # six equal ones: 0 or 1 of them negative, and the mirror images
        ([0.1] * 15 + [-0.1] * 5, 2 * 21_700 / 2**20),  # Σ C(20, k) for k ≤ 5
        ([0.3 - 0.2, 0.1, -0.1, 0.1, 0.1, 0.1], 14 / 64),  # equal but for the last bit
    ],
)
def test_signed_rank_is_exact_for_few_pairs(differences: list[float], p: float) -> None:
    assert signed_rank(differences) == pytest.approx(p)


@pytest.mark.parametrize("pairs", [6, 13, 25, 50])
def test_signed_rank_agrees_with_scipy_where_scipy_is_exact(pairs: int) -> None:
    draw = random.Random(pairs)
    differences = [draw.gauss(0.3, 1.0) for _ in range(pairs)]
    assert signed_rank(differences) == pytest.approx(wilcoxon(differences, method="exact").pvalue, rel=1e-9)


def test_signed_rank_of_many_pairs_is_close_to_the_exact_one() -> None:
    """51 and more go to the normal approximation; the step from 50 must not be seen."""
    draw = random.Random(0)
    differences = [draw.gauss(0.2, 1.0) for _ in range(51)]
    assert signed_rank(differences) == pytest.approx(wilcoxon(differences, method="exact").pvalue, abs=0.005)
    assert signed_rank([*differences, *[0.0] * 9]) == signed_rank(differences)  # these say nothing


def test_five_pairs_are_too_few() -> None:
    assert math.isnan(signed_rank([0.1, 0.2, 0.3, 0.4, 0.5]))
    assert math.isnan(signed_rank([0.0] * 5))


def test_pairs_are_patients() -> None:
    """Patient p has two cases in two seeds: (0.2 + 0.4 + 0.6 + 0.8) / 4."""
    ours = [
        score(0.2, "a", patient="p"),
        score(0.4, "b", patient="p"),
        score(0.6, "a", 1, patient="p"),
        score(0.8, "b", 1, patient="p"),
        score(0.9, "c"),
    ]
    theirs = [s._replace(values={**s.values, "dice": s.dice / 2}) for s in ours]
    assert pair_patients(ours, theirs) == [pytest.approx((0.9, 0.45)), pytest.approx((0.5, 0.25))]


def test_same_name_at_two_sites_is_two_patients() -> None:
    ours = [score(0.2), score(0.6, site="south")]
    assert pair_patients(ours, ours) == [(0.2, 0.2), (0.6, 0.6)]


def test_a_missing_case_is_refused() -> None:
    ours = [score(0.5), score(0.7, "c2")]
    with pytest.raises(DataError) as error:
        pair_patients(ours, ours[:1])
    assert error.value.code == "other-cases"
    assert "case c2" in error.value.where


def test_seeds_and_organs_that_only_one_has_are_left_out() -> None:
    """A run that failed leaves a gap; the others are still paired."""
    ours = [score(0.4), score(0.8, seed=1), score(0.1, organ="spleen")]
    assert pair_patients(ours, [score(0.3)]) == [(0.4, 0.3)]
    assert pair_patients(ours, [score(0.3, seed=2)]) == []


def paired(gain: float, organs: Sequence[str] = ("liver", "spleen"), patients: int = 6) -> list[Score]:
    """Patients 0, 1, … score 0.1, 0.11, …; `gain` grows a little with the patient so that no two differences tie."""
    return [
        score(0.1 + 0.01 * index + gain * (1 + 0.1 * index), f"c{index}", organ=organ)
        for index in range(patients)
        for organ in organs
    ]


def test_the_family_of_a_correction() -> None:
    """Two methods × two organs: 4 · 2/64. All organs together: two methods, 2 · 2/64."""
    compared = compare_scores({"r": paired(0), "a": paired(0.1), "b": paired(-0.05)}, "r", ["liver", "spleen"])
    for method in ("a", "b"):
        for organ in ("liver", "spleen"):
            figure = compared.figures[method, organ, FEDERATION]
            assert (figure.p, figure.p_holm) == pytest.approx((2 / 64, 8 / 64))
            assert not figure.differs
        whole = compared.figures[method, ALL_ORGANS, FEDERATION]
        assert (whole.p, whole.p_holm, whole.pairs) == pytest.approx((2 / 64, 4 / 64, 6))
    # Gains 0.1, 0.11, … 0.15.
    assert compared.figures["a", "liver", FEDERATION].difference == pytest.approx(0.125)
    reference = compared.figures["r", "liver", FEDERATION]
    assert math.isnan(reference.p)
    assert math.isnan(reference.difference)


def test_one_method_against_the_reference_needs_no_correction() -> None:
    compared = compare_scores({"r": paired(0, ["liver"]), "a": paired(0.1, ["liver"])}, "r", ["liver"])
    figure = compared.figures["a", "liver", FEDERATION]
    assert figure.p_holm == figure.p == pytest.approx(2 / 64)
    assert figure.differs


def by_place(method_scores: Sequence[Score]) -> tuple[Comparison, dict[Place, float]]:
    compared = compare_scores({"m": method_scores}, "m", ["liver", "spleen"])
    return compared, {p: f.mean for (_, organ, p), f in compared.figures.items() if organ == ALL_ORGANS}


def test_places() -> None:
    scores = [
        score(0.9),
        score(0.5, organ="spleen", labelled=False),
        score(0.7, "c9", site="south", organ="spleen"),
        score(0.1, "c8", site="island", split="external", labelled=False),
    ]
    compared, means = by_place(scores)
    assert means[FEDERATION] == pytest.approx(0.7)
    assert means[LABELLED] == pytest.approx(0.8)
    assert means[NOT_LABELLED] == pytest.approx(0.5)
    assert means[EXTERNAL] == means[Place("site", "island")] == pytest.approx(0.1)
    assert means[Place("site", "north")] == pytest.approx(0.7)
    assert compared.external_sites == {"island"}
    assert [place.site for place in compared.places if place.kind == "site"] == ["north", "south", "island"]
    assert compared.figure("m", "spleen", EXTERNAL) is None
    assert compared.first_place == FEDERATION
    assert compared.figure("m").mean == pytest.approx(0.7)


def test_where_only_external_sites_were_scored_they_come_first() -> None:
    compared, means = by_place([score(0.1, "c8", site="island", split="external", labelled=False)])
    assert compared.first_place == EXTERNAL
    assert compared.figure("m").mean == means[EXTERNAL] == pytest.approx(0.1)
    assert [place for place in compared.places if compared.scored_at(place)] == [Place("site", "island"), EXTERNAL]
    assert by_place([score(0.9)])[0].first_place == FEDERATION


def test_interval_draws_patients_and_not_their_cases_or_seeds() -> None:
    """One patient with many values gives nothing to draw from; so do two that are alike."""
    alone = [score(0.1 * index, f"c{index}", index % 2, patient="p") for index in range(8)]
    figure = compare_scores({"m": alone}, "m", ["liver"]).figures["m", "liver", FEDERATION]
    assert figure.low == figure.high == pytest.approx(0.35)
    apart = [s._replace(patient=s.case) for s in alone]
    figure = compare_scores({"m": apart}, "m", ["liver"]).figures["m", "liver", FEDERATION]
    assert figure.low < 0.3 < 0.4 < figure.high
    assert (figure.seeds, figure.cases) == (2, 8)


def test_order_does_not_matter() -> None:
    scores = {"r": paired(0), "a": paired(0.1)}
    shuffled = {method: random.Random(1).sample(some, len(some)) for method, some in scores.items()}
    assert (
        compare_scores(shuffled, "r", ["liver"]).figures["a", "liver", FEDERATION]
        == (compare_scores(scores, "r", ["liver"]).figures["a", "liver", FEDERATION])
    )


def test_rows_become_scores() -> None:
    row = {"split": "test", "site": "north", "case": "c1", "organ": "liver", "dice": 0.0, "assd": math.nan}
    other = {**row, "organ": "spleen", "dice": 0.5, "assd": 3.0}
    first, second = read_scores([row, other], 3, lambda site, organ: organ == "spleen", {("north", "c1"): "p1"})
    assert first[:6] == (3, "test", "north", "p1", "c1", "liver")
    assert (first.dice, first.missed, first.labelled) == (0.0, True, False)
    assert (second.values["assd"], second.missed, second.labelled) == (3.0, False, True)
    figure = compare_scores({"m": [first]}, "m", ["liver"]).figures["m", "liver", FEDERATION]
    assert (figure.mean, figure.missed) == (0.0, 1)
