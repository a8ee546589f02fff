"""The partial losses against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from refusing import refused

from panorgan.anatomy import Vocabulary
from panorgan.losses.partial import (
    marginal_cross_entropy,
    member_matrix,
    partial_dice,
    partial_dice_ce,
    structure_bce,
    structure_probabilities,
)
from panorgan.preparation.batch import Batch

ABDOMEN = Vocabulary(["liver", "spleen"])
KIDNEYS = Vocabulary(["kidney_left", "kidney_right"])
TUMOUR = Vocabulary(["liver", "liver_tumour"])


def make_batch(structures: tuple[str, ...], masks: list, annotated: list) -> Batch:
    """Masks [B][T][voxels] on a line of voxels."""
    masks_tensor = torch.tensor(masks, dtype=torch.bool)
    count, _, voxels = masks_tensor.shape
    return Batch(torch.zeros(count, 1, voxels), masks_tensor, torch.tensor(annotated), structures, ("case",) * count)


def log_odds(*probabilities: float) -> list[float]:
    return [math.log(p) for p in probabilities]


# Two voxels; softmax over (background, liver, spleen) = (.5, .3, .2) and (.1, .6, .3).
LOGITS = torch.tensor(
    [[[math.log(0.5), math.log(0.1)], [math.log(0.3), math.log(0.6)], [math.log(0.2), math.log(0.3)]]]
)


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_lower_precision_around_the_loss_does_not_lower_it(activation):
    """Under autocast a matrix product would round probabilities to eight bits."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3 if activation == "softmax" else 2, 500, generator=generator)
    masks = (torch.rand(2, 2, 500, generator=generator) > 0.7).tolist()
    batch = make_batch(("liver", "spleen"), masks, [[True, True], [True, False]])
    plain = partial_dice_ce(logits, batch, ABDOMEN, activation)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(partial_dice_ce(logits, batch, ABDOMEN, activation), plain)


def test_dice_by_hand():
    probabilities = torch.tensor([[[0.2, 0.8], [0.5, 0.5]]])
    masks = torch.tensor([[[False, True], [True, True]]])
    # first structure: 1 - (2·0.8 + 1)/(1.0 + 1 + 1); second: 1 - (2·1.0 + 1)/(1.0 + 2 + 1)
    first, second = 1 - 2.6 / 3, 1 - 3 / 4
    both = partial_dice(probabilities, masks, torch.tensor([[True, True]]))
    assert both.item() == pytest.approx((first + second) / 2)
    one = partial_dice(probabilities, masks, torch.tensor([[True, False]]))
    assert one.item() == pytest.approx(first)
    assert partial_dice(probabilities, masks, torch.tensor([[False, False]])).item() == 0.0


def test_marginal_cross_entropy_fully_annotated_is_ordinary():
    batch = make_batch(("liver", "spleen"), [[[True, False], [False, False]]], [[True, True]])
    loss = marginal_cross_entropy(LOGITS, batch.masks, batch.annotated, member_matrix(batch, ABDOMEN, LOGITS.device))
    assert loss.item() == pytest.approx(-(math.log(0.3) + math.log(0.1)) / 2, rel=1e-6)


def test_marginal_cross_entropy_merges_the_unknown_into_the_rest():
    batch = make_batch(("liver", "spleen"), [[[True, False], [False, False]]], [[True, False]])
    loss = marginal_cross_entropy(LOGITS, batch.masks, batch.annotated, member_matrix(batch, ABDOMEN, LOGITS.device))
    # voxel 2 is "not liver": background .1 + spleen .3
    assert loss.item() == pytest.approx(-(math.log(0.3) + math.log(0.4)) / 2, rel=1e-6)


