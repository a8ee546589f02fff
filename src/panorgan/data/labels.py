"""How annotated structures relate to the network's channels.

The network predicts the *vocabulary*; sites annotate *structures*, which may be vocabulary organs or unions of
them (`kidney` where the vocabulary has both sides). Masks are inclusive: a liver mask contains its tumours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Literal

from panorgan.anatomy import Vocabulary
from panorgan.errors import AnatomyError

Activation = Literal["softmax", "sigmoid"]
"""How logits become probabilities. *softmax*: over background + organs, which exclude each other.
*sigmoid*: one per organ, independently."""

CONVENTIONS: Mapping[Activation, str] = {"softmax": "exclusive", "sigmoid": "independent"}
"""The activation in experiments, model cards and cache keys on disk; fingerprints depend on these words."""


@lru_cache(maxsize=256)
def membership(structures: tuple[str, ...], vocabulary: Vocabulary) -> tuple[tuple[bool, ...], ...]:
    """Row t says which vocabulary organs make up structure t; [structures][organs].

    A structure that this vocabulary cannot express gets an empty row: it must not be annotated in a batch for a
    network with these channels (a site's own small model in `solo`, for instance).
    """
    rows = []
    for structure in structures:
        try:
            members = set(vocabulary.members(structure))
        except AnatomyError:
            members = set()
        rows.append(tuple(organ in members for organ in vocabulary))
    return tuple(rows)


@lru_cache(maxsize=256)
def labelled_organs(structures: tuple[str, ...], vocabulary: Vocabulary) -> tuple[tuple[bool, ...], ...]:
    """Row t says which vocabulary organs an annotation of structure t shows; [structures][organs].

    The organ itself, or the parts of a union. Not what lies inside unmarked: a kidney's mask contains its tumours, but
    does not show them.
    """
    rows = []
    for structure, row in zip(structures, membership(structures, vocabulary), strict=True):
        inner = vocabulary.inside(structure)
        rows.append(tuple(member and organ not in inner for organ, member in zip(vocabulary, row, strict=True)))
    return tuple(rows)


def structures_of(annotated: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """All structures that any of the given annotated sets names, in a stable order."""
    return tuple(sorted({name for names in annotated for name in names}))
