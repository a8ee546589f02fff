"""Chooses the shape of a U-Net for given scans: the size of a patch, and the axes that each level halves.

nnU-Net's rules (Isensee et al., Nature Methods 2021), in short: a patch has the scans' proportions in millimetres; an
axis is halved while at least four voxels remain, and only once the other axes are as coarse as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

SMALLEST_EDGE = 4
"""Voxels along an axis that the deepest level keeps at least."""
MOST_LEVELS = 6
FEW_SLICES = 2 * SMALLEST_EDGE
"""With fewer slices than this, a network with volumes could never halve them."""
THICK = 3.0
"""Slices are thick where voxels are this many times longer across them than within."""

Strides = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Topology:
    """A patch (1 across the slices of a 2D network), and per level the stride along each of the network's axes."""

    patch_size: tuple[int, int, int]
    strides: Strides

    @property
    def halves_all(self) -> bool:
        """Whether every level halves every axis, as a U-Net does by default."""
        return all(set(level) == {2} for level in self.strides[1:])

    @property
    def dimensions(self) -> int:
        """2 for slices, 3 for volumes."""
        return len(self.strides[0])


def suits_slices(shape: Sequence[float], spacing: Sequence[float]) -> bool:
    """Whether scans are a few thick slices across the third axis, which a 2D network sees one by one."""
    return spacing[2] >= THICK * max(spacing[0], spacing[1]) and round(shape[2]) < FEW_SLICES


def topology(
    shape: Sequence[float],
    spacing: Sequence[float],
    voxels: float,
    sliced: int | None = None,
    levels: int | None = None,
) -> Topology:
    """A patch of at most about `voxels` voxels for scans of a median `shape`, and the strides that suit it.

    `sliced` is the axis that the slices of a 2D network lie across; `levels` fixes the depth of the network.
    """
    axes = [axis for axis in range(3) if axis != sliced]
    sizes = {axis: float(shape[axis]) for axis in axes}
    while math.prod(sizes.values()) > voxels:
        # What is longest in millimetres is shortened: context should reach equally far in every direction.
        longest = max((a for a in axes if sizes[a] > FEW_SLICES), key=lambda a: sizes[a] * spacing[a], default=None)
        if longest is None:
            break
        sizes[longest] *= 0.95
    strides = strides_for([sizes[axis] for axis in axes], [spacing[axis] for axis in axes], levels)
    divisors = [math.prod(along) for along in zip(*strides, strict=True)]
    patch = [1, 1, 1]
    for axis, divisor in zip(axes, divisors, strict=True):
        patch[axis] = max(2 * divisor, round(sizes[axis] / divisor) * divisor)
    return Topology((patch[0], patch[1], patch[2]), strides)


def strides_for(sizes: Sequence[float], spacing: Sequence[float], levels: int | None = None) -> Strides:
    """Per level the stride along each axis; as many levels as the sizes allow, or `levels`."""
    left, mm = list(sizes), list(spacing)
    strides: list[tuple[int, ...]] = [(1,) * len(left)]
    while len(strides) < (levels or MOST_LEVELS):
        able = [axis for axis, size in enumerate(left) if size >= 2 * SMALLEST_EDGE]
        finest = min((mm[axis] for axis in able), default=math.inf)
        halved = [axis for axis in able if mm[axis] < 2 * finest]
        if not halved and len(strides) >= (levels or 2):
            break
        for axis in halved:
            left[axis], mm[axis] = left[axis] / 2, mm[axis] * 2
        strides.append(tuple(2 if axis in halved else 1 for axis in range(len(left))))
    return tuple(strides)
