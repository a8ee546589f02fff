"""Which organs contain gas besides tissue, and which consist of it."""

from __future__ import annotations

from panorgan.anatomy.catalogue import ancestors, catalogue

# Gas comes and goes with meals; the organ is its wall and what it holds.
_GUT = frozenset({"oesophagus", "stomach", "duodenum", "small_bowel", "colon", "rectum"})
# Air belongs to the tissue; what lies inside shows its border against it.
_AERATED = frozenset({"lung", "trachea"})


def is_gut(organ: str) -> bool:
    """Whether an organ is the gut, a part of it, or lies inside it."""
    return not _GUT.isdisjoint(_line(organ))


def is_aerated(organ: str) -> bool:
    """Whether an organ is made of air and tissue, or lies inside one that is."""
    return not _AERATED.isdisjoint(_line(organ))


def _line(organ: str) -> tuple[str, ...]:
    """The organ and what it belongs to; of an organ that the catalogue does not have, its name alone."""
    return (organ, *ancestors(organ)) if organ in catalogue() else (organ,)
