"""The meaning of the values of a unified label.

With C organs and T annotated structures:

    0            background
    1 … C        an organ of the vocabulary
    C + 1 + t    inside structure t, a union, with the part unknown
    C + 1 + T    left out: the sample's own masks contradict each other here
    C + 2 + T    disagreed: outside all annotated masks, and the teachers and the main teacher differ (eq. 5)

A value stands for the channels that a voxel may belong to, usually one. It is several where neither the sample's
annotation nor a teacher covers an organ: "background" then means "background or that organ".
"""

from __future__ import annotations

from functools import lru_cache

import torch

from panorgan.anatomy import Vocabulary, ancestors
from panorgan.data.labels import labelled_organs, membership
from panorgan.losses.partial import on_device
from panorgan.preparation.batch import Batch

Rows = tuple[tuple[bool, ...], ...]


def undecided_value(structure: int, vocabulary: Vocabulary) -> int:
    """The value of a voxel of which only the union is known; `structure` is its index in the batch's structures."""
    return len(vocabulary) + 1 + structure


def left_out_value(structures: tuple[str, ...], vocabulary: Vocabulary) -> int:
    """The value of a voxel that is excluded from the loss."""
    return undecided_value(len(structures), vocabulary)


def disagreed_value(structures: tuple[str, ...], vocabulary: Vocabulary) -> int:
    """The value of a voxel known only to lie outside all annotated structures; the largest value."""
    return left_out_value(structures, vocabulary) + 1


def possible_channels(batch: Batch, vocabulary: Vocabulary) -> torch.Tensor:
    """The channels that each value stands for, [B, values, C + 1] bool; depends on names and flags, not on voxels.

    Knowing an organ, from an annotated structure or a teacher, can only exclude channels from a value. So the
    exclusions are computed once, and a step takes one product with its flags.
    """
    known = batch.soft_targets_valid
    if known is None:
        known = batch.annotated.new_ones(len(batch.annotated), len(batch.soft_target_organs))
    flags = torch.cat([batch.annotated, known], dim=1).float()
    none_known, each = _exclusions(batch.structures, batch.soft_target_organs, vocabulary, flags.device)
    return (torch.addmm(none_known.view(1, -1), flags, each.flatten(1)) == 0).view(len(flags), *none_known.shape)


@lru_cache(maxsize=64)
def _exclusions(
    structures: tuple[str, ...], teachers: tuple[str, ...], vocabulary: Vocabulary, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """1 where a value does not stand for a channel: with no organ known [values, C + 1], and with only one known,
    [T + E, values, C + 1] for each structure and teacher."""
    one = torch.eye(len(structures) + len(teachers), dtype=torch.bool)
    flags = torch.cat([torch.zeros_like(one[:1]), one])
    annotated, known = flags.split([len(structures), len(teachers)], dim=1)
    batch = Batch(
        image=torch.empty(len(flags), 0),
        masks=torch.empty(len(flags), 0),
        annotated=annotated,
        structures=structures,
        cases=("",) * len(flags),
        soft_target_organs=teachers,
        soft_targets_valid=known,
    )
    denied = (~_from_meanings(batch, vocabulary)).float().to(device)
    return denied[0], denied[1:]


def _from_meanings(batch: Batch, vocabulary: Vocabulary) -> torch.Tensor:
    """`possible_channels`, from the meaning of the values."""
    device, structures, organs = batch.annotated.device, batch.structures, len(vocabulary)
    unknown = ~known_organs(batch, vocabulary)
    inside = on_device(inside_rows(vocabulary), device).bool()
    within = on_device(_within_rows(vocabulary), device)
    # Background, or an unknown organ, unless it lies inside a known one.
    unseen = unknown & ~((~unknown).float() @ within > 0)
    unseen_inside = inside & unknown.unsqueeze(1)
    besides = torch.cat([unseen.unsqueeze(1), unseen_inside], dim=1) & ~_separated(batch, vocabulary)
    values = disagreed_value(structures, vocabulary) + 1
    table = torch.eye(values, organs + 1, dtype=torch.bool, device=device).repeat(len(unknown), 1, 1)
    table[:, : organs + 1, 1:] |= besides
    table[:, organs + 1 : -2, 1:] = _parts_left(batch, vocabulary, unknown)
    table[:, -2:] = True
    members = on_device(membership(structures, vocabulary), device)
    table[:, -1, 1:] = batch.annotated.float() @ members == 0
    return table


def known_organs(batch: Batch, vocabulary: Vocabulary) -> torch.Tensor:
    """[B, C] bool: the organs that a sample's annotation covers or a teacher knows."""
    says = on_device(labelled_organs(batch.structures, vocabulary), batch.annotated.device)
    known = batch.annotated.float() @ says > 0
    for place, name in enumerate(batch.soft_target_organs):
        organ = vocabulary.index(name)
        known[:, organ] |= True if batch.soft_targets_valid is None else batch.soft_targets_valid[:, place]
    return known


@lru_cache(maxsize=64)
def inside_rows(vocabulary: Vocabulary) -> Rows:
    """Row k says which organs may lie inside organ k: its tumour, or the tumour of the union it is a part of."""
    return tuple(
        tuple(
            any(inner in vocabulary.inside(o) and organ not in vocabulary.inside(o) for o in (organ, *ancestors(organ)))
            for inner in vocabulary
        )
        for organ in vocabulary
    )


@lru_cache(maxsize=64)
def _within_rows(vocabulary: Vocabulary) -> Rows:
    """Row k says which organs always lie inside organ k."""
    return tuple(tuple(inner in vocabulary.inside(organ) for inner in vocabulary) for organ in vocabulary)


def _separated(batch: Batch, vocabulary: Vocabulary) -> torch.Tensor:
    """[B, C + 1, C] bool: pairs of a channel and an organ of which an annotated structure has one but not the other."""
    members = on_device(membership(batch.structures, vocabulary), batch.annotated.device)
    channels = torch.nn.functional.pad(members, (1, 0))
    apart = channels.unsqueeze(2) != members.unsqueeze(1)
    return torch.einsum("bt,tkc->bkc", batch.annotated.float(), apart.float()) > 0


def _parts_left(batch: Batch, vocabulary: Vocabulary, unknown: torch.Tensor) -> torch.Tensor:
    """[B, T, C] bool: the parts of each structure, and what lies inside it where that is unknown.

    A smaller annotated structure would have taken its members.
    """
    rows = membership(batch.structures, vocabulary)
    members = on_device(rows, unknown.device).bool()
    parts = on_device(labelled_organs(batch.structures, vocabulary), unknown.device).bool()
    left = parts | (members & unknown.unsqueeze(1))
    for t, row in enumerate(rows):
        for s, other in enumerate(rows):
            if other != row and all(a or not b for a, b in zip(row, other, strict=True)):
                left[:, t] &= ~(members[s] & batch.annotated[:, s : s + 1])
    return left
