"""Slices written twice, or not at all: what a broken export leaves in a stack that is otherwise in order."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from panorgan.data_doctor.files import Problem

# Two slices may be equal by chance where next to nothing is shown; three are a copy.
_IN_A_ROW = 3
_WHOLE = "Give the whole series. Where slices are what you have, train with 'network.dimensions: 2'."
_AGAIN = "Copy or convert the scan again from its source."


def check_slices(voxels: NDArray[Any], labels: NDArray[np.uint8] | None, axis: int) -> Problem | None:
    """Look along the axis of a stack: equal slices one after the other, or one value where something is labelled."""
    if 1 in voxels.shape:
        shape = " × ".join(str(n) for n in voxels.shape)
        return Problem("one-slice", "A scan is a single slice.", f"it has {shape} voxels", _WHOLE)
    planes = np.moveaxis(voxels, axis, 0)
    if len(planes) < _IN_A_ROW:
        return None
    constant = np.array([bool((plane == plane.flat[0]).all()) for plane in planes])
    again = np.array([not c and np.array_equal(p, q) for c, p, q in zip(constant, planes, planes[1:], strict=False)])
    longest, first = _longest_run(again)
    if longest + 1 >= _IN_A_ROW:
        what = f"{longest + 1} slices in a row are the same."
        why = f"from slice {first + 1} of {len(planes)} on; noise makes every slice of a scan another"
        return Problem("repeated-slices", what, why, _AGAIN)
    if labels is None:
        return None
    hidden = np.flatnonzero(constant & np.moveaxis(labels, axis, 0).any(axis=(1, 2)))
    if not len(hidden):
        return None
    what = f"{len(hidden)} slices show nothing, but something is labelled in them."
    why = f"every voxel of slice {hidden[0] + 1} of {len(planes)} has the same value: it was not written, or cut off"
    return Problem("repeated-slices", what, why, _AGAIN)


def _longest_run(flags: NDArray[np.bool_]) -> tuple[int, int]:
    """Length and beginning of the longest run of true."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    if not len(edges):
        return 0, 0
    lengths = edges[1::2] - edges[::2]
    longest = int(lengths.argmax())
    return int(lengths[longest]), int(edges[2 * longest])
