"""A plan for everybody, from numbers that each site measures on its own training cases.

A site counts and measures: how many cases, how many of them CT, the middle voxel size and extent, and a histogram of
the Hounsfield units inside its annotated structures. No image and no case leaves; the numbers are pooled, and the plan
follows from them: the middle voxel size of all cases, and a window that holds nearly all of the annotated tissue.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from panorgan.cases.case import Case
from panorgan.cases.preprocess import Grid, Plan, PlanChoices, checked_spacing, checked_window
from panorgan.errors import DataError

POOLED: Literal["pooled"] = "pooled"

# Hounsfield units in bins of 16, from air to dense bone; what lies beyond counts in the outer bins.
_FIRST_HU, _BIN_HU, _BINS = -1024.0, 16.0, 256
# Share of annotated tissue that the window leaves out at either end, as nnU-Net clips it.
_LEFT_OUT = 0.005
# Fat is near -100 HU and in every CT; MR has next to nothing below zero.
_CT_BELOW_HU, _CT_SHARE = -50.0, 0.01
# Patches of at most this many voxels are proposed: what fits common GPUs twice with a 5-level U-Net.
_PATCH_VOXELS = 128**3


class PlanSettings(PlanChoices):
    """The experiment's `plan`: what is said holds for every site, what is `pooled` is measured at the sites."""

    spacing_mm: tuple[float, float, float] | Literal["pooled"] = Field(
        POOLED, description="voxel size after resampling (R, A, S); pooled: the middle one of all training cases"
    )
    intensity: Literal["window", "zscore", "pooled"] = Field(
        POOLED, description="window: clip HU, for CT; zscore: by each scan's own mean and spread, for MR"
    )
    window_hu: tuple[float, float] | Literal["pooled"] = Field(
        POOLED, description="for 'window': clipped here, then mapped to [-1, 1]; pooled: 99 % of the annotated tissue"
    )

    @field_validator("spacing_mm")
    @classmethod
    def _positive(cls, value: tuple[float, float, float] | Literal["pooled"]) -> Any:
        return value if value == POOLED else checked_spacing(value)

    @field_validator("window_hu")
    @classmethod
    def _ordered(cls, value: tuple[float, float] | Literal["pooled"]) -> Any:
        return value if value == POOLED else checked_window(value)

    @property
    def measures(self) -> bool:
        """Whether anything has to be measured at the sites."""
        open_window = self.window_hu == POOLED and self.intensity != "zscore"
        return POOLED in (self.spacing_mm, self.intensity) or open_window

    def resolve(self, sites: Mapping[str, SiteStatistics]) -> Plan:
        """The plan that follows from what the sites measured; `sites` may be empty where nothing is pooled."""
        spacing = self.spacing_mm if self.spacing_mm != POOLED else pooled_spacing(sites)
        intensity = self.intensity if self.intensity != POOLED else pooled_intensity(sites)
        fixed = {name: getattr(self, name) for name in PlanChoices.model_fields}
        if intensity == "zscore":
            return Plan(spacing_mm=spacing, intensity=intensity, **fixed)
        window = self.window_hu if self.window_hu != POOLED else pooled_window(sites)
        return Plan(spacing_mm=spacing, intensity=intensity, window_hu=window, **fixed)