def test_marginal_cross_entropy_ignores_what_nobody_knows_and_contradictions():
    nothing = make_batch(("liver", "spleen"), [[[True, False], [True, False]]], [[False, False]])
    members = member_matrix(nothing, ABDOMEN, LOGITS.device)
    assert marginal_cross_entropy(LOGITS, nothing.masks, nothing.annotated, members).item() == pytest.approx(
        0, abs=1e-6
    )
    # voxel 1 is liver and spleen at once: impossible for softmax channels, left out; voxel 2 is background
    clash = make_batch(("liver", "spleen"), [[[True, False], [True, False]]], [[True, True]])
    loss = marginal_cross_entropy(LOGITS, clash.masks, clash.annotated, members)
    assert loss.item() == pytest.approx(-math.log(0.1), rel=1e-6)


def test_union_is_the_sum_of_its_members():
    logits = torch.tensor([[log_odds(0.5, 0.1), log_odds(0.2, 0.3), log_odds(0.3, 0.6)]])
    batch = make_batch(("kidney",), [[[True, False]]], [[True]])
    probability = structure_probabilities(logits, batch, KIDNEYS, "softmax")
    torch.testing.assert_close(probability, torch.tensor([[[0.5, 0.9]]]))
    loss = marginal_cross_entropy(logits, batch.masks, batch.annotated, member_matrix(batch, KIDNEYS, logits.device))
    assert loss.item() == pytest.approx(-(math.log(0.5) + math.log(0.1)) / 2, rel=1e-6)


def test_a_liver_mask_contains_its_tumour():
    logits = torch.tensor([[log_odds(0.5, 0.1), log_odds(0.2, 0.3), log_odds(0.3, 0.6)]])
    batch = make_batch(("liver", "liver_tumour"), [[[True, True], [False, True]]], [[True, True]])
    torch.testing.assert_close(
        structure_probabilities(logits, batch, TUMOUR, "softmax"), torch.tensor([[[0.5, 0.9], [0.3, 0.6]]])
    )
    loss = marginal_cross_entropy(logits, batch.masks, batch.annotated, member_matrix(batch, TUMOUR, logits.device))
    assert loss.item() == pytest.approx(-(math.log(0.2) + math.log(0.6)) / 2, rel=1e-6)
    # tumour unknown: liver may be either channel
    liver_only = make_batch(("liver", "liver_tumour"), [[[True, True], [False, True]]], [[True, False]])
    members = member_matrix(liver_only, TUMOUR, logits.device)
    loss = marginal_cross_entropy(logits, liver_only.masks, liver_only.annotated, members)
    assert loss.item() == pytest.approx(-(math.log(0.5) + math.log(0.9)) / 2, rel=1e-6)


def test_independent_bce_by_hand():
    logits = torch.tensor([[[0.0, 2.0], [-1.0, 3.0]]])
    batch = make_batch(("liver", "spleen"), [[[True, False], [True, True]]], [[True, False]])
    expected = (math.log(2) + math.log(1 + math.exp(2.0))) / 2
    assert structure_bce(logits, batch, ABDOMEN).item() == pytest.approx(expected, rel=1e-6)


def test_independent_union_is_present_when_any_member_is():
    logits = torch.tensor([[[0.0, 0.0], [math.log(3), math.log(3)]]])  # sigmoids 0.5 and 0.75
    batch = make_batch(("kidney",), [[[True, False]]], [[True]])
    probability = structure_probabilities(logits, batch, KIDNEYS, "sigmoid")
    torch.testing.assert_close(probability, torch.full((1, 1, 2), 1 - 0.5 * 0.25))
    expected = -(math.log(0.875) + math.log(0.125)) / 2
    assert structure_bce(logits, batch, KIDNEYS).item() == pytest.approx(expected, rel=1e-5)


def test_independent_organ_uses_its_own_sigmoid_not_its_tumours():
    logits = torch.tensor([[[0.0], [math.log(3)]]])
    batch = make_batch(("liver", "liver_tumour"), [[[True], [True]]], [[True, True]])
    probability = structure_probabilities(logits, batch, TUMOUR, "sigmoid")
    torch.testing.assert_close(probability, torch.tensor([[[0.5], [0.75]]]))


