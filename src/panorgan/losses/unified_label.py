"""A unified label over background and all organs, from a sample's annotation and the teachers of the other organs.

UFPS's pseudo label (eqs. 4 and 5). Ground truth always wins: at every voxel the annotation allows some channels (those
of `partial.marginal_cross_entropy`), and teachers only choose among them. `label_values` defines the values.

All channels are processed at once, as bytes: few, small passes for any number of organs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, reduce
from typing import Literal

import torch

from panorgan.anatomy import Vocabulary
from panorgan.data.labels import labelled_organs
from panorgan.errors import AnatomyError
from panorgan.losses.label_values import (
    disagreed_value,
    inside_rows,
    left_out_value,
    possible_channels,
    undecided_value,
)
from panorgan.losses.main_teacher import MainTeacher, global_main_teacher
from panorgan.losses.partial import checked_members, on_device
from panorgan.preparation.batch import Batch

Conflicts = Literal["sequence", "confidence"]
"""Which teacher wins a voxel claimed by several. *sequence*: the later in a fixed order. *confidence*: the surer
one."""


@dataclass(frozen=True)
class UnifiedLabel:
    """Labels of a batch as values, and the channels that each value stands for.

    One byte per voxel for any number of organs: cheap to keep and to compare. Losses ask for channels.

    Parameters
    ----------
    values : [B, *S] uint8, see `label_values`.
    possible : [B, values, C + 1] bool, the channels that a value stands for in each sample.
    """

    values: torch.Tensor
    possible: torch.Tensor

    def channels(self) -> torch.Tensor:
        """The channels that every voxel may belong to, [B, C + 1, *S] bool; one-hot where the label is sure."""
        return self._channels

    @cached_property
    def _channels(self) -> torch.Tensor:
        return self._look_up(self.possible)

    def targets(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(one-hot target, where it counts), both [B, C + 1, *S] bool.

        Where several channels are possible none of them counts; all others do, as absent. With softmax channels that
        is complete: the remaining probability is the sum over the possible ones.
        """
        target, counted = self.target_masks
        return target.bool(), counted.bool()

    @cached_property
    def target_masks(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The same as floats, 0 or 1; computed once per step."""
        target, counted = self._look_up(torch.cat(self._tables(), dim=2).float()).chunk(2, dim=1)
        return target, counted

    def _tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Target and counted channels for every value, [B, values, C + 1] bool each."""
        sure = self.possible.sum(2, keepdim=True) == 1
        return self.possible & sure, ~self.possible | sure

    @cached_property
    def words(self) -> torch.Tensor:
        """The same for a kernel, [3, B, values]: target channels, counted channels, possible channels.

        One bit per channel, the lowest for the background.
        """
        masks = torch.stack([*self._tables(), self.possible])
        return (masks << torch.arange(masks.shape[3], device=masks.device)).sum(3)

    def _look_up(self, table: torch.Tensor) -> torch.Tensor:
        """Rows of a table [B, values, K] for every voxel, [B, K, *S]."""
        count, channels = len(table), table.shape[2]
        places = self.values.flatten(1).long().unsqueeze(1).expand(-1, channels, -1)
        return table.transpose(1, 2).gather(2, places).view(count, channels, *self.values.shape[1:])


def merge(
    batch: Batch,
    vocabulary: Vocabulary,
    order: Sequence[str] = (),
    conflicts: Conflicts = "sequence",
    main: MainTeacher | None = None,
) -> UnifiedLabel:
    """The unified label of a batch; with a main teacher that of eq. 5.

    Background is where every teacher says background. Where the annotation says "one of these organs" (a liver that may
    hold a tumour, a kidney of one side or the other), a teacher's claim decides; without one it is the outer organ, and
    of several parts the one that teachers find most probable. Parts of which not all have a teacher stay undecided.

    Parameters
    ----------
    batch : masks and annotated flags, and teachers' probabilities in `soft_targets`.
    order : organs from large to small for `sequence`, see `overlap_priority`.
    """
    allowed = allowed_channels(batch, vocabulary)
    values = pseudo_label(batch, vocabulary, order, conflicts, allowed)
    if main is None:
        values = _fill_unclaimed(values, batch, vocabulary, allowed)
    else:
        values = _with_main_teacher(values, batch, vocabulary, allowed, main)
    # Where no channel is allowed the value is still 0.
    values.add_(_bytes(~_any(allowed)), alpha=left_out_value(batch.structures, vocabulary))
    return UnifiedLabel(values, possible_channels(batch, vocabulary))


def chosen_label(scores: torch.Tensor, batch: Batch, vocabulary: Vocabulary) -> UnifiedLabel:
    """The hard label of a network: at every voxel the channel with the highest score [B, C + 1, *S] that the annotation
    allows. Nothing is left undecided: the network knows all organs."""
    allowed = allowed_channels(batch, vocabulary)
    values = _best_allowed(scores.detach(), allowed)
    values.add_(_bytes(~_any(allowed)), alpha=left_out_value(batch.structures, vocabulary))
    knowing = replace(batch, soft_target_organs=tuple(vocabulary), soft_targets_valid=None)
    return UnifiedLabel(values, possible_channels(knowing, vocabulary))


def _with_main_teacher(
    teachers: torch.Tensor, batch: Batch, vocabulary: Vocabulary, allowed: torch.Tensor, main: MainTeacher
) -> torch.Tensor:
    """The values of eq. 5, from those of the teachers; ground truth takes precedence."""
    open_to, left_alone = allowed, None
    if unknown := [channel for channel, organ in enumerate(vocabulary, 1) if not main.knows(organ)]:
        open_to = allowed.clone()
        for channel in unknown:
            open_to[:, channel] = False
        left_alone = reduce(torch.logical_or, (teachers == channel for channel in unknown))
    chosen = _best_allowed(main.scores.detach(), open_to)
    counted = _more_than_one(open_to.unbind(1))
    values, disagreed = global_main_teacher(teachers, chosen, main.share, counted, left_alone)
    leave_out = main.disagreement == "left_out"
    torn = disagreed & (teachers > 0) & (chosen > 0) if leave_out else None
    scores = main.scores if _knows_all_parts(main, batch, vocabulary) else None
    values = _fill_unclaimed(values, batch, vocabulary, allowed, scores, torn)
    if leave_out:
        _paint(values, disagreed & allowed[:, 0], disagreed_value(batch.structures, vocabulary))
    return values


def _knows_all_parts(main: MainTeacher, batch: Batch, vocabulary: Vocabulary) -> bool:
    """Whether the main teacher is used for all parts of the annotated unions; else it cannot choose between them."""
    rows = (row for row in labelled_organs(batch.structures, vocabulary) if sum(row) > 1)
    return all(main.knows(organ) for row in rows for organ, part in zip(vocabulary, row, strict=True) if part)


def pseudo_label(
    batch: Batch,
    vocabulary: Vocabulary,
    order: Sequence[str] = (),
    conflicts: Conflicts = "sequence",
    allowed: torch.Tensor | None = None,
) -> torch.Tensor:
    """The teachers' label, [B, *S] uint8: 0, or the channel of an organ; without `allowed`, ignoring the annotation.

    A teacher claims a voxel if its probability is above one half. What lies inside an organ wins over the organ.
    """
    if batch.soft_targets is None or not batch.soft_target_organs:
        return torch.zeros_like(batch.image[:, 0], dtype=torch.uint8)
    channels, painted = _teachers_channels(batch.soft_target_organs, vocabulary, tuple(order))
    claims = _claims(batch, channels, allowed)
    if conflicts == "confidence":
        claims = _most_probable(claims, batch.soft_targets.float(), channels, vocabulary)
    return _paint_in_order(claims, channels, painted)


@lru_cache(maxsize=64)
def _teachers_channels(
    names: tuple[str, ...], vocabulary: Vocabulary, order: tuple[str, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The channel of every teacher, and the same channels by overlap priority, the lowest first."""
    painted = (organ for organ in overlap_priority(vocabulary, order) if organ in names)
    return tuple(vocabulary.index(name) + 1 for name in names), tuple(vocabulary.index(organ) + 1 for organ in painted)


def without_own_teachers(batch: Batch, vocabulary: Vocabulary) -> Batch:
    """The batch with teachers only for structures that a sample does not label itself."""
    if batch.soft_targets_valid is None or not batch.soft_target_organs:
        return batch
    labelled = (
        batch.annotated.float() @ on_device(labelled_organs(batch.structures, vocabulary), batch.annotated.device) > 0
    )
    own = torch.stack([labelled[:, vocabulary.index(name)] for name in batch.soft_target_organs], dim=1)
    return replace(batch, soft_targets_valid=batch.soft_targets_valid & ~own)


def overlap_priority(vocabulary: Vocabulary, larger_first: Sequence[str] = ()) -> tuple[str, ...]:
    """All organs by priority in overlaps: each wins over those before it.

    As given; organs not given follow in vocabulary order. Then what lies inside an organ is moved behind it. A
    vocabulary that lists large organs first needs no further order.
    """
    places = {organ: place for place, organ in enumerate(larger_first)}
    if unknown := [organ for organ in places if organ not in vocabulary]:
        raise AnatomyError(
            f"The overlap priority names organs that are not in the vocabulary: {', '.join(unknown)}.",
            code="not-in-vocabulary",
            where="larger_first",
            fix=f"Use only: {', '.join(vocabulary)}.",
        )
    return Vocabulary(sorted(vocabulary, key=lambda organ: places.get(organ, len(places)))).paint_order()


def allowed_channels(batch: Batch, vocabulary: Vocabulary) -> torch.Tensor:
    """The channels that the annotation allows at each voxel, [B, C + 1, *S] bool.

    A channel is allowed when, for every annotated structure, membership and mask agree. Nothing annotated: all are.
    """
    rows = checked_members(batch, vocabulary)
    outside = on_device(tuple((1, *(not member for member in row)) for row in rows), batch.masks.device, torch.uint8)
    space = (1,) * (batch.masks.ndim - 2)
    masks, unknown = _bytes(batch.masks), _bytes(~batch.annotated).view(*batch.annotated.shape, 1, *space)
    agree = (
        (masks[:, t : t + 1] ^ row.view(1, -1, *space)).bitwise_or_(unknown[:, t]) for t, row in enumerate(outside)
    )
    allowed: torch.Tensor = reduce(torch.Tensor.bitwise_and_, agree)
    return allowed.view(torch.bool)


def _claims(batch: Batch, channels: Sequence[int], allowed: torch.Tensor | None) -> torch.Tensor:
    """Where each teacher claims a voxel for its channel, [B, E, *S] bool."""
    assert batch.soft_targets is not None
    claims = batch.soft_targets > 0.5
    if batch.soft_targets_valid is not None:
        known = batch.soft_targets_valid.view(*batch.soft_targets_valid.shape, *(1,) * (claims.ndim - 2))
        _bytes(claims).bitwise_and_(_bytes(known))
    if allowed is not None:
        claims &= torch.stack([allowed[:, channel] for channel in channels], dim=1)
    return claims


def _most_probable(
    claims: torch.Tensor, probabilities: torch.Tensor, channels: Sequence[int], vocabulary: Vocabulary
) -> torch.Tensor:
    """The most probable of the claims [B, E, *S]; what lies inside an organ has already won over the organ."""
    inside = inside_rows(vocabulary)
    kept = claims.clone()
    for outer, channel in enumerate(channels):
        for inner, other in enumerate(channels):
            if inside[channel - 1][other - 1]:
                kept[:, outer] &= ~claims[:, inner]
    scores = probabilities * kept.float()
    return kept & (scores == scores.amax(1, keepdim=True))


def _paint_in_order(planes: torch.Tensor, channels: Sequence[int], order: Sequence[int]) -> torch.Tensor:
    """Overlay channels, [B, *S] uint8: per voxel the last one that is set; 0 where none is.

    `planes` [B, K, *S] bool are those of `channels`; `order` has the same channels in the order of painting.
    """
    # Ranks that grow with overlap priority: the last channel has the largest. Usually channels are such ranks already.
    numbers = dict(zip(order, sorted(channels), strict=True))
    weights = on_device((tuple(numbers[channel] for channel in channels),), planes.device, torch.uint8)
    values = (_bytes(planes) * weights.view(1, -1, *(1,) * (planes.ndim - 2))).amax(1)
    if list(order) == sorted(channels):
        return values
    channel_of = {number: channel for channel, number in numbers.items()}
    table = on_device((tuple(channel_of.get(n, 0) for n in range(max(channels) + 1)),), planes.device, torch.uint8)
    return table.view(-1).index_select(0, values.flatten().int()).view(values.shape)


def _best_allowed(scores: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """The allowed channel with the highest score, [B, *S] uint8; 0 where none is allowed."""
    values = torch.zeros_like(allowed[:, 0], dtype=torch.uint8)
    best = torch.full_like(scores[:, 0], float("-inf"))
    # Channel by channel: several times faster on a CPU than an argmax over a strided axis.
    for channel, plane in enumerate(allowed.unbind(1)):
        better = plane & (scores[:, channel] > best)
        best = torch.where(better, scores[:, channel], best)
        _paint(values, better, channel)
    return values


def _paint(values: torch.Tensor, where: torch.Tensor, value: int) -> None:
    """`values[where] = value` for bytes, as arithmetic modulo 256: many times faster on a CPU than `masked_fill_`."""
    values += _bytes(where) * (value - values)


def _bytes(mask: torch.Tensor) -> torch.Tensor:
    """The same memory as 0 and 1: on a CPU, bytes take a fraction of the time."""
    return mask.view(torch.uint8)


def _any(planes: torch.Tensor) -> torch.Tensor:
    """`planes.any(1)` of [B, K, *S] bool."""
    return _bytes(planes).amax(1).view(torch.bool)


def _more_than_one(planes: Sequence[torch.Tensor]) -> torch.Tensor:
    """Where at least two of several bool planes are set; adding them up would take eight bytes per voxel."""
    one, two = planes[0], torch.zeros_like(planes[0])
    for plane in planes[1:]:
        two = two | (one & plane)
        one = one | plane
    return two


def _fill_unclaimed(
    values: torch.Tensor,
    batch: Batch,
    vocabulary: Vocabulary,
    allowed: torch.Tensor,
    main: torch.Tensor | None = None,
    torn: torch.Tensor | None = None,
) -> torch.Tensor:
    """Fill in voxels that no teacher claims and that ground truth marks as foreground; writes into `values`.

    `main` [B, C + 1, *S] chooses among the parts of a union, instead of the teachers. `torn` [B, *S] bool: where two
    parts are claimed, so that none is chosen.
    """
    lacking = (values == 0) & ~allowed[:, 0]
    outer = _outermost(allowed, vocabulary)
    channels = range(1, len(vocabulary) + 1)
    values += _bytes(lacking) * _paint_in_order(outer, channels, channels)
    parts = {t: sum(row) for t, row in enumerate(labelled_organs(batch.structures, vocabulary)) if sum(row) > 1}
    if parts:  # only a union leaves several organs to choose from
        several = lacking & _more_than_one(outer.unbind(1))
        undecided = several & ~_choose_part(values, several, outer.unbind(1), batch, vocabulary, main)
        undecided = undecided if torn is None else undecided | (several & torn)
        for t in sorted(parts, key=lambda t: -parts[t]):
            here = undecided & batch.masks[:, t] & batch.annotated[:, t].view(-1, *(1,) * (values.ndim - 1))
            _paint(values, here, undecided_value(t, vocabulary))
    return values


def _outermost(allowed: torch.Tensor, vocabulary: Vocabulary) -> torch.Tensor:
    """Per organ, where it is allowed and nothing that it may lie inside of is, [B, C, *S] bool."""
    organs = allowed[:, 1:]
    pairs = [
        (outer, inner) for outer, row in enumerate(inside_rows(vocabulary)) for inner, is_in in enumerate(row) if is_in
    ]
    planes = organs.clone() if pairs else organs
    for outer, inner in pairs:
        planes[:, inner] &= ~organs[:, outer]
    return planes


def _choose_part(
    values: torch.Tensor,
    several: torch.Tensor,
    outer: Sequence[torch.Tensor],
    batch: Batch,
    vocabulary: Vocabulary,
    main: torch.Tensor | None,
) -> torch.Tensor:
    """Assign voxels of a union to the most probable part; returns where there was one, [B, *S] bool.

    There is none where a part has no teacher, or where no part is more probable than the others.
    """
    nothing = 0.0 if main is None else float("-inf")
    best = torch.full(values.shape, nothing, device=values.device)
    settled = torch.ones_like(several)
    complete = torch.ones_like(several)
    for organ, plane in enumerate(outer):
        here = several & plane
        score, known = _organ_probability(organ, batch, vocabulary, main)
        if score is None:
            complete &= ~here
            continue
        complete &= ~here | known.view(-1, *(1,) * (values.ndim - 1))
        better, equal = here & (score > best), here & (score == best)
        settled = (settled & ~equal) | better
        best = torch.where(better, score, best)
        _paint(values, better, organ + 1)
    return complete & settled & (best > nothing)


def _organ_probability(
    organ: int, batch: Batch, vocabulary: Vocabulary, main: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Probability of an organ, [B, *S], and the samples for which a teacher gives it, [B] bool."""
    everywhere = torch.ones_like(batch.annotated[:, :1]).any(1)
    if main is not None:
        return main[:, organ + 1].detach().float(), everywhere
    if batch.soft_targets is None or vocabulary[organ] not in batch.soft_target_organs:
        return None, ~everywhere
    place = batch.soft_target_organs.index(vocabulary[organ])
    known = everywhere if batch.soft_targets_valid is None else batch.soft_targets_valid[:, place]
    return batch.soft_targets[:, place].float(), known
