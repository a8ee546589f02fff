"""Where organs lie in the body: left or right, above or below, in front or behind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from panorgan.anatomy import ancestors, catalogue
from panorgan.data.volume import Volume
from panorgan.data_doctor import plausible
from panorgan.data_doctor.files import Problem
from panorgan.data_doctor.findings import StructureFacts

# Centres that are closer than this say nothing about sides.
_CLEAR_MM = 10.0
# A narrower body is a crop, whose middle is not the body's.
_WHOLE_BODY_MM = 200.0


@dataclass(frozen=True)
class Body:
    """The body's middle and width from left to right, in RAS millimetres."""

    middle_mm: float
    width_mm: float


def find_body(image: Volume, air_below: float) -> Body | None:
    """The body in a scan [X, Y, Z] in RAS order; None where the scan does not hold its whole width."""
    step = tuple(max(1, n // 128) for n in image.voxels.shape)
    tissue = image.voxels[:: step[0], :: step[1], :: step[2]] > air_below
    profile = tissue.sum(axis=(1, 2)).astype(np.float64)
    if not profile.any():
        return None
    columns = np.flatnonzero(profile > 0.02 * profile.max())
    width = (columns[-1] - columns[0] + 1) * step[0] * image.spacing[0]
    middle = float((profile * np.arange(len(profile))).sum() / profile.sum()) * step[0]
    y, z = (n / 2 for n in image.voxels.shape[1:])
    x = float((image.affine[:3, :3] @ np.array([middle, y, z]) + image.affine[:3, 3])[0])
    return Body(x, float(width)) if width >= _WHOLE_BODY_MM else None


def check_sides(
    facts: Mapping[str, StructureFacts], body: Body | None, folder_names: Mapping[str, str]
) -> tuple[str, Problem] | None:
    """Left and right: paired organs against each other, then single ones against the body's middle.

    `folder_names` says what the folder calls an organ, for the line that exchanges two of them.
    """
    swapped = [pair for pair in plausible.pairs() if _swapped(facts, pair)]
    right_pairs = [pair for pair in plausible.pairs() if _centres(facts, pair) and not _swapped(facts, pair)]
    wrong, right = _single(facts, body)
    crossed, straight = _vessels(facts)
    if crossed and not (right or right_pairs):
        wrong += crossed  # alone among organs on their sides, it is a vena cava on the left, which some people have
    right += straight
    if not swapped and not wrong:
        return None
    if not swapped and right_pairs:
        # The pairs say that the header is right; one organ alone may be odd, but the label must then be looked at.
        why = "paired organs lie on their sides, so the header is right"
    elif right and (swapped or len(right) > len(wrong)):
        why = f"{', '.join(right)} on their own side, so the header is right and labels are swapped"
    elif len(wrong) + len(swapped) > 1:
        why = "everything is mirrored: the header's left-right direction is wrong (or the patient has situs inversus)"
    else:
        why = "the labels are swapped, or the header's left-right direction is wrong"
    names = [*(f"{left} and {right_}" for left, right_ in swapped), *wrong]
    fix = "Compare with the DICOM: convert the scan again if it is mirrored; if only the labels are swapped, "
    if swapped:
        left, right_one = (folder_names.get(name, name) for name in swapped[0])
        fix += f"correct them (in all cases: 'labels: {{{left}: {swapped[0][1]}, {right_one}: {swapped[0][0]}}}')."
    else:
        fix += "correct them, or remove the case."
    first = swapped[0][0] if swapped else wrong[0]
    return first, Problem("wrong-side", f"On the wrong side of the body: {', '.join(names)}.", why, fix)


def check_order(facts: Mapping[str, StructureFacts]) -> Iterator[tuple[str, Problem]]:
    """Head to foot and front to back."""
    tables = (
        (2, plausible.ABOVE, "above", "head to foot"),
        (1, plausible.IN_FRONT, "in front of", "front to back"),
    )
    for axis, table, relation, direction in tables:
        wrong = [pair for pair in table if _reversed(facts, pair, axis)]
        if not wrong:
            continue
        why = ", ".join(f"{first} should lie {relation} {second}" for first, second in wrong)
        alone = _one_to_blame(facts, wrong)
        if alone:
            what = f"The {alone} lies the wrong way round, {direction}, and nothing else does."
            why += "; an ectopic or transplanted organ, a label of something else, or a header that turns the body"
            yield (
                alone,
                Problem("odd-place", what, why, "Look at the case in a viewer; leave it if the organ is there."),
            )
        else:
            fix = "Convert the scan again from DICOM; its header turns the body round."
            yield wrong[0][0], Problem("wrong-order", f"The organs lie the wrong way round, {direction}.", why, fix)


def axes_in_order(facts: Mapping[str, StructureFacts]) -> set[int]:
    """The RAS axes along which labelled organs clearly lie as they should, and none the other way round."""
    found = set()
    for axis, table in ((2, plausible.ABOVE), (1, plausible.IN_FRONT)):
        right = any(_reversed(facts, (second, first), axis) for first, second in table)
        if right and not any(_reversed(facts, pair, axis) for pair in table):
            found.add(axis)
    return found


def _one_to_blame(facts: Mapping[str, StructureFacts], wrong: Sequence[tuple[str, str]]) -> str:
    """The one organ whose odd place explains everything; empty where two organs disagree, or both of a pair do."""
    if any(_both_sides(facts, name) for pair in wrong for name in pair):
        return ""
    shared = set(wrong[0]).intersection(*wrong)
    # The second ones of the tables (bladder, kidney) are the ones that surgeons move.
    return next((name for name in wrong[0][::-1] if name in shared), "")


def _both_sides(facts: Mapping[str, StructureFacts], name: str) -> bool:
    """Whether both organs of a pair are drawn, apart or as two pieces of one mask."""
    if f"{name}_left" not in catalogue():
        return False
    both = all(side in facts and facts[side].voxels for side in (f"{name}_left", f"{name}_right"))
    whole = facts.get(name)
    return both or (whole is not None and whole.pieces > 1 and whole.largest_piece < 0.8)


def _centres(facts: Mapping[str, StructureFacts], pair: tuple[str, str]) -> bool:
    return all(name in facts and facts[name].voxels for name in pair)


def _swapped(facts: Mapping[str, StructureFacts], pair: tuple[str, str]) -> bool:
    """RAS: x grows to the patient's right."""
    left, right = pair
    return _centres(facts, pair) and facts[left].centre_mm[0] - facts[right].centre_mm[0] > _CLEAR_MM


def _single(facts: Mapping[str, StructureFacts], body: Body | None) -> tuple[list[str], list[str]]:
    """Unpaired organs, and lone ones of a pair, that lie clearly on the wrong and on the right side."""
    wrong: list[str] = []
    right: list[str] = []
    if body is None:
        return wrong, right
    sides = dict(plausible.TYPICAL_SIDE)
    for pair in plausible.pairs():
        if not _centres(facts, pair):
            sides |= {pair[0]: ("left", 0.05), pair[1]: ("right", 0.05)}
    for name, (side, share) in sides.items():
        if name not in facts or not facts[name].voxels:
            continue
        away = (facts[name].centre_mm[0] - body.middle_mm) * (1 if side == "right" else -1)
        if away < -share * body.width_mm:
            wrong.append(name)
        elif away > share * body.width_mm:
            right.append(name)
    return wrong, right


def _vessels(facts: Mapping[str, StructureFacts]) -> tuple[list[str], list[str]]:
    """Organs that lie next to each other near the middle, clearly the wrong and the right way round."""
    wrong: list[str] = []
    right: list[str] = []
    for left, right_one in plausible.LEFT_OF:
        if _centres(facts, (left, right_one)):
            away = facts[left].centre_mm[0] - facts[right_one].centre_mm[0]
            if abs(away) > _CLEAR_MM:
                (wrong if away > 0 else right).append(left)
    return wrong, right


def _reversed(facts: Mapping[str, StructureFacts], pair: tuple[str, str], axis: int) -> bool:
    first, second = (_places(facts, name, axis) for name in pair)
    # Every part must agree: one kidney that hangs low says nothing.
    return bool(first and second) and max(first) < min(second) - _CLEAR_MM


def _places(facts: Mapping[str, StructureFacts], name: str, axis: int) -> list[float]:
    """Centres of an organ, or of its parts."""
    found = [f for f in facts.values() if f.voxels and (f.name == name or (name in ancestors(f.name)))]
    return [f.centre_mm[axis] for f in found]
