"""Statistics that each site measures on its own training cases, and how those of all sites are pooled.

A site sends how many cases it has, how many of them are CT, their median voxel size and extent, and per structure the
range of Hounsfield units inside it. No image leaves; the numbers are pooled, and the plan follows from them: a median
voxel size, and a window in which every annotated structure can be seen. Numbers are coarse, but those of a site with a
single training case describe that patient: the docs say so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from panorgan.anatomy.gas import is_aerated, is_gut
from panorgan.errors import DataError
from panorgan.preparation.pooling import MINORITY, capped, weighted_median, without_extremes

# Hounsfield units in bins of 16, from air to dense bone; what lies beyond counts in the outer bins.
_FIRST_HU, _BIN_HU, _BINS = -1024.0, 16.0, 256
_LOW = "plan/hu_low/"
# Share of a structure's voxels that the window may leave out at either end, as nnU-Net clips them.
_LEFT_OUT = 0.005
# Below is gas, well apart from fat near -100. A window from here shows gas darker than fat; one that reaches down to
# gas spends most of its greys on what no tissue has.
_GAS_HU = -256.0


@dataclass(frozen=True)
class CaseMeasurements:
    """What is measured on one case; stays at its site. `hu_counts`: per structure, voxels per bin of HU."""

    spacing_mm: tuple[float, float, float]
    extent_mm: tuple[float, float, float]
    is_ct: bool
    hu_counts: Mapping[str, NDArray[np.int64]]

    def as_json(self) -> dict[str, Any]:
        """Plain JSON types, for the site's own cache."""
        return {
            "spacing_mm": self.spacing_mm,
            "extent_mm": self.extent_mm,
            "is_ct": self.is_ct,
            "hu_counts": {name: counts.tolist() for name, counts in self.hu_counts.items()},
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> CaseMeasurements:
        """The inverse of `as_json`."""
        counts = {name: np.array(own, dtype=np.int64) for name, own in content["hu_counts"].items()}
        return cls(tuple(content["spacing_mm"]), tuple(content["extent_mm"]), bool(content["is_ct"]), counts)


@dataclass(frozen=True)
class SiteStatistics:
    """What a site sends about its training cases: numbers only. `hu_ranges`: low and high per structure, CT only."""

    cases: int
    ct_cases: int
    spacing_mm: tuple[float, float, float]
    extent_mm: tuple[float, float, float]
    hu_ranges: Mapping[str, tuple[float, float]]

    @classmethod
    def of(cls, measured: Sequence[CaseMeasurements]) -> SiteStatistics:
        """Medians over a site's cases, rounded to what a plan needs."""
        counts: dict[str, NDArray[np.int64]] = {}
        for case in measured:
            for name, own in case.hu_counts.items():
                counts[name] = counts.get(name, np.zeros(_BINS, dtype=np.int64)) + own
        sx, sy, sz = _median([case.spacing_mm for case in measured], [1.0] * len(measured))
        ex, ey, ez = _median([case.extent_mm for case in measured], [1.0] * len(measured))
        return cls(
            cases=len(measured),
            ct_cases=sum(case.is_ct for case in measured),
            spacing_mm=(round(sx, 2), round(sy, 2), round(sz, 2)),
            extent_mm=(_coarse(ex), _coarse(ey), _coarse(ez)),
            hu_ranges={name: _tissue_range(name, own) for name, own in sorted(counts.items()) if own.any()},
        )

    def as_numbers(self) -> dict[str, float]:
        """What leaves the site: a flat list of named numbers, as messages carry them."""
        numbers = {"plan/cases": float(self.cases), "plan/ct_cases": float(self.ct_cases)}
        for axis, name in enumerate("RAS"):
            numbers[f"plan/spacing_mm/{name}"] = self.spacing_mm[axis]
            numbers[f"plan/extent_mm/{name}"] = self.extent_mm[axis]
        for structure, (low, high) in self.hu_ranges.items():
            numbers[f"plan/hu_low/{structure}"], numbers[f"plan/hu_high/{structure}"] = low, high
        return numbers

    @classmethod
    def from_numbers(cls, numbers: Mapping[str, float], site: str = "") -> SiteStatistics:
        """The inverse of `as_numbers`; refuses impossible measurements."""
        try:
            sx, sy, sz = (numbers[f"plan/spacing_mm/{axis}"] for axis in "RAS")
            ex, ey, ez = (numbers[f"plan/extent_mm/{axis}"] for axis in "RAS")
            cases, ct_cases = (_whole(numbers[f"plan/{name}"]) for name in ("cases", "ct_cases"))
            lows = {name.removeprefix(_LOW): value for name, value in numbers.items() if name.startswith(_LOW)}
            ranges = {name: (low, numbers[f"plan/hu_high/{name}"]) for name, low in lows.items()}
        except (KeyError, ValueError, OverflowError) as error:
            raise _nonsense(site, f"{type(error).__name__}: {error}") from error
        sound = all(math.isfinite(number) for number in numbers.values()) and min(sx, sy, sz, ex, ey, ez) > 0
        if not sound or not 0 <= ct_cases <= cases or cases < 1 or any(low >= high for low, high in ranges.values()):
            raise _nonsense(site, "counts, sizes or ranges that cannot be")
        return cls(cases, ct_cases, (sx, sy, sz), (ex, ey, ez), ranges)


def _whole(number: float) -> int:
    if number != int(number):
        raise ValueError(f"{number} cases")
    return int(number)


def _nonsense(site: str, why: str) -> DataError:
    return DataError(
        "A site sent numbers for the plan that make no sense.",
        code="implausible-statistics",
        where=site,
        why=why,
        fix="Let the site run the same panorgan version, and 'panorgan plan' on its own data.",
    )


def hu_histogram(values: NDArray[Any]) -> NDArray[np.int64]:
    """A histogram of the values over bins of Hounsfield units."""
    bins = np.clip((values - _FIRST_HU) // _BIN_HU, 0, _BINS - 1).astype(np.int64)
    return np.bincount(bins, minlength=_BINS)


def pooled_spacing(sites: Mapping[str, SiteStatistics]) -> tuple[float, float, float]:
    """The median of the sites' median voxel sizes, weighted by cases, with no site above half of the weight."""
    return _median([site.spacing_mm for site in sites.values()], _weights(sites))


def pooled_extent(sites: Mapping[str, SiteStatistics]) -> tuple[float, float, float]:
    """The median of the sites' median extents, weighted in the same way."""
    return _median([site.extent_mm for site in sites.values()], _weights(sites))


def _weights(sites: Mapping[str, SiteStatistics]) -> list[float]:
    """Weights by cases. With three or more sites, one that has, or claims, most cases does not decide alone."""
    return capped([float(site.cases) for site in sites.values()], MINORITY)


def pooled_intensity(sites: Mapping[str, SiteStatistics]) -> Literal["window", "zscore"]:
    """A window if all scans are CT, z-score if none is; for a mixture, the user must decide."""
    shares = {name: site.ct_cases / site.cases for name, site in sites.items()}
    if all(share == 1 for share in shares.values()):
        return "window"
    if all(share == 0 for share in shares.values()):
        return "zscore"
    raise DataError(
        "CT and other scans are mixed.",
        code="mixed-modality",
        where="plan.intensity",
        why=", ".join(f"{share:.0%} of {name} look like CT" for name, share in shares.items()),
        fix="Check the odd ones with 'panorgan doctor'. If all is right, set 'plan: {intensity: zscore}'.",
    )


def pooled_window(sites: Mapping[str, SiteStatistics]) -> tuple[float, float]:
    """From the lowest to the highest range of any structure at any site.

    Structures do not compete by volume: a liver has a thousand times the voxels of a small vessel, and a window for the
    bulk of the tissue would show the vessel as a flat patch. Gas that an organ holds is no part of its range: sites
    leave it out where they measure (`_tissue_range`). Where three or more sites know a structure, the one that reaches
    farthest is left out at either end: no single site widens the window for all.
    """
    measured: dict[str, list[tuple[float, float]]] = {}
    for site in sites.values():
        for structure, own in site.hu_ranges.items():
            measured.setdefault(structure, []).append(own)
    ranges = [without_extremes([low for low, _ in own], [high for _, high in own]) for own in measured.values()]
    if not ranges:
        raise DataError(
            "No window can be pooled: the sites have no annotated CT voxel.",
            code="no-window",
            where="plan.window_hu",
            fix="Set 'plan: {window_hu: [-500, 500]}', or 'intensity: zscore' where the scans are not CT.",
        )
    return min(low for low, _ in ranges), max(high for _, high in ranges)


def _tissue_range(structure: str, counts: NDArray[np.int64]) -> tuple[float, float]:
    """The range of a structure's voxels, without gas inside it unless the structure itself is gas."""
    low, high = _range(counts)
    if low >= _GAS_HU or high <= _GAS_HU or is_aerated(structure):
        return low, high
    # Of the gut it is known, however much gas it holds; of any other structure most voxels must be tissue.
    gas = counts[: int((_GAS_HU - _FIRST_HU) / _BIN_HU)].sum()
    return (_GAS_HU if is_gut(structure) or gas < counts.sum() / 2 else low), high


def _range(counts: NDArray[np.int64]) -> tuple[float, float]:
    """The range that leaves out half a percent of the voxels at either end, in whole bins."""
    below, total = np.cumsum(counts), int(counts.sum())
    low = int(np.searchsorted(below, _LEFT_OUT * total, side="right"))
    high = int(np.searchsorted(below, (1 - _LEFT_OUT) * total, side="left"))
    return _FIRST_HU + low * _BIN_HU, _FIRST_HU + (high + 1) * _BIN_HU


def _coarse(extent_mm: float) -> float:
    """Round to whole centimetres, at least one: enough to choose a patch, too little to identify a patient."""
    return max(10.0, round(extent_mm / 10) * 10.0)


def _median(values: Sequence[tuple[float, float, float]], weights: Sequence[float]) -> tuple[float, float, float]:
    """Weighted median per axis."""
    x, y, z = (weighted_median(along, weights) for along in zip(*values, strict=True))
    return x, y, z
