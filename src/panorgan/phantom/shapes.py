"""Implicit shapes on a voxel grid: signed distances in mm, negative inside, roughened by smooth noise.

Everything random is defined in millimetres, never in voxels, so one patient looks alike at every resolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import CubicSpline

Array = NDArray[np.floating[Any]]
Box = tuple[slice, slice, slice]
Point = tuple[float, float, float]

LATTICE_HALF_MM = 260.0  # random control points cover this cube; beyond it the field stays constant
_FAR = np.float32(60.0)


def spline_basis(positions: Array, wavelength: float) -> Array:
    """Cubic B-spline weights, (positions, controls), of control points `wavelength` mm apart."""
    controls = int(np.ceil(2 * LATTICE_HALF_MM / wavelength)) + 4
    inside = np.clip(positions, -LATTICE_HALF_MM, LATTICE_HALF_MM)
    place = (inside + LATTICE_HALF_MM) / wavelength + 1.5
    gap = np.abs(place[:, None] - np.arange(controls)[None, :])
    near = 2 / 3 - gap**2 + gap**3 / 2
    tail = np.clip(2 - gap, 0, None) ** 3 / 6
    return np.asarray(np.where(gap < 1, near, tail), dtype=np.float32)


def smooth_noise(rng: np.random.Generator, axes: Sequence[Array], wavelength: float) -> Array:
    """A smooth random field of about unit deviation on the grid of `axes` (mm), (X, Y, Z)."""
    bases = [spline_basis(axis, wavelength) for axis in axes]
    lattice = rng.standard_normal([basis.shape[1] for basis in bases], dtype=np.float32)
    field = np.tensordot(bases[0], lattice, axes=(1, 0))
    field = np.matmul(bases[1], field)
    field = np.matmul(field, bases[2].T)
    # Weighting along three axes leaves a deviation of about a third.
    return np.asarray(field * 3.0, dtype=np.float32)


def smooth_min(a: Array, b: Array, width: float) -> Array:
    """Union of two shapes with a fillet of `width` mm."""
    bridge = np.clip(width - np.abs(a - b), 0, None)
    return np.asarray(np.minimum(a, b) - bridge * bridge / (4 * width), dtype=np.float32)


def smooth_max(a: Array, b: Array, width: float) -> Array:
    """Intersection of two shapes with a rounded edge of `width` mm."""
    return -smooth_min(-a, -b, width)


def coverage(distance: Array, softness: float) -> Array:
    """Share of a voxel inside the shape, 0 to 1: the partial-volume effect without supersampling."""
    return np.asarray(np.clip(0.5 - distance / np.float32(softness), 0, 1))


def superellipse(x: Array, y: Array, a: Array, b: Array, power: float) -> Array:
    """Distance to the closed curve \\|x/a\\|^p + \\|y/b\\|^p = 1, to first order."""
    u, v = np.abs(x / a) + 1e-6, np.abs(y / b) + 1e-6
    up, vp = u ** (power - 1), v ** (power - 1)
    level = (up * u + vp * v) ** (1 / power)
    slope = np.hypot(up / a, vp / b) * level ** (1 - power)
    return np.asarray((level - 1) / slope, dtype=np.float32)


def rotation(about_x: float = 0.0, about_y: float = 0.0, about_z: float = 0.0) -> NDArray[np.float64]:
    """Rotation matrix from three angles in degrees, applied in the order x, y, z."""
    ax, ay, az = np.deg2rad([about_x, about_y, about_z])
    rx = np.array([[1, 0, 0], [0, np.cos(ax), -np.sin(ax)], [0, np.sin(ax), np.cos(ax)]])
    ry = np.array([[np.cos(ay), 0, np.sin(ay)], [0, 1, 0], [-np.sin(ay), 0, np.cos(ay)]])
    rz = np.array([[np.cos(az), -np.sin(az), 0], [np.sin(az), np.cos(az), 0], [0, 0, 1]])
    return np.asarray(rz @ ry @ rx)


@dataclass(frozen=True)
class Patch:
    """A box of the grid with the patient coordinates of its voxels, each (X, Y, Z) in mm."""

    box: Box
    x: Array
    y: Array
    z: Array

    def ellipsoid(self, centre: Point, radii: Point, turn: NDArray[np.float64] | None = None) -> Array:
        """Distance to an ellipsoid; `turn` rotates its own axes into the patient's."""
        u, v, w = self.local(centre, turn)
        u, v, w = u / np.float32(radii[0]), v / np.float32(radii[1]), w / np.float32(radii[2])
        level = np.sqrt(u * u + v * v + w * w) + np.float32(1e-6)
        u, v, w = u / np.float32(radii[0]), v / np.float32(radii[1]), w / np.float32(radii[2])
        slope = np.sqrt(u * u + v * v + w * w) + np.float32(1e-6)
        return np.asarray(level * (level - 1) / slope, dtype=np.float32)

    def local(self, centre: Point, turn: NDArray[np.float64] | None = None) -> tuple[Array, Array, Array]:
        """Coordinates relative to `centre`, along the turned axes."""
        axes = (self.x, self.y, self.z)
        shifted = [axis - np.float32(middle) for axis, middle in zip(axes, centre, strict=True)]
        if turn is None:
            return shifted[0], shifted[1], shifted[2]
        rows = np.asarray(turn.T, dtype=np.float32)
        u, v, w = (row[0] * shifted[0] + row[1] * shifted[1] + row[2] * shifted[2] for row in rows)
        return u, v, w


