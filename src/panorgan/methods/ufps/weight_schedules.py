"""Sample weights, from the teachers' uncertainty and the progress of training (UFPS, eq. 8 and Note 8).

All schedules begin by favouring samples with certain teachers, and turn to the others with time.
"""

from __future__ import annotations

import math
from typing import Literal

import torch

from panorgan.methods.ufps.uncertainty_bank import BankStatistics, UncertaintyBank

Schedule = Literal["tail_shift", "base_decrement", "round_trip_gaussian"]


def sample_weights(
    schedule: Schedule,
    uncertainty: torch.Tensor,
    bank: UncertaintyBank,
    round_number: int,
    rounds: int,
    tail: float = 0.7,
    least: float = 0.0,
) -> torch.Tensor:
    """Weights [B] for the uncertainties [B] of a batch, by a schedule's name.

    `rounds` is R: the last round in which weights count, so that every schedule completes. `tail` is the quantile of
    U_T. The formulas go below 0 where norm(U) > log 2, one case far from all others; training would then unlearn it, so
    weights are clamped at `least`.
    """
    statistics, threshold = bank.statistics(), bank.quantile(tail)
    if schedule == "tail_shift":
        weights = tail_shift(uncertainty, statistics, threshold, round_number, rounds)
    elif schedule == "base_decrement":
        weights = base_decrement(uncertainty, statistics, round_number, rounds)
    else:
        weights = round_trip_gaussian(uncertainty, statistics, threshold, round_number, rounds)
    return weights.clamp(min=least)


def tail_shift(
    uncertainty: torch.Tensor, statistics: BankStatistics, threshold: torch.Tensor, round_number: int, rounds: int
) -> torch.Tensor:
    """Eq. 8: 2 − e^{norm(U) − r/R} above the threshold U_T, 2 − e^{norm(U)} up to it. The tail gains weight with
    time."""
    shift = (uncertainty > threshold) * (round_number / rounds)
    return 2 - torch.exp(statistics.normalised(uncertainty) - shift)


def base_decrement(
    uncertainty: torch.Tensor, statistics: BankStatistics, round_number: int, rounds: int, alpha: float = 1.0
) -> torch.Tensor:
    """2 − ((α − e)·r/R + e)^{norm(U)}: from e to α; with α = 1 all samples count alike in the end."""
    base = (alpha - math.e) * round_number / rounds + math.e
    return 2 - torch.pow(base, statistics.normalised(uncertainty))


def round_trip_gaussian(
    uncertainty: torch.Tensor,
    statistics: BankStatistics,
    threshold: torch.Tensor,
    round_number: int,
    rounds: int,
    beta: float = 0.7,
    width: float = 0.28,
    start: Literal["minimum", "mean"] = "minimum",
) -> torch.Tensor:
    """(1 − β)·G(U) + β·(2 − e^{norm(U)}), G a normal density whose centre goes to the threshold and back.

    The distance is norm(U_T) − norm(U_min), covered in ⌊R/2⌋ rounds. Note 8 prints norm(μ), which is 0, as its start;
    the centre would then pass the threshold, which the text says it does not; `start="mean"` does that. β and the width
    ρ are not in the paper; these are the values of the released code.
    """
    norm = statistics.normalised(uncertainty)
    least = statistics.normalised(statistics.minimum)
    way = statistics.normalised(threshold) - least
    centre = (least if start == "minimum" else torch.zeros_like(least)) + way * _round_trip(round_number, rounds)
    density = torch.exp(-((norm - centre) ** 2) / (2 * width**2)) / (math.sqrt(2 * math.pi) * width)
    return (1 - beta) * density + beta * (2 - torch.exp(norm))


def _round_trip(round_number: int, rounds: int) -> float:
    """0 → 1 in the first half of the rounds, 1 → 0 in the second; at 0 in the odd round that may be left over."""
    half = max(rounds // 2, 1)
    return round_number / half if round_number <= half else max(0.0, 1 - (round_number - half) / half)
