"""Volume, mean intensity and completeness of every organ in a label map."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import nibabel as nib
import numpy as np
from numpy.typing import NDArray

from panorgan.anatomy import Vocabulary

# In files: cubic millimetres; hundredths of a HU, but four digits of means below 1 (scans scaled to 0 … 1).
_ML_PLACES, _INTENSITY_PLACES, _INTENSITY_DIGITS = 3, 2, 4
# Towards the first and the last voxel of each axis of RAS.
_SIDES = (("left", "right"), ("posterior", "anterior"), ("inferior", "superior"))


@dataclass(frozen=True)
class OrganStatistics:
    """One organ in one scan; inner structures (a tumour, a vessel) and parts count.

    Attributes
    ----------
    voxels : their number.
    volume_ml : millilitres.
    mean_intensity : of the scan inside the organ, in its own units (HU for CT); None where the organ is empty.
    cut_off : the sides of the scan that the organ touches, such as `superior`: there it may go on, and the volume is
        a part of it.
    """

    voxels: int
    volume_ml: float
    mean_intensity: float | None
    cut_off: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """The same for a file: plain types, rounded to what the numbers are good for."""
        mean = None if self.mean_intensity is None else _rounded_intensity(self.mean_intensity)
        return {
            "voxels": self.voxels,
            "volume_ml": round(self.volume_ml, _ML_PLACES),
            "mean_intensity": mean,
            "cut_off": list(self.cut_off),
        }


def organ_statistics(
    labels: NDArray[np.uint8],
    voxels: NDArray[np.generic],
    affine: NDArray[np.float64],
    vocabulary: Vocabulary,
    organs: Iterable[str] | None = None,
) -> dict[str, OrganStatistics]:
    """Statistics by organ, of all in the vocabulary if `organs` is left out; label i + 1 is organ i.

    The map is read once for all organs, slice by slice: a large scan would not fit into memory in double precision.
    """
    count = len(vocabulary) + 1
    sizes, sums = np.zeros(count, dtype=np.int64), np.zeros(count)
    for level in range(labels.shape[2]):
        plane = labels[:, :, level].ravel()
        sizes += np.bincount(plane, minlength=count)
        sums += np.bincount(plane, weights=voxels[:, :, level].ravel(), minlength=count)
    touched = _touched(labels, affine)
    millilitres = abs(float(np.linalg.det(affine[:3, :3]))) / 1000
    found = {}
    for organ in vocabulary if organs is None else organs:
        members = [vocabulary.index(member) + 1 for member in vocabulary.members(organ)]
        size = int(sizes[members].sum())
        mean = float(sums[members].sum()) / size if size else None
        cut_off = tuple(side for side, there in touched.items() if there.intersection(members))
        found[organ] = OrganStatistics(size, size * millilitres, mean, cut_off)
    return found


def _rounded_intensity(value: float) -> float:
    small = 0 < abs(value) < 1
    return round(value, _INTENSITY_DIGITS - 1 - math.floor(math.log10(abs(value))) if small else _INTENSITY_PLACES)


def _touched(labels: NDArray[np.uint8], affine: NDArray[np.float64]) -> dict[str, set[int]]:
    """The labels at each side of the scan."""
    found = {}
    for axis, (ras_axis, direction) in enumerate(nib.orientations.io_orientation(affine)):
        first, last = _SIDES[int(ras_axis)][:: int(direction)]
        for side, place in ((first, 0), (last, -1)):
            found[side] = set(np.unique(np.take(labels, place, axis=axis)).tolist())
    return {side: found[side] for sides in _SIDES for side in sides}