@dataclass(frozen=True)
class Tube:
    """A curve with a radius at each of its points: (N, 3) and (N,) in mm."""

    points: NDArray[np.float64]
    radii: NDArray[np.float64]

    @classmethod
    def through(cls, knots: Sequence[Sequence[float]], pieces: int = 3) -> Tube:
        """A smooth tube through knots (x, y, z, radius), each span cut into `pieces` straight pieces."""
        table = np.asarray(knots, dtype=np.float64)
        steps = np.linalg.norm(np.diff(table[:, :3], axis=0), axis=1)
        arc = np.concatenate([[0.0], np.cumsum(steps)])
        where = np.interp(np.arange(0, len(table) - 1 + 1e-9, 1 / pieces), np.arange(len(table)), arc)
        fine = CubicSpline(arc, table, bc_type="natural")(where)
        return cls(fine[:, :3], np.clip(fine[:, 3], table[:, 3].min(), table[:, 3].max()))

    def bounds(self, margin: float) -> tuple[Point, Point]:
        """The corners of a box that holds the tube and `margin` mm around it."""
        reach = self.radii[:, None] + margin
        low, high = (self.points - reach).min(axis=0), (self.points + reach).max(axis=0)
        return (float(low[0]), float(low[1]), float(low[2])), (float(high[0]), float(high[1]), float(high[2]))


class Grid:
    """The voxels of a scan in patient coordinates: x to the patient's left, y to the back, z to the head."""

    def __init__(self, x: Array, y: Array, z: Array, softness: float) -> None:
        self.x, self.y, self.z, self.softness = x, y, z, softness
        # Coordinates are warped, so each slab of voxels spans an interval, not one value.
        others = ((1, 2), (0, 2), (0, 1))
        coordinates = (x, y, z)
        self._low = [c.min(axis=o) for c, o in zip(coordinates, others, strict=True)]
        self._high = [c.max(axis=o) for c, o in zip(coordinates, others, strict=True)]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.x.shape

    def patch(self, low: Sequence[float], high: Sequence[float]) -> Patch:
        """The smallest box of voxels that holds the corners `low` and `high` (mm); may be empty."""
        box = []
        for axis in range(3):
            hits = np.flatnonzero((self._high[axis] >= low[axis]) & (self._low[axis] <= high[axis]))
            box.append(slice(int(hits[0]), int(hits[-1]) + 1) if hits.size else slice(0, 0))
        b = (box[0], box[1], box[2])
        return Patch(b, self.x[b], self.y[b], self.z[b])

    def around(self, centre: Point, radii: Point, margin: float = 14.0) -> Patch:
        """The box of voxels around an ellipsoid."""
        middle, reach = np.asarray(centre), np.asarray(radii) + margin
        return self.patch((middle - reach).tolist(), (middle + reach).tolist())

    def tube(self, tube: Tube, margin: float = 14.0) -> tuple[Patch, Array, Array]:
        """Patch, distance to the tube, and the length along it (mm) of the nearest point."""
        whole = self.patch(*tube.bounds(margin))
        distance = np.full(whole.x.shape, _FAR, dtype=np.float32)
        along = np.zeros_like(distance)
        start = 0.0
        for a, b, ra, rb in zip(tube.points, tube.points[1:], tube.radii, tube.radii[1:], strict=False):
            step = b - a
            length = float(np.linalg.norm(step)) + 1e-6
            piece = self.patch(*Tube(np.stack([a, b]), np.array([ra, rb])).bounds(margin))
            u, v, w = piece.local((float(a[0]), float(a[1]), float(a[2])))
            unit = (step / length).astype(np.float32)
            t = np.clip(u * unit[0] + v * unit[1] + w * unit[2], 0, np.float32(length))
            away = (u - t * unit[0]) ** 2 + (v - t * unit[1]) ** 2 + (w - t * unit[2]) ** 2
            d = np.sqrt(away) - np.float32(ra) - t * np.float32((rb - ra) / length)
            inner = tuple(slice(p.start - q.start, p.stop - q.start) for p, q in zip(piece.box, whole.box, strict=True))
            nearer = d < distance[inner]
            distance[inner][nearer] = d[nearer]
            along[inner][nearer] = t[nearer] + np.float32(start)
            start += length
        return whole, distance, along
