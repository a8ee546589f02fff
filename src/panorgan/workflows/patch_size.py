"""Checks that the patch is not larger than the scans: padding costs time and memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

CODE = "patch-larger-than-scans"


def oversized_patch(patch: Sequence[int], largest: Sequence[float]) -> str:
    """A warning about a patch that is larger than every scan along all axes; otherwise empty.

    `largest` is the size of the largest scan along each axis, in voxels of the plan; or of the median one, before they
    are prepared.
    """
    if not largest or not all(size > math.ceil(scan) for size, scan in zip(patch, largest, strict=True)):
        return ""
    scan = " × ".join(str(math.ceil(size)) for size in largest)
    times = math.prod(patch) / math.prod(largest)
    return (
        f"training.sampling.patch_size {list(patch)} is larger than the scans ({scan} voxels at this voxel "
        f"size): a patch is {times:.1f} times as large, and the rest is padding. A smaller patch trains faster; "
        "'panorgan plan' proposes one."
    )
