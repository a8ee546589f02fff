"""The frame around the organs: skin, fat, muscle, spine, ribs, lungs, heart."""

from __future__ import annotations

import numpy as np

from panorgan.phantom.patient import Canvas
from panorgan.phantom.shapes import Array, coverage, smooth_max, smooth_min, superellipse
from panorgan.phantom.tissue import AIR, FAT, LUNG

VERTEBRA_MM = 35.0


class Frame:
    """Distances to the surfaces that bound the organs, each (X, Y, Z) in mm."""

    def __init__(self, canvas: Canvas) -> None:
        self.canvas = canvas
        grid, patient = canvas.grid, canvas.patient
        self.x, self.y, self.z = grid.x, grid.y, grid.z
        self.spine_y = spine_depth(self.z)
        # A waist, wider hips and chest; visceral fat pushes the belly forward.
        waist = ((self.z + 45) / 100) ** 2
        belly = np.float32(30 * patient.visceral) * np.exp(-(((self.z + 40) / 95) ** 2))
        half_width = np.float32(canvas.vary(142, 0.02)) + 6 * np.minimum(waist, 2) + belly / 5
        half_depth = np.float32(canvas.vary(102, 0.025)) + belly / 2
        middle = 5 - belly / 2
        y = self.y - middle
        self.lean = superellipse(self.x, y, half_width, half_depth, 2.35) + canvas.swell * np.float32(0.8)
        fat = np.float32(patient.subcutaneous)
        side = fat * (1.0 - 0.25 * (self.z > 40))
        back = np.float32(0.2) * fat
        furrow = 5 * np.exp(-((self.x / 14) ** 2)) * (self.y > 0)
        skin = superellipse(self.x, y - back / 2, half_width + side, half_depth + fat * 0.8, 2.3)
        self.couch = self._couch_height(skin)
        self.skin = smooth_max(skin + furrow, canvas.scan_y - self.couch + 2.0, 10.0)
        # The body lies on the couch, so muscle is pressed flat as well.
        self.lean = smooth_max(self.lean + furrow / 2, self.skin + np.float32(2.5 + fat / 5), 8.0)
        self.cavity = self._cavity()
        self.dome = self._dome()

    def _couch_height(self, skin: Array) -> Array:
        """Height (mm, scan y) of the curved couch top: the lowest skin presses into it a little."""
        canvas = self.canvas
        below = np.where(skin < 0, canvas.scan_y, -1e3)
        lowest = float(np.quantile(below.max(axis=1), 0.9)) - 4.0
        return np.asarray(lowest - canvas.scan_x**2 / np.float32(2 * 620.0), dtype=np.float32)

    def _cavity(self) -> Array:
        """Inner surface of the muscle wall, with the spine and its muscles bulging in."""
        x, y, z = np.abs(self.x), self.y - self.spine_y, self.z
        front = np.clip(-self.y / 90, 0, 1)
        wall = 17 - 7 * front - 4 * (1 - front) * np.clip(z / 80, 0, 1)
        inner = self.lean + wall
        # Psoas grows downwards, quadratus lumborum lies next to it, erector spinae behind.
        size = np.clip((35 - z) / 110, 0.05, 1)
        psoas = np.hypot((x - 24 - 15 * size) / 1.0, y - 6 - 4 * size) - (6 + 15 * size)
        quadratus = np.hypot((x - 60) / 1.3, (y - 28) / 0.9) - 13 * np.clip((50 - z) / 60, 0, 1)
        self.erector = (np.hypot((x - 33) / 1.35, (y - 44) / 1.0) - 22).astype(np.float32)
        column = np.hypot(x / 1.25, y - 2) - 20
        self.psoas = np.minimum(psoas, quadratus).astype(np.float32)
        behind = smooth_min(smooth_min(self.psoas, self.erector, 6), column.astype(np.float32), 5)
        return smooth_max(inner.astype(np.float32), -behind, 6)

    def _dome(self) -> Array:
        """Height of the diaphragm (mm): two domes, falling off to the sides and furthest to the back."""
        canvas = self.canvas
        breath = canvas.rng.normal(0, 5)
        peaks = []
        for side, top in ((-1, 98.0), (1, 88.0)):
            peak = top + breath + canvas.rng.normal(0, 3)
            ahead = (self.y + 8) / np.where(self.y > -8, 80, 96)
            fall = ((self.x - side * 64) / 74) ** 2 + ahead**2
            peaks.append(peak - 46 * np.minimum(fall, 3.0) ** 1.25)
        return np.asarray(np.maximum(peaks[0], peaks[1]) + canvas.lumps + 2 * canvas.swell, dtype=np.float32)


