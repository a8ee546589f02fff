"""The hollow organs: small bowel, colon, stomach, duodenum, oesophagus, gallbladder."""

from __future__ import annotations

import numpy as np
from scipy.spatial import cKDTree

from panorgan.phantom.body import Frame
from panorgan.phantom.patient import Canvas
from panorgan.phantom.shapes import Tube, rotation, smooth_max

GAS = -920.0


def paint_gut(canvas: Canvas, frame: Frame) -> None:
    """Small bowel, then colon and stomach over it."""
    _paint_small_bowel(canvas, frame)
    _paint_mesentery(canvas)
    _paint_colon(canvas, frame)
    _paint_stomach(canvas, frame)


def _paint_small_bowel(canvas: Canvas, frame: Frame) -> None:
    """Packed loops: cells around scattered seeds, with mesenteric fat between them."""
    rng, fat = canvas.rng, canvas.patient.visceral
    patch = canvas.grid.patch((-110, -110, -170), (110, 45, 25))
    step = 27.0
    seeds = np.stack(
        np.meshgrid(np.arange(-113, 114, step), np.arange(-117, 46, step), np.arange(-184, 26, step), indexing="ij"),
        -1,
    ).reshape(-1, 3)
    seeds = seeds + rng.uniform(-0.42, 0.42, seeds.shape) * step
    size = rng.uniform(11.5, 19.0, len(seeds)).astype(np.float32)
    kind = rng.choice(4, size=len(seeds), p=[0.46, 0.34, 0.14, 0.06])  # collapsed, fluid, gas, oral contrast
    fluid = rng.normal(18, 9, len(seeds)).astype(np.float32)
    level = rng.uniform(-9, 2, len(seeds)).astype(np.float32)
    if patch.x.size == 0:
        return
    bend = [6 * canvas.lumps[patch.box], -6 * canvas.swell[patch.box]]
    places = np.stack([patch.x + bend[0], patch.y + bend[1], patch.z - bend[0]], axis=-1).reshape(-1, 3)
    found = cKDTree(seeds).query(places, k=2)
    gaps, cells = np.asarray(found[0]), np.asarray(found[1])
    near, second = (gaps[:, i].astype(np.float32).reshape(patch.x.shape) for i in (0, 1))
    cell = cells[:, 0].reshape(patch.x.shape)
    root = np.exp(-((patch.x / 55) ** 2) - (((patch.y + 15) / 35) ** 2))
    spacing = 0.8 + 3.5 * fat + (3 + 9 * fat) * root
    loop = np.maximum(near - size[cell] * np.float32(1.12 - 0.2 * fat), spacing - (second - near) / 2)
    envelope = np.hypot(patch.x / 96, (patch.y + 32) / (58 + 14 * fat)) * 60 - 60
    envelope = np.maximum(envelope, patch.z + 5 - 0.25 * (patch.y + 30))
    loop = smooth_max(loop.astype(np.float32), envelope.astype(np.float32), 8)
    loop = np.maximum(loop, frame.cavity[patch.box] + 3)
    wall = np.float32(canvas.tissues["gut_wall"])
    inner = np.where(kind[cell] == 0, wall - 12, fluid[cell])
    inner = np.where((kind[cell] == 2) & (patch.y - seeds[cell, 1].astype(np.float32) < level[cell]), GAS, inner)
    inner = np.where(kind[cell] == 3, 210, inner)
    canvas.paint(patch.box, loop, wall + 4 * canvas.grain[patch.box])
    canvas.paint(patch.box, loop + 3.2, inner.astype(np.float32))


def _paint_mesentery(canvas: Canvas) -> None:
    """Small vessels that fan out from the mesenteric root."""
    for _ in range(9):
        end = canvas.rng.normal((0, -55, -75), (45, 14, 30))
        middle = canvas.rng.normal((end[0] / 2, -38, -45), 8)
        tube = Tube.through([(2, -18, -22, 2.6), (*middle, 2.2), (*end, 1.2)])
        patch, distance, _ = canvas.grid.tube(tube, margin=6)
        canvas.paint(patch.box, distance, 0.6 * canvas.tissues["portal_vein"])


def _paint_colon(canvas: Canvas, frame: Frame) -> None:
    """Ascending, transverse and descending colon with haustra, stool and gas."""
    forward = -22 * canvas.patient.visceral
    knots = [
        (-88, 12, -190, 22),
        (*canvas.jitter(-94, 16, -110), canvas.vary(23, 0.1)),
        (*canvas.jitter(-92, 5, -62), canvas.vary(22, 0.1)),
        (*canvas.jitter(-72, -38, -52), canvas.vary(19, 0.1)),
        (*canvas.jitter(-20, -68 + forward, -62, spread=6), canvas.vary(19, 0.1)),
        (*canvas.jitter(40, -66 + forward, -42, spread=6), canvas.vary(18, 0.1)),
        (*canvas.jitter(84, -36, -4), canvas.vary(18, 0.1)),
        (*canvas.jitter(102, 8, 10), canvas.vary(17, 0.1)),
        (*canvas.jitter(104, 30, -45), canvas.vary(14, 0.1)),
        (*canvas.jitter(100, 22, -110), canvas.vary(13, 0.1)),
        (92, 5, -190, 14),
    ]
    patch, distance, along = canvas.grid.tube(Tube.through(knots))
    box = patch.box
    distance = distance + 2.2 * np.cos(along / np.float32(4.6)) + canvas.lumps[box] * np.float32(1.2)
    distance = np.maximum(distance, frame.cavity[box] + 2.5)
    canvas.paint(box, distance, canvas.tissues["gut_wall"], "colon", halo=1 + 3 * canvas.patient.visceral)
    # Stool is a crumbly mix of gas and solids; gas gathers in the front, so the transverse colon is airy.
    crumbs = canvas.grain[box] * 0.9 + canvas.lumps[box] * 0.5
    stool = np.where(crumbs > 0.75, -420, 35 + 25 * crumbs)
    airy = np.clip((-patch.y - 20 + 14 * canvas.swell[box]) / 12, 0, 1)
    lumen = stool + airy * (GAS - stool)
    canvas.paint(box, distance + 3.5, lumen.astype(np.float32), "colon")


