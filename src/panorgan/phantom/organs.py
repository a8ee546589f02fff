"""The solid organs and the great vessels, with optional tumours."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from panorgan.phantom.body import Frame, spine_depth
from panorgan.phantom.gut import gap
from panorgan.phantom.patient import Canvas
from panorgan.phantom.shapes import Array, Patch, Point, Tube, rotation, smooth_max, smooth_min


class Lesions:
    """Tumours of one patient: where they are, and, once painted, which voxels they fill."""

    def __init__(self, canvas: Canvas, wanted: bool, rng: np.random.Generator) -> None:
        # An own generator: with or without tumours, it is the same patient.
        self.canvas, self.wanted, self.rng = canvas, wanted, rng
        self.distances: dict[str, Array] = {}
        self.hosts: dict[str, list[str]] = {}

    def grow(self, name: str, host: str, patch: Patch, organ: Array, spots: list[tuple[Point, float]]) -> Array:
        """Add lobulated masses at `spots` (centre, radius); returns the organ swollen around them."""
        if not self.wanted:
            return organ
        canvas = self.canvas
        whole = self.distances.setdefault(name, np.full(canvas.grid.shape, 99, dtype=np.float32))
        self.hosts.setdefault(name, []).append(host)
        rough = canvas.lumps[patch.box] * np.float32(1.4) + canvas.grain[patch.box] * np.float32(0.6)
        for centre, radius in spots:
            a, b, c = (radius * self.rng.uniform(0.8, 1.2, size=3)).tolist()
            mass = patch.ellipsoid(centre, (a, b, c)) + rough
            whole[patch.box] = np.minimum(whole[patch.box], mass)
            organ = smooth_min(organ, mass - 1.0, 8.0)
        return organ

    def paint(self) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.bool_]]]:
        """Darken the lesions inside their organs, with a brighter rim and a necrotic core."""
        canvas, masks = self.canvas, {}
        for name, distance in self.distances.items():
            numbers = [canvas.number(host) for host in self.hosts[name]]
            inside = np.isin(canvas.owner, numbers)
            share = np.clip(0.5 - distance / np.float32(canvas.grid.softness), 0, 1) * inside
            rim = np.exp(-(((distance + 1.5) / 2.2) ** 2))
            core = np.clip((-distance - 9) / 6, 0, 1)
            value = canvas.tissues[name] + 5 * canvas.grain - 18 * core
            value = value + rim * (canvas.tissues[f"{name}_rim"] - value)
            canvas.hu += share * (value.astype(np.float32) - canvas.hu)
            masks[name] = share > 0.5
        return masks


def paint_liver(canvas: Canvas, frame: Frame, lesions: Lesions) -> None:
    """Right lobe under the dome, left lobe tapering across the midline, vessels inside."""
    x, y, z = canvas.jitter(-66, -2, 36, spread=3)
    right = (canvas.vary(74, 0.05), canvas.vary(84, 0.05), canvas.vary(78, 0.07))
    patch = canvas.grid.patch((-160, -120, -75), (90, 110, 140))
    box = patch.box
    lobe = patch.ellipsoid((x, y, z), right, rotation(about_y=float(canvas.rng.normal(-14, 4))))
    reach = canvas.vary(70, 0.15)
    left = patch.ellipsoid(
        (reach * 0.05 - 4, -46, canvas.vary(56, 0.06)),
        (reach, 36, canvas.vary(33, 0.12)),
        rotation(about_y=-14),
    )
    distance = smooth_min(lobe, left, 26)
    # The under-surface is hollow where stomach, kidney and the hilum press in.
    hollow = patch.ellipsoid((4, 22, 4), (54, 44, 66))
    hollow = smooth_min(hollow, patch.ellipsoid((-30, -62, -44), (52, 46, 46)), 20)
    distance = smooth_max(distance, -hollow, 18)
    distance = distance + canvas.swell[box] * np.float32(2.2) + canvas.lumps[box] * np.float32(1.0)
    distance = smooth_max(distance, frame.cavity[box] + 1.5, 6)
    spots = []
    for place in ((-88, 8, 30), (-72, -38, 36), (-60, 34, 48))[: int(canvas.rng.integers(1, 4))]:
        spots.append((canvas.jitter(*place, spread=6), float(canvas.rng.uniform(9, 20))))
    distance = lesions.grow("liver_tumour", "liver", patch, distance, spots)
    hu = canvas.tissues["liver"] + 2.0 * canvas.lumps[box] + 1.5 * canvas.swell[box]
    canvas.paint(box, distance, hu.astype(np.float32), "liver", halo=0.5 * gap(canvas))
    _paint_liver_vessels(canvas, patch, distance)


def _paint_liver_vessels(canvas: Canvas, liver: Patch, surface: Array) -> None:
    """Portal branches from the hilum and hepatic veins to the cava; the liver keeps their voxels."""
    depth = np.full(canvas.grid.shape, 99, dtype=np.float32)
    depth[liver.box] = surface + 5
    portal = [
        [(-34, -4, 26, 6.5), (-62, 2, 34, 5), (-92, 14, 30, 2.5)],
        [(-60, 2, 34, 4.5), (-82, -16, 50, 3), (-96, -28, 60, 2)],
        [(-34, -4, 28, 5.5), (-16, -26, 46, 4), (10, -44, 56, 2.5)],
    ]
    hepatic = [
        [(-22, 8, 84, 5), (-60, 10, 66, 4.5), (-98, 16, 46, 2.5)],
        [(-22, 4, 84, 5), (-46, -24, 64, 4), (-62, -52, 40, 2.5)],
        [(-20, 2, 82, 4.5), (0, -26, 66, 3.5), (16, -46, 58, 2)],
    ]
    for branches, tissue in ((portal, "portal_vein"), (hepatic, "hepatic_vein")):
        for knots in branches:
            moved = [(*canvas.jitter(*knot[:3], spread=3), 1.2 * knot[3]) for knot in knots]
            patch, distance, _ = canvas.grid.tube(Tube.through(moved), margin=6)
            distance = np.maximum(distance, depth[patch.box])
            canvas.paint(patch.box, distance, canvas.tissues[tissue], "liver")


def paint_spleen(canvas: Canvas, frame: Frame) -> None:
    """A crescent along the wall, behind and next to the stomach."""
    x, y, z = canvas.jitter(92, 36, 46, spread=3)
    size = canvas.vary(1.0, 0.09)
    patch = canvas.grid.around((x, y, z), (56, 70, 80))
    box = patch.box
    turn = rotation(about_x=float(canvas.rng.normal(14, 6)), about_z=float(canvas.rng.normal(-22, 6)))
    outer = patch.ellipsoid((x, y, z), (42 * size, 56 * size, 57 * size), turn)
    hilum = patch.ellipsoid((x - 40, y - 20, z + 4), (36, 38, 70), turn)
    distance = smooth_max(outer, -hilum, 10) + canvas.swell[box] * np.float32(2.0)
    distance = smooth_max(distance, frame.cavity[box] + 2.0, 6)
    hu = canvas.tissues["spleen"] + 2.0 * canvas.lumps[box]
    if canvas.tissues.phase == "arterial":  # the red pulp fills unevenly at first
        hu = hu + 16 * np.sin(patch.z / 7 + 2 * canvas.swell[box] + patch.y / 11)
    canvas.paint(box, distance, hu.astype(np.float32), "spleen", halo=gap(canvas))


def paint_kidneys(canvas: Canvas, frame: Frame, lesions: Lesions) -> None:
    """Two beans in perirenal fat, the left one higher; cortex, medulla, sinus fat."""
    ill = int(canvas.rng.integers(0, 2))
    for index, (name, side, height) in enumerate((("kidney_left", 1, 2.0), ("kidney_right", -1, -14.0))):
        centre = canvas.jitter(side * 63, 42, height, spread=3)
        turn = rotation(
            about_x=float(canvas.rng.normal(-8, 4)),
            about_y=side * float(canvas.rng.normal(-12, 4)),
            about_z=side * float(canvas.rng.normal(-38, 7)),
        )
        size = canvas.vary(1.0, 0.06)
        patch = canvas.grid.around(centre, (46, 46, 64))
        box = patch.box
        u, v, w = patch.local(centre, turn)
        own = Patch(box, side * u, v, w)  # own x points away from the hilum on both sides
        bean = own.ellipsoid((0, 0, 0), (28 * size, 28 * size, 56 * size))
        bean = smooth_max(bean, -own.ellipsoid((-30, 0, 0), (15, 12, 22)), 10)
        bean = bean + canvas.lumps[box] * np.float32(1.3)
        sinus = own.ellipsoid((-13, 0, 0), (14, 8, 25 * size)) + canvas.grain[box] * np.float32(1.2)
        bean = smooth_max(bean, frame.cavity[box] + 2, 5)
        whole = smooth_max(bean, -sinus, 4)
        if index == ill:
            pole = float(canvas.rng.choice([-1, 1]))
            local = np.array([side * 14.0, -4.0, pole * 30.0])
            place = turn @ local + np.asarray(centre)
            spot = ((float(place[0]), float(place[1]), float(place[2])), float(canvas.rng.uniform(10, 18)))
            whole = lesions.grow("kidney_tumour", name, patch, whole, [spot])
        medulla = np.clip((-bean - 7) / 3, 0, 1) * np.clip(canvas.lumps[box] * 1.5 + 1.0, 0.15, 1)
        hu = canvas.tissues["renal_cortex"] + medulla * (
            canvas.tissues["renal_medulla"] - canvas.tissues["renal_cortex"]
        )
        canvas.paint(box, bean - (2 + 9 * canvas.patient.visceral), -98.0)
        canvas.paint(box, np.maximum(sinus, bean), -55 + 45 * canvas.grain[box])
        canvas.paint(box, whole, hu.astype(np.float32), name)


def paint_pancreas(canvas: Canvas, lesions: Lesions) -> None:
    """A lobulated band from the duodenum, over the great vessels, towards the spleen."""
    thin = float(np.clip(1.12 - 0.005 * (canvas.patient.age - 35), 0.8, 1.12))
    knots = [
        (*canvas.jitter(-32, -8, -34, spread=3), 12 * thin),
        (*canvas.jitter(-28, -12, -14, spread=3), 14.5 * thin),
        (*canvas.jitter(-6, -27, 2, spread=3), 10.5 * thin),
        (*canvas.jitter(26, -24, 14, spread=4), 11 * thin),
        (*canvas.jitter(54, -2, 26, spread=4), 11 * thin),
        (*canvas.jitter(76, 14, 34, spread=3), 9.5 * thin),
    ]
    patch, distance, _ = canvas.grid.tube(Tube.through(knots))
    box = patch.box
    lobules = 1.1 + 0.02 * max(canvas.patient.age - 40, 0)
    distance = distance + canvas.grain[box] * np.float32(lobules) + canvas.lumps[box] * np.float32(1.2)
    part = int(canvas.rng.integers(1, 5))
    spot = (
        (float(knots[part][0]), float(knots[part][1]), float(knots[part][2])),
        float(canvas.rng.uniform(10, 15)),
    )
    distance = lesions.grow("pancreas_tumour", "pancreas", patch, distance, [spot])
    # Fat creeps between the lobules with age and weight.
    streaks = np.clip(canvas.grain[box] - 0.6, 0, 1.5) * (10 + 50 * canvas.patient.visceral)
    hu = canvas.tissues["pancreas"] - streaks
    canvas.paint(box, distance, hu.astype(np.float32), "pancreas", halo=0.6 * gap(canvas))


def paint_vessels(canvas: Canvas) -> None:
    """Aorta, vena cava, splenic, portal and mesenteric vessels, renal vessels, adrenals."""
    tissues = canvas.tissues
    splenic = [(82, 20, 40, 3.5), (54, 4, 28, 4), (24, -14, 14, 4.5), (-6, -16, 4, 5.5), (-34, -4, 26, 7)]
    _vessel(canvas, splenic, tissues["portal_vein"], "portal_and_splenic_vein", keep="liver")
    for knots, tissue in (
        ([(-6, -16, 4, 5.5), (-10, -26, -40, 5), (-14, -34, -110, 4)], "portal_vein"),
        ([(9, 2, 12, 3.5), (4, -18, -6, 3.5), (2, -26, -60, 3)], "aorta"),
        ([(-20, 12, -12, 4), (-44, 36, -14, 4)], "inferior_vena_cava"),
        ([(-14, 2, 2, 4), (16, -4, 2, 4), (44, 34, 2, 4)], "inferior_vena_cava"),
    ):
        _vessel(canvas, knots, tissues[tissue], "", keep="pancreas")
    for side, x in ((-1, -38), (1, 42)):
        _vessel(canvas, [(x, 24, 50, 2.6), (x + side * 9, 36, 34, 2.6)], tissues["gland"], "", keep="liver")
    _paint_great_vessels(canvas)


def _paint_great_vessels(canvas: Canvas) -> None:
    """The cava on the right and the aorta on the left of the spine, calcified in the old."""
    tissues = canvas.tissues
    age = canvas.patient.age
    width = canvas.vary(10.2 + 0.03 * (age - 50), 0.07)
    front = {z: float(spine_depth(z)) - 18 for z in (-180, -100, -40, 20, 70)}
    cava = [
        (-20, front[-180] - 8, -180, 10),
        (-19, front[-100] - 8, -100, 10.5),
        (*canvas.jitter(-21, front[-40] - 7, -40, spread=2), 11),
        (*canvas.jitter(-23, front[20] - 9, 20, spread=2), 11.5),
        (-22, 2, 70, 12.5),
        (-16, -6, 110, 13),
    ]
    _vessel(canvas, cava, tissues["inferior_vena_cava"], "inferior_vena_cava", halo=0.4)
    aorta = [
        (22, 22, 220, width * 1.15),
        (20, 20, 120, width * 1.12),
        (*canvas.jitter(13, front[70] - 8, 70, spread=2), width * 1.1),
        (*canvas.jitter(9, front[20] - 11, 20, spread=2), width),
        (*canvas.jitter(9, front[-40] - 11, -40, spread=2), width * 0.92),
        (8, front[-100] - 10, -100, width * 0.85),
        (8, front[-180] - 9, -180, width * 0.8),
    ]
    patch, distance = _vessel(canvas, aorta, tissues["aorta"], "aorta", halo=0.8)
    if age > 55:
        plaque = np.clip(canvas.grain[patch.box] - 2.3 + (age - 55) / 30, 0, 1) * np.exp(-(((distance + 1) / 2) ** 2))
        canvas.hu[patch.box] += (plaque * 420).astype(np.float32)


def _vessel(
    canvas: Canvas, knots: Sequence[Sequence[float]], hu: float, name: str, halo: float = 0.0, keep: str = ""
) -> tuple[Patch, Array]:
    """Paint one tube, sparing the voxels that belong to the organ `keep`."""
    patch, distance, _ = canvas.grid.tube(Tube.through(knots), margin=8)
    distance = distance + canvas.swell[patch.box] * np.float32(0.6)
    if keep:
        distance = np.where(canvas.owner[patch.box] == canvas.number(keep), np.float32(20), distance)
    canvas.paint(patch.box, distance, hu, name, halo=halo)
    return patch, distance
