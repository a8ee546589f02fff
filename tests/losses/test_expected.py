"""Cross-entropy with the received model's shares: by hand, and as EM promises."""

from __future__ import annotations

import math

import pytest
import torch

from panorgan.anatomy import Vocabulary
from panorgan.losses import expected_cross_entropy
from panorgan.losses.partial import marginal_cross_entropy, member_matrix
from panorgan.preparation.batch import Batch

ABDOMEN = Vocabulary(["liver", "spleen"])
KIDNEYS = Vocabulary(["liver", "kidney_left", "kidney_right"])


def batch_of(structures: tuple[str, ...], masks: list, annotated: list) -> Batch:
    """Masks [B][T][voxels] on a line of voxels."""
    lines = torch.tensor(masks, dtype=torch.bool)
    count, _, voxels = lines.shape
    return Batch(torch.zeros(count, 1, voxels), lines, torch.tensor(annotated), structures, ("case",) * count)


def logits_of(*voxels: tuple[float, ...]) -> torch.Tensor:
    """[1, channels, voxels] with these probabilities."""
    return torch.tensor([[math.log(p) for p in voxel] for voxel in voxels]).T.unsqueeze(0)


def random_logits(channels: int, seed: int) -> torch.Tensor:
    return torch.randn(2, channels, 40, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_by_hand():
    """Voxel 1 is not liver: background and spleen, 0.4 and 0.1 received, share it 0.8 to 0.2. Voxel 2 is liver."""
    batch = batch_of(("liver",), [[[0, 1]]], [[True]])
    loss = expected_cross_entropy(
        logits_of((0.5, 0.3, 0.2), (0.1, 0.6, 0.3)), logits_of((0.4, 0.5, 0.1), (0.2, 0.2, 0.6)), batch, ABDOMEN
    )
    by_hand = (-(0.8 * math.log(0.5) + 0.2 * math.log(0.2)) - math.log(0.6)) / 2
    assert loss.tolist() == pytest.approx([by_hand])


def test_a_union_is_shared_out_among_its_members():
    batch = batch_of(("kidney",), [[[1]]], [[True]])
    loss = expected_cross_entropy(logits_of((0.1, 0.2, 0.3, 0.4)), logits_of((0.5, 0.2, 0.2, 0.1)), batch, KIDNEYS)
    assert loss.item() == pytest.approx(-(2 / 3 * math.log(0.3) + 1 / 3 * math.log(0.4)))


@pytest.mark.parametrize("annotated", [[True, True], [True, False], [False, False]])
def test_at_the_received_model_the_gradient_is_that_of_the_marginal_loss(annotated):
    """What makes it an E-step: both losses then rise and fall alike."""
    masks = (torch.rand(2, 1, 40, generator=torch.Generator().manual_seed(3)) > 0.6).tolist()
    batch = batch_of(("liver", "spleen"), [[row[0], [not v for v in row[0]]] for row in masks], [annotated] * 2)
    received = random_logits(3, 0)
    one, other = received.clone().requires_grad_(), received.clone().requires_grad_()
    expected_cross_entropy(one, received, batch, ABDOMEN).sum().backward()
    members = member_matrix(batch, ABDOMEN, one.device)
    marginal_cross_entropy(other.float(), batch.masks, batch.annotated, members).sum().backward()
    torch.testing.assert_close(one.grad, other.grad, atol=1e-6, rtol=1e-5)
    assert (one.grad.abs().max().item() > 1e-3) is any(annotated)


def test_with_every_organ_annotated_the_received_model_has_no_say():
    batch = batch_of(("liver", "spleen"), [[[1, 0, 0], [0, 1, 0]]], [[True, True]])
    logits = logits_of((0.5, 0.3, 0.2), (0.1, 0.6, 0.3), (0.4, 0.3, 0.3))
    first = expected_cross_entropy(logits, random_logits(3, 1)[:1, :, :3], batch, ABDOMEN)
    assert first.item() == pytest.approx(-(math.log(0.3) + math.log(0.3) + math.log(0.4)) / 3)


def test_voxels_in_two_exclusive_masks_are_left_out():
    batch = batch_of(("liver", "spleen"), [[[1, 1], [1, 0]]], [[True, True]])
    logits = logits_of((0.5, 0.3, 0.2), (0.1, 0.6, 0.3)).requires_grad_()
    loss = expected_cross_entropy(logits, logits.detach(), batch, ABDOMEN)
    assert loss.item() == pytest.approx(-math.log(0.6))
    loss.sum().backward()
    assert torch.equal(logits.grad[..., 0], torch.zeros(1, 3))


def test_a_site_that_cannot_tell_two_organs_apart_does_not_let_one_take_over():
    """A voxel that is no liver: under the marginal loss what is likelier grows faster; under this one nothing moves."""
    batch = batch_of(("liver",), [[[0]]], [[True]])
    received = logits_of((0.5, 0.3, 0.2))

    def odds_after(loss, steps: int = 300) -> float:
        logits = received.clone().requires_grad_()
        for _ in range(steps):
            (gradient,) = torch.autograd.grad(loss(logits).sum(), logits)
            logits = (logits - gradient).detach().requires_grad_()
        background, _, spleen = logits.flatten().exp().tolist()
        return background / spleen

    members = member_matrix(batch, ABDOMEN, received.device)
    assert odds_after(lambda x: expected_cross_entropy(x, received, batch, ABDOMEN)) == pytest.approx(2.5, rel=0.01)
    assert odds_after(lambda x: marginal_cross_entropy(x, batch.masks, batch.annotated, members)) > 3
