"""Entropy and uncertainty of teachers against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from panorgan.methods.ufps.uncertainty import sample_uncertainty, teacher_logits, voxel_entropy


def entropy_of(*probabilities: float) -> float:
    return -sum(p * math.log(p) for p in probabilities if p)


def test_entropy_is_averaged_over_classes():
    logits = torch.tensor([[0.5, 0.25, 0.25], [1 / 3, 1 / 3, 1 / 3]]).log().T.view(1, 3, 2)
    expected = [entropy_of(0.5, 0.25, 0.25) / 3, math.log(3) / 3]
    assert voxel_entropy(logits)[0].tolist() == pytest.approx(expected, rel=1e-6)
    assert voxel_entropy(logits, classes=5)[0].tolist() == pytest.approx([e * 3 / 5 for e in expected], rel=1e-6)


def test_the_softmax_is_over_classes_and_not_over_voxels():
    logits = torch.zeros(1, 4, 7)
    assert voxel_entropy(logits).shape == (1, 7)
    assert voxel_entropy(logits)[0].tolist() == pytest.approx([math.log(4) / 4] * 7, rel=1e-6)


def test_odds_of_independent_teachers():
    """p = 3/4 and 1/2: odds 3 and 1 against 1 for the background, so that the softmax is 1/5, 3/5, 1/5."""
    probabilities = torch.tensor([[[0.75], [0.5]]])
    both = teacher_logits(probabilities, torch.tensor([[True, True]])).softmax(1)
    assert both.flatten().tolist() == pytest.approx([0.2, 0.6, 0.2], rel=1e-6)
    first = teacher_logits(probabilities, torch.tensor([[True, False]])).softmax(1)
    assert first.flatten().tolist() == pytest.approx([0.25, 0.75, 0.0], rel=1e-6)


def test_one_teacher_keeps_its_own_entropy():
    logits = teacher_logits(torch.tensor([[[0.9, 0.5]]]), torch.tensor([[True]]))
    expected = [entropy_of(0.9, 0.1) / 2, math.log(2) / 2]
    assert voxel_entropy(logits)[0].tolist() == pytest.approx(expected, rel=1e-5)


def test_without_teachers_there_is_no_doubt():
    no_site = teacher_logits(torch.rand(2, 3, 4), torch.zeros(2, 3, dtype=torch.bool))
    assert torch.equal(voxel_entropy(no_site), torch.zeros(2, 4))
    none = teacher_logits(torch.zeros(2, 0, 4), torch.zeros(2, 0, dtype=torch.bool))
    assert torch.equal(voxel_entropy(none), torch.zeros(2, 4))


def test_uncertainty_by_hand():
    """Classes of 2, 1 and 0 voxels: ((0.1 + 0.3)/3 + 0.5/2 + 0/1)/3; values beyond the classes belong to none."""
    entropy = torch.tensor([[0.1, 0.3, 0.5, 0.9]])
    label = torch.tensor([[0, 0, 1, 7]], dtype=torch.uint8)
    expected = (0.4 / 3 + 0.5 / 2 + 0.0) / 3
    assert sample_uncertainty(entropy, label, 3).tolist() == pytest.approx([expected], rel=1e-6)


def test_certain_teachers_have_no_uncertainty():
    probabilities = torch.tensor([[[0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]]])
    entropy = voxel_entropy(teacher_logits(probabilities, torch.tensor([[True, True]])), classes=3)
    found = sample_uncertainty(entropy, torch.tensor([[0, 1, 2, 0]]), 3)
    assert found.item() == pytest.approx(0, abs=5e-6)
    logits = torch.tensor([[[200.0, 0.0], [0.0, 200.0]]])
    assert sample_uncertainty(voxel_entropy(logits), torch.tensor([[0, 1]]), 2).item() == 0.0


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_uniform_logits_give_the_largest_uncertainty(classes):
    """E = log N / N everywhere, so U = (log N / N)·(1/N) Σ_c n_c/(n_c + 1)."""
    label = torch.arange(classes).repeat_interleave(6).unsqueeze(0)
    uniform = sample_uncertainty(voxel_entropy(torch.zeros(1, classes, 6 * classes)), label, classes).item()
    assert uniform == pytest.approx(math.log(classes) / classes * 6 / 7, rel=1e-6)
    logits = torch.randn(1, classes, 6 * classes, generator=torch.Generator().manual_seed(0))
    assert sample_uncertainty(voxel_entropy(logits), label, classes).item() < uniform


def test_teachers_that_contradict_each_other_are_uncertain():
    certain = torch.tensor([[[1.0], [1.0]]])
    logits = teacher_logits(certain, torch.tensor([[True, True]]))
    assert voxel_entropy(logits).item() == pytest.approx(math.log(2) / 3, rel=1e-4)


def test_samples_do_not_mix_and_space_does_not_matter():
    generator = torch.Generator().manual_seed(1)
    entropy = torch.rand(3, 4, 5, 6, generator=generator)
    label = torch.randint(0, 4, (3, 4, 5, 6), generator=generator)
    together = sample_uncertainty(entropy, label, 4)
    alone = [
        sample_uncertainty(e.flatten()[None], v.flatten()[None], 4).item() for e, v in zip(entropy, label, strict=True)
    ]
    assert together.tolist() == pytest.approx(alone, rel=1e-6)


def test_classes_at_once_are_classes_one_by_one():
    generator = torch.Generator().manual_seed(3)
    entropy = torch.rand(2, 6, 7, 8, generator=generator)
    label = torch.randint(0, 6, (2, 6, 7, 8), generator=generator, dtype=torch.uint8)  # 5 belongs to no class
    expected = [
        sum(entropy[b][label[b] == c].sum() / ((label[b] == c).sum() + 1) for c in range(5)) / 5 for b in (0, 1)
    ]
    assert sample_uncertainty(entropy, label, 5).tolist() == pytest.approx([e.item() for e in expected], rel=1e-6)


def test_lower_precision_around_it_does_not_lower_it():
    generator = torch.Generator().manual_seed(2)
    probabilities, known = torch.rand(2, 3, 500, generator=generator), torch.ones(2, 3, dtype=torch.bool)
    label = torch.randint(0, 4, (2, 500), generator=generator)
    plain = sample_uncertainty(voxel_entropy(teacher_logits(probabilities, known)), label, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lowered = sample_uncertainty(voxel_entropy(teacher_logits(probabilities, known)), label, 4)
    assert torch.equal(lowered, plain)
    assert lowered.dtype == torch.float32
