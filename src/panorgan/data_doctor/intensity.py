"""What a scan's values say: CT or MR, and whether a CT is still in Hounsfield units."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from panorgan.data_doctor.files import Problem

# Percentiles of this many voxels are as good as those of all.
_ENOUGH = 2_000_000
_AIR = -1000.0
# Dense bone ends near 2000 HU. Metal lies above, and some scanners write it without an end, but it is small.
_METAL_HU, _MOST_METAL = 2000.0, 0.05
_INT16, _MOST_BEYOND = 32768.0, 0.02
_AGAIN = "Convert the scan again from DICOM with its rescale slope and intercept (dcm2niix does), once."


@dataclass(frozen=True)
class Values:
    """The scan's values in numbers; shares are of all voxels.

    `at_min`, `at_max` hold exactly the least or largest value. `soft` lies within ±200, where fat, water and soft
    tissue of a CT are, `shifted` the same around +1024; `metal` lies above bone, `beyond` outside of 16 bits. `air` is
    the most frequent level below −300, NaN without one.
    """

    low: float
    high: float
    percentiles: Mapping[str, float]
    at_min: float
    at_max: float
    soft: float
    shifted: float
    dark: float
    metal: float
    beyond: float
    air: float

    def plain(self) -> dict[str, float]:
        """For the report."""
        return {"min": self.low, **self.percentiles, "max": self.high}


def measure(voxels: NDArray[Any]) -> Values:
    """Numbers about a scan [X, Y, Z] of finite values."""
    low, high = float(voxels.min()), float(voxels.max())
    some = voxels.ravel(order="K")[:: max(1, round(voxels.size / _ENOUGH))].astype(np.float64)
    p1, median, p99 = (float(value) for value in np.percentile(some, (1, 50, 99)))
    dark = some[some < -300]
    at_min = float((some == low).mean())
    return Values(
        low,
        high,
        {"p1": p1, "median": median, "p99": p99},
        at_min,
        float((some == high).mean()),
        float((np.abs(some) <= 200).mean()),
        float((np.abs(some - 1024) <= 200).mean()),
        len(dark) / len(some),
        float((some > _METAL_HU).mean()),
        float((np.abs(some) > _INT16).mean()),
        _level(dark, low, at_min),
    )


def _level(dark: NDArray[np.float64], low: float, at_min: float) -> float:
    """The most frequent value, in steps of 25. Padding around a round field of view is one exact value, not air."""
    rest = dark[dark > low] if at_min > 0.005 and low < -1100 else dark
    # Padding may be all that there is: a scan with slope 2 whose air was cut at one value.
    rest = rest if len(rest) > 0.02 * max(len(dark), 1) else dark
    if not len(rest):
        return float("nan")
    bins = np.round(rest / 25).astype(np.int64)
    return float(25 * (np.bincount(bins - bins.min()).argmax() + bins.min()))


def guess_modality(values: Values) -> str:
    """CT where there is air of about −1000 HU, MR where nothing is negative but noise; empty when unsure."""
    if values.percentiles["p1"] < -300 and abs(values.air - _AIR) <= 200:
        return "CT"
    return "MR" if values.percentiles["p1"] > -25 and values.low > -200 else ""


def check_ct(values: Values, declared_in: str = "") -> Problem | None:
    """What keeps a scan declared or recognised as CT from being in Hounsfield units; the most telling reason only.

    `declared_in` says where the modality is written, for the fix.
    """
    span = f"its values run from {values.low:.5g} to {values.high:.5g}"
    if values.beyond > _MOST_BEYOND:
        why = f"{span}; {values.beyond:.0%} of the voxels lie outside of 16 bits"
        return Problem("hu-overflow", "A CT holds values beyond 16 bits.", why, _AGAIN)
    if values.low < -50 and values.metal > _MOST_METAL:
        why = (
            f"{span}; {values.metal:.0%} of the voxels are above {_METAL_HU:.0f} HU, denser than bone: air was wrapped"
        )
        return Problem("hu-overflow", "A CT holds values that no body has.", why, _AGAIN)
    if (values.low >= -1 and values.high <= 256) or values.high - values.low <= 50:
        return Problem(
            "hu-lost", "A CT is not in Hounsfield units.", f"{span}: 8-bit or normalised grey values", _AGAIN
        )
    if values.low > -200 and values.shifted > 0.1:
        why = f"{span}; {values.shifted:.0%} of the voxels lie around +1024, where soft tissue is when 1024 was added"
        return Problem("hu-offset", "A CT is shifted by about +1024 HU.", why, _AGAIN)
    # A thin limb in a wide, padded field of view holds little tissue too, but its air is where air belongs.
    if values.low < -1500 and (values.soft < 0.002 or (values.soft < 0.01 and values.air < -1700)):
        why = f"{span}; almost no voxel is near 0 HU, where water and soft tissue are"
        return Problem("hu-offset", "A CT is shifted down, as if the intercept was applied twice.", why, _AGAIN)
    if values.low >= -50:
        return Problem(
            "modality-mismatch",
            "A scan declared as CT does not look like CT.",
            f"{span}: no air, no fat; it looks like MR",
            _wrong_kind(declared_in),
        )
    if values.low > -600 and values.high < 1000 and values.at_min > 0.01 and values.at_max > 0.0002:
        why = f"{span}, with {values.at_min:.0%} and {values.at_max:.1%} of the voxels exactly at the ends"
        return Problem("hu-clipped", "A CT was clipped to a window.", why, _AGAIN)
    return _check_scale(values, span)


def _wrong_kind(declared_in: str) -> str:
    return f"Correct the modality ({declared_in}), or remove the case." if declared_in else "Remove the case."


def check_mr(values: Values, declared_in: str = "") -> Problem | None:
    """A scan declared as MR must not hold air of −1000 HU."""
    if values.percentiles["p1"] > -500 or np.isnan(values.air) or abs(values.air - _AIR) > 150:
        return None
    return Problem(
        "modality-mismatch",
        "A scan declared as MR looks like CT.",
        f"its air is at {values.air:.0f}; values run from {values.low:.5g} to {values.high:.5g}",
        _wrong_kind(declared_in),
    )


def _check_scale(values: Values, span: str) -> Problem | None:
    """Air is where a wrong slope shows: −2000 for twice, −500 for half."""
    if np.isnan(values.air) or values.dark < 0.02:
        return None
    half = values.low > -700 and values.air < -350
    if values.air < -1300 or half:
        why = f"{span}; air is at about {values.air:.0f} instead of −1000 HU"
        return Problem("hu-scale", "A CT has a wrong scale.", why, _AGAIN)
    return None
