"""Whether a file that is taken for a scan is a label map: whole numbers in large even regions."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

# Label maps have a few hundred ids at most. An 8-bit picture has no more values, but noise makes its neighbours differ.
_MOST_VALUES = 256
_EVEN = 0.5
# Enough voxels to see a broken number, or too many values, without reading a whole scan.
_SOME = 200_000


def looks_like_labels(voxels: NDArray[Any]) -> bool:
    """Whether voxels [X, Y, Z] are ids of structures rather than intensities."""
    some = voxels.ravel(order="K")[:: max(1, voxels.size // _SOME)]
    if (some < 0).any() or (some != np.rint(some)).any() or len(np.unique(some)) > _MOST_VALUES:
        return False
    inside = voxels != 0
    if not inside.any() or inside.all():
        return False
    return any(_share_of_equals(voxels, inside, axis) > _EVEN for axis in range(voxels.ndim))


def _share_of_equals(voxels: NDArray[Any], inside: NDArray[np.bool_], axis: int) -> float:
    """Of the voxels that are not zero, those with the value of the one before them."""
    along = np.moveaxis(voxels, axis, 0)
    marked = np.moveaxis(inside, axis, 0)[1:]
    return float((along[1:] == along[:-1])[marked].mean()) if marked.any() else 0.0
