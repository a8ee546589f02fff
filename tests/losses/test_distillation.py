"""Distillation against numbers worked out by hand, and what an annotation leaves unsaid."""

from __future__ import annotations

import math

import pytest
import torch

from panorgan.anatomy import Vocabulary
from panorgan.losses import soft_bce, unlabelled
from panorgan.preparation.batch import Batch

THREE = math.log(3)  # σ(log 3) = 3/4, σ(−log 3) = 1/4


def make_batch(structures: tuple[str, ...], annotated: list[list[bool]]) -> Batch:
    count = len(annotated)
    masks = torch.zeros(count, len(structures), 1, dtype=torch.bool)
    return Batch(torch.zeros(count, 1, 1), masks, torch.tensor(annotated), structures, ("case",) * count)


# -- soft_bce --------------------------------------------------------------------------------------------------------


def test_values_by_hand():
    """Two voxels, two channels: the mean over voxels, then over channels."""
    logits = torch.tensor([[[0.0, THREE], [-THREE, THREE]]])
    targets = torch.tensor([[[0.2, 0.6], [1.0, 0.0]]])
    first = (math.log(2) - 0.6 * math.log(3 / 4) - 0.4 * math.log(1 / 4)) / 2
    second = (-math.log(1 / 4) - math.log(1 / 4)) / 2
    both = soft_bce(logits, targets, torch.tensor([[True, True]]))
    assert both.shape == (1,)
    assert both.item() == pytest.approx((first + second) / 2, rel=1e-6)
    assert soft_bce(logits, targets, torch.tensor([[True, False]])).item() == pytest.approx(first, rel=1e-6)
    assert soft_bce(logits, targets, torch.tensor([[False, True]])).item() == pytest.approx(second, rel=1e-6)


def test_gradients_by_hand():
    """(σ(x) − t)/(V·n) where a channel counts, n of them and V voxels; 0 elsewhere."""
    logits = torch.tensor([[[0.0, THREE], [-THREE, THREE], [1.0, 2.0]]], requires_grad=True)
    targets = torch.tensor([[[0.2, 0.6], [1.0, 0.0], [0.3, 0.3]]])
    soft_bce(logits, targets, torch.tensor([[True, True, False]])).sum().backward()
    expected = torch.tensor([[[0.5 - 0.2, 0.75 - 0.6], [0.25 - 1.0, 0.75 - 0.0], [0.0, 0.0]]]) / (2 * 2)
    torch.testing.assert_close(logits.grad, expected)


def test_samples_count_their_own_channels():
    logits = torch.tensor([[[0.0], [5.0]], [[-5.0], [THREE]]])
    targets = torch.tensor([[[0.5], [0.0]], [[1.0], [1.0]]])
    loss = soft_bce(logits, targets, torch.tensor([[True, False], [False, True]]))
    torch.testing.assert_close(loss, torch.tensor([math.log(2), -math.log(3 / 4)]))


def test_the_teachers_own_answer_is_the_minimum_with_gradient_zero():
    """The loss there is the entropy of the targets, not zero."""
    logits = torch.tensor([[[THREE, 0.0]]], requires_grad=True)
    loss = soft_bce(logits, logits.detach().sigmoid(), torch.tensor([[True]]))
    loss.sum().backward()
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert loss.item() == pytest.approx((entropy + math.log(2)) / 2, rel=1e-6)
    torch.testing.assert_close(logits.grad, torch.zeros(1, 1, 2), atol=1e-7, rtol=0)


def test_nothing_counted_is_zero_with_gradient_zero():
    logits = torch.randn(2, 3, 4, 4, requires_grad=True)
    loss = soft_bce(logits, torch.rand(2, 3, 4, 4), torch.zeros(2, 3, dtype=torch.bool))
    assert loss.tolist() == [0.0, 0.0]
    loss.sum().backward()
    assert logits.grad.abs().max() == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["logits", "targets"])
