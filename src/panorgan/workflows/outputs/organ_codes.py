"""How an organ is coded for other systems: category, type, side and place, in SNOMED CT where it has a concept.

An organ without a concept gets a code of panorgan's own scheme, 99PANORGAN: its name. DICOM reserves designators that
begin with 99 for private schemes.
"""

from __future__ import annotations

from dataclasses import dataclass

from panorgan.anatomy import Organ, catalogue, find_organ
from panorgan.errors import AnatomyError

PRIVATE_SCHEME = "99PANORGAN"
_SNOMED = "SCT"
_ABNORMAL = ("tumour", "cyst")
# DICOM's long strings (LO), which labels and meanings are.
_LONGEST = 64
_LONGEST_VALUE = 16


@dataclass(frozen=True)
class Coding:
    """One coded concept."""

    value: str
    meaning: str
    scheme: str = _SNOMED

    @property
    def is_short(self) -> bool:
        """Whether it fits DICOM's CodeValue; LongCodeValue holds the others."""
        return len(self.value) <= _LONGEST_VALUE


_STRUCTURE = Coding("91723000", "Anatomical Structure")
_ABNORMAL_STRUCTURE = Coding("49755003", "Morphologically Abnormal Structure")
_SIDES = {"left": Coding("7771000", "Left"), "right": Coding("24028007", "Right")}


@dataclass(frozen=True)
class OrganCodes:
    """What a segment says of its organ; `region` is the organ that it lies in, if any."""

    label: str
    category: Coding
    type: Coding
    modifier: Coding | None = None
    region: Coding | None = None
    region_modifier: Coding | None = None

    @property
    def of_anatomy(self) -> bool:
        """Whether it is a structure of healthy bodies."""
        return self.category == _STRUCTURE

    @property
    def private(self) -> bool:
        """Whether any of the concepts is panorgan's own."""
        return any(code is not None and code.scheme == PRIVATE_SCHEME for code in (self.type, self.region))


def codes_of(name: str) -> OrganCodes:
    """The codes of an organ."""
    organ = catalogue()[name]
    within = _lies_in(organ)
    return OrganCodes(
        label=_label(organ),
        category=_ABNORMAL_STRUCTURE if _whole(organ).kind in _ABNORMAL else _STRUCTURE,
        type=_type(organ),
        modifier=_modifier(organ),
        region=_type(within) if within else None,
        region_modifier=_modifier(within) if within else None,
    )


def rgb(name: str) -> tuple[int, int, int]:
    """The colour of an organ, 0 to 255."""
    colour = catalogue()[name].colour
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _label(organ: Organ) -> str:
    """Its title where that leads back to the organ, so that the segment can be read again; else its name."""
    try:
        again = find_organ(organ.title) == organ
    except AnatomyError:
        again = False
    return organ.title if again and organ.title == _text(organ.title) else organ.name


def _text(title: str) -> str:
    """As DICOM's long strings hold it: a backslash would begin another value."""
    return title.replace("\\", "/")[:_LONGEST]


def _type(organ: Organ) -> Coding:
    if organ.snomed_value:
        return Coding(organ.snomed_value, _text(organ.snomed_meaning))
    return Coding(organ.name, _text(organ.title), PRIVATE_SCHEME)


def _modifier(organ: Organ) -> Coding | None:
    if organ.modifier_value:
        return Coding(organ.modifier_value, organ.modifier_meaning)
    # A SNOMED concept without a modifier includes the side.
    return _SIDES.get(str(organ.side)) if not organ.snomed_value else None


def _whole(organ: Organ) -> Organ:
    """What an organ is a part of, or itself."""
    while organ.relation == "part":
        organ = catalogue()[str(organ.parent)]
    return organ


def _lies_in(organ: Organ) -> Organ | None:
    whole = _whole(organ)
    return catalogue()[str(whole.parent)] if whole.relation == "inside" else None
