"""What a label may be, by where it lies in the body, how large it is and what is in it. Unsure is no guess.

A few large organs can be recognised with confidence: liver, spleen, kidneys, lungs, and the chambers of a heart in cine
MR. Everything else is left to the person who drew it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from panorgan.data.volume import Volume
from panorgan.data_doctor.masks import Mask, describe
from panorgan.data_doctor.organ_positions import find_body

# Kidneys lie at one height; a spleen is farther above a right kidney.
_LEVEL_MM = 38.0
_OF_A_HEART = {
    "heart_myocardium": "a ring",
    "heart_left_ventricle": "within a ring",
    "heart_right_ventricle": "next to a ring",
}
# A mask with a share of so much in one piece is one piece.
_ONE = 0.9
# Of the cases with the label, so many must agree.
_AGREEING = 0.75


@dataclass(frozen=True)
class Shape:
    """What one label looks like in one case. `size_mm` is its bounding box; positions are shares of the body.

    `side` runs from −0.5 (the patient's left) to 0.5 (right), `depth` from −0.5 (back) to 0.5 (front); both are NaN
    where the scan does not hold the whole body. `cut` ones reach the first or last slice. `around` are the labels that
    it encloses in its slices.
    """

    volume_ml: float
    side: float
    depth: float
    height_mm: float
    size_mm: tuple[float, float, float]
    pieces: int
    largest_piece: float
    median: float
    cut: bool = False
    around: tuple[str, ...] = ()


@dataclass(frozen=True)
class Look:
    """One case: CT, MR or unknown, its labels by name, the body's width, and the value that air lies below."""

    modality: str
    shapes: Mapping[str, Shape]
    width_mm: float = float("nan")
    air_below: float = float("nan")


@dataclass(frozen=True)
class Guess:
    """An organ and the reason, for a person to check."""

    organ: str
    why: str


def look_at(image: Volume, masks: Mapping[str, Mask], modality: str, air_below: float) -> Look:
    """Describe the masks of one case; image and masks [X, Y, Z] in RAS order."""
    body = None if np.isnan(air_below) else find_body(image, air_below)
    middle_y, depth_mm = _front_to_back(image, air_below) if body else (float("nan"), float("nan"))
    drawn = {name: mask for name, mask in masks.items() if mask.inside.any()}
    shapes = {}
    for name, mask in drawn.items():
        facts, _, _ = describe(name, mask, image)
        whole = _largest(mask) if facts.largest_piece > _ONE else mask
        x, y, z = facts.centre_mm
        shapes[name] = Shape(
            facts.volume_ml,
            (x - body.middle_mm) / body.width_mm if body else float("nan"),
            (y - middle_y) / depth_mm,
            z,
            _extent(whole, image),
            facts.pieces,
            facts.largest_piece,
            facts.median,
            whole.start[2] == 0 or whole.start[2] + whole.inside.shape[2] == whole.shape[2],
            tuple(other for other, inner in drawn.items() if other != name and _encloses(mask, inner)),
        )
    return Look(modality, shapes, body.width_mm if body else float("nan"), air_below)


def guess_organs(looks: Sequence[Look]) -> dict[str, Guess]:
    """The organs that most cases agree on; a name that is missing could not be guessed."""
    found: dict[str, Guess] = {}
    names = {name for look in looks for name in look.shapes}
    for name in sorted(names):
        own = [(look, _guess_one(look).get(name)) for look in looks if name in look.shapes]
        organs = {organ for _, organ in own if organ}
        if len(organs) == 1 and sum(organ is not None for _, organ in own) >= _AGREEING * len(own):
            organ = organs.pop()
            found[name] = Guess(organ, _reason(organ, [look.shapes[name] for look, _ in own]))
    taken = [guess.organ for guess in found.values()]
    return {name: guess for name, guess in found.items() if taken.count(guess.organ) == 1}


def _guess_one(look: Look) -> dict[str, str]:
    """Names to organs in one case, one rule after the other; an organ that two labels could be is none of them."""
    known: dict[str, str] = {}
    for rule in _RULES:
        known |= {name: organ for name, organ in rule(look, known).items() if name not in known}
    return known


def _lungs(look: Look, known: Mapping[str, str]) -> dict[str, str]:
    if look.modality != "CT":
        return {}
    airy = {n: s for n, s in look.shapes.items() if s.median < -500 and s.volume_ml > 300}
    if len(airy) == 1:
        ((name, shape),) = airy.items()
        both = abs(shape.side) < 0.08 and shape.size_mm[0] > 0.4 * look.width_mm
        return {name: "lung"} if both else {}
    sides = {n: "lung_right" if s.side > 0.07 else "lung_left" if s.side < -0.07 else "" for n, s in airy.items()}
    return sides if sorted(sides.values()) == ["lung_left", "lung_right"] else {}


def _liver(look: Look, known: Mapping[str, str]) -> dict[str, str]:
    """The largest solid organ, on the right."""

    def fits(shape: Shape) -> bool:
        solid = -20 < shape.median < 220 if look.modality == "CT" else not shape.median < 1.5 * look.air_below
        large = 600 < shape.volume_ml < 4500 and max(shape.size_mm) < 350
        return large and shape.side > 0.05 and shape.largest_piece > 0.8 and solid

    return _only({n: s for n, s in look.shapes.items() if n not in known}, fits, "liver")


def _kidneys(look: Look, known: Mapping[str, str]) -> dict[str, str]:
    """Two of a size that mirror each other next to the spine; or both in one label.

    The spleen is often as large, and lies farther out and higher than the left kidney.
    """
    free = {n: s for n, s in look.shapes.items() if n not in known and (look.modality != "CT" or 0 < s.median < 400)}
    left = {n: s for n, s in free.items() if _is_kidney(s) and -0.32 < s.side < -0.07}
    right = {n: s for n, s in free.items() if _is_kidney(s) and 0.07 < s.side < 0.32}
    pairs = [(a, b) for a in left for b in right if _mirrored(left[a], right[b])]
    inmost = [(a, b) for a, b in pairs if not any(_beyond(left[other], left[a]) for other in left if other != a)]
    pairs = inmost if len(pairs) > 1 and len({b for _, b in pairs}) == 1 else pairs
    if len(pairs) == 1:
        return {pairs[0][0]: "kidney_left", pairs[0][1]: "kidney_right"}

    def both(shape: Shape) -> bool:
        apart = 0.3 * look.width_mm < shape.size_mm[0] < 0.8 * look.width_mm
        halves = 0.35 < shape.largest_piece < 0.68
        placed = abs(shape.side) < 0.08 and shape.depth < 0.03 and shape.size_mm[2] < 220
        return apart and halves and placed and 120 < shape.volume_ml < 900

    return {} if pairs else _only(free, both, "kidney")


def _is_kidney(shape: Shape) -> bool:
    x, y, z = shape.size_mm
    # Upright, other than most spleens.
    sized = 60 < shape.volume_ml < 450 and min(x, y) > 35 and 1.1 * max(x, y) < z < 175
    return sized and shape.depth < 0.03 and shape.largest_piece > 0.8 and not shape.cut


def _beyond(kidney: Shape, other: Shape) -> bool:
    """Whether the first lies nearer to the spine than the other, and below it: then the other is the spleen."""
    return abs(kidney.side) < abs(other.side) - 0.03 and kidney.height_mm < other.height_mm - 20


def _mirrored(left: Shape, right: Shape) -> bool:
    alike = 0.4 < left.volume_ml / right.volume_ml < 2.5
    near = abs(left.height_mm - right.height_mm) < _LEVEL_MM and abs(left.depth - right.depth) < 0.15
    # The spleen lies farther out than a right kidney.
    return alike and near and -0.12 < abs(left.side) - right.side < 0.08


def _spleen(look: Look, known: Mapping[str, str]) -> dict[str, str]:
    """On the left and behind, farther out and higher than the left kidney; alone it looks like one."""
    kidney = next((look.shapes[name] for name, organ in known.items() if organ == "kidney_left"), None)
    if kidney is None or "liver" not in known.values():
        return {}

    def fits(shape: Shape) -> bool:
        solid = look.modality != "CT" or 0 < shape.median < 300
        compact = shape.largest_piece > 0.8 and max(shape.size_mm) < 220
        return (
            _beyond(kidney, shape) and solid and compact and 40 < shape.volume_ml < 1200 and -0.27 < shape.depth < 0.02
        )

    return _only({n: s for n, s in look.shapes.items() if n not in known and s.side < 0}, fits, "spleen")


def _heart(look: Look, known: Mapping[str, str]) -> dict[str, str]:
    """A ring of muscle around one cavity, and a second cavity next to it; nothing else is labelled in a cine MR."""
    if look.modality == "CT" or len(look.shapes) != 3:
        return {}
    rings = [(name, shape.around[0]) for name, shape in look.shapes.items() if len(shape.around) == 1]
    if len(rings) != 1:
        return {}
    ring, cavity = rings[0]
    (other,) = set(look.shapes) - {ring, cavity}
    sizes = [look.shapes[name].volume_ml for name in (ring, cavity, other)]
    sized = all(5 < ml < 600 for ml in sizes) and 0.15 < sizes[1] / sizes[0] < 5
    return {ring: "heart_myocardium", cavity: "heart_left_ventricle", other: "heart_right_ventricle"} if sized else {}


Rule = Callable[[Look, Mapping[str, str]], dict[str, str]]
_RULES: tuple[Rule, ...] = (_lungs, _liver, _kidneys, _spleen, _heart)


def _only(shapes: Mapping[str, Shape], fits: Callable[[Shape], bool], organ: str) -> dict[str, str]:
    """The one label that fits; none where two do."""
    found = [name for name, shape in shapes.items() if fits(shape)]
    return {found[0]: organ} if len(found) == 1 else {}


def _reason(organ: str, shapes: Sequence[Shape]) -> str:
    if organ in _OF_A_HEART:
        return _OF_A_HEART[organ]
    sides = [shape.side for shape in shapes if not np.isnan(shape.side)]
    if not sides or abs(median(sides)) < 0.07:
        return "it lies on both sides"
    return f"it lies on the {'right' if median(sides) > 0 else 'left'}"


def in_ml(volume: float) -> str:
    """A volume with as many digits as mean something."""
    return f"{volume:.0f}" if volume >= 10 else f"{volume:.2g}"


def _largest(mask: Mask) -> Mask:
    """Its largest piece: a stray voxel far away must not make it large."""
    numbers, count = ndimage.label(mask.inside)
    if count < 2:
        return mask
    piece = Mask.cut(numbers == np.bincount(numbers.ravel())[1:].argmax() + 1)
    return Mask(tuple(a + b for a, b in zip(mask.start, piece.start, strict=True)), piece.inside, mask.shape)


def _extent(mask: Mask, image: Volume) -> tuple[float, float, float]:
    x, y, z = (n * mm for n, mm in zip(mask.inside.shape, image.spacing, strict=True))
    return x, y, z


def _front_to_back(image: Volume, air_below: float) -> tuple[float, float]:
    """Middle and depth of the body in RAS millimetres along y; the table behind it is thin and counts little."""
    tissue = image.voxels[::2, :, :: max(1, image.voxels.shape[2] // 64)] > air_below
    profile: NDArray[np.int64] = tissue.sum(axis=(0, 2))
    rows = np.flatnonzero(profile > 0.15 * profile.max())
    first, last = int(rows[0]), int(rows[-1])
    x, z = (n / 2 for n in (image.voxels.shape[0], image.voxels.shape[2]))
    ends = [image.affine[1, :3] @ np.array([x, y, z]) + image.affine[1, 3] for y in (first, last)]
    return float(sum(ends) / 2), float(max(abs(ends[1] - ends[0]), 1.0))


def _encloses(outer: Mask, inner: Mask) -> bool:
    """Whether an inner mask lies within the ring of the outer one, in slices that show both."""
    low = [max(a, b) for a, b in zip(outer.start, inner.start, strict=True)]
    high = [
        min(a + n, b + m)
        for a, n, b, m in zip(outer.start, outer.inside.shape, inner.start, inner.inside.shape, strict=True)
    ]
    if any(a >= b for a, b in zip(low, high, strict=True)):
        return False
    # In x and y the ring reaches beyond what it encloses on all sides, in most slices of the inner one.
    within = [
        outer.start[axis] <= inner.start[axis]
        and outer.start[axis] + outer.inside.shape[axis] >= inner.start[axis] + inner.inside.shape[axis]
        for axis in (0, 1)
    ]
    touching = _touching(outer, inner)
    return all(within) and touching > 0.8


def _touching(outer: Mask, inner: Mask) -> float:
    """The share of the inner mask's border in the slices that has the outer mask next to it."""
    shape = tuple(n + 2 for n in outer.shape)
    ring, core = np.zeros(shape, np.bool_), np.zeros(shape, np.bool_)
    ring[tuple(slice(s.start + 1, s.stop + 1) for s in outer.box)] = outer.inside
    core[tuple(slice(s.start + 1, s.stop + 1) for s in inner.box)] = inner.inside
    beside = np.zeros_like(core)
    for axis in (0, 1):
        for step in (-1, 1):
            beside |= np.roll(core, step, axis=axis)
    border = beside & ~core
    # Slices without the ring are the base of the heart, where the cavity opens.
    border &= ring.any(axis=(0, 1))
    return float((border & ring).sum() / max(border.sum(), 1))
