"""FedIOD's two containment losses and their gate, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from panorgan.methods.fediod.attention_containment import containment, gate, missing_intersection, outside_union

LOW = math.log(3) / 250
"""α = 1000 times a quarter of this is log 3: the gate is 3/4 above and 1/4 below the mean of a row."""


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def attention(tokens: int, samples: int = 2, seed: int = 0, sharpness: float = 1.0) -> torch.Tensor:
    """Random rows that add up to one, [B, n, n]."""
    scores = torch.randn(samples, tokens, tokens, generator=torch.Generator().manual_seed(seed))
    return (sharpness * scores).softmax(dim=-1)


# -- Γ -----------------------------------------------------------------------------------------------------------------


def test_gate_by_hand_with_the_mean_of_each_row():
    """Rows with means LOW/2 and 0.3; ±LOW/4 around the first, far away from the second."""
    maps = torch.tensor([[[LOW / 4, LOW * 3 / 4], [0.0, 0.6]]])
    torch.testing.assert_close(gate(maps), torch.tensor([[[0.25, 0.75], [0.0, 1.0]]]), atol=1e-6, rtol=0)


def test_gate_of_the_papers_size():
    """256 tokens: a row's mean is 1/256, attention of 0 has σ(−1000/256) = 0.0197, all of it 1."""
    maps = torch.eye(256).unsqueeze(0)
    found = gate(maps)
    assert found[0, 3, 4].item() == pytest.approx(sigmoid(-1000 / 256), rel=1e-5)
    assert found[0, 3, 3].item() == 1.0


def test_gate_is_a_half_where_nothing_stands_out():
    assert torch.equal(gate(torch.full((1, 4, 4), 0.25)), torch.full((1, 4, 4), 0.5))


def test_the_steepness_can_be_chosen():
    maps = torch.tensor([[[0.25, 0.75], [0.75, 0.25]]])
    third = gate(maps, alpha=4 * math.log(2))
    torch.testing.assert_close(third, torch.tensor([[[1 / 3, 2 / 3], [2 / 3, 1 / 3]]]))


# -- the losses by hand ------------------------------------------------------------------------------------------------


def test_missing_intersection_by_hand():
    """Γ(Ā) = ¼, ¾ and 0, 1: 1 − (1·¼ + 2·¾ + 3·0 + 4·1)/10 = 0.425. Î need not be normalised."""
    maps = torch.tensor([[[LOW / 4, LOW * 3 / 4], [0.0, 0.6]]])
    intersection = torch.tensor([[[0.1, 0.2], [0.3, 0.4]]])
    loss = missing_intersection(maps, intersection)
    assert loss.shape == (1,)
    assert loss.item() == pytest.approx(0.425, rel=1e-5)


def test_outside_union_by_hand():
    """Γ(Û) = ¼, ¾ and 0, 1: 1 − (0.5·¼ + 0.5·¾ + 0.8·0 + 0.2·1)/2 = 0.65."""
    union = torch.tensor([[[LOW / 4, LOW * 3 / 4], [0.0, 0.6]]])
    assert outside_union(torch.tensor([[[0.5, 0.5], [0.8, 0.2]]]), union).item() == pytest.approx(0.65, rel=1e-5)


def test_the_two_take_different_sides():
    """Ā looks at one token where Î and Û look at two: it leaves half of Î out, and stays within Û."""
    narrow = torch.tensor([[1.0, 0.0, 0.0, 0.0]]).expand(1, 4, 4)
    wide = torch.tensor([[0.5, 0.5, 0.0, 0.0]]).expand(1, 4, 4)
    assert missing_intersection(narrow, wide).item() == pytest.approx(0.5)
    assert outside_union(narrow, wide).item() == 0.0
    assert missing_intersection(wide, narrow).item() == 0.0
    assert outside_union(wide, narrow).item() == pytest.approx(0.5)


def test_extremes():
    same = torch.eye(4).unsqueeze(0)
    apart = same.roll(1, dims=-1)
    for loss in (missing_intersection, outside_union):
        assert loss(same, same).item() == 0.0
        assert loss(same, apart).item() == 1.0
        assert loss(torch.full((1, 4, 4), 0.25), torch.full((1, 4, 4), 0.25)).item() == 0.5


def test_nothing_in_common_asks_for_nothing():
    maps = attention(6).requires_grad_()
    loss = missing_intersection(maps, torch.zeros(2, 6, 6))
    loss.sum().backward()
    assert loss.tolist() == [0.0, 0.0]
    assert maps.grad.abs().max() == 0


@pytest.mark.parametrize("tokens", [2, 16, 256])
@pytest.mark.parametrize("sharpness", [0.1, 1.0, 30.0])
def test_values_lie_between_zero_and_one(tokens, sharpness):
    maps, other = attention(tokens, sharpness=sharpness), attention(tokens, seed=1, sharpness=sharpness)
    for loss in (missing_intersection(maps, other), outside_union(maps, other)):
        assert loss.shape == (2,)
        assert ((loss >= 0) & (loss <= 1)).all()


