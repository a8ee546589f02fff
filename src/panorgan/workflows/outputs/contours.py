"""From a mask to closed polygons, slice by slice.

The outline runs halfway between the centres of pixels inside and outside (marching squares of contourpy at 0.5), so
that a pixel belongs to the mask exactly where its centre lies inside. It cuts the corners of pixels: the enclosed area
is that of the pixels less half a pixel per outline, and plus half a pixel per hole. Pixels that touch only at a corner
have separate outlines.
"""

from __future__ import annotations

import itertools

import numpy as np
from contourpy import FillType, contour_generator
from numpy.typing import NDArray
from scipy.spatial import cKDTree

Ring = NDArray[np.float64]
"""Points [n, 2] as (column, row), pixel centres at integers; closed, without repeating the first point."""


def outlines(mask: NDArray[np.bool_]) -> list[Ring]:
    """The polygons of a mask [rows, columns].

    A hole is joined to its outline by a channel of no width (DICOM calls this a keyhole), so that every polygon is one
    line; whoever fills it by the even-odd rule or by winding numbers gets the hole.
    """
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    if not rows.size:
        return []
    # Only where the mask is, with an empty border, so that every outline closes.
    window = mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    padded = np.pad(window, 1).astype(np.float64)
    first = np.array([columns[0], rows[0]]) - 1
    generator = contour_generator(z=padded, name="serial", fill_type=FillType.OuterOffset)
    found = []
    for points, offsets in zip(*generator.filled(0.5, 2.0), strict=True):
        rings = [_corners(points[begin : end - 1] + first) for begin, end in itertools.pairwise(offsets)]
        found.append(_joined(rings[0], rings[1:]))
    return found


def _corners(ring: Ring) -> Ring:
    """Without the points on straight lines between others."""
    before, after = ring - np.roll(ring, 1, axis=0), np.roll(ring, -1, axis=0) - ring
    return ring[before[:, 0] * after[:, 1] != before[:, 1] * after[:, 0]]


def _joined(outer: Ring, holes: list[Ring]) -> Ring:
    """One line through an outline and its holes, the nearest hole first, so that channels do not cross other holes."""
    holes = list(holes)
    while holes:
        tree = cKDTree(outer)
        nearest = [np.stack(tree.query(hole)) for hole in holes]  # distances, and where on the line
        which = int(np.argmin([distances.min() for distances, _ in nearest]))
        distances, at = nearest[which]
        leave = int(distances.argmin())
        enter, hole = int(at[leave]), np.roll(holes.pop(which), -leave, axis=0)
        outer = np.concatenate([outer[: enter + 1], hole, hole[:1], outer[enter:]])
    return outer
