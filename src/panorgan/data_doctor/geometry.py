"""Whether a label lies on its image's grid and, if not, in what they differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import nibabel as nib
import numpy as np
from numpy.typing import NDArray

from panorgan.data.volume import Volume, grid_distance_mm, on_grid, turned_like
from panorgan.data_doctor.files import Problem

_RAS = np.eye(4)
_RESAMPLE = "Resample the label to the image in your annotation tool (nearest neighbour), or remove the case."


@dataclass(frozen=True)
class Difference:
    """The code of the first thing that differs, and all differences in words."""

    code: str
    why: str


def to_ras(volume: Volume) -> Volume:
    """Axes flipped and swapped to run right, front, up; nothing is interpolated."""
    return turned_like(volume, Volume(volume.voxels, _RAS))


def compare(label: Volume, image: Volume, repair: str) -> Problem | None:
    """None where the label can be used as it is."""
    if on_grid(label, image) is not None:
        return None
    found = difference(label, image)
    fixable = label.voxels.shape == image.voxels.shape and lies_on_voxels(label, image)
    return Problem(
        found.code,
        "A label file lies on another grid than its image.",
        found.why,
        f"Only the label's header is wrong. {repair}" if fixable else _RESAMPLE,
    )


def difference(label: Volume, image: Volume) -> Difference:
    """In what two grids differ."""
    if label.voxels.shape != image.voxels.shape:
        turned = turned_like(label, image)
        if turned.voxels.shape != image.voxels.shape:
            return Difference("shape-mismatch", _shapes(label, image))
        label = turned
    differing: dict[str, str] = {}
    if not np.allclose(label.spacing, image.spacing, rtol=1e-3):
        differing["spacing-mismatch"] = f"spacing {_mm(label.spacing)} in the label, {_mm(image.spacing)} in the image"
    angle = _angle(label, image)
    if angle > 0.05:
        codes = ("".join(nib.aff2axcodes(volume.affine)) for volume in (label, image))
        differing["direction-mismatch"] = f"axes {' against '.join(codes)}, up to {angle:.3g}° apart"
    shift = label.affine[:3, 3] - image.affine[:3, 3]
    if np.abs(shift).max() > 1e-2:
        differing["origin-mismatch"] = f"origin shifted by {_mm(tuple(shift))}"
    apart = grid_distance_mm(label, image)
    words = "; ".join([*differing.values(), f"corners up to {apart:.3g} mm apart"])
    # Tiny differences of each kind may still add up to a corner that is off.
    return Difference(next(iter(differing), "grid-mismatch"), words)


def lies_on_voxels(label: Volume, image: Volume) -> bool:
    """Whether the label was obviously drawn on the image's voxels, so that only its header is wrong.

    Less than half a voxel apart, or: organs are far more uniform voxel by voxel than where the header puts them.
    """
    if label.voxels.shape != image.voxels.shape:
        return False
    if grid_distance_mm(label, image) < 0.5 * min(image.spacing):
        return True
    inside = np.argwhere(np.rint(np.nan_to_num(label.voxels)) > 0)
    if len(inside) < 20:
        return False
    inside = inside[:: max(1, len(inside) // 20000)]
    ids = label.voxels[tuple(inside.T)]
    world = inside @ label.affine[:3, :3].T + label.affine[:3, 3]
    back = np.linalg.inv(image.affine)
    elsewhere = np.rint(world @ back[:3, :3].T + back[:3, 3]).astype(int)
    seen = ((elsewhere >= 0) & (elsewhere < image.voxels.shape)).all(axis=1)
    as_drawn = _spread(image, inside, ids)
    if seen.mean() < 0.9:
        # An annotator cannot draw outside of the scan; but the values must not speak against it.
        return as_drawn < 0.8 * float(np.nanstd(image.voxels))
    return as_drawn < 0.8 * _spread(image, elsewhere[seen], ids[seen])


def _spread(image: Volume, places: NDArray[Any], ids: NDArray[Any]) -> float:
    """Mean distance of the image's values from the median of their label."""
    values = image.voxels[tuple(places.T)].astype(np.float64)
    away = [np.abs(values[ids == i] - np.median(values[ids == i])) for i in np.unique(ids)]
    return float(np.concatenate(away).mean())


def _angle(label: Volume, image: Volume) -> float:
    """Largest angle between axes of the same number, in degrees."""
    first, second = (v.affine[:3, :3] / np.array(v.spacing) for v in (label, image))
    return float(np.degrees(np.arccos(np.clip((first * second).sum(axis=0), -1, 1)).max()))


def _shapes(label: Volume, image: Volume) -> str:
    words = f"the label has {_times(label.voxels.shape)} voxels, the image {_times(image.voxels.shape)}"
    if sorted(label.voxels.shape) == sorted(image.voxels.shape):
        words += ": its axes are in another order (transposed)"
    return words


def _times(shape: tuple[int, ...]) -> str:
    return " × ".join(str(n) for n in shape)


def _mm(values: tuple[float, ...]) -> str:
    return " × ".join(f"{value:.4g}" for value in values) + " mm"