@dataclass(frozen=True)
class CaseMeasurements:
    """What is measured on one case; stays at its site."""

    spacing_mm: tuple[float, float, float]
    extent_mm: tuple[float, float, float]
    is_ct: bool
    hu_counts: NDArray[np.int64]

    def as_json(self) -> dict[str, Any]:
        """For the site's own cache."""
        return {
            "spacing_mm": self.spacing_mm,
            "extent_mm": self.extent_mm,
            "is_ct": self.is_ct,
            "hu_counts": self.hu_counts.tolist(),
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> CaseMeasurements:
        """The inverse of `as_json`."""
        counts = np.array(content["hu_counts"], dtype=np.int64)
        return cls(tuple(content["spacing_mm"]), tuple(content["extent_mm"]), bool(content["is_ct"]), counts)


@dataclass(frozen=True)
class SiteStatistics:
    """What a site tells about its training cases: numbers only."""

    cases: int
    ct_cases: int
    spacing_mm: tuple[float, float, float]
    extent_mm: tuple[float, float, float]
    hu_counts: NDArray[np.int64]

    @classmethod
    def of(cls, measured: Sequence[CaseMeasurements]) -> SiteStatistics:
        """Middle values and sums over a site's cases."""
        return cls(
            cases=len(measured),
            ct_cases=sum(case.is_ct for case in measured),
            spacing_mm=_middle([case.spacing_mm for case in measured], [1.0] * len(measured)),
            extent_mm=_middle([case.extent_mm for case in measured], [1.0] * len(measured)),
            hu_counts=np.sum([case.hu_counts for case in measured], axis=0, dtype=np.int64),
        )

    def window(self) -> tuple[float, float] | None:
        """Where nearly all of the site's annotated CT voxels lie; None where it has none."""
        return _window(self.hu_counts) if self.hu_counts.any() else None

    def as_numbers(self) -> dict[str, float]:
        """What leaves the site: a flat list of named numbers, as messages carry them. Empty bins are left out."""
        numbers = {"plan/cases": float(self.cases), "plan/ct_cases": float(self.ct_cases)}
        for axis, name in enumerate("RAS"):
            numbers[f"plan/spacing_mm/{name}"] = self.spacing_mm[axis]
            numbers[f"plan/extent_mm/{name}"] = self.extent_mm[axis]
        for place in np.flatnonzero(self.hu_counts):
            numbers[f"plan/hu/{place:03d}"] = float(self.hu_counts[place])
        return numbers

    @classmethod
    def from_numbers(cls, numbers: Mapping[str, float]) -> SiteStatistics:
        """The inverse of `as_numbers`."""
        counts = np.zeros(_BINS, dtype=np.int64)
        for name, count in numbers.items():
            if name.startswith("plan/hu/"):
                counts[int(name.rpartition("/")[2])] = int(count)
        sx, sy, sz = (numbers[f"plan/spacing_mm/{axis}"] for axis in "RAS")
        ex, ey, ez = (numbers[f"plan/extent_mm/{axis}"] for axis in "RAS")
        return cls(int(numbers["plan/cases"]), int(numbers["plan/ct_cases"]), (sx, sy, sz), (ex, ey, ez), counts)


def measure_case(case: Case, plan_choices: PlanChoices) -> CaseMeasurements:
    """Read a case and measure it."""
    volume = case.read_image()
    masks = case.read_masks(volume)
    is_ct = float((volume.voxels < _CT_BELOW_HU).mean()) > _CT_SHARE
    # The body is found by its density, so cropping makes sense to measure for CT alone.
    crop = plan_choices.crop if is_ct else "none"
    grid = Grid.of(volume, Plan(crop=crop))
    x, y, z = (n * mm for n, mm in zip(grid.ras_shape, grid.ras_spacing, strict=True))
    counts = np.zeros(_BINS, dtype=np.int64)
    if is_ct and masks:
        inside = volume.voxels[np.logical_or.reduce(list(masks.values()))]
        places = np.clip((inside - _FIRST_HU) // _BIN_HU, 0, _BINS - 1).astype(np.int64)
        counts = np.bincount(places, minlength=_BINS)
    return CaseMeasurements(grid.ras_spacing, (x, y, z), is_ct, counts)


def pooled_spacing(sites: Mapping[str, SiteStatistics]) -> tuple[float, float, float]:
    """The middle of the sites' middle voxel sizes, each site counting by its cases; rounded to a hundredth of a mm."""
    x, y, z = _middle([s.spacing_mm for s in sites.values()], [float(s.cases) for s in sites.values()])
    return round(x, 2), round(y, 2), round(z, 2)


def pooled_intensity(sites: Mapping[str, SiteStatistics]) -> Literal["window", "zscore"]:
    """Window where all is CT, z-score where nothing is; a mixture needs a person's decision."""
    shares = {name: site.ct_cases / site.cases for name, site in sites.items()}
    if all(share == 1 for share in shares.values()):
        return "window"
    if all(share == 0 for share in shares.values()):
        return "zscore"
    raise DataError(
        "CT and other scans are mixed.",
        where="plan.intensity",
        why=", ".join(f"{share:.0%} of {name} look like CT" for name, share in shares.items()),
        fix="Check the odd ones with 'panorgan doctor'. If all is right, set 'plan: {intensity: zscore}'.",
    )


def pooled_window(sites: Mapping[str, SiteStatistics]) -> tuple[float, float]:
    """Where all but half a percent of the annotated voxels lie at either end; bins of 16 HU."""
    counts = np.sum([site.hu_counts for site in sites.values()], axis=0)
    if not counts.any():
        raise DataError(
            "No window can be pooled: the sites have no annotated CT voxel.",
            where="plan.window_hu",
            fix="Set 'plan: {window_hu: [-500, 500]}', or 'intensity: zscore' where the scans are not CT.",
        )
    return _window(counts)


def _window(counts: NDArray[np.int64]) -> tuple[float, float]:
    below, total = np.cumsum(counts), int(counts.sum())
    low = int(np.searchsorted(below, _LEFT_OUT * total, side="right"))
    high = int(np.searchsorted(below, (1 - _LEFT_OUT) * total, side="left"))
    return _FIRST_HU + low * _BIN_HU, _FIRST_HU + (high + 1) * _BIN_HU


def proposed_patch(
    plan: Plan, sites: Mapping[str, SiteStatistics], divisors: Sequence[int], sliced: int | None = None
) -> tuple[int, int, int]:
    """A patch of the scans' proportions that common GPUs can hold, no larger than the scans need it.

    Sizes are multiples of the network's `divisors`, at least twice those. `sliced` is the axis that the slices of a 2D
    network lie across; `divisors` are then those of the other two.
    """
    extent = _middle([s.extent_mm for s in sites.values()], [float(s.cases) for s in sites.values()])
    axes = [axis for axis in range(3) if axis != sliced]
    sizes = {axis: extent[axis] / plan.spacing_mm[axis] for axis in axes}
    while math.prod(sizes.values()) > _PATCH_VOXELS:
        # Shorten what is longest in millimetres: context should reach equally far in every direction.
        sizes[max(axes, key=lambda axis: sizes[axis] * plan.spacing_mm[axis])] *= 0.95
    patch = [1, 1, 1]
    for axis, divisor in zip(axes, divisors, strict=True):
        patch[axis] = max(2 * divisor, round(sizes[axis] / divisor) * divisor)
    return patch[0], patch[1], patch[2]


def _middle(values: Sequence[tuple[float, float, float]], weights: Sequence[float]) -> tuple[float, float, float]:
    """Weighted median per axis: the smallest value that at least half of the weight does not exceed."""
    table, weight = np.array(values), np.array(weights)
    middles = []
    for axis in range(3):
        order = np.argsort(table[:, axis], kind="stable")
        reached = np.cumsum(weight[order]) >= weight.sum() / 2
        middles.append(float(table[order[int(reached.argmax())], axis]))
    return middles[0], middles[1], middles[2]
