"""Dice and cross-entropy for cases that annotate only some structures.

Everything here works on probabilities *after* the activation: masking logits would turn hidden voxels into 0.5.

Notation: C channels, T annotated structures, M[t, c] says whether organ c is a member of structure t (a union such as
`kidney` has two members; `liver` contains its tumour). Unknown structures never enter a sum.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import torch
import torch.nn.functional as F

from panorgan.anatomy import Vocabulary
from panorgan.data.labels import Activation, labelled_organs, membership
from panorgan.errors import AnatomyError
from panorgan.preparation.batch import Batch

DiceOver = Literal["batch", "sample"]

# log(0) of a union's probability would be -inf; this is far below the resolution of bfloat16 or float32 losses.
_SMALLEST = 1e-7


def partial_dice_ce(
    logits: torch.Tensor,
    batch: Batch,
    vocabulary: Vocabulary,
    activation: Activation,
    dice_weight: float = 1.0,
    ce_weight: float = 1.0,
    dice_over: DiceOver = "sample",
) -> torch.Tensor:
    """Per-sample loss [B]: weighted Dice + cross-entropy over what each sample annotates.

    Cross-entropy is the marginal one of `marginal_cross_entropy` for softmax channels and the binary one of
    `structure_bce` for sigmoid channels. A sample that annotates nothing has loss 0.
    """
    logits = logits.float()
    members = member_matrix(batch, vocabulary, logits.device)
    loss = logits.new_zeros(logits.shape[0])
    if dice_weight:
        probabilities = structure_probabilities(logits, batch, vocabulary, activation)
        loss = loss + dice_weight * partial_dice(probabilities, batch.masks, batch.annotated, dice_over)
    if ce_weight and activation == "softmax":
        loss = loss + ce_weight * marginal_cross_entropy(logits, batch.masks, batch.annotated, members)
    elif ce_weight:
        loss = loss + ce_weight * structure_bce(logits, batch, vocabulary)
    return loss


def member_matrix(batch: Batch, vocabulary: Vocabulary, device: torch.device) -> torch.Tensor:
    """M [T, C] as floats; raises an error if a batch annotates something these channels cannot express."""
    return on_device(checked_members(batch, vocabulary), device)


def checked_members(batch: Batch, vocabulary: Vocabulary) -> tuple[tuple[bool, ...], ...]:
    """The rows of `member_matrix`."""
    rows = membership(batch.structures, vocabulary)
    empty = [t for t, row in enumerate(rows) if not any(row)]
    if empty and bool(batch.annotated[:, empty].any()):
        names = ", ".join(batch.structures[t] for t in empty)
        raise AnatomyError(
            f"A batch annotates structures that the network cannot express: {names}.",
            code="network-lacks-structures",
            why=f"its channels are {', '.join(vocabulary)}",
            fix="Add them to the vocabulary, or restrict 'annotated' of the site.",
        )
    return rows


@lru_cache(maxsize=64)
def on_device(
    rows: tuple[tuple[int, ...], ...], device: torch.device, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The rows as a cached, read-only tensor: copying them in every step would make the device wait."""
    return torch.tensor(rows, dtype=dtype, device=device)


def structure_probabilities(
    logits: torch.Tensor, batch: Batch, vocabulary: Vocabulary, activation: Activation
) -> torch.Tensor:
    """Probability that a voxel belongs to each annotated structure, [B, T, *S].

    Softmax channels: the sum over members. Sigmoid channels: the structure's own sigmoid if it has one, else
    the probability that at least one of its members is present.
    """
    if activation == "softmax":
        organs = logits.softmax(dim=1)[:, 1:]
        return _over_members(member_matrix(batch, vocabulary, logits.device), organs)
    return 1 - _log_absent(logits, batch, vocabulary).exp()


def partial_dice(
    probabilities: torch.Tensor, masks: torch.Tensor, annotated: torch.Tensor, over: DiceOver = "sample"
) -> torch.Tensor:
    """Soft Dice loss per sample [B], mean over its annotated structures; [B, T, *S] in.

    1 − (2 Σ p·y + 1)/(Σ p + Σ y + 1), sums over voxels. Over the `batch`: the sums also run over the samples that
    annotate a structure, and a structure absent from all of them is left out.
    """
    space = tuple(range(2, probabilities.ndim))
    truth = masks.to(probabilities.dtype)
    overlap, probability, size = (probabilities * truth).sum(space), probabilities.sum(space), truth.sum(space)
    return dice_of_sums(overlap, probability, size, annotated, over)


