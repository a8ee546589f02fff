"""Which organs of the vocabulary make up an annotated structure."""

from __future__ import annotations

import pytest

from panorgan.anatomy import Vocabulary
from panorgan.data.labels import membership, structures_of

VOCABULARY = Vocabulary(["liver", "liver_tumour", "kidney_left", "kidney_right", "spleen"])


@pytest.mark.parametrize(
    ("structure", "row"),
    [
        ("liver", (True, True, False, False, False)),  # contains its tumour
        ("liver_tumour", (False, True, False, False, False)),
        ("kidney", (False, False, True, True, False)),  # a union of two channels
        ("kidney_left", (False, False, True, False, False)),
        ("spleen", (False, False, False, False, True)),
        ("pancreas", (False, False, False, False, False)),  # not of this vocabulary
    ],
)
def test_row_of_one_structure(structure, row) -> None:
    assert membership((structure,), VOCABULARY) == (row,)


def test_rows_follow_the_structures_and_columns_the_vocabulary() -> None:
    rows = membership(("spleen", "kidney"), Vocabulary(["kidney", "spleen"]))
    assert rows == ((False, True), (True, False))


def test_half_a_union_is_not_the_union() -> None:
    assert membership(("kidney",), Vocabulary(["kidney_left", "spleen"])) == ((False, False),)


def test_structures_are_sorted_and_unique() -> None:
    assert structures_of([("spleen", "liver"), (), ("kidney", "liver")]) == ("kidney", "liver", "spleen")
    assert structures_of([]) == ()
