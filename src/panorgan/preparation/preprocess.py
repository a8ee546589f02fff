"""From a scan on its own grid to the network's grid, and back.

Forward: reorient to RAS, crop to the body if the plan says so, bring intensities to [-1, 1], resample to the plan's
spacing. Back: class scores are resampled linearly to the scan's own voxels, decided there, and put into the whole scan,
so that a prediction has exactly the shape and affine of its scan. The plan travels with the model so that prediction
repeats it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import nibabel as nib
import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy import ndimage

from panorgan.data.volume import Volume
from panorgan.preparation.plan import Plan

# Finding the body: denser than air and most of lung, on a coarse grid, with a little air kept around it.
_BODY_HU = -400.0
_BODY_GRID_MM = 4.0
_BODY_MARGIN_MM = 8.0
# Pieces of at least this share of the largest belong to the body, too.
_BODY_SHARE = 0.1

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Grid:
    """A scan's own grid, how it was turned to RAS, and which box of it the network sees.

    `box` is (start, stop) per RAS axis.
    """

    shape: tuple[int, ...]
    affine: NDArray[np.float64]
    to_ras: NDArray[Any]
    spacing: tuple[float, float, float]
    box: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, volume: Volume, plan: Plan | None = None) -> Grid:
        """The grid of a volume, cropped where the plan says so; `spacing` is along its own axes."""
        to_ras = nib.orientations.io_orientation(volume.affine)
        whole = tuple((0, n) for n in _turned(volume.voxels.shape, to_ras))
        grid = cls(volume.voxels.shape, volume.affine, to_ras, volume.spacing, whole)
        if plan is None or plan.crop == "none":
            return grid
        seen = volume.voxels if not volume.more else np.any([voxels != 0 for voxels in volume.channels], axis=0)
        box = _body_box(grid.turn_to_ras(seen), plan, grid.ras_spacing)
        return replace(grid, box=box)

    @property
    def ras_shape(self) -> tuple[int, int, int]:
        """Shape after reorientation and cropping."""
        x, y, z = (stop - start for start, stop in self.box)
        return x, y, z

    @property
    def ras_spacing(self) -> tuple[float, float, float]:
        """Spacing after reorientation."""
        x, y, z = _turned(self.spacing, self.to_ras)
        return x, y, z

    def planned_shape(self, plan: Plan) -> tuple[int, int, int]:
        """Shape on the plan's grid: same physical extent, whole voxels, at least one."""
        x, y, z = (
            max(1, round(n * mm / wanted))
            for n, mm, wanted in zip(self.ras_shape, self.ras_spacing, plan.spacing_mm, strict=True)
        )
        return x, y, z

    def turn_to_ras(self, voxels: NDArray[Any]) -> NDArray[Any]:
        """Flip, transpose and crop; no interpolation."""
        turned = nib.orientations.apply_orientation(voxels, self.to_ras)
        return np.ascontiguousarray(turned[tuple(slice(start, stop) for start, stop in self.box)])

    def turn_back(self, voxels: NDArray[Any]) -> NDArray[Any]:
        """The inverse of `turn_to_ras`; zeros where something was cut off."""
        ras = np.array([[0, 1], [1, 1], [2, 1]])
        back = nib.orientations.ornt_transform(ras, self.to_ras)
        sizes = _turned(self.shape, self.to_ras)
        outside = [(start, size - stop) for (start, stop), size in zip(self.box, sizes, strict=True)]
        return np.ascontiguousarray(nib.orientations.apply_orientation(np.pad(voxels, outside), back))


def prepare_image(volume: Volume, plan: Plan, grid: Grid | None = None) -> torch.Tensor:
    """The network's view of a scan: float32 [X, Y, Z] in [-1, 1] on the plan's grid; [C, X, Y, Z] of several channels.

    Every channel is brought to its range by itself.
    """
    grid = grid or Grid.of(volume, plan)
    channels = [_prepare_channel(voxels, plan, grid) for voxels in volume.channels]
    return channels[0] if len(channels) == 1 else torch.stack(channels)


def _prepare_channel(scan: NDArray[Any], plan: Plan, grid: Grid) -> torch.Tensor:
    voxels = torch.from_numpy(grid.turn_to_ras(scan).astype(np.float32))
    voxels = _windowed(voxels, plan.window_hu) if plan.intensity == "window" else _standardised(voxels)
    shape = grid.planned_shape(plan)
    if plan.image_interpolation == "cubic":
        return _resample(voxels, shape, order=3).clamp(-1, 1)  # a spline overshoots at edges
    return _resample(voxels, shape)


def with_channels(image: torch.Tensor) -> torch.Tensor:
    """A prepared image [X, Y, Z] or [C, X, Y, Z] as [C, X, Y, Z]."""
    return image if image.ndim == 4 else image[None]


