"""GMT, eq. 5: by hand on a line of voxels; what is left out of the loss; organs that the main teacher does not know."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from voxel_lines import make_batch

from panorgan.anatomy import Vocabulary
from panorgan.losses.label_values import disagreed_value, undecided_value
from panorgan.losses.main_teacher import MainTeacher, global_main_teacher
from panorgan.losses.unified_label import merge, without_own_teachers
from panorgan.losses.unified_loss import unified_dice_bce
from panorgan.methods.ufps.reverse_ce import reverse_cross_entropy
from panorgan.preparation.batch import Batch

ABDOMEN = Vocabulary(["liver", "spleen", "pancreas"])
KIDNEYS = Vocabulary(["kidney_left", "kidney_right", "kidney_tumour"])
LEFT_OUT = disagreed_value(("spleen",), ABDOMEN)


def one_hot(channels: list[int], count: int = 4) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor([channels]), count).movedim(-1, 1).float()


def values(batch: Batch, vocabulary: Vocabulary, main: list[int], **options: object) -> list[int]:
    scores = one_hot(main, len(vocabulary) + 1)
    return merge(batch, vocabulary, main=MainTeacher(scores, **options)).values[0].tolist()


# -- the equation ----------------------------------------------------------------------------------------------------


def both(teachers: list[list[int]], main: list[list[int]], *options: object) -> tuple[list, list]:
    label, disagreed = global_main_teacher(torch.tensor(teachers), torch.tensor(main), *options)
    return label.tolist(), disagreed.int().tolist()


def test_alone_where_they_agree_too_little():
    """They share 3 of 5 voxels, less than 4."""
    assert both([[1, 1, 1, 2, 0, 0]], [[1, 1, 1, 1, 1, 0]]) == ([[1, 1, 1, 1, 1, 0]], [[0] * 6])


def test_with_the_others_where_they_agree():
    """4 of 5 voxels: not less than 0.8 · 5. What only one of them claims has no class."""
    teachers, main = [[1, 1, 1, 1, 0, 2]], [[1, 1, 1, 1, 1, 0]]
    assert both(teachers, main) == ([[1, 1, 1, 1, 0, 0]], [[0, 0, 0, 0, 1, 1]])
    assert both(teachers, main, 0.81) == (main, [[0] * 6])


def test_the_same_organ_alone_counts():
    assert both([[2, 2, 2]], [[1, 1, 1]]) == ([[1, 1, 1]], [[0] * 3])


def test_a_main_teacher_without_foreground():
    assert both([[1, 1, 0]], [[0, 0, 0]]) == ([[0, 0, 0]], [[1, 1, 0]]), "0 < 0.8 · 0 is false"
    assert both([[0, 0, 0]], [[0, 0, 0]]) == ([[0, 0, 0]], [[0, 0, 0]])
    assert both([[0, 0, 0]], [[1, 1, 0]]) == ([[1, 1, 0]], [[0, 0, 0]])


def test_patch_by_patch_on_counted_voxels():
    """3 of 4 is too little; 3 of 3 is not."""
    counted = torch.tensor([[True] * 4, [True, False, True, True]])
    found = both([[1, 0, 1, 1]] * 2, [[1, 1, 1, 1]] * 2, 0.8, counted)
    assert found == ([[1, 1, 1, 1], [1, 0, 1, 1]], [[0] * 4, [0, 1, 0, 0]])


def test_what_is_left_alone_keeps_its_label_and_counts_in_no_volume():
    """Teachers name organ 3 in the last two voxels. With them the main teacher would have 4 of 6; so it has 4 of 4."""
    teachers, main = [[1, 1, 1, 1, 0, 3, 3]], [[1, 1, 1, 1, 0, 1, 1]]
    assert both(teachers, main) == (main, [[0] * 7])
    left_alone = torch.tensor([[False] * 5 + [True] * 2])
    assert both(teachers, main, 0.8, None, left_alone) == (teachers, [[0] * 7])


# -- ground truth ----------------------------------------------------------------------------------------------------


def test_ground_truth_wins():
    spleen = [False, True, True, False, False, False]
    batch = make_batch(("spleen",), [spleen], [True], {"liver": [0.9] * 2 + [0.1] + [0.9] * 3, "pancreas": [0.0] * 6})
    # It claims liver where spleen is, spleen where none is: there its next best follows from the logits, background.
    main = [2, 1, 0, 1, 1, 1]
    # open voxels: 1, 4, 5, 6; the main teacher has liver at 4, 5, 6, and the teacher agrees: both branch
    assert values(batch, ABDOMEN, main) == [LEFT_OUT, 2, 2, 1, 1, 1]
    assert values(batch, ABDOMEN, main, disagreement="background") == [0, 2, 2, 1, 1, 1]
    # a teacher who sees liver nowhere: the main teacher alone
    batch = replace(batch, soft_targets=torch.zeros_like(batch.soft_targets))
    assert values(batch, ABDOMEN, main) == [0, 2, 2, 1, 1, 1]


def test_ground_truth_is_no_opinion_when_volumes_are_compared():
    """Of five open voxels of liver both name four; three of annotated spleen, which teachers leave alone, count not."""
    spleen = [True] * 3 + [False] * 5
    batch = make_batch(("spleen",), [spleen], [True], {"liver": [0.0] * 3 + [0.9] * 4 + [0.1], "pancreas": [0.0] * 8})
    assert values(batch, ABDOMEN, [2] * 3 + [1] * 5) == [2, 2, 2, 1, 1, 1, 1, LEFT_OUT]


def test_where_they_disagree_ground_truth_still_names_the_union():
    """5 of 6 alike. Of the last, which they put on different sides, only the annotated kidney is left."""
    sides = {"kidney_left": [0.9] * 5 + [0.1], "kidney_right": [0.1] * 5 + [0.9], "kidney_tumour": [0.0] * 6}
    batch = make_batch(("kidney",), [[True] * 6], [True], sides)
    assert values(batch, KIDNEYS, [1] * 6) == [1] * 5 + [undecided_value(0, KIDNEYS)]
    assert values(batch, KIDNEYS, [1] * 6, disagreement="background") == [1] * 6, "the main teacher's side"
    # where teachers claim no side, there is no disagreement
    silent = make_batch(("kidney",), [[True] * 6], [True], {**sides, "kidney_right": [0.0] * 6})
    assert values(silent, KIDNEYS, [1] * 6) == [1] * 6


def test_what_they_disagree_on_is_left_out_of_the_loss_but_for_what_ground_truth_denies():
    """Ten voxels of liver, all but the last agreed on. There neither background, liver nor pancreas is taught."""
    batch = make_batch(("spleen",), [[False] * 10], [True], {"liver": [0.9] * 9 + [0.1], "pancreas": [0.0] * 10})
    label = merge(batch, ABDOMEN, main=MainTeacher(one_hot([1] * 10)))
    target, counted = label.targets()
    assert not target[0, :, -1].any()
    assert counted[0, :, -1].tolist() == [False, False, True, False], "it is no spleen: that is annotated"
    logits = torch.randn(1, 4, 10, generator=torch.Generator().manual_seed(0)).requires_grad_()
    (unified_dice_bce(logits, label).sum() + reverse_cross_entropy(logits, label.channels()).sum()).backward()
    # the softmax ties all channels together; a loss on the spleen alone cannot tell the others apart
    p = logits.detach().softmax(1)[0, :, -1]
    pull = logits.grad[0, :, -1]
    torch.testing.assert_close(pull[[0, 1, 3]] / p[[0, 1, 3]], (pull[0] / p[0]).expand(3))
    old = merge(batch, ABDOMEN, main=MainTeacher(one_hot([1] * 10), disagreement="background"))
    assert old.targets()[0][0, :, -1].tolist() == [True, False, False, False]


# -- organs that it does not know ------------------------------------------------------------------------------------

ORGANS = [0.9] * 5 + [0.0] * 5, [0.0] * 7 + [0.9] * 2 + [0.0]
"""Teachers: five voxels of liver, two of pancreas."""


def patch() -> Batch:
    liver, pancreas = ORGANS
    return make_batch(("spleen",), [[False] * 10], [True], {"liver": liver, "pancreas": pancreas})


def test_an_organ_it_does_not_know_is_left_to_the_teachers():
    """It sees the liver as they do, and no pancreas."""
    main = [1] * 5 + [0] * 5
    assert values(patch(), ABDOMEN, main) == [1] * 5 + [0, 0, LEFT_OUT, LEFT_OUT, 0]
    assert values(patch(), ABDOMEN, main, known=("liver",)) == [1] * 5 + [0, 0, 3, 3, 0]


def test_it_does_not_erase_an_organ_where_it_decides_alone():
    """It sees liver in eight voxels, of which they agree on five: less than 6.4."""
    main = [1] * 8 + [0, 0]
    assert values(patch(), ABDOMEN, main) == [1] * 8 + [0, 0], "both voxels of pancreas are gone"
    # seven of them outside the pancreas; 5 < 5.6
    assert values(patch(), ABDOMEN, main, known=("liver", "spleen")) == [1] * 7 + [3, 3, 0]


def test_what_it_says_of_an_organ_it_does_not_know_is_not_heard():
    """It calls everything pancreas; next to that, the background is what it says."""
    assert values(patch(), ABDOMEN, [1] * 5 + [3] * 5, known=("liver",)) == [1] * 5 + [0, 0, 3, 3, 0]
    assert values(patch(), ABDOMEN, [3] * 10, known=()) == [1] * 5 + [0, 0, 3, 3, 0], "the teachers' label"


def test_a_main_teacher_that_knows_one_side_only_does_not_choose_between_sides():
    sides = {"kidney_left": [0.3, 0.3], "kidney_right": [0.4, 0.4], "kidney_tumour": [0.0] * 2}
    batch = make_batch(("kidney",), [[True, True]], [True], sides)
    assert values(batch, KIDNEYS, [1, 1]) == [1, 1]
    assert values(batch, KIDNEYS, [1, 1], known=("kidney_left",)) == [2, 2], "as the teachers would"


@pytest.mark.parametrize(("known", "grows"), [(None, False), (("liver", "spleen"), True)])
def test_a_small_organ_survives_with_the_guard_and_dies_without(known, grows):
    """A site without labels of the pancreas learns from a teacher who has it right, and from a global model that gives
    it 0.30 and calls it background. Ten rounds of ten steps; the local model is the next global one.

    The liver, on which the global model is far ahead of its teacher, makes it decide alone: all that it does not see is
    then background, and gets less likely with every round.
    """
    teachers = {"liver": [0.9] * 2 + [0.0] * 8, "pancreas": [0.0] * 7 + [0.9] * 2 + [0.0]}
    batch = make_batch(("spleen",), [[False] * 10], [True], teachers)
    p = torch.full((1, 4, 10), 1e-3)
    p[0, 1, :6] = 1.0
    p[0, 0, 6:] = 0.7
    p[0, 3, 6:] = 0.3
    logits = p.log().requires_grad_()
    optimizer = torch.optim.SGD([logits], 5.0)
    for _ in range(10):
        main = MainTeacher(logits.detach().clone(), known=known)
        for _ in range(10):
            optimizer.zero_grad()
            unified_dice_bce(logits, merge(batch, ABDOMEN, main=main)).sum().backward()
            optimizer.step()
    pancreas = logits.detach().softmax(1)[0, 3, 7:9].mean().item()
    assert pancreas > 0.9 if grows else pancreas < 0.02


# -- own teachers ----------------------------------------------------------------------------------------------------


def test_teachers_of_labelled_organs_have_no_say_in_a_label():
    """Two samples; the first labels the spleen, the second does not."""
    teachers = {"liver": [0.9, 0.1], "spleen": [0.9, 0.9]}
    one = make_batch(("spleen",), [[False, True]], [True], teachers)
    batch = replace(
        one,
        image=one.image.repeat(2, 1, 1),
        masks=one.masks.repeat(2, 1, 1),
        annotated=torch.tensor([[True], [False]]),
        soft_targets=one.soft_targets.repeat(2, 1, 1),
        soft_targets_valid=one.soft_targets_valid.repeat(2, 1),
        cases=("a", "b"),
    )
    heard = without_own_teachers(batch, ABDOMEN)
    assert heard.soft_targets_valid.tolist() == [[True, False], [True, True]]
    assert merge(heard, ABDOMEN).values.tolist() == [[1, 2], [2, 2]]
    no_site = replace(batch, soft_targets=None, soft_target_organs=(), soft_targets_valid=None)
    assert without_own_teachers(no_site, ABDOMEN) is no_site
