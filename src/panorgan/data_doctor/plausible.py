"""Plausible ranges in a human body. Wide on purpose: anything outside deserves a look by a person.

The ranges hold disease (fatty liver, huge spleens, polycystic kidneys) and every contrast phase.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from panorgan.anatomy import ancestors, catalogue

Range = tuple[float, float]

AIR_HU = -500.0
"""What is below is air; so is the lung, which only masks of the lung may hold."""

# Median HU of the whole organ. Only organs of known content: the gut may hold air, water or contrast medium.
_HU: Mapping[str, tuple[Range, str]] = {
    "liver": ((-40, 250), "severe fatty change is about −20 HU; the portal phase stays below 200"),
    "spleen": ((0, 300), "about 45 native, up to 250 in the arterial phase"),
    "kidney": ((-20, 500), "about 30 native; the excretory phase is bright"),
    "pancreas": ((-80, 250), "fat between its lobes lowers the median in old age"),
    "gallbladder": ((-40, 400), "bile is near 0; stones and excreted contrast are brighter"),
    "aorta": ((10, 900), "blood is about 40, contrast medium only adds to it"),
    "inferior_vena_cava": ((0, 700), "blood is about 40, contrast medium only adds to it"),
    "portal_and_splenic_vein": ((-20, 500), "thin veins share voxels with fat"),
    "spine": ((20, 900), "bone marrow and cortex; osteoporosis stays above fat"),
    "lung": ((-1000, -150), "mostly air, even with consolidation"),
    "heart_left_ventricle": ((10, 900), "blood is about 40, contrast medium only adds to it"),
    "heart_right_ventricle": ((10, 1500), "blood is about 40; fresh contrast medium is very bright"),
    "heart_myocardium": ((0, 350), "muscle is about 50 and enhances"),
}

# Least and largest volume in ml. The least counts only for masks that the border of the scan does not cut.
_VOLUME_ML: Mapping[str, Range] = {
    "liver": (200, 7000),
    "spleen": (5, 5000),
    "kidney": (10, 12000),
    "kidney_left": (5, 6000),
    "kidney_right": (5, 6000),
    "pancreas": (3, 600),
    "gallbladder": (0.3, 1500),
    "adrenal_gland": (0.3, 2000),
    "oesophagus": (1, 1000),
    "stomach": (10, 6000),
    "duodenum": (3, 1200),
    "small_bowel": (30, 8000),
    "colon": (30, 12000),
    "urinary_bladder": (2, 4000),
    "aorta": (5, 3000),
    "inferior_vena_cava": (3, 800),
    "portal_and_splenic_vein": (1, 500),
    "spine": (30, 4000),
    "lung": (200, 12000),
    "lung_left": (50, 7000),
    "lung_right": (50, 7000),
    "heart_left_ventricle": (2, 1500),
    "heart_right_ventricle": (2, 1500),
    "heart_myocardium": (10, 1500),
    "hippocampus": (0.3, 20),
}

# One organ in one piece. Not the gut (looped, cut), vessels (thin, cut), lesions (many), pairs, nor the lungs, whose
# bases surround the diaphragm and come apart in a scan of the abdomen.
ONE_PIECE = frozenset(
    {"liver", "spleen", "kidney_left", "kidney_right", "pancreas", "gallbladder", "stomach", "urinary_bladder"}
    | {"hippocampus_anterior", "hippocampus_posterior"}
)

# May hold air, so that a mask full of it is no surprise.
AIRY = frozenset({"lung", "oesophagus", "stomach", "duodenum", "small_bowel", "colon"})

# May hold anything, so that its brightness says nothing about where it lies.
_HOLLOW = frozenset(AIRY - {"lung"})

# Side of unpaired organs, and how far from the middle they must lie on the other side to be wrong (share of the
# body's width). The stomach and a low gallbladder come near the midline.
TYPICAL_SIDE: Mapping[str, tuple[str, float]] = {
    "liver": ("right", 0.08),
    "spleen": ("left", 0.08),
    "gallbladder": ("right", 0.12),
    "stomach": ("left", 0.12),
}

# Centres, first above second. Only organs far apart in every patient.
ABOVE = (
    *((upper, "urinary_bladder") for upper in ("liver", "spleen", "kidney", "stomach", "pancreas", "lung")),
    ("lung", "kidney"),
)
# Centres, first in front of second: the kidneys lie behind the peritoneum, against the muscles of the back.
IN_FRONT = tuple((front, "kidney") for front in ("stomach", "pancreas", "gallbladder", "liver"))

# Centres, first left of second, in the same slices of all patients but one in three hundred.
LEFT_OF = (("aorta", "inferior_vena_cava"),)

# Far steadier than vessels and kidneys, whose brightness follows the contrast medium.
STEADY = frozenset({"liver", "spleen", "pancreas", "gallbladder"})


@cache
def hu_range(organ: str) -> tuple[Range, str] | None:
    """Plausible median HU and the reason; the parts of an organ are made of the same."""
    return next((_HU[name] for name in _made_of(organ) if name in _HU), None)


def volume_range_ml(organ: str) -> Range | None:
    """Plausible volume; a part may be any share of its whole, but not more."""
    if organ in _VOLUME_ML:
        return _VOLUME_ML[organ]
    whole = next((_VOLUME_ML[name] for name in ancestors(organ) if name in _VOLUME_ML), None)
    return (0.0, whole[1]) if whole else None


def may_hold_air(organ: str) -> bool:
    """Whether a mask of it may contain air; so may what lies inside a lung or the gut."""
    return not AIRY.isdisjoint((organ, *ancestors(organ)))


def is_hollow(organ: str) -> bool:
    """Whether an organ, or the organ that it is a part of, contains food."""
    return not _HOLLOW.isdisjoint((organ, *ancestors(organ)))


def pairs() -> tuple[tuple[str, str], ...]:
    """(left, right) organs of the same parent."""
    found = []
    for organ in catalogue().values():
        twin = organ.name.replace("_left", "_right")
        if organ.side == "left" and twin != organ.name and twin in catalogue():
            found.append((organ.name, twin))
    return tuple(found)


def exclusive(first: str, second: str) -> bool:
    """Whether no voxel may belong to both: neither holds the other, and no common whole has one of them inside it."""
    if first == second or first in ancestors(second) or second in ancestors(first):
        return False
    common = set(ancestors(first)) & set(ancestors(second))
    # Left and right kidney share no voxel; a kidney's tumour shares all of its voxels with one of them.
    lesion = any(catalogue()[name].relation == "inside" for name in (first, second))
    return not (common and lesion)


def _made_of(organ: str) -> tuple[str, ...]:
    """The organ and what it is a part of. What lies inside (a tumour, a vessel) is made of something else."""
    names = [organ]
    while catalogue()[names[-1]].relation == "part":
        names.append(str(catalogue()[names[-1]].parent))
    return tuple(names)