def _paint_stomach(canvas: Canvas, frame: Frame) -> None:
    """A J-shaped bag: wall with folds, fluid or food, and gas in front."""
    rng = canvas.rng
    full = float(rng.uniform(0.85, 1.2))
    knots = [
        (*canvas.jitter(62, 14, 74, spread=3), 31 * full),
        (*canvas.jitter(68, -20, 50, spread=4), 34 * full),
        (*canvas.jitter(64, -46, 20, spread=5), 28 * full),
        (*canvas.jitter(34, -58, -10, spread=5), 21 * full),
        (*canvas.jitter(-4, -55, -10, spread=4), 16),
        (*canvas.jitter(-28, -40, 0, spread=3), 11),
    ]
    patch, distance, _ = canvas.grid.tube(Tube.through(knots))
    box = patch.box
    distance = distance + canvas.swell[box] * np.float32(2.5) + canvas.lumps[box] * np.float32(1.5)
    distance = np.maximum(distance, frame.cavity[box] + 3)
    folds = 3.6 + 1.2 * np.clip(canvas.grain[box], -1, 2)
    base = float(rng.choice([8.0, 22.0, 45.0]))
    food = base + float(rng.choice([0.0, 9.0, 16.0])) * canvas.grain[box]
    # Gas rises to the front of a patient who lies on the back; the fluid level is flat in the scanner.
    height = canvas.scan_y[:, box[1], :] - np.float32(canvas.patient.centre[1] + rng.normal(-48, 9))
    share = np.clip(0.5 - height / 4, 0, 1)
    lumen = food + share * (GAS - food)
    canvas.paint(box, distance, canvas.tissues["gut_wall"] + 2 * canvas.grain[box], "stomach", halo=gap(canvas))
    canvas.paint(box, distance + folds, lumen.astype(np.float32), "stomach")


def paint_duodenum(canvas: Canvas) -> None:
    """The C-shaped loop around the head of the pancreas."""
    knots = [
        (-28, -38, 0, 10),
        (*canvas.jitter(-50, -16, -6, spread=3), 12),
        (*canvas.jitter(-50, -2, -42, spread=3), 12),
        (*canvas.jitter(-18, 2, -60, spread=3), 11),
        (*canvas.jitter(26, -8, -48, spread=3), 10),
    ]
    patch, distance, _ = canvas.grid.tube(Tube.through(knots))
    distance = distance + canvas.lumps[patch.box] * np.float32(1.5)
    filled = float(canvas.rng.choice([12.0, 30.0, 55.0]))
    canvas.paint(patch.box, distance, canvas.tissues["gut_wall"], "duodenum", halo=0.5 * gap(canvas))
    canvas.paint(patch.box, distance + 3.5, filled, "duodenum")


def paint_oesophagus(canvas: Canvas) -> None:
    """From the chest in front of the aorta to the cardia of the stomach."""
    knots = [(4, 10, 220, 8), (8, 10, 120, 8), (16, 4, 92, 8), (34, 2, 76, 8), (46, 2, 70, 8)]
    patch, distance, _ = canvas.grid.tube(Tube.through(knots))
    keep = canvas.owner[patch.box] == canvas.number("stomach")
    distance = np.where(keep, np.float32(20), distance)
    canvas.paint(patch.box, distance, canvas.tissues["gut_wall"] - 5, "oesophagus")


def paint_gallbladder(canvas: Canvas) -> None:
    """A pear of bile under the liver, its fundus pointing forward and down."""
    centre = canvas.jitter(-46, -46, -12, spread=3)
    radii = (canvas.vary(15, 0.12), canvas.vary(15, 0.12), canvas.vary(29, 0.12))
    turn = rotation(about_x=float(canvas.rng.normal(-38, 8)), about_y=float(canvas.rng.normal(10, 6)))
    patch = canvas.grid.around(centre, (28, 28, 28))
    _, _, along = patch.local(centre, turn)
    distance = patch.ellipsoid(centre, radii, turn) + np.clip(along, -20, 20) * np.float32(0.12)
    canvas.paint(patch.box, distance, canvas.tissues["gut_wall"] - 8, "gallbladder", halo=0.5)
    canvas.paint(patch.box, distance + 2.2, canvas.tissues["gallbladder"], "gallbladder")


def gap(canvas: Canvas) -> float:
    """Width (mm) of the fat that parts neighbouring organs: hardly any in lean patients."""
    return 0.6 + 3.0 * canvas.patient.visceral
