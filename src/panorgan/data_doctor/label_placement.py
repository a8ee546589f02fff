"""Whether a label lies where its image shows something: it must not fit far better mirrored, turned or shifted.

Headers do not show this. A converter that flips the voxels of the image alone, or an annotation tool that writes its
slices in another order, leaves two files that agree in every number and show different things.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from panorgan.data_doctor.files import Problem

# Organs against a shell of this many voxels around them.
_SHELL = 2
_SHIFTS = (1, 2, 3, 4, 6, 8)
# A better fit by chance: clean scans of three kinds stay above 0.75, mirrored and shifted ones below 0.62.
_FAR_BETTER = 0.7
_FEWEST_VOXELS = 200
_ENOUGH_VOXELS, _TO_CHOOSE = 20_000, 1_200
# Organs that the border cuts leave the scan when they are shifted; too few must not decide.
_STILL_INSIDE = 0.75
# Beyond bone, and below air, differences say nothing about organs.
_CT_RANGE = (-1000.0, 500.0)
_MIRRORED = ("left–right", "front–back", "head–foot")
_WAYS = (("left", "right"), ("back", "front"), ("foot", "head"))

Places = NDArray[np.int64]


@dataclass(frozen=True)
class Move:
    """Where a label might belong: mirrored along axes (along two of them it is turned by half), then shifted."""

    words: str
    mirrored: tuple[int, ...] = ()
    shift: tuple[int, int, int] = (0, 0, 0)

    def places(self, places: Places, shape: tuple[int, ...]) -> Places:
        """Voxels [N, 3] after the move."""
        moved: Places = places + np.array(self.shift)
        for axis in self.mirrored:
            moved[:, axis] = shape[axis] - 1 - moved[:, axis]
        return moved


def _all_moves() -> Iterator[Move]:
    for count in (1, 2):
        for axes in combinations(range(3), count):
            yield Move(f"with {' and '.join(_MIRRORED[axis] for axis in axes)} exchanged", axes)
    for axis, ways in enumerate(_WAYS):
        for distance in _SHIFTS:
            for way, sign in zip(ways, (-1, 1), strict=True):
                shift = [0, 0, 0]
                shift[axis] = sign * distance
                yield Move(f"{distance} voxels farther towards the {way}", shift=(shift[0], shift[1], shift[2]))


_MOVES = tuple(_all_moves())


@dataclass(frozen=True)
class Fit:
    """How the label fits best: `ratio` of that spread to the one where it lies, and what was done to it."""

    ratio: float
    move: str


def check_placement(image: NDArray[Any], labels: NDArray[np.uint8], ct: bool) -> Problem | None:
    """Look at a scan [X, Y, Z] in RAS order with one number per organ; the gut, which holds anything, is left out."""
    best = best_fit(image, labels, ct)
    if best is None or best.ratio >= _FAR_BETTER:
        return None
    return Problem(
        "label-misplaced",
        f"The label fits its image far better {best.move}.",
        f"values inside the organs would then differ from their median only {best.ratio:.2f} times as much",
        "Look at image and label in a viewer: one of them was flipped, shifted or belongs to another scan. Export the "
        "label again from the scan itself.",
    )


def best_fit(image: NDArray[Any], labels: NDArray[np.uint8], ct: bool) -> Fit | None:
    """The best of all moves; None where there is too little to judge by. Few voxels choose it, many measure it."""
    places, classes = _sampled(labels)
    if np.count_nonzero(classes) < _FEWEST_VOXELS:
        return None

    def compare(move: Move, here: Places, own: NDArray[np.uint8], unmoved: float) -> float:
        there = move.places(here, image.shape)
        seen: NDArray[np.bool_] = np.all((there >= 0) & (there < image.shape), axis=1)
        if seen.mean() < _STILL_INSIDE:
            return 1.0
        if not seen.all():
            # A shift leaves some voxels outside of the scan: both spreads are of the same others.
            there, here, own = there[seen], here[seen], own[seen]
            unmoved = _spread(_values(image, here, ct), own)
        return _spread(_values(image, there, ct), own) / max(unmoved, 1e-9)

    step = max(1, len(places) // _TO_CHOOSE)
    few = places[::step], classes[::step]
    spread = _spread(_values(image, few[0], ct), few[1])
    best = min(_MOVES, key=lambda move: compare(move, *few, spread))
    return Fit(compare(best, places, classes, _spread(_values(image, places, ct), classes)), best.words)


def _values(image: NDArray[Any], places: Places, ct: bool) -> NDArray[np.float64]:
    found: NDArray[np.float64] = image[tuple(places.T)].astype(np.float64)
    return found.clip(*_CT_RANGE) if ct else found


def _sampled(labels: NDArray[np.uint8]) -> tuple[Places, NDArray[np.uint8]]:
    """Some voxels [N, 3] of organs and of the shell around them, sorted by class [N]; the shell's class is 0."""
    drawn = (
        np.argwhere(labels.any(axis=(1, 2))),
        np.argwhere(labels.any(axis=(0, 2))),
        np.argwhere(labels.any(axis=(0, 1))),
    )
    if not all(len(axis) for axis in drawn):
        return np.zeros((0, 3), np.int64), np.zeros(0, np.uint8)
    start = [max(0, int(axis[0, 0]) - _SHELL) for axis in drawn]
    box = labels[tuple(slice(a, int(axis[-1, 0]) + 1 + _SHELL) for a, axis in zip(start, drawn, strict=True))]
    near = np.flatnonzero(_grown(box > 0))
    near = near[:: max(1, len(near) // _ENOUGH_VOXELS)]
    places = np.stack(np.unravel_index(near, box.shape), axis=1).astype(np.int64)
    classes = box[tuple(places.T)]
    order = np.argsort(classes, kind="stable")
    return (places + np.array(start))[order], classes[order]


def _grown(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The mask and its neighbours, `_SHELL` times over; slices are many times quicker than scipy's dilation."""
    for _ in range(_SHELL):
        grown = mask.copy()
        for axis in range(3):
            here, there = [slice(None)] * 3, [slice(None)] * 3
            here[axis], there[axis] = slice(1, None), slice(None, -1)
            grown[tuple(here)] |= mask[tuple(there)]
            grown[tuple(there)] |= mask[tuple(here)]
        mask = grown
    return mask


def _spread(values: NDArray[np.float64], classes: NDArray[np.uint8]) -> float:
    """Distance from the median of the own class, as a share of that from the median of all. Sorted by class."""
    borders = (np.flatnonzero(classes[1:] != classes[:-1]) + 1).tolist()
    parts = [values[a:b] for a, b in zip([0, *borders], [*borders, len(values)], strict=True)]
    return sum(map(_from_median, parts)) / max(_from_median(values), 1e-9)


def _from_median(values: NDArray[np.float64]) -> float:
    """Sum of the distances from the median (the upper one of two; numpy's own costs more than all the rest)."""
    rank = len(values) // 2
    return float(np.abs(values - np.partition(values, rank)[rank]).sum())
