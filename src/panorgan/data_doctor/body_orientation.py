"""Checks a CT's orientation against its header by the image alone, for cases without a labelled organ to tell.

The body leaves a scan at head and feet and is surrounded by air elsewhere: that gives its long axis. The spine is bone
near the middle of the body, on the back's side of its centre; the table lies behind a patient on the back. Lungs are
at the head's end of a scan that goes on into the abdomen. Bones are alike on both sides, so left and right are not
judged. Whatever is not clear (a limb, the head, a crop, a table on the other side than the spine) gives no answer.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from panorgan.data.volume import Volume
from panorgan.data_doctor.files import Problem

# The body is looked at in voxels of about this size.
_GRID_MM = 4.0
_BODY_HU, _BONE_HU, _SOLID_HU = -300.0, 150.0, -700.0
_LUNG_HU = (-950.0, -550.0)
# A torso is at least so wide, and seen over at least this length.
_WIDTH_MM, _LENGTH_MM = 180.0, 60.0
# Tissue's share of an axis' end faces: at head and feet the body goes on at both ends; at the sides it may touch one,
# where it lies off the middle of the field of view, but not much of both.
_GOES_ON, _CLOSED, _TOUCHED = 0.12, 0.05, 0.35
# Half the width of the strip through the body's middle in which the spine lies, and of a stretch along it.
_STRIP_MM, _STRETCH_MM = 24.0, 40.0
# Bone in the strip: at least so much per slice on the spine's side, so many times that of the other side.
_SPINE_MM2, _TIMES = 250.0, 3.0
# So many stretches must show the spine, of those with a clear answer this share; fewer will do where the table agrees.
_FEWEST, _FEWEST_WITH_TABLE, _AGREE = 3, 2, 0.8
_TABLE_MM, _TABLE_WIDTH, _TABLE_SLICES = 100.0, 0.5, 0.7
# Shares of the body's area: both lungs and the smaller one over the last centimetre, gas in the bowel where no lung is.
_LUNGS, _LUNG_HALF, _GAS = 0.15, 0.04, 0.06
_NO_LUNG_MM, _END_MM, _FULL_BODY = 100.0, 10.0, 0.7

_SIDES = {(0, -1): "left", (0, 1): "right", (1, -1): "back", (1, 1): "front", (2, -1): "foot", (2, 1): "head"}
"""Names of the directions of RAS axes."""

Array = NDArray[np.float32]
Mask = NDArray[np.bool_]
Direction = tuple[int, int]


@dataclass(frozen=True)
class Seen:
    """Directions of the body in the image, as (RAS axis, sign) of the header; None where the image does not tell.

    `stretches` of how many show the spine there; `table` tells whether the table lies there too.
    """

    long_axis: int
    back: Direction
    stretches: tuple[int, int]
    table: bool
    head: Direction | None

    @property
    def is_right(self) -> bool:
        """Whether the image agrees with the header."""
        return not self.says_wrong

    @property
    def says_wrong(self) -> set[int]:
        """The RAS axes in which the image contradicts the header."""
        wrong = {1} if self.back != (1, -1) else set()
        return wrong | ({2} if self.long_axis != 2 or self.head not in (None, (2, 1)) else set())


def check_orientation(image: Volume, confirmed: Collection[int] = ()) -> Problem | None:
    """A problem where a CT [X, Y, Z] in RAS order clearly shows a body that lies otherwise than its header says.

    `confirmed` are the RAS axes along which labelled organs lie as the header says: these know better.
    """
    seen = look_at_body(image)
    if seen is None or seen.is_right or seen.says_wrong & set(confirmed):
        return None
    there, count = seen.stretches
    words = []
    if seen.back != (1, -1):
        words.append(f"the spine lies at the {_SIDES[seen.back]} in {there} of {count} stretches of the scan")
        words.append(
            f"the table lies at the {_SIDES[seen.back]} too" if seen.table else "no table is seen that would confirm it"
        )
    if seen.head not in (None, (2, 1)):
        words.append(f"the lungs lie at the end that it calls {_SIDES[seen.head]}")
    if seen.long_axis != 2:
        words.append(
            "the body goes on beyond the scan's " + ("left and right" if seen.long_axis == 0 else "front and back")
        )
    sure = "almost surely" if seen.table or len(words) > 2 else "probably"
    return Problem(
        "body-turned",
        f"The header {sure} turns the body: {_exchanged(seen)}.",
        "by the header, " + ", ".join(words),
        "Open the scan in a viewer. Convert it again from DICOM, or correct its header; left and right may be "
        "exchanged too, which bones do not show.",
    )


def _exchanged(seen: Seen) -> str:
    if seen.long_axis != 2 or seen.back[0] != 1:
        return "its axes are exchanged"
    parts = ["front and back"] if seen.back != (1, -1) else []
    parts += ["head and foot"] if seen.head == (2, -1) else []
    return f"{' and '.join(parts)} are exchanged"


def look_at_body(image: Volume) -> Seen | None:
    """What the image shows of a torso; None where it is not clear."""
    coarse, spacing = _coarse(image)
    tissue = _largest(coarse > _BODY_HU)
    if tissue is None:
        return None
    open_, closed = _ends(tissue)
    # A wide patient may reach both sides of the field of view. That another axis than the header's is the long one
    # must be beyond doubt: in a crop from the middle of the body the sides look like ends.
    axis = 2 if 2 in open_ else open_[0] if len(open_) == 1 and len(closed) == 2 else None
    return None if axis is None else _look_along(coarse, tissue, spacing, axis, closed)


def _look_along(coarse: Array, tissue: Mask, spacing: tuple[float, ...], axis: int, closed: set[int]) -> Seen | None:
    """The same if this is the body's long axis; the body must not be cut off where its back is."""
    others = [other for other in range(3) if other != axis]
    # From here on the first axis of the arrays is the long one.
    coarse, tissue = np.moveaxis(coarse, axis, 0), np.moveaxis(tissue, axis, 0)
    mm = (spacing[axis], spacing[others[0]], spacing[others[1]])
    if len(coarse) * mm[0] < _LENGTH_MM:
        return None
    found = _spine(coarse, tissue, mm)
    if found is None or others[found[0][0] - 1] not in closed:
        return None
    (along, sign), stretches = found
    table, opposite = (_has_table(coarse, tissue, mm, along, side) for side in (sign, -sign))
    if opposite and not table:
        return None
    if stretches[0] < (_FEWEST_WITH_TABLE if table else _FEWEST):
        return None
    end = _head_end(coarse, tissue, mm, along)
    return Seen(
        axis, (others[along - 1], sign), stretches, table and not opposite, None if end is None else (axis, end)
    )


