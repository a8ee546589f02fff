"""Masks by organ, cut to their bounding boxes so that a hundred of them fit into memory, and what they look like."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage
from scipy.spatial import cKDTree

from panorgan.anatomy import ancestors
from panorgan.data.volume import Volume
from panorgan.data_doctor import plausible
from panorgan.data_doctor.files import Problem
from panorgan.data_doctor.findings import StructureFacts

Integers = NDArray[np.signedinteger[Any]]

_NEIGHBOURS = np.ones((3, 3, 3), dtype=np.bool_)
_FEW_VOXELS = 3
_SPECK_ML = 0.1
_MANY_PIECES = 30
_FAR_MM = 20.0
_LOOK = "Look at the label in a viewer and correct it, or remove the case."


@dataclass(frozen=True)
class Mask:
    """A mask [X, Y, Z] cut to its bounding box, which begins at voxel `start` of a scan of shape `shape`."""

    start: tuple[int, ...]
    inside: NDArray[np.bool_]
    shape: tuple[int, ...]

    @classmethod
    def cut(cls, whole: NDArray[np.bool_]) -> Mask:
        """The smallest box that holds every voxel; empty masks have an empty box."""
        box = ndimage.find_objects(whole.view(np.uint8))
        if not box:
            return cls((0, 0, 0), np.zeros((0, 0, 0), dtype=np.bool_), whole.shape)
        return cls(tuple(s.start for s in box[0]), whole[box[0]].copy(), whole.shape)

    @classmethod
    def of_ids(cls, labels: NDArray[Any], ids: Iterable[int], boxes: list[Any]) -> Mask:
        """The voxels with one of these ids; `boxes[i - 1]` holds those with id i, is None or beyond the end."""
        drawn = [i for i in ids if 0 < i <= len(boxes) and boxes[i - 1] is not None]
        found = [boxes[i - 1] for i in drawn]
        if not found:
            return cls((0, 0, 0), np.zeros((0, 0, 0), dtype=np.bool_), labels.shape)
        around = tuple(
            slice(min(s.start for s in axis), max(s.stop for s in axis)) for axis in zip(*found, strict=True)
        )
        return cls(tuple(s.start for s in around), np.isin(labels[around], drawn), labels.shape)

    @property
    def box(self) -> tuple[slice, ...]:
        """Where it lies in the scan."""
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.inside.shape, strict=True))

    @property
    def faces(self) -> int:
        """How many of the scan's six faces it touches."""
        ends = zip(self.start, self.inside.shape, self.shape, strict=True)
        return sum((a == 0) + (a + n == whole) for a, n, whole in ends) if self.inside.size else 0


def inclusive(named: Mapping[str, Mask], organs: Mapping[str, str]) -> dict[str, Mask]:
    """Masks by organ from masks by the folder's names; an organ holds its parts and what lies inside it."""
    found = {}
    for organ in dict.fromkeys(organs.values()):
        parts = [named[name] for name, own in organs.items() if organ in (own, *ancestors(own)) and name in named]
        if not parts:
            continue
        if len(parts) == 1:
            found[organ] = parts[0]
            continue
        whole = np.zeros(parts[0].shape, dtype=np.bool_)
        for part in parts:
            whole[part.box] |= part.inside
        found[organ] = Mask.cut(whole)
    return found


def describe(organ: str, mask: Mask, image: Volume) -> tuple[StructureFacts, Integers, Integers]:
    """Facts, the pieces' numbers inside the box, and their sizes."""
    voxels = int(np.count_nonzero(mask.inside))
    millilitres = voxels * abs(float(np.linalg.det(image.affine[:3, :3]))) / 1000
    nan = float("nan")
    if not voxels:
        empty = StructureFacts(organ, 0, 0.0, (nan, nan, nan), 0, 0.0, nan)
        return empty, np.zeros((0, 0, 0), np.int32), np.zeros(0, np.int64)
    numbers, count = ndimage.label(mask.inside, structure=_NEIGHBOURS)
    sizes = np.bincount(numbers.ravel(), minlength=count + 1)[1:]
    middle = [float(c) + a for c, a in zip(ndimage.center_of_mass(mask.inside), mask.start, strict=True)]
    x, y, z = image.affine[:3, :3] @ np.array(middle) + image.affine[:3, 3]
    median = float(np.median(image.voxels[mask.box][mask.inside]))
    facts = StructureFacts(
        organ,
        voxels,
        millilitres,
        (float(x), float(y), float(z)),
        int(count),
        float(sizes.max()) / voxels,
        median,
    )
    return facts, numbers, sizes


def check_one(organ: str, mask: Mask, image: Volume, facts: StructureFacts, ct: bool) -> Iterator[Problem]:
    """Size, place and brightness of one mask that is not empty."""
    yield from _check_size(mask, facts)
    if not ct or plausible.may_hold_air(organ):
        in_air = 0.0
    else:
        in_air = float((image.voxels[mask.box][mask.inside] < plausible.AIR_HU).mean())
    if in_air > 0.25:
        yield Problem("mask-in-air", f"{in_air:.0%} of the {organ} mask lies in air.", "it is a solid organ", _LOOK)
    known = plausible.hu_range(organ) if ct and in_air <= 0.25 and facts.voxels > _FEW_VOXELS else None
    if known and not known[0][0] <= facts.median <= known[0][1]:
        (low, high), reason = known
        yield Problem(
            "hu-organ",
            f"The median of {organ} is {facts.median:.0f} HU.",
            f"expected {low:.0f} to {high:.0f}: {reason}",
            "Check that the label belongs to this scan, and the scan's rescale slope and intercept.",
        )