def spine_depth(z: Array | float) -> Array:
    """Depth (y, mm) of the vertebral bodies' centre: forward in the loin, backward in the chest."""
    return np.asarray(40 - 7 * np.exp(-(((np.asarray(z) + 70) / 80) ** 2)), dtype=np.float32)


def paint_lungs(canvas: Canvas, frame: Frame) -> None:
    """Lung bases above the diaphragm, with vessels, and the heart between them."""
    grid = canvas.grid
    top = grid.patch((-400, -400, -30), (400, 400, 900))
    box = top.box
    air = np.maximum(frame.dome[box] - top.z, frame.cavity[box] + 1.0)
    vessels = np.clip(canvas.grain[box] - 1.5, 0, 1) * 500
    tissue = (LUNG + 25 * canvas.swell[box] + 60 * np.clip(top.y / 70, 0, 1) + vessels).astype(np.float32)
    air = smooth_max(air, 18 + 7 * canvas.swell[box] - np.abs(top.x), 14)
    canvas.paint(box, air - 3.0, canvas.tissues["muscle"])
    for name, side in (("lung_left", -1), ("lung_right", 1)):
        canvas.paint(box, np.maximum(air, side * top.x), tissue, name)
    centre, radii = canvas.jitter(22, -28, 140, spread=3), (62.0, 45.0, 52.0)
    heart_patch = grid.around(centre, radii)
    wall = np.maximum(heart_patch.ellipsoid(centre, radii), frame.cavity[heart_patch.box] + 4)
    canvas.paint(heart_patch.box, wall - 5, FAT + 10)
    canvas.paint(heart_patch.box, wall, canvas.tissues["muscle"] + 20)
    canvas.paint(heart_patch.box, wall + 9, canvas.tissues["heart"])


def close_body(canvas: Canvas, frame: Frame) -> None:
    """Put wall, skin and air around what was painted into the cavity."""
    soft = canvas.grid.softness
    wall = _wall(canvas, frame)
    inside = coverage(frame.cavity, soft)
    canvas.hu = wall + inside * (canvas.hu - wall)
    canvas.owner[inside <= 0.5] = 0
    _paint_ribs(canvas, frame)
    _paint_spine(canvas, frame)
    body = coverage(frame.skin, 1.5 * soft)  # a step of 900 HU shows every voxel edge
    canvas.hu = (AIR + body * (canvas.hu - AIR)).astype(np.float32)


def _wall(canvas: Canvas, frame: Frame) -> Array:
    """Skin, subcutaneous fat and muscle with fat between its layers."""
    soft, age = canvas.grid.softness, canvas.patient.age
    streaks = np.clip(canvas.grain - 0.9, 0, 1.5) * (10 + 0.9 * max(age - 40, 0))
    muscle = canvas.tissues["muscle"] + 3 * canvas.lumps - streaks
    # Fat planes: between the flat abdominal muscles, around the back muscles, in the midline.
    planes = np.exp(-(((frame.lean + 9) / 1.6) ** 2)) * (np.abs(frame.x) > 45) * 70
    planes += np.exp(-((frame.erector / 2.2) ** 2)) * 85 + np.exp(-((frame.psoas / 2.2) ** 2)) * 60
    planes += np.exp(-((frame.x / 5) ** 2)) * (frame.y < -20) * 60
    muscle = np.maximum(muscle - planes, FAT)
    fat = FAT + 4 * canvas.lumps + np.clip(canvas.grain - 1.6, 0, 1) * 40
    wall = fat + coverage(frame.lean, soft) * (muscle - fat)
    skin = np.exp(-(((frame.skin + 1.5) / 2.0) ** 2))
    return np.asarray(wall + skin * (20 - wall) * 0.8, dtype=np.float32)


