"""Sample weights at given uncertainties and rounds, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from panorgan.methods.ufps.uncertainty_bank import BankStatistics, UncertaintyBank
from panorgan.methods.ufps.weight_schedules import base_decrement, round_trip_gaussian, sample_weights, tail_shift

# μ = 0.5 and U from 0.25 to 1.25: norm(U) = U − 0.5, without rounding. U_T = 0.75.
BANK = BankStatistics(*(torch.tensor(x) for x in (0.5, 0.1, 0.25, 1.25)))
THRESHOLD = torch.tensor(0.75)
U = torch.tensor([0.25, 0.5, 0.75, 1.0])
NORM = [-0.25, 0.0, 0.25, 0.5]


@pytest.mark.parametrize("r", [0, 100, 500])
def test_tail_shift(r):
    """At the threshold itself a sample is not in the tail."""
    expected = [2 - math.exp(n) for n in NORM[:3]] + [2 - math.exp(0.5 - r / 500)]
    assert tail_shift(U, BANK, THRESHOLD, r, 500).tolist() == pytest.approx(expected, rel=1e-6)


def test_tail_shift_in_plain_numbers():
    found = tail_shift(U, BANK, THRESHOLD, 250, 500).tolist()
    assert found == pytest.approx([1.221199, 1.0, 0.715975, 1.0], abs=1e-6)


@pytest.mark.parametrize(("r", "base"), [(0, math.e), (250, (1 + math.e) / 2), (500, 1.0)])
def test_base_decrement(r, base):
    expected = [2 - base**n for n in NORM]
    assert base_decrement(U, BANK, r, 500).tolist() == pytest.approx(expected, rel=1e-6)
    other = base_decrement(U, BANK, r, 500, alpha=2.0).tolist()
    assert other == pytest.approx([2 - ((2 - math.e) * r / 500 + math.e) ** n for n in NORM], rel=1e-6)


# norm(U_min) = −0.25 and norm(U_T) = 0.25: the way is 0.5.
@pytest.mark.parametrize(
    ("r", "rounds", "centre"),
    [(0, 500, -0.25), (125, 500, 0.0), (250, 500, 0.25), (375, 500, 0.0), (500, 500, -0.25), (5, 5, -0.25)],
)
def test_round_trip_gaussian(r, rounds, centre):
    def by_hand(norm: float, beta: float, width: float) -> float:
        density = math.exp(-((norm - centre) ** 2) / (2 * width**2)) / (math.sqrt(2 * math.pi) * width)
        return (1 - beta) * density + beta * (2 - math.exp(norm))

    found = round_trip_gaussian(U, BANK, THRESHOLD, r, rounds).tolist()
    assert found == pytest.approx([by_hand(n, 0.7, 0.28) for n in NORM], rel=1e-5)
    found = round_trip_gaussian(U, BANK, THRESHOLD, r, rounds, beta=0.25, width=0.5).tolist()
    assert found == pytest.approx([by_hand(n, 0.25, 0.5) for n in NORM], rel=1e-5)


def test_round_trip_gaussian_as_printed_starts_at_the_mean():
    """Centres 0.25 further than above; the density at its centre is 1/(√(2π)·0.28) = 1.42479."""
    found = round_trip_gaussian(U, BANK, THRESHOLD, 0, 500, start="mean")[1].item()
    assert found == pytest.approx(0.3 * 1.424794 + 0.7 * 1.0, abs=1e-5)
    found = round_trip_gaussian(U, BANK, THRESHOLD, 250, 500, start="mean")[3].item()
    assert found == pytest.approx(0.3 * 1.424794 + 0.7 * (2 - math.exp(0.5)), abs=1e-5)


def test_a_single_round_has_a_way_too():
    assert torch.isfinite(round_trip_gaussian(U, BANK, THRESHOLD, 1, 1)).all()


def test_from_a_bank():
    """0, 0.25, 0.75, 1: μ = 0.5, the 0.7 quantile lies at place 2.1, 0.775."""
    bank = UncertaintyBank("abcd")
    bank.put("abcd", torch.tensor([0.0, 0.25, 0.75, 1.0]))
    seen = torch.tensor([0.25, 0.75, 1.0])
    found = sample_weights("tail_shift", seen, bank, 200, 500).tolist()
    assert found == pytest.approx([2 - math.exp(-0.25), 2 - math.exp(0.25), 2 - math.exp(0.5 - 0.4)], rel=1e-6)
    lower = sample_weights("tail_shift", seen, bank, 200, 500, tail=0.5).tolist()
    assert lower[1] == pytest.approx(2 - math.exp(0.25 - 0.4), rel=1e-6)
    found = sample_weights("base_decrement", seen, bank, 500, 500).tolist()
    assert found == pytest.approx([1.0, 1.0, 1.0])
    found = sample_weights("round_trip_gaussian", seen, bank, 0, 500)
    torch.testing.assert_close(found, round_trip_gaussian(seen, bank.statistics(), bank.quantile(0.7), 0, 500))


@pytest.mark.parametrize("schedule", ["tail_shift", "base_decrement"])
def test_a_bank_without_spread_weighs_all_alike(schedule):
    bank = UncertaintyBank("ab")
    bank.put("ab", torch.tensor([0.2, 0.2]))
    assert sample_weights(schedule, torch.tensor([0.2]), bank, 200, 500).tolist() == [1.0]


def test_no_weight_is_negative():
    """One case far from nineteen others: norm = 0.95, 2 − e^0.95 = −0.586. Training would unlearn it."""
    bank = UncertaintyBank([str(place) for place in range(20)])
    bank.put([str(place) for place in range(20)], torch.tensor([0.0] * 19 + [1.0]))
    odd = torch.tensor([1.0])
    exact = tail_shift(odd, bank.statistics(), bank.quantile(0.7), 0, 500)
    assert exact.item() == pytest.approx(2 - math.exp(0.95), rel=1e-5)
    assert sample_weights("tail_shift", odd, bank, 0, 500).item() == 0.0
    assert sample_weights("tail_shift", odd, bank, 0, 500, least=0.1).item() == pytest.approx(0.1)