def _check_size(mask: Mask, facts: StructureFacts) -> Iterator[Problem]:
    least, most = plausible.volume_range_ml(facts.name) or (0.0, float("inf"))
    filled = facts.voxels / float(np.prod(mask.shape))
    size = f"{facts.voxels} voxels, {facts.volume_ml:.3g} ml"
    speck = facts.voxels <= _FEW_VOXELS and facts.volume_ml < _SPECK_ML
    if speck or (facts.volume_ml < least and not mask.faces):
        why = f"{size}; at least {least:g} ml is expected" if least else size
        yield Problem("tiny-mask", f"The {facts.name} mask is tiny.", why, _LOOK)
    elif facts.volume_ml > most:
        yield Problem("huge-mask", f"The {facts.name} mask is huge.", f"{size}; at most {most:g} ml is expected", _LOOK)
    elif filled > 0.9 or mask.faces == 6:
        why = f"it fills {filled:.0%} of the scan and touches {mask.faces} of its 6 faces: inside and outside swapped?"
        yield Problem("huge-mask", f"The {facts.name} mask reaches everywhere.", why, _LOOK)


def check_pieces(organ: str, mask: Mask, numbers: Integers, sizes: Integers, image: Volume) -> Iterator[Problem]:
    """An organ in one piece has no second piece of weight far away, nor dozens of crumbs."""
    if organ not in plausible.ONE_PIECE or len(sizes) < 2:
        return
    if len(sizes) > _MANY_PIECES:
        why = f"{len(sizes)} pieces; the largest holds {sizes.max() / sizes.sum():.0%}"
        yield Problem("specks", f"The {organ} mask is in many pieces.", why, _LOOK)
    largest = int(sizes.argmax())
    voxel_ml = abs(float(np.linalg.det(image.affine[:3, :3]))) / 1000
    for piece, size in enumerate(sizes.tolist()):
        relevant = size >= 8 and (size >= 0.05 * sizes[largest] or size * voxel_ml >= 5)
        if piece == largest or not relevant:
            continue
        gap = _gap_mm(numbers == largest + 1, numbers == piece + 1, image.spacing)
        if gap > _FAR_MM and not _at_border(numbers == piece + 1, mask):
            why = f"{size * voxel_ml:.3g} ml lie {gap:.0f} mm away from the rest"
            yield Problem("far-piece", f"The {organ} mask has a far second piece.", why, _LOOK)
            return


def _at_border(piece: NDArray[np.bool_], mask: Mask) -> bool:
    """Whether the scan's border cuts the piece, which may then go on outside."""
    places = np.argwhere(piece) + np.array(mask.start)
    return bool((places.min(axis=0) == 0).any() or (places.max(axis=0) == np.array(mask.shape) - 1).any())


def _gap_mm(first: NDArray[np.bool_], second: NDArray[np.bool_], spacing: Iterable[float]) -> float:
    """Shortest distance between the surfaces of two pieces."""
    surfaces = [
        np.argwhere(piece & ~ndimage.binary_erosion(piece)) * np.array(tuple(spacing)) for piece in (first, second)
    ]
    distances, _ = cKDTree(surfaces[0]).query(surfaces[1][:: max(1, len(surfaces[1]) // 5000)])
    return float(np.min(distances))


def check_overlaps(masks: Mapping[str, Mask]) -> Iterator[tuple[str, Problem]]:
    """Pairs of organs that exclude each other and share voxels: at least ten, and a hundredth of the smaller one."""
    for (first, one), (second, other) in combinations(masks.items(), 2):
        if not one.inside.size or not other.inside.size or not plausible.exclusive(first, second):
            continue
        shared = _shared(one, other)
        smaller = min(np.count_nonzero(one.inside), np.count_nonzero(other.inside))
        if shared >= 10 and shared >= 0.01 * smaller:
            why = f"{shared} voxels belong to both, {shared / smaller:.0%} of the smaller one"
            yield first, Problem("overlapping-masks", f"{first} and {second} overlap.", why, _LOOK)


def _shared(one: Mask, other: Mask) -> int:
    low = np.maximum(one.start, other.start)
    high = np.minimum(*(np.add(mask.start, mask.inside.shape) for mask in (one, other)))
    if (low >= high).any():
        return 0
    parts = [
        mask.inside[tuple(slice(a - s, b - s) for a, b, s in zip(low, high, mask.start, strict=True))]
        for mask in (one, other)
    ]
    return int(np.count_nonzero(parts[0] & parts[1]))


def painted(masks: Mapping[str, Mask], shape: tuple[int, ...]) -> tuple[NDArray[np.uint8], tuple[str, ...]]:
    """One integer per voxel for a picture: i + 1 for the i-th name, inner organs over outer ones."""
    names = tuple(sorted((n for n, m in masks.items() if m.inside.size), key=lambda n: (len(ancestors(n)), n)))[:255]
    picture = np.zeros(shape, dtype=np.uint8)
    for number, name in enumerate(names, start=1):
        picture[masks[name].box][masks[name].inside] = number
    return picture, names
