"""One random patient: build, pose, and the warped grid on which the anatomy is drawn."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from panorgan.phantom.config import PhantomSite
from panorgan.phantom.shapes import Array, Box, Grid, rotation, smooth_noise
from panorgan.phantom.tissue import FAT, Tissues

Value = Array | float


@dataclass(frozen=True)
class Patient:
    """Numbers that shape the whole body; lengths in mm of an average adult."""

    scale: tuple[float, float, float]
    centre: tuple[float, float, float]
    turn: tuple[float, float, float]
    subcutaneous: float
    visceral: float
    age: float

    @classmethod
    def random(cls, rng: np.random.Generator, site: PhantomSite) -> Patient:
        """Draw a patient from the site's population."""
        size = 1.05 * float(np.clip(rng.normal(site.size, site.size_spread), 0.6, 1.5))
        spread = rng.normal(1.0, 0.02, size=3)
        fatness = float(np.clip(rng.normal(site.fatness, site.fatness_spread), 0.02, 1.0))
        # Men and women store fat differently: the two depots share a cause, not a value.
        visceral = float(np.clip(fatness + rng.normal(0, 0.12), 0.02, 1.0))
        shift = rng.normal(0.0, (4.0, 2.5, 5.0))
        turn = rng.normal(0.0, (1.5, 1.5, 2.2))
        return cls(
            scale=(size * float(spread[0]), size * float(spread[1]), size * float(spread[2])),
            centre=(float(shift[0]), float(shift[1]) - 8.0, float(shift[2])),
            turn=(float(turn[0]), float(turn[1]), float(turn[2])),
            subcutaneous=6.0 + 30.0 * fatness,
            visceral=visceral,
            age=float(np.clip(rng.normal(site.age, 11), 18, 92)),
        )


class Canvas:
    """The scan in progress: HU, which structure owns each voxel, and the noise that roughens surfaces.

    Structures are painted from the least to the most important; the later one wins.
    """

    def __init__(
        self,
        rng: np.random.Generator,
        patient: Patient,
        tissues: Tissues,
        axes: tuple[Array, Array, Array],
        softness: float,
    ) -> None:
        self.rng, self.patient, self.tissues = rng, patient, tissues
        self.scan_x, self.scan_y, self.scan_z = np.meshgrid(*axes, indexing="ij", sparse=True)
        warp = [smooth_noise(rng, axes, 85.0) * np.float32(4.5) for _ in range(3)]
        self.swell = smooth_noise(rng, axes, 42.0)
        self.lumps = smooth_noise(rng, axes, 20.0)
        self.grain = smooth_noise(rng, axes, 9.0)
        self.grid = self._place(warp, softness)
        self.hu: Array = np.full(self.grid.shape, FAT, dtype=np.float32)
        self.owner = np.zeros(self.grid.shape, dtype=np.int16)
        self.names: list[str] = [""]

    def _place(self, warp: list[Array], softness: float) -> Grid:
        """Patient coordinates of every voxel: pose first, then the bending of the body."""
        c, s = self.patient.centre, self.patient.scale
        scan = (self.scan_x, self.scan_y, self.scan_z)
        moved = [axis - np.float32(middle) for axis, middle in zip(scan, c, strict=True)]
        rows = rotation(*self.patient.turn).T.astype(np.float32)
        placed = []
        for axis in range(3):
            row = rows[axis]
            turned = row[0] * moved[0] + row[1] * moved[1] + row[2] * moved[2]
            placed.append(((turned + warp[axis]) / np.float32(s[axis])).astype(np.float32))
        return Grid(placed[0], placed[1], placed[2], softness)

    def jitter(self, *values: float, spread: float = 4.0) -> tuple[float, float, float]:
        """A point moved by a normal deviation of `spread` mm per axis."""
        moved = np.asarray(values) + self.rng.normal(0, spread, size=3)
        return float(moved[0]), float(moved[1]), float(moved[2])

    def vary(self, value: float, share: float = 0.08) -> float:
        """A length changed by a few per cent."""
        return value * float(np.clip(self.rng.normal(1.0, share), 1 - 2.5 * share, 1 + 2.5 * share))

    def number(self, name: str) -> int:
        """The owner number of a structure; 0 for a nameless one."""
        if name not in self.names:
            self.names.append(name)
        return self.names.index(name)

    def paint(
        self,
        box: Box,
        distance: Array,
        value: Value,
        name: str = "",
        halo: float = 0.0,
    ) -> None:
        """Fill a shape with `value`; `halo` mm of fat keep it apart from what was painted before."""
        hu, owner, soft = self.hu[box], self.owner[box], np.float32(self.grid.softness)
        share = np.clip(0.5 - distance / soft, 0, 1)
        if halo > 0:
            around = np.clip(0.5 - (distance - np.float32(halo)) / soft, 0, 1)
            hu += around * (np.float32(FAT) - hu)
            owner[around > 0.5] = 0
        hu += share * (value - hu)
        owner[share > 0.5] = self.number(name)