def test_what_does_not_count_cannot_poison_loss_or_gradient(bad, where):
    logits, targets = torch.tensor([[[0.0, 1.0], [2.0, 3.0]]]), torch.tensor([[[0.5, 0.5], [0.1, 0.1]]])
    clean = logits.clone().requires_grad_()
    wanted = soft_bce(clean, targets, torch.tensor([[True, False]])).sum()
    wanted.backward()
    (logits if where == "logits" else targets)[0, 1] = bad
    logits.requires_grad_()
    loss = soft_bce(logits, targets, torch.tensor([[True, False]])).sum()
    loss.backward()
    assert torch.equal(loss, wanted)
    assert torch.equal(logits.grad, clean.grad)
    assert logits.grad[0, 1].tolist() == [0.0, 0.0]


def test_an_organ_that_is_nowhere_stays_finite():
    """Logits of −10 000: a target of 0 costs nothing, one above it a large but finite amount."""
    nowhere = torch.full((1, 1, 2), -1e4)
    assert soft_bce(nowhere, torch.zeros(1, 1, 2), torch.tensor([[True]])).item() == 0
    assert soft_bce(nowhere, torch.full((1, 1, 2), 0.5), torch.tensor([[True]])).item() == pytest.approx(5000)


def test_lower_precision_around_it_does_not_lower_it():
    generator = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(2, 3, 50, generator=generator), torch.rand(2, 3, 50, generator=generator)
    counted = torch.tensor([[True, False, True], [True, True, True]])
    plain = soft_bce(logits, targets, counted)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(soft_bce(logits, targets, counted), plain)
    # bfloat16 logits, as a network under autocast gives them, are widened before anything is computed
    rough = logits.bfloat16()
    assert torch.equal(soft_bce(rough, targets, counted), soft_bce(rough.float(), targets, counted))
    assert soft_bce(rough, targets, counted).dtype == torch.float32


# -- unlabelled ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("organs", "structures", "expected"),
    [
        (["liver", "spleen"], ("liver",), ["spleen"]),
        (["liver", "spleen"], ("liver", "spleen"), []),
        # A union tells where its parts are, though not which is which.
        (["kidney_left", "kidney_right", "liver"], ("kidney",), ["liver"]),
        (["kidney_left", "kidney_right", "liver"], ("kidney_left",), ["kidney_right", "liver"]),
        # A liver mask contains its tumours and vessels, but does not show them.
        (["liver", "liver_tumour", "hepatic_vessel"], ("liver",), ["liver_tumour", "hepatic_vessel"]),
        (["liver", "liver_tumour", "hepatic_vessel"], ("liver", "liver_tumour"), ["hepatic_vessel"]),
        # A tumour does not show its organ.
        (["liver", "liver_tumour"], ("liver_tumour",), ["liver"]),
        (["kidney_left", "kidney_right", "kidney_tumour"], ("kidney",), ["kidney_tumour"]),
        # Not a word of this vocabulary: it says nothing here.
        (["liver", "spleen"], ("pancreas", "spleen"), ["liver"]),
    ],
)
def test_what_an_annotation_leaves_unsaid(organs, structures, expected):
    batch = make_batch(structures, [[True] * len(structures)])
    missing = unlabelled(batch, Vocabulary(organs))
    assert missing.dtype == torch.bool
    assert [organ for organ, said in zip(organs, missing[0].tolist(), strict=True) if said] == expected


def test_a_mixed_batch_is_told_apart_sample_by_sample():
    batch = make_batch(("kidney", "liver", "spleen"), [[True, False, False], [False, True, True], [False] * 3])
    vocabulary = Vocabulary(["spleen", "kidney_left", "kidney_right", "liver"])
    assert unlabelled(batch, vocabulary).tolist() == [
        [True, False, False, True],
        [False, True, True, False],
        [True, True, True, True],
    ]


def test_it_does_not_depend_on_the_precision_around_it():
    batch = make_batch(("liver", "spleen"), [[True, False]] * 3)
    vocabulary = Vocabulary(["liver", "spleen"])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert unlabelled(batch, vocabulary).tolist() == [[False, True]] * 3
