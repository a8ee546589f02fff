"""Unified labels: by hand on a line of voxels, and what must hold for every annotation and every teacher."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusing import refused
from voxel_lines import make_batch

from panorgan.anatomy import Vocabulary
from panorgan.data.labels import membership
from panorgan.losses.label_values import inside_rows, left_out_value, undecided_value
from panorgan.losses.main_teacher import MainTeacher
from panorgan.losses.unified_label import (
    allowed_channels,
    merge,
    overlap_priority,
    pseudo_label,
)
from panorgan.preparation.batch import Batch

ABDOMEN = Vocabulary(["liver", "spleen", "pancreas"])
LIVER = Vocabulary(["liver", "liver_tumour", "spleen"])
KIDNEYS = Vocabulary(["kidney_left", "kidney_right", "kidney_tumour"])


def values(batch: Batch, vocabulary: Vocabulary, **options: object) -> list[int]:
    return merge(batch, vocabulary, **options).values[0].tolist()


# -- teachers among themselves ---------------------------------------------------------------------------------------

CLASH = {"liver": [0.9, 0.9, 0.2, 0.6], "pancreas": [0.1, 0.7, 0.8, 0.4], "spleen": [0.0, 0.0, 0.6, 0.5]}


def test_background_is_where_every_teacher_says_background():
    batch = make_batch(("spleen",), [[False] * 4], [False])
    assert pseudo_label(batch, ABDOMEN)[0].tolist() == [0, 0, 0, 0]  # no claim
    teachers = torch.tensor([[[0.5, 0.51, 0.1, 0.0], [0.0, 0.2, 0.3, 0.9], [0.4, 0.4, 0.4, 0.1]]])
    batch = replace(batch, soft_targets=teachers, soft_target_organs=("liver", "pancreas", "spleen"))
    assert pseudo_label(batch, ABDOMEN)[0].tolist() == [0, 1, 0, 3]
    assert pseudo_label(batch, ABDOMEN).dtype == torch.uint8
    deaf = replace(batch, soft_targets_valid=torch.tensor([[True, False, True]]))
    assert pseudo_label(deaf, ABDOMEN)[0].tolist() == [0, 1, 0, 0]


def test_conflicts_in_sequence_and_by_confidence():
    batch = make_batch(("spleen",), [[False] * 4], [False], CLASH)
    # vocabulary order: liver, spleen, pancreas; the later one is painted over the earlier
    assert values(batch, ABDOMEN) == [1, 3, 3, 1]
    assert values(batch, ABDOMEN, order=("pancreas", "spleen", "liver")) == [1, 1, 2, 1]
    assert values(batch, ABDOMEN, conflicts="confidence") == [1, 1, 3, 1]


def test_equal_confidence_goes_to_the_later_in_the_sequence():
    batch = make_batch(("spleen",), [[False]], [False], {"liver": [0.8], "pancreas": [0.8]})
    assert values(batch, ABDOMEN, conflicts="confidence") == [3]
    assert values(batch, ABDOMEN, conflicts="confidence", order=("pancreas", "liver")) == [1]


@pytest.mark.parametrize("conflicts", ["sequence", "confidence"])
def test_the_inner_organ_wins_whatever_order_and_confidence(conflicts):
    teachers = {"liver": [0.99, 0.99, 0.1], "liver_tumour": [0.6, 0.4, 0.7], "spleen": [0.1, 0.1, 0.1]}
    batch = make_batch(("spleen",), [[False] * 3], [False], teachers)
    for order in ((), ("liver_tumour", "liver"), ("liver", "liver_tumour")):
        assert values(batch, LIVER, conflicts=conflicts, order=order) == [2, 1, 2]


def test_overlap_priority():
    assert overlap_priority(ABDOMEN) == ("liver", "spleen", "pancreas")
    assert overlap_priority(ABDOMEN, ("pancreas",)) == ("pancreas", "liver", "spleen")
    assert overlap_priority(LIVER, ("liver_tumour", "spleen", "liver")) == ("spleen", "liver", "liver_tumour")
    with refused("not-in-vocabulary") as caught:
        overlap_priority(ABDOMEN, ("stomach",))
    assert "stomach" in caught.value.what


# -- ground truth ----------------------------------------------------------------------------------------------------


def test_ground_truth_wins_everywhere():
    """Spleen is annotated: it overwrites claims, and a claim of spleen outside its mask falls."""
    teachers = {"liver": [0.9, 0.9, 0.1, 0.6], "spleen": [0.9, 0.1, 0.1, 0.9]}
    batch = make_batch(("spleen",), [[False, True, True, False]], [True], {**teachers, "pancreas": [0.0] * 4})
    # voxel 1: liver and spleen claim it; it is no spleen, so the liver keeps it though the spleen comes later
    assert values(batch, ABDOMEN) == [1, 2, 2, 1]
    # an unknown mask says nothing
    unknown = make_batch(("spleen",), [[False, True, True, False]], [False], {**teachers, "pancreas": [0.0] * 4})
    assert values(unknown, ABDOMEN) == [2, 1, 0, 2]


def test_contradicting_masks_are_left_out():
    batch = make_batch(("liver", "spleen"), [[True, True], [True, False]], [True, True], {"pancreas": [0.9, 0.9]})
    label = merge(batch, ABDOMEN)
    assert label.values[0].tolist() == [left_out_value(batch.structures, ABDOMEN), 1]
    target, counted = label.targets()
    assert not counted[0, :, 0].any()
    assert target[0, :, 1].tolist() == [False, True, False, False]
    assert counted[0, :, 1].all()


def test_a_tumour_inside_an_annotated_liver():
    batch = make_batch(
        ("liver",), [[True, True, False]], [True], {"liver_tumour": [0.9, 0.4, 0.9], "spleen": [0.1] * 3}
    )
    assert values(batch, LIVER) == [2, 1, 0]  # a tumour outside of the liver is none
    assert merge(batch, LIVER).channels()[0, :, 1].tolist() == [False, True, False, False]


def test_what_nobody_tells_of_stays_possible():
    """No teacher for the tumour: liver may hold it, background may not. None for the spleen: background may."""
    batch = make_batch(("liver",), [[True, False]], [True])
    label = merge(batch, LIVER)
    assert label.values[0].tolist() == [1, 0]
    assert label.channels()[0, :, 0].tolist() == [False, True, True, False]
    assert label.channels()[0, :, 1].tolist() == [True, False, False, True]
    target, counted = label.targets()
    assert not target.any()
    assert counted[0, :, 0].tolist() == [True, False, False, True]
    assert counted[0, :, 1].tolist() == [False, True, True, False]


def test_an_organ_that_only_a_teacher_tells_of_may_hold_an_unseen_tumour():
    batch = make_batch(("spleen",), [[False, False]], [True], {"liver": [0.9, 0.1]})
    label = merge(batch, LIVER)
    assert label.values[0].tolist() == [1, 0]
    assert label.channels()[0, :, 0].tolist() == [False, True, True, False]
    assert label.channels()[0, :, 1].tolist() == [True, False, False, False]


# -- unions ----------------------------------------------------------------------------------------------------------


def test_teachers_decide_the_side_inside_a_union():
    sides = {"kidney_left": [0.9, 0.3, 0.2, 0.9, 0.0], "kidney_right": [0.1, 0.2, 0.3, 0.1, 0.0]}
    batch = make_batch(("kidney",), [[True, True, True, False, True]], [True], {**sides, "kidney_tumour": [0.0] * 5})
    label = merge(batch, KIDNEYS)
    # claimed; more probable; more probable; no kidney at all; no opinion
    assert label.values[0].tolist() == [1, 1, 2, 0, undecided_value(0, KIDNEYS)]
    assert label.channels()[0, :, 4].tolist() == [False, True, True, False]


def test_without_a_teacher_for_each_side_a_union_stays_undecided():
    kidney = ("kidney",)
    no_site = make_batch(kidney, [[True, False]], [True])
    label = merge(no_site, KIDNEYS)
    assert label.values[0].tolist() == [undecided_value(0, KIDNEYS), 0]
    # tumours are unknown too, which lie in kidneys and so not in the background
    assert label.channels()[0, :, 0].tolist() == [False, True, True, True]
    assert label.channels()[0, :, 1].tolist() == [True, False, False, False]
    target, counted = label.targets()
    assert counted[0, :, 0].tolist() == [True, False, False, False]
    assert not target[0, :, 0].any()
    half = make_batch(kidney, [[True, True]], [True], {"kidney_left": [0.3, 0.7], "kidney_tumour": [0.1, 0.1]})
    assert values(half, KIDNEYS) == [undecided_value(0, KIDNEYS), 1]
    # the same where another sample of the batch has that teacher and this one has not
    sides = {"kidney_left": [0.3, 0.7], "kidney_right": [0.4, 0.9], "kidney_tumour": [0.1, 0.1]}
    deaf = replace(
        make_batch(kidney, [[True, True]], [True], sides), soft_targets_valid=torch.tensor([[True, False, True]])
    )
    assert values(deaf, KIDNEYS) == [undecided_value(0, KIDNEYS), 1]


def test_equally_probable_sides_stay_undecided():
    lobes = ("lung_left", "lung_right")
    sides = {"lung_left": [0.25, 0.25, 0.125], "lung_right": [0.25, 0.375, 0.0]}
    batch = make_batch(("lung",), [[True] * 3], [True], sides)
    assert values(batch, Vocabulary(lobes)) == [undecided_value(0, Vocabulary(lobes)), 2, 1]


def test_a_tumour_teacher_speaks_inside_a_union():
    batch = make_batch(("kidney",), [[True, True]], [True], {"kidney_tumour": [0.9, 0.2]})
    label = merge(batch, KIDNEYS)
    assert label.values[0].tolist() == [3, undecided_value(0, KIDNEYS)]
    assert label.channels()[0, :, 1].tolist() == [False, True, True, False]


def test_a_smaller_union_narrows_a_larger_one():
    left, right = ("upper_lobe_left", "lower_lobe_left"), ("upper_lobe_right", "middle_lobe_right", "lower_lobe_right")
    lobes = Vocabulary([f"lung_{lobe}" for lobe in left + right])
    batch = make_batch(("lung", "lung_left"), [[True, True, False], [True, False, False]], [True, True])
    label = merge(batch, lobes)
    assert label.values[0].tolist() == [undecided_value(1, lobes), undecided_value(0, lobes), 0]
    assert label.channels()[0, :, 0].tolist() == [False, True, True, False, False, False]
    assert label.channels()[0, :, 1].tolist() == [False, False, False, True, True, True]


# -- for every annotation and every teacher --------------------------------------------------------------------------

WHOLE = Vocabulary(
    ["liver", "spleen", "liver_tumour", "hepatic_vessel", "kidney_left", "kidney_right", "kidney_tumour"]
)
STRUCTURES = ("hepatic_vessel", "kidney", "kidney_left", "kidney_tumour", "liver", "liver_tumour", "spleen")
VOXELS = 40


@st.composite
def situations(draw: st.DrawFn) -> tuple[torch.Tensor, Batch]:
    """True channels of voxels, and a batch that annotates some structures truly and has teachers for some organs."""
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    truth = torch.randint(0, len(WHOLE) + 1, (2, VOXELS), generator=random)
    rows = torch.nn.functional.pad(torch.tensor(membership(STRUCTURES, WHOLE)), (1, 0))
    masks = rows[:, truth].movedim(0, 1)
    flags = st.lists(st.booleans(), min_size=2 * len(STRUCTURES), max_size=2 * len(STRUCTURES))
    annotated = torch.tensor(draw(flags)).view(2, -1)
    known = torch.tensor(draw(flags)).view(2, -1)
    soft_targets = torch.rand(2, len(WHOLE), VOXELS, generator=random)
    image = torch.zeros(2, 1, VOXELS)
    return truth, Batch(image, masks, annotated, STRUCTURES, ("a", "b"), soft_targets, tuple(WHOLE), known)


@st.composite
def main_teachers(draw: st.DrawFn) -> MainTeacher | None:
    """One that says anything, of all organs or of some."""
    if draw(st.booleans()):
        return None
    scores = torch.randn(2, len(WHOLE) + 1, VOXELS, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    known = draw(st.none() | st.lists(st.sampled_from(WHOLE.organs), unique=True).map(tuple))
    share, disagreement = draw(st.sampled_from([0.0, 0.8])), draw(st.sampled_from(["left_out", "background"]))
    return MainTeacher(scores, share, known, disagreement)


@settings(max_examples=150, deadline=None)
@given(situations(), st.sampled_from(["sequence", "confidence"]), st.permutations(list(WHOLE)), main_teachers())
def test_no_label_says_what_ground_truth_denies(situation, conflicts, order, main):
    """Whatever teachers say, every voxel has one value, and it stands for channels that the annotation allows."""
    _, batch = situation
    label = merge(batch, WHOLE, order, conflicts, main)
    assert label.values.shape == (2, VOXELS)
    possible = label.channels()
    assert possible.any(1).all()
    assert not (possible & ~allowed_channels(batch, WHOLE)).any()
    target, counted = label.targets()
    assert (target.sum(1) <= 1).all()
    assert not (target & ~counted).any()
    # A voxel with one allowed channel has that label.
    fixed = allowed_channels(batch, WHOLE).sum(1) == 1
    assert torch.equal(possible.movedim(1, -1)[fixed], allowed_channels(batch, WHOLE).movedim(1, -1)[fixed])


def painted_one_by_one(batch: Batch, order: list[str], conflicts: str, allowed: torch.Tensor | None) -> list[list[int]]:
    """`pseudo_label` as one would do it by hand: voxel by voxel, organ by organ."""
    inside = {(o, i) for o, row in enumerate(inside_rows(WHOLE)) for i, is_in in enumerate(row) if is_in}
    label = [[0] * VOXELS for _ in batch.cases]
    for b, v in product(range(len(label)), range(VOXELS)):
        claims = {
            WHOLE.index(name): batch.soft_targets[b, e, v].item()
            for e, name in enumerate(batch.soft_target_organs)
            if batch.soft_targets_valid[b, e] and (allowed is None or allowed[b, WHOLE.index(name) + 1, v])
        }
        claims = {organ: p for organ, p in claims.items() if p > 0.5}
        best = 0.0
        for organ in (WHOLE.index(name) for name in overlap_priority(WHOLE, order)):
            if organ not in claims:
                continue
            if conflicts == "confidence":
                if claims[organ] < best or any((organ, other) in inside for other in claims):
                    continue
                best = claims[organ]
            label[b][v] = organ + 1
    return label


@settings(max_examples=60, deadline=None)
@given(
    situations(),
    st.sampled_from(["sequence", "confidence"]),
    st.permutations(list(WHOLE)),
    st.permutations(range(len(WHOLE))),
    st.integers(1, len(WHOLE)),
    st.booleans(),
)
def test_all_organs_at_once_are_painted_as_one_after_the_other(situation, conflicts, order, places, count, free):
    """Any order of painting, any order and number of teachers, with equal probabilities among them."""
    _, batch = situation
    chosen = list(places)[:count]
    batch = replace(
        batch,
        soft_targets=(batch.soft_targets[:, chosen] * 8).round() / 8,
        soft_target_organs=tuple(WHOLE[place] for place in chosen),
        soft_targets_valid=batch.soft_targets_valid[:, chosen],
    )
    allowed = None if free else allowed_channels(batch, WHOLE)
    found = pseudo_label(batch, WHOLE, order, conflicts, allowed)
    assert found.tolist() == painted_one_by_one(batch, order, conflicts, allowed)


@settings(max_examples=150, deadline=None)
@given(situations(), st.sampled_from(["sequence", "confidence"]))
def test_with_teachers_that_are_right_the_label_never_excludes_the_truth(situation, conflicts):
    truth, batch = situation
    rows = torch.nn.functional.pad(torch.tensor(membership(tuple(WHOLE), WHOLE)), (1, 0))
    claimed = rows[:, truth].movedim(0, 1)
    right = torch.where(claimed, 0.5 + batch.soft_targets / 2 + 1e-3, batch.soft_targets / 2)
    heard = torch.where(
        batch.soft_targets_valid.unsqueeze(2), right, batch.soft_targets
    )  # what is not known may be anything
    label = merge(replace(batch, soft_targets=heard), WHOLE, conflicts=conflicts)
    assert label.channels().gather(1, truth.unsqueeze(1)).all()


@settings(max_examples=50, deadline=None)
@given(situations())
def test_everything_annotated_is_the_truth_and_teachers_change_nothing(situation):
    truth, batch = situation
    rows = torch.nn.functional.pad(torch.tensor(membership(tuple(WHOLE), WHOLE)), (1, 0))
    everything = torch.ones(2, len(WHOLE), dtype=torch.bool)
    full = replace(batch, masks=rows[:, truth].movedim(0, 1), annotated=everything, structures=tuple(WHOLE))
    assert torch.equal(merge(full, WHOLE).values.long(), truth)


@settings(max_examples=50, deadline=None)
@given(situations(), st.permutations(range(len(WHOLE))), st.permutations(range(len(STRUCTURES))))
def test_neither_the_order_of_teachers_nor_of_structures_matters(situation, teachers, structures):
    _, batch = situation
    moved = replace(
        batch,
        masks=batch.masks[:, list(structures)],
        annotated=batch.annotated[:, list(structures)],
        structures=tuple(STRUCTURES[t] for t in structures),
        soft_targets=batch.soft_targets[:, list(teachers)],
        soft_target_organs=tuple(WHOLE[e] for e in teachers),
        soft_targets_valid=batch.soft_targets_valid[:, list(teachers)],
    )
    for conflicts in ("sequence", "confidence"):
        one, other = merge(batch, WHOLE, (), conflicts), merge(moved, WHOLE, (), conflicts)
        assert torch.equal(one.channels(), other.channels())
    # Random probabilities are never equal: by confidence the overlap priority does not matter either.
    turned = merge(batch, WHOLE, tuple(reversed(WHOLE.organs)), "confidence")
    assert torch.equal(turned.values, merge(batch, WHOLE, (), "confidence").values)


def test_volumes_and_slices():
    generator = torch.Generator().manual_seed(0)
    for space in ((4, 5), (3, 4, 5)):
        masks = torch.rand(2, 1, *space, generator=generator) > 0.5
        soft_targets = torch.rand(2, 2, *space, generator=generator)
        batch = Batch(torch.zeros(2, 1, *space), masks, torch.tensor([[True], [False]]), ("spleen",), ("a", "b"))
        batch = replace(
            batch,
            soft_targets=soft_targets,
            soft_target_organs=("liver", "pancreas"),
            soft_targets_valid=torch.ones(2, 2) > 0,
        )
        label = merge(batch, ABDOMEN, main=MainTeacher(torch.randn(2, 4, *space, generator=generator)))
        assert label.values.shape == (2, *space)
        assert label.channels().shape == (2, 4, *space)
        assert torch.equal(label.values[0] == 2, masks[0, 0])