def test_extreme_logits_stay_finite_with_useful_gradients():
    logits = torch.tensor([[[60.0, -60.0], [-60.0, 60.0]]], requires_grad=True)
    batch = make_batch(("liver", "spleen"), [[[False, True], [True, False]]], [[True, True]])
    loss = partial_dice_ce(logits, batch, ABDOMEN, "sigmoid").sum()
    loss.backward()
    assert torch.isfinite(loss)
    # every voxel is utterly wrong: the cross-entropy gradient is ±1, averaged over 2 voxels and 2 structures
    torch.testing.assert_close(logits.grad, torch.tensor([[[0.25, -0.25], [-0.25, 0.25]]]))


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_hidden_labels_have_no_influence(activation):
    """The masked-loss trap: whatever the mask of an unknown structure says, loss and gradient stay the same."""
    channels = 3 if activation == "softmax" else 2
    logits = torch.randn(2, channels, 5, generator=torch.Generator().manual_seed(0), requires_grad=True)
    known = [[True, False, True, False, False], [False, False, True, True, False]]
    outcomes = []
    for hidden in ([False] * 5, [True] * 5):
        batch = make_batch(("liver", "spleen"), [[k, hidden] for k in known], [[True, False]] * 2)
        loss = partial_dice_ce(logits, batch, ABDOMEN, activation).sum()
        outcomes.append((loss, torch.autograd.grad(loss, logits)[0]))
    assert torch.equal(outcomes[0][0], outcomes[1][0])
    assert torch.equal(outcomes[0][1], outcomes[1][1])


def test_everything_annotated_equals_full_supervision():
    """With all organs annotated the loss is ordinary Dice + cross-entropy, computed here without our code."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(3, 3, 4, 5, 6, generator=generator)
    labels = torch.randint(0, 3, (3, 4, 5, 6), generator=generator)
    masks = torch.stack([labels == 1, labels == 2], dim=1)
    batch = Batch(logits, masks, torch.ones(3, 2, dtype=torch.bool), ("liver", "spleen"), ("a", "b", "c"))
    p = logits.softmax(1)[:, 1:]
    y = masks.float()
    dice = (2 * (p * y).sum((2, 3, 4)) + 1) / (p.sum((2, 3, 4)) + y.sum((2, 3, 4)) + 1)
    expected = (1 - dice).mean(1) + F.cross_entropy(logits, labels, reduction="none").mean((1, 2, 3))
    torch.testing.assert_close(partial_dice_ce(logits, batch, ABDOMEN, "softmax"), expected)


def test_weights_switch_terms_off():
    batch = make_batch(("liver", "spleen"), [[[True, False], [False, False]]], [[True, True]])
    dice = partial_dice_ce(LOGITS, batch, ABDOMEN, "softmax", ce_weight=0)
    ce = partial_dice_ce(LOGITS, batch, ABDOMEN, "softmax", dice_weight=0)
    both = partial_dice_ce(LOGITS, batch, ABDOMEN, "softmax", dice_weight=0.5, ce_weight=2)
    torch.testing.assert_close(both, 0.5 * dice + 2 * ce)
    assert dice.item() > 0
    assert ce.item() > 0


def test_samples_do_not_mix():
    one = make_batch(("liver", "spleen"), [[[True, False], [False, False]]], [[True, True]])
    two = make_batch(
        ("liver", "spleen"),
        [[[True, False], [False, False]], [[False, True], [True, False]]],
        [[True, True], [False, True]],
    )
    alone = partial_dice_ce(LOGITS, one, ABDOMEN, "softmax")
    together = partial_dice_ce(LOGITS.repeat(2, 1, 1), two, ABDOMEN, "softmax")
    torch.testing.assert_close(together[:1], alone)


def test_a_structure_the_channels_cannot_express_is_refused_only_when_annotated():
    hidden = make_batch(("liver", "pancreas"), [[[True, False], [True, True]]], [[True, False]])
    assert torch.isfinite(partial_dice_ce(LOGITS, hidden, ABDOMEN, "softmax")).all()
    shown = make_batch(("liver", "pancreas"), [[[True, False], [True, True]]], [[True, True]])
    with refused("network-lacks-structures") as caught:
        partial_dice_ce(LOGITS, shown, ABDOMEN, "softmax")
    assert "pancreas" in caught.value.what
    assert caught.value.fix


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 3), st.integers(1, 2))
def test_gradients_never_push_an_unknown_organ_against_background(seed, voxels, organ):
    """Softmax channels: where an organ is unknown, background and organ keep their ratio to first order."""
    logits = torch.randn(1, 3, voxels, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    logits.requires_grad_()
    names = ("liver", "spleen")
    known = 1 - (organ - 1)
    batch = make_batch(names, [[[False] * voxels] * 2], [[i == known for i in range(2)]])
    loss = marginal_cross_entropy(
        logits, batch.masks, batch.annotated, member_matrix(batch, ABDOMEN, logits.device).double()
    ).sum()
    (gradient,) = torch.autograd.grad(loss, logits)
    probabilities = logits.detach().softmax(1)
    ratio_background = gradient[:, 0] / probabilities[:, 0]
    ratio_unknown = gradient[:, organ] / probabilities[:, organ]
    torch.testing.assert_close(ratio_background, ratio_unknown)


def test_the_mask_of_a_union_teaches_no_tumour_inside_it():
    """A kidney's mask contains its tumours but does not show them: their sigmoid channel must not move."""
    vocabulary = Vocabulary(["kidney_left", "kidney_right", "kidney_tumour"])
    masks = torch.tensor([True, False, True, True]).view(1, 1, 4, 1, 1)
    image = torch.zeros(1, 1, 4, 1, 1)
    batch = Batch(image, masks, torch.ones(1, 1, dtype=torch.bool), ("kidney",), ("case",))
    logits = torch.tensor([0.3, -0.2, 0.1]).view(1, 3, 1, 1, 1).repeat(1, 1, 4, 1, 1).requires_grad_()
    partial_dice_ce(logits, batch, vocabulary, "sigmoid").sum().backward()
    assert logits.grad[:, :2].abs().min() > 0
    assert logits.grad[:, 2].abs().max() == 0
    # By hand: the union is present unless both sides are absent.
    absent = (1 / (1 + math.exp(0.3))) * (1 / (1 + math.exp(-0.2)))
    found = structure_probabilities(logits, batch, vocabulary, "sigmoid")
    assert found.flatten().tolist() == pytest.approx([1 - absent] * 4)