def dice_of_sums(
    overlap: torch.Tensor,
    probability: torch.Tensor,
    truth: torch.Tensor,
    annotated: torch.Tensor,
    over: DiceOver = "sample",
) -> torch.Tensor:
    """`partial_dice` from its sums over voxels, Σ p·y, Σ p and Σ y, all [B, T]."""
    if over == "batch":
        # An absent organ would get a gradient of 1 per voxel towards probability 0, from which a small organ that is
        # absent from most patches would not recover. Cross-entropy handles absence more gently.
        overlap, probability, truth = (
            torch.where(annotated, s, torch.zeros_like(s)).sum(0).expand_as(s) for s in (overlap, probability, truth)
        )
        annotated = annotated & (truth > 0)
    return _mean_over_annotated(1 - (2 * overlap + 1) / (probability + truth + 1), annotated)


def marginal_cross_entropy(
    logits: torch.Tensor, masks: torch.Tensor, annotated: torch.Tensor, members: torch.Tensor
) -> torch.Tensor:
    """Per-sample [B] mean over voxels of −log Σ p_c over the channels that the annotation allows.

    Channel c is allowed at a voxel when, for every annotated structure, membership and mask agree. With everything
    annotated one channel is left: ordinary cross-entropy. With nothing annotated all are: loss 0. Where masks of
    exclusive structures overlap nothing is allowed: such voxels are left out.
    """
    batch = annotated.shape[0]
    # Disagreements per channel: Σ_t a_t (M_tc + y_t − 2 M_tc y_t); the background is a member of nothing.
    table = F.pad(members, (1, 0))
    truth = masks.to(logits.dtype)
    weight = annotated.to(logits.dtype)
    always = weight @ table
    per_voxel = torch.einsum("bt,tc,bt...->bc...", weight, 1 - 2 * table, truth)
    disagreements = always.view(batch, -1, *(1,) * (logits.ndim - 2)) + per_voxel
    allowed = disagreements < 0.5
    some = allowed.any(dim=1)
    # A voxel without any allowed channel gets all of them: its loss is then 0, and finite.
    allowed = allowed | ~some.unsqueeze(1)
    chosen = logits.masked_fill(~allowed, float("-inf")).logsumexp(dim=1)
    loss = logits.logsumexp(dim=1) - chosen
    count = some.flatten(1).sum(1).clamp(min=1)
    return loss.flatten(1).sum(1) / count


def structure_bce(logits: torch.Tensor, batch: Batch, vocabulary: Vocabulary) -> torch.Tensor:
    """Binary cross-entropy per sample [B], mean over voxels and annotated structures, sigmoid channels."""
    log_absent = _log_absent(logits, batch, vocabulary)
    log_present = torch.log((1 - log_absent.exp()).clamp(min=_SMALLEST))
    for t, own in enumerate(_own_channels(batch, vocabulary)):
        if own is not None:  # exact in the tails, where 1 − e^x has lost its digits
            log_present[:, t] = F.logsigmoid(logits[:, own])
    truth = batch.masks.to(logits.dtype)
    loss = -(truth * log_present + (1 - truth) * log_absent)
    return _mean_over_annotated(loss.flatten(2).mean(2), batch.annotated)


def _own_channels(batch: Batch, vocabulary: Vocabulary) -> list[int | None]:
    return [vocabulary.index(name) if name in vocabulary else None for name in batch.structures]


def _log_absent(logits: torch.Tensor, batch: Batch, vocabulary: Vocabulary) -> torch.Tensor:
    """log P(voxel is not in the structure), sigmoid channels, [B, T, *S]."""
    log_absent = F.logsigmoid(-logits)
    checked_members(batch, vocabulary)
    return _over_members(on_device(labelled_organs(batch.structures, vocabulary), logits.device), log_absent)


def _over_members(members: torch.Tensor, channels: torch.Tensor) -> torch.Tensor:
    """Σ_c M[t, c]·x[b, c, …] → [B, T, *S] in float32, also under autocast, which would keep only eight bits."""
    with torch.autocast(channels.device.type, enabled=False):
        return torch.einsum("tc,bc...->bt...", members, channels.float())


def _mean_over_annotated(values: torch.Tensor, annotated: torch.Tensor) -> torch.Tensor:
    """[B, T] → [B], the mean over annotated entries, 0 where there are none."""
    weight = annotated.to(values.dtype)
    # where, not a product: 0 · NaN of an unknown structure must not reach the sample's loss
    total = torch.where(annotated, values, torch.zeros_like(values)).sum(1)
    return total / weight.sum(1).clamp(min=1)