def test_it_is_one_minus_the_printed_equations():
    maps, other = attention(16).double(), attention(16, seed=1).double()
    beta = maps.mean(-1, keepdim=True), other.mean(-1, keepdim=True)
    contained = (other / (1 + torch.exp(-1000 * (maps - beta[0])))).sum((1, 2)) / other.sum((1, 2))
    inside = (maps / (1 + torch.exp(-1000 * (other - beta[1])))).sum((1, 2)) / maps.sum((1, 2))
    torch.testing.assert_close(missing_intersection(maps, other).double(), 1 - contained, atol=1e-5, rtol=0)
    torch.testing.assert_close(outside_union(maps, other).double(), 1 - inside, atol=1e-5, rtol=0)


def test_samples_do_not_mix():
    maps, other = attention(8, samples=3), attention(8, samples=3, seed=1)
    for loss in (missing_intersection, outside_union):
        alone = torch.cat([loss(maps[i : i + 1], other[i : i + 1]) for i in range(3)])
        torch.testing.assert_close(loss(maps, other), alone)


# -- gradients ---------------------------------------------------------------------------------------------------------


def test_gradients_by_hand():
    """∂L_I/∂Ā = −Î·α·Γ(1 − Γ)/Σ Î; ∂L_U/∂Ā = ((1 − Γ(Û)) − L_U)/Σ Ā; β passes none on."""
    maps = torch.tensor([[[LOW / 4, LOW * 3 / 4], [0.0, 0.6]]], requires_grad=True)
    missing_intersection(maps, torch.tensor([[[0.1, 0.2], [0.3, 0.4]]])).sum().backward()
    expected = torch.tensor([[[-0.1 * 1000 * 3 / 16, -0.2 * 1000 * 3 / 16], [0.0, 0.0]]])
    torch.testing.assert_close(maps.grad, expected, rtol=1e-5, atol=1e-6)

    maps = torch.tensor([[[0.5, 0.5], [0.8, 0.2]]], requires_grad=True)
    outside_union(maps, torch.tensor([[[LOW / 4, LOW * 3 / 4], [0.0, 0.6]]])).sum().backward()
    expected = (torch.tensor([[[0.75, 0.25], [1.0, 0.0]]]) - 0.65) / 2
    torch.testing.assert_close(maps.grad, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss", [missing_intersection, outside_union])
def test_the_sites_common_maps_get_no_gradient(loss):
    maps, common = attention(8).requires_grad_(), attention(8, seed=1).requires_grad_()
    loss(maps, common).sum().backward()
    assert maps.grad.abs().max() > 0
    assert common.grad is None


@pytest.mark.parametrize("loss", [missing_intersection, outside_union])
def test_following_the_gradient_lowers_the_loss(loss):
    """By the scores in front of a softmax, as a network would, from a map that looks elsewhere; α as steep for 16
    tokens as 1000 is for 256."""
    common = attention(16, samples=1, sharpness=3.0)
    scores = torch.randn(1, 16, 16, generator=torch.Generator().manual_seed(5), requires_grad=True)
    optimizer = torch.optim.Adam([scores], lr=0.05)
    values = []
    for _ in range(200):
        optimizer.zero_grad()
        value = loss(scores.softmax(dim=-1), common, alpha=62.5).sum()
        value.backward()
        optimizer.step()
        values.append(value.item())
    assert values[-1] < 0.1 < 0.25 < values[0]


# -- precision ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [missing_intersection, outside_union])
def test_lower_precision_around_it_does_not_lower_it(loss):
    maps, common = attention(64, sharpness=2.0), attention(64, seed=1)
    plain = loss(maps, common)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(loss(maps, common), plain)
    # what autocast made narrow is widened before anything is computed
    rough = maps.bfloat16()
    assert torch.equal(loss(rough, common.half()), loss(rough.float(), common.half().float()))
    assert loss(rough, common.half()).dtype == torch.float32


@pytest.mark.parametrize("loss", [missing_intersection, outside_union])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_steepest_maps_stay_finite(loss, dtype):
    """Attention of exactly 0 and 1 puts up to ±1000 into the sigmoid."""
    maps = torch.eye(256, dtype=dtype).repeat(2, 1, 1).requires_grad_()
    value = loss(maps, torch.eye(256).roll(1, dims=-1).repeat(2, 1, 1))
    value.sum().backward()
    assert value.tolist() == pytest.approx([1 - sigmoid(-1000 / 256)] * 2, rel=1e-5)
    assert maps.grad.isfinite().all()


def test_both_at_once_are_one_after_the_other():
    """Values and gradients."""
    own, intersection, union = (attention(6, seed=seed, sharpness=3.0) for seed in range(3))
    together, apart = own.clone().requires_grad_(), own.clone().requires_grad_()
    both = containment(together, intersection, union, 20.0)
    each = torch.stack([missing_intersection(apart, intersection, 20.0), outside_union(apart, union, 20.0)])
    torch.testing.assert_close(both, each)
    weights = torch.tensor([[1.0, 2], [3, 5]])
    (both * weights).sum().backward()
    (each * weights).sum().backward()
    torch.testing.assert_close(together.grad, apart.grad)