def test_dice_over_the_batch_by_hand():
    """Sums run over the samples that annotate a structure; one that no sample shows is left out."""
    probabilities = torch.tensor([[[0.2, 0.8], [0.5, 0.5]], [[0.4, 0.4], [0.9, 0.9]]])
    masks = torch.tensor([[[False, True], [False, False]], [[False, False], [True, True]]])
    annotated = torch.tensor([[True, True], [True, False]])
    loss = partial_dice(probabilities, masks, annotated, "batch")
    # Structure 0: Σ p·y = 0.8, Σ p = 1.8, Σ y = 1. Structure 1: annotated by sample 0 alone, which does not show it.
    assert loss.tolist() == pytest.approx([1 - 2.6 / 3.8] * 2)


def test_over_the_batch_absent_organs_and_unknown_ones_have_no_dice():
    probabilities = torch.tensor([[[0.2, 0.8]], [[float("nan"), 0.4]]], requires_grad=True)
    masks = torch.tensor([[[False, False]], [[True, True]]])
    loss = partial_dice(probabilities, masks, torch.tensor([[True], [False]]), "batch")
    assert loss.tolist() == [0.0, 0.0]
    loss.sum().backward()
    assert torch.equal(probabilities.grad[0], torch.zeros(1, 2))


def test_one_sample_that_shows_everything_has_the_same_dice_either_way():
    generator = torch.Generator().manual_seed(1)
    probabilities, masks = torch.rand(1, 3, 50, generator=generator), torch.rand(1, 3, 50, generator=generator) > 0.5
    annotated = torch.ones(1, 3, dtype=torch.bool)
    assert torch.equal(
        partial_dice(probabilities, masks, annotated, "batch"), partial_dice(probabilities, masks, annotated)
    )
