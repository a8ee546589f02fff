"""What the values of a unified label stand for, by names and flags alone."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import panorgan.losses.label_values as module
from panorgan.anatomy import Vocabulary
from panorgan.losses.label_values import (
    disagreed_value,
    inside_rows,
    known_organs,
    left_out_value,
    possible_channels,
    undecided_value,
)
from panorgan.preparation.batch import Batch

KIDNEYS = Vocabulary(["kidney_left", "kidney_right", "kidney_tumour", "spleen"])


def make_batch(annotated: list[list[bool]], known: list[list[bool]]) -> Batch:
    """Samples that may annotate kidney and spleen, and may have teachers for a side and the tumour."""
    count = len(annotated)
    masks = torch.zeros(count, 2, 1, dtype=torch.bool)
    names = ("kidney_left", "kidney_tumour")
    image, soft_targets = torch.zeros(count, 1, 1), torch.zeros(count, 2, 1)
    structures, cases = ("kidney", "spleen"), ("case",) * count
    return Batch(image, masks, torch.tensor(annotated), structures, cases, soft_targets, names, torch.tensor(known))


def test_values_follow_one_another():
    assert [undecided_value(t, KIDNEYS) for t in range(2)] == [5, 6]
    assert left_out_value(("kidney", "spleen"), KIDNEYS) == 7
    assert disagreed_value(("kidney", "spleen"), KIDNEYS) == 8


def test_told_by_annotation_or_teacher():
    """A kidney's mask shows its sides, and no tumour."""
    batch = make_batch([[True, False], [False, True], [False, False]], [[False, False], [True, False], [False, True]])
    assert known_organs(batch, KIDNEYS).tolist() == [
        [True, True, False, False],
        [True, False, False, True],
        [False, False, True, False],
    ]


def test_a_tumour_may_lie_in_either_side():
    assert inside_rows(KIDNEYS) == (
        (False, False, True, False),
        (False, False, True, False),
        (False,) * 4,
        (False,) * 4,
    )
    nested = Vocabulary(["liver", "liver_tumour", "hepatic_vessel"])
    assert inside_rows(nested) == ((False, True, True), (False,) * 3, (False,) * 3)


def test_a_table_by_hand():
    """Kidney and spleen annotated, tumours taught: values are channels, but for the side of a kidney."""
    table = possible_channels(make_batch([[True, True]], [[False, True]]), KIDNEYS)[0].int().tolist()
    assert table == [
        [1, 0, 0, 0, 0],
        [0, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 0, 1],
        [0, 1, 1, 0, 0],
        [0, 0, 0, 0, 1],
        [1, 1, 1, 1, 1],
        [1, 0, 0, 0, 0],
    ]


def test_where_teachers_disagree_ground_truth_still_denies_what_it_annotates():
    """A voxel outside the masks of kidney and spleen is neither, nor a tumour of a kidney. Nothing annotated: nothing
    is denied."""
    batch = make_batch([[True, False], [False, True], [False, False]], [[True, True]] * 3)
    found = possible_channels(batch, KIDNEYS)[:, disagreed_value(batch.structures, KIDNEYS)].int().tolist()
    assert found == [[1, 0, 0, 0, 1], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]


def test_a_table_of_a_sample_that_tells_nothing_by_hand():
    """Background may be anything; a side may hold a tumour. Samples of a batch have tables of their own."""
    batch = make_batch([[False, False], [True, True]], [[False, False], [False, True]])
    tables = possible_channels(batch, KIDNEYS)
    assert tables[0, :5].int().tolist() == [
        [1, 1, 1, 1, 1],
        [0, 1, 0, 1, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 0, 1],
    ]
    assert torch.equal(tables[1], possible_channels(make_batch([[True, True]], [[False, True]]), KIDNEYS)[0])


WHOLE = Vocabulary(
    ["liver", "spleen", "liver_tumour", "hepatic_vessel", "kidney_left", "kidney_right", "kidney_tumour"]
)
STRUCTURES = ("hepatic_vessel", "kidney", "kidney_left", "kidney_tumour", "liver", "liver_tumour", "spleen")


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_what_each_denies_alone_all_deny_together(data):
    """The product of flags and denials says the same as working a table out from all flags at once."""
    structures = tuple(data.draw(st.lists(st.sampled_from(STRUCTURES), min_size=1, unique=True)))
    teachers = tuple(data.draw(st.lists(st.sampled_from(WHOLE.organs), unique=True)))
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    annotated, known = (torch.rand(4, len(names), generator=draw) > 0.6 for names in (structures, teachers))
    nothing = torch.zeros(4, 1, 1)
    batch = Batch(nothing, nothing.bool(), annotated, structures, ("case",) * 4, None, teachers, known)
    assert torch.equal(possible_channels(batch, WHOLE), module._from_meanings(batch, WHOLE))
    heard = replace(batch, soft_targets_valid=None)
    assert torch.equal(possible_channels(heard, WHOLE), module._from_meanings(heard, WHOLE))
