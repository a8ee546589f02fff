"""What the values of a unified label stand for, by names and flags alone."""

from __future__ import annotations

import torch

from panorgan.anatomy import Vocabulary
from panorgan.cases.sampling import Batch
from panorgan.losses.label_values import inside_rows, left_out_value, possible_channels, told, undecided_value

KIDNEYS = Vocabulary(["kidney_left", "kidney_right", "kidney_tumour", "spleen"])


def make_batch(annotated: list[list[bool]], known: list[list[bool]]) -> Batch:
    """Samples that may annotate kidney and spleen, and may have teachers for a side and the tumour."""
    count = len(annotated)
    masks = torch.zeros(count, 2, 1, dtype=torch.bool)
    names = ("kidney_left", "kidney_tumour")
    image, extra = torch.zeros(count, 1, 1), torch.zeros(count, 2, 1)
    structures, cases = ("kidney", "spleen"), ("case",) * count
    return Batch(image, masks, torch.tensor(annotated), structures, cases, extra, names, torch.tensor(known))


def test_values_follow_one_another():
    assert [undecided_value(t, KIDNEYS) for t in range(2)] == [5, 6]
    assert left_out_value(("kidney", "spleen"), KIDNEYS) == 7


def test_told_by_annotation_or_teacher():
    """A kidney's mask shows its sides, and no tumour."""
    batch = make_batch([[True, False], [False, True], [False, False]], [[False, False], [True, False], [False, True]])
    assert told(batch, KIDNEYS).tolist() == [
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
    ]


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