def _paint_ribs(canvas: Canvas, frame: Frame) -> None:
    """Bands that slope down to the front within the wall, ending at the costal margin."""
    patch = canvas.grid.patch((-400, -400, -70), (400, 400, 900))
    box, x, y, z = patch.box, patch.x, patch.y, patch.z
    level = z - 0.5 * y + 4 * canvas.swell[box] + np.float32(canvas.rng.uniform(0, 28))
    band = np.abs(np.mod(level, 28) - 14) - 6.0
    shell = np.abs(frame.lean[box] + 10.5) - 4.6
    margin = -32 + 0.95 * np.clip(-y, 0, None) + 0.5 * np.clip(40 - np.abs(x), 0, None) - z
    rib = np.maximum(np.maximum(band, shell), margin)
    rib = np.maximum(rib, 26 - np.abs(x)).astype(np.float32)
    bone = 620 - 190 * np.clip(-rib / 3, 0, 1) - 2.0 * (canvas.patient.age - 50)
    calcified = 115 + 120 * np.clip(canvas.grain[box] - 0.8, 0, 1)
    cartilage = np.clip((-y - 52) / 18, 0, 1)
    canvas.paint(box, rib, (bone + cartilage * (calcified - bone)).astype(np.float32))


def _paint_spine(canvas: Canvas, frame: Frame) -> None:
    """Vertebral bodies and discs, canal, arch, transverse and spinous processes."""
    patch = canvas.grid.patch((-60, -5, -900), (60, 140, 900))
    box = patch.box
    x, z = patch.x, patch.z
    y = patch.y - frame.spine_y[box]
    start = np.float32(canvas.rng.uniform(0, VERTEBRA_MM))
    phase = np.mod(z + 0.12 * y + start, VERTEBRA_MM) - VERTEBRA_MM / 2
    waisted = 1 - 0.09 * np.cos(2 * np.pi * phase / VERTEBRA_MM)
    canal = np.hypot(x / 1.25, y - 23) - 9.0
    body = smooth_max(np.hypot(x / (1.36 * waisted), y / waisted) - 17.0, 0.5 - canal, 3)
    disc = np.abs(phase) - (VERTEBRA_MM / 2 - 4.5)
    loss = 2.2 * (canvas.patient.age - 50)
    shell = np.clip(1 + np.maximum(body, disc) / 3.2, 0, 1)
    bone = 205 - loss + 35 * canvas.grain[box] + 330 * shell
    between = np.clip(disc / 3 + 0.5, 0, 1)
    value = bone + between * (88 - bone)
    arch = np.abs(np.hypot(x / 1.15, y - 24) - 12.5) - 3.4
    arch = np.maximum(arch, np.abs(phase + 2) - 13)
    transverse = np.maximum(np.hypot((y - 19) - 0.08 * np.abs(x), phase - 4) - 3.8, np.abs(x) - 36)
    transverse = np.maximum(transverse, 13 - np.abs(x))
    spinous = np.maximum(np.maximum(np.abs(x) - 3.2, np.abs(y - 47) - 15), np.abs(phase + 7) - 9)
    process = np.minimum(np.minimum(arch, transverse), spinous)
    canvas.paint(box, process.astype(np.float32), (470 - loss + 40 * canvas.grain[box]).astype(np.float32))
    canvas.paint(box, body, value.astype(np.float32))
    canvas.paint(box, canal.astype(np.float32), -35.0)
    canvas.paint(box, (canal + 2.5).astype(np.float32), 28.0)
