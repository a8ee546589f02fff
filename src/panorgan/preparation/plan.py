"""The preprocessing plan: what every site does to a scan before the network sees it.

`PlanSettings` is what the experiment says; it may leave voxel size and intensities to be pooled from what the sites
measure. `Plan` is the same with nothing left open. It travels with requests and with the model, so that every site and
every later prediction repeats it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, field_validator

from panorgan.preparation.site_statistics import (
    SiteStatistics,
    pooled_extent,
    pooled_intensity,
    pooled_spacing,
    pooled_window,
)
from panorgan.settings import SettingError, Settings

POOLED: Literal["pooled"] = "pooled"
MEASURABLE = ("spacing_mm", "intensity", "window_hu")
"""What may be pooled from the sites; all other settings of a plan are chosen."""

# Patches of at most this many voxels are proposed: what fits common GPUs twice with a 5-level U-Net.
_PATCH_VOXELS = 128**3


class PlanSettings(Settings):
    """The experiment's `plan`: set values apply at every site, and `pooled` ones are measured at the sites."""

    crop: Literal["none", "body"] = Field(
        "none", description="body: cut off the air (and the table) around the patient before anything else"
    )
    image_interpolation: Literal["linear", "cubic"] = Field("linear", description="cubic is sharper and slower")
    label_interpolation: Literal["linear", "nearest"] = Field(
        "linear", description="linear: each mask like an image, then one half decides; nearest: one voxel decides"
    )
    spacing_mm: tuple[float, float, float] | Literal["pooled"] = Field(
        POOLED, description="voxel size after resampling (R, A, S); pooled: the median of the sites' medians"
    )
    intensity: Literal["window", "zscore", "pooled"] = Field(
        POOLED, description="window: clip HU, for CT; zscore: by each scan's own mean and spread, for MR"
    )
    window_hu: tuple[float, float] | Literal["pooled"] = Field(
        POOLED,
        description="for 'window': clipped here, then mapped to [-1, 1]; pooled: 99 % of every annotated structure",
    )

    @field_validator("spacing_mm")
    @classmethod
    def _positive(cls, value: tuple[float, float, float] | Literal["pooled"]) -> Any:
        if value != POOLED and min(value) <= 0:
            raise SettingError("spacing must be positive millimetres", code="size-not-positive")
        return value

    @field_validator("window_hu")
    @classmethod
    def _ordered(cls, value: tuple[float, float] | Literal["pooled"]) -> Any:
        if value != POOLED and value[0] >= value[1]:
            raise SettingError("the window's lower end must be below its upper end", code="window-empty")
        return value

    @property
    def measures(self) -> bool:
        """Whether anything has to be measured at the sites."""
        open_window = self.window_hu == POOLED and self.intensity != "zscore"
        return POOLED in (self.spacing_mm, self.intensity) or open_window

    def resolve(self, sites: Mapping[str, SiteStatistics]) -> Plan:
        """The plan that follows from the sites' measurements; `sites` may be empty if nothing is pooled."""
        settled: dict[str, Any] = self.model_dump(exclude=set(MEASURABLE))
        settled["spacing_mm"] = self.spacing_mm if self.spacing_mm != POOLED else pooled_spacing(sites)
        settled["intensity"] = self.intensity if self.intensity != POOLED else pooled_intensity(sites)
        if settled["intensity"] == "window":
            settled["window_hu"] = self.window_hu if self.window_hu != POOLED else pooled_window(sites)
        return Plan(**settled)


class Plan(PlanSettings):
    """What every site does to a scan before the network sees it."""

    spacing_mm: tuple[float, float, float] = Field((3.0, 3.0, 3.0), description="voxel size after resampling (R, A, S)")
    intensity: Literal["window", "zscore"] = Field(
        "window", description="window: clip HU, for CT; zscore: by each scan's own mean and spread, for MR"
    )
    window_hu: tuple[float, float] = Field(
        (-500.0, 500.0), description="for 'window': intensities clipped here, then mapped to [-1, 1]"
    )

    def resolve(self, sites: Mapping[str, SiteStatistics]) -> Plan:
        """The plan itself, as it is complete already."""
        return self


def proposed_patch(
    plan: Plan, sites: Mapping[str, SiteStatistics], divisors: Sequence[int], sliced: int | None = None
) -> tuple[int, int, int]:
    """A patch of the scans' proportions that common GPUs can hold, no larger than the scans need it.

    Sizes are multiples of the network's `divisors`, at least twice those. `sliced` is the axis that the slices of a 2D
    network lie across; `divisors` are then those of the other two.
    """
    extent = pooled_extent(sites)
    axes = [axis for axis in range(3) if axis != sliced]
    sizes = {axis: extent[axis] / plan.spacing_mm[axis] for axis in axes}
    while math.prod(sizes.values()) > _PATCH_VOXELS:
        # Shorten what is longest in millimetres: context should reach equally far in every direction.
        sizes[max(axes, key=lambda axis: sizes[axis] * plan.spacing_mm[axis])] *= 0.95
    patch = [1, 1, 1]
    for axis, divisor in zip(axes, divisors, strict=True):
        patch[axis] = max(2 * divisor, round(sizes[axis] / divisor) * divisor)
    return patch[0], patch[1], patch[2]