def prepare_mask(mask: NDArray[np.bool_], grid: Grid, plan: Plan) -> NDArray[np.bool_]:
    """A mask on the plan's grid: like an image, then one half decides (smoother); or the nearest voxel decides."""
    voxels = torch.from_numpy(grid.turn_to_ras(mask).astype(np.float32))
    order = 0 if plan.label_interpolation == "nearest" else 1
    resized: NDArray[np.bool_] = (_resample(voxels, grid.planned_shape(plan), order) >= 0.5).numpy()
    return resized


def to_scan_grid(scores: torch.Tensor, grid: Grid) -> torch.Tensor:
    """One channel of scores [X, Y, Z] on the plan's grid → the scan's RAS-turned (and cropped) voxels, linearly."""
    return _resample(scores, grid.ras_shape)


def _turned(per_axis: Sequence[Number], to_ras: NDArray[Any]) -> list[Number]:
    """Values per array axis, reordered to the RAS axes."""
    order = np.argsort(to_ras[:, 0])
    return [per_axis[int(axis)] for axis in order]


def _body_box(ras: NDArray[Any], plan: Plan, spacing: tuple[float, float, float]) -> tuple[tuple[int, int], ...]:
    """(start, stop) per axis around the patient and a margin; the whole scan where nothing stands out.

    CT: what is denser than air on a coarse copy, in pieces not much smaller than the largest (two legs, an arm), so
    that the table and tubes fall away. Otherwise everything that is not zero: MR is zero where it was masked or padded.
    """
    steps = [max(1, round(_BODY_GRID_MM / mm)) for mm in spacing]
    if plan.intensity == "window":
        coarse = ras[tuple(slice(None, None, step) for step in steps)] > _BODY_HU
        # Opened, so that a thin table falls away; beyond the border the body goes on.
        opened = ndimage.binary_dilation(ndimage.binary_erosion(coarse, border_value=1)) & coarse
        pieces, count = ndimage.label(opened)
        if count == 0:
            return tuple((0, n) for n in ras.shape)
        sizes = np.bincount(pieces.ravel())
        sizes[0] = 0
        body = np.isin(pieces, np.flatnonzero(sizes >= _BODY_SHARE * sizes.max()))
    else:
        steps, body = [1, 1, 1], ras != 0
        if not body.any():
            return tuple((0, n) for n in ras.shape)
    box = []
    for axis, (size, step, mm) in enumerate(zip(ras.shape, steps, spacing, strict=True)):
        inside = np.flatnonzero(body.any(axis=tuple(other for other in range(3) if other != axis)))
        margin = math.ceil(_BODY_MARGIN_MM / mm)
        # The body may begin right after the coarse voxel before, and end right before the one after.
        first, last = (int(inside[0]) - 1) * step + 1, (int(inside[-1]) + 1) * step
        box.append((max(0, first - margin), min(size, last + margin)))
    return tuple(box)


def _windowed(voxels: torch.Tensor, window: tuple[float, float]) -> torch.Tensor:
    low, high = window
    return (voxels.clamp(low, high) - low) * (2 / (high - low)) - 1


def _standardised(voxels: torch.Tensor) -> torch.Tensor:
    """Mean 0, four standard deviations at ±1, clipped there; a constant scan becomes 0."""
    spread = voxels.std(correction=0)
    return ((voxels - voxels.mean()) / (4 * spread + 1e-12)).clamp(-1, 1)


def _resample(voxels: torch.Tensor, shape: tuple[int, int, int], order: int = 1) -> torch.Tensor:
    """Resample to another shape; the grids' outer faces coincide. `order` 0: nearest, 1: linear, 3: cubic spline.

    Axes that shrink more than twofold are smoothed first (not for nearest): interpolation looks at few neighbours and
    skips the rest, so fine noise would stay, and small lesions come and go. The mean over a block of f voxels has
    variance (f² − 1)/12. Interpolating halfway between two voxels gives 1/4 of it; a Gaussian gives what is missing.
    """
    if tuple(voxels.shape) == shape:
        return voxels.clone()
    if order == 0:
        return F.interpolate(voxels[None, None], size=shape, mode="nearest-exact")[0, 0]
    factors = [old / new for old, new in zip(voxels.shape, shape, strict=True)]
    sigmas = [math.sqrt(max((f * f - 1) / 12 - 1 / 4, 0.0)) for f in factors]
    if any(sigmas):
        voxels = torch.from_numpy(ndimage.gaussian_filter(voxels.numpy(), sigmas, mode="nearest"))
    if order == 1:
        return F.interpolate(voxels[None, None], size=shape, mode="trilinear", align_corners=False)[0, 0]
    offsets = [(f - 1) / 2 for f in factors]
    spline = ndimage.affine_transform(voxels.numpy(), factors, offsets, shape, order=3, mode="nearest")
    return torch.from_numpy(spline)