def _coarse(image: Volume) -> tuple[Array, tuple[float, ...]]:
    """Means of blocks of about 4 mm: quick, and with little noise."""
    steps = [max(1, round(_GRID_MM / mm)) for mm in image.spacing]
    size = [n // step * step for n, step in zip(image.voxels.shape, steps, strict=True)]
    whole = image.voxels[tuple(slice(n) for n in size)]
    shape = [part for n, step in zip(size, steps, strict=True) for part in (n // step, step)]
    means = whole.reshape(shape).mean(axis=(1, 3, 5), dtype=np.float32)
    return means, tuple(step * mm for step, mm in zip(steps, image.spacing, strict=True))


def _largest(tissue: Mask) -> Mask | None:
    """The largest piece, after thin things such as a table's shell have fallen off."""
    if min(tissue.shape) < 8:
        return None
    opened = ndimage.binary_opening(tissue, ndimage.generate_binary_structure(3, 1), iterations=2)
    # At the ends of the scan the body goes on, which opening does not know.
    pieces, count = ndimage.label(opened)
    if not count:
        return None
    sizes = np.bincount(pieces.ravel())
    sizes[0] = 0
    kept: Mask = pieces == sizes.argmax()
    return ndimage.binary_dilation(kept, iterations=2) & tissue


def _ends(tissue: Mask) -> tuple[list[int], set[int]]:
    """The axes at both of whose ends the body goes on, and those at whose ends it does not."""
    open_, closed = [], set()
    for axis in range(3):
        ends = np.moveaxis(tissue, axis, 0)
        low, high = sorted((float(ends[:2].any(0).mean()), float(ends[-2:].any(0).mean())))
        if low >= _GOES_ON:
            open_.append(axis)
        if low <= _CLOSED and high <= _TOUCHED:
            closed.add(axis)
    return open_, closed


def _extent(profile: NDArray[np.integer]) -> tuple[int, int]:
    """First and last place that hold a fair part of the body: arms and folds of skin do not move the middle."""
    inside = np.flatnonzero(profile > 0.1 * profile.max())
    return int(inside[0]), int(inside[-1])


def _spine(coarse: Array, tissue: Mask, mm: tuple[float, ...]) -> tuple[Direction, tuple[int, int]] | None:
    """Axis (1 or 2) and sign of the side on which the spine lies, and in how many stretches of how many it does."""
    length = max(1, round(_STRETCH_MM / mm[0]))
    bone = (coarse > _BONE_HU) & tissue
    votes: list[Direction | None] = []
    for start in range(0, len(coarse) - length // 2, length):
        part = slice(start, start + length)
        votes.append(_side_of_bone(bone[part], tissue[part], mm))
    clear = [vote for vote in votes if vote is not None]
    if not clear:
        return None
    side = max(set(clear), key=clear.count)
    there = clear.count(side)
    if there < _AGREE * len(clear) or there < len(votes) / 2:
        return None
    return side, (there, len(votes))


def _side_of_bone(bone: Mask, tissue: Mask, mm: tuple[float, ...]) -> Direction | None:
    """The side of the body's middle on which nearly all bone of one middle strip lies; None without a clear one."""
    area = tissue.any(0)
    if not area.any():
        return None
    rows, columns = _extent(area.sum(1)), _extent(area.sum(0))
    extents = [(last - first + 1) * size for (first, last), size in zip((rows, columns), mm[1:], strict=True)]
    if max(extents) < _WIDTH_MM:
        return None
    middle = [(first + last) / 2 for first, last in (rows, columns)]
    amount = bone.mean(0) * mm[1] * mm[2]  # mm² per slice
    found: list[tuple[float, Direction]] = []
    both: list[float] = []
    for along in (1, 2):
        across = 2 - along  # the other axis of `amount`
        strip = round(_STRIP_MM / mm[1 + across])
        centre = round(middle[across])
        own = np.moveaxis(amount, across, 0)[max(0, centre - strip) : centre + strip + 1].sum(0)
        places = np.arange(len(own))
        low, high = own[places < middle[along - 1]].sum(), own[places > middle[along - 1]].sum()
        most, least, sign = (low, high, -1) if low > high else (high, low, 1)
        both.append(float(least))
        if most >= _SPINE_MM2 and most >= _TIMES * least:
            found.append((float(most), (along, sign)))
    # Between hips or arms a bone in the middle strip may be the pubis as well as the spine.
    return found[0][1] if len(found) == 1 and max(both) < found[0][0] else None


def _has_table(coarse: Array, tissue: Mask, mm: tuple[float, ...], along: int, sign: int) -> bool:
    """Whether something wide lies outside of the body on one side, in most slices."""
    outside = (coarse > _SOLID_HU) & ~ndimage.binary_dilation(tissue, iterations=2)
    # Now the side is the end of the second axis, and the width the third one.
    body, things = (np.moveaxis(some, along, 1) for some in (tissue, outside))
    if sign < 0:
        body, things = body[:, ::-1], things[:, ::-1]
    reach = round(_TABLE_MM / mm[along])
    wide = []
    for own, near in zip(body, things, strict=True):
        if not own.any():
            continue
        edge = int(np.flatnonzero(own.any(1))[-1])
        width = int(np.count_nonzero(own.any(0)))
        inside = own.any(0)
        # From a little before the body's edge: a table is hollow, and the body sinks into it.
        covered = near[max(0, edge - 3) : edge + 1 + reach].any(0) & inside
        wide.append(np.count_nonzero(covered) >= _TABLE_WIDTH * width)
    return bool(wide) and float(np.mean(wide)) >= _TABLE_SLICES


def _head_end(coarse: Array, tissue: Mask, mm: tuple[float, ...], along: int) -> int | None:
    """The end, -1 or 1, at which both lungs lie, where the body goes on without them, as wide, at the other.

    `along` is the axis from front to back. Shoulders are as wide as a chest and have no lungs, but end after some
    centimetres.
    """
    filled = np.stack([ndimage.binary_fill_holes(plane) for plane in tissue])
    inner = ndimage.binary_erosion(filled, iterations=2, border_value=1)
    lung = ndimage.binary_opening((coarse > _LUNG_HU[0]) & (coarse < _LUNG_HU[1]) & inner)
    area = filled.sum((1, 2)).astype(np.float64)
    across = np.moveaxis(lung, along, 1).sum(1)  # [long axis, left to right]
    columns = np.flatnonzero(filled.any((0, along)))
    middle = (columns[0] + columns[-1]) // 2
    halves = np.stack([across[:, :middle].sum(1), across[:, middle + 1 :].sum(1)]) / np.maximum(area, 1)
    free, ends = round(_NO_LUNG_MM / mm[0]), max(1, round(_END_MM / mm[0]))
    if len(area) < free + ends:
        return None
    for sign in (-1, 1):
        shares, sizes = (halves, area) if sign < 0 else (halves[:, ::-1], area[::-1])
        at_end, away = shares[:, :ends].mean(1), shares[:, -free:].sum(0)
        there = at_end.min() >= _LUNG_HALF and at_end.sum() >= _LUNGS
        if there and away.max() <= _GAS and sizes[-free:].min() >= _FULL_BODY * sizes[:ends].mean():
            return sign
    return None
