"""From a scan on its own grid to the network's grid, and back.

Forward: reorient to RAS, resample to the plan's spacing, bring intensities to [-1, 1].
Back: class scores are resampled linearly to the scan's own voxels, then decided there, so that a prediction has
exactly the shape and affine of its scan. The plan travels with the model so that prediction repeats it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import nibabel as nib
import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import Field, field_validator
from scipy import ndimage

from panorgan.cases.volume import Volume
from panorgan.settings import Settings


class Plan(Settings):
    """What every site does to a scan before the network sees it."""

    spacing_mm: tuple[float, float, float] = Field((3.0, 3.0, 3.0), description="voxel size after resampling (R, A, S)")
    intensity: Literal["window", "zscore"] = Field(
        "window", description="window: clip HU, for CT; zscore: by each scan's own mean and spread, for MR"
    )
    window_hu: tuple[float, float] = Field(
        (-500.0, 500.0), description="for 'window': intensities clipped here, then mapped to [-1, 1]"
    )

    @field_validator("spacing_mm")
    @classmethod
    def _positive(cls, value: tuple[float, float, float]) -> tuple[float, float, float]:
        if min(value) <= 0:
            raise ValueError("spacing must be positive millimetres")
        return value

    @field_validator("window_hu")
    @classmethod
    def _ordered(cls, value: tuple[float, float]) -> tuple[float, float]:
        if value[0] >= value[1]:
            raise ValueError("the window's lower end must be below its upper end")
        return value


@dataclass(frozen=True)
class Grid:
    """A scan's own grid and how it was turned to RAS."""

    shape: tuple[int, ...]
    affine: NDArray[np.float64]
    to_ras: NDArray[Any]
    spacing: tuple[float, float, float]

    @classmethod
    def of(cls, volume: Volume) -> Grid:
        """The grid of a volume; `spacing` is along its own axes."""
        to_ras = nib.orientations.io_orientation(volume.affine)
        return cls(volume.voxels.shape, volume.affine, to_ras, volume.spacing)

    @property
    def ras_shape(self) -> tuple[int, int, int]:
        """Shape after reorientation."""
        shape = [0, 0, 0]
        for axis, (target, _) in enumerate(self.to_ras):
            shape[int(target)] = self.shape[axis]
        return shape[0], shape[1], shape[2]

    @property
    def ras_spacing(self) -> tuple[float, float, float]:
        """Spacing after reorientation."""
        spacing = [0.0, 0.0, 0.0]
        for axis, (target, _) in enumerate(self.to_ras):
            spacing[int(target)] = self.spacing[axis]
        return spacing[0], spacing[1], spacing[2]

    def planned_shape(self, plan: Plan) -> tuple[int, int, int]:
        """Shape on the plan's grid: same physical extent, whole voxels, at least one."""
        x, y, z = (
            max(1, round(n * mm / wanted))
            for n, mm, wanted in zip(self.ras_shape, self.ras_spacing, plan.spacing_mm, strict=True)
        )
        return x, y, z

    def turn_to_ras(self, voxels: NDArray[Any]) -> NDArray[Any]:
        """Flip and transpose to RAS; no interpolation."""
        return np.ascontiguousarray(nib.orientations.apply_orientation(voxels, self.to_ras))

    def turn_back(self, voxels: NDArray[Any]) -> NDArray[Any]:
        """The inverse of `turn_to_ras`."""
        ras = np.array([[0, 1], [1, 1], [2, 1]])
        back = nib.orientations.ornt_transform(ras, self.to_ras)
        return np.ascontiguousarray(nib.orientations.apply_orientation(voxels, back))


def prepare_image(volume: Volume, plan: Plan) -> torch.Tensor:
    """The network's view of a scan: float32 [X, Y, Z] in [-1, 1] on the plan's grid."""
    grid = Grid.of(volume)
    voxels = torch.from_numpy(grid.turn_to_ras(volume.voxels).astype(np.float32))
    voxels = _windowed(voxels, plan.window_hu) if plan.intensity == "window" else _standardised(voxels)
    return _resample(voxels, grid.planned_shape(plan))


def prepare_mask(mask: NDArray[np.bool_], grid: Grid, plan: Plan) -> NDArray[np.bool_]:
    """A mask on the plan's grid: resampled like an image, then one half decides (smoother than nearest neighbour)."""
    voxels = torch.from_numpy(grid.turn_to_ras(mask).astype(np.float32))
    resized: NDArray[np.bool_] = (_resample(voxels, grid.planned_shape(plan)) >= 0.5).numpy()
    return resized


def to_scan_grid(scores: torch.Tensor, grid: Grid) -> torch.Tensor:
    """One channel of scores [X, Y, Z] on the plan's grid → the scan's RAS-turned voxels, linearly."""
    return _resample(scores, grid.ras_shape)


def _windowed(voxels: torch.Tensor, window: tuple[float, float]) -> torch.Tensor:
    low, high = window
    return (voxels.clamp(low, high) - low) * (2 / (high - low)) - 1


def _standardised(voxels: torch.Tensor) -> torch.Tensor:
    """Mean 0, four standard deviations at ±1, clipped there; a constant scan becomes 0."""
    spread = voxels.std(correction=0)
    return ((voxels - voxels.mean()) / (4 * spread + 1e-12)).clamp(-1, 1)


def _resample(voxels: torch.Tensor, shape: tuple[int, int, int]) -> torch.Tensor:
    """Trilinear, the outer faces of both grids coincide; smoothed first along axes that shrink more than twofold.

    Linear interpolation looks at two neighbours and skips the rest: fine noise would stay, and small lesions come and
    go. The mean over a block of f voxels has variance (f² − 1)/12. Interpolating halfway between two voxels gives 1/4
    of it; a Gaussian gives what is missing.
    """
    if tuple(voxels.shape) == shape:
        return voxels.clone()
    factors = [old / new for old, new in zip(voxels.shape, shape, strict=True)]
    sigmas = [math.sqrt(max((f * f - 1) / 12 - 1 / 4, 0.0)) for f in factors]
    if any(sigmas):
        voxels = torch.from_numpy(ndimage.gaussian_filter(voxels.numpy(), sigmas, mode="nearest"))
    return F.interpolate(voxels[None, None], size=shape, mode="trilinear", align_corners=False)[0, 0]
