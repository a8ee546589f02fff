"""The transformer at the bottleneck: attention, positions and weights by hand, heads one by one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from panorgan.methods.fediod.attention_gate import mean_attention
from panorgan.methods.fediod.bottleneck_attention import (
    Attend,
    BottleneckTransformer,
    Heads,
    Layer,
    cast_together,
    sinusoidal_positions,
)

# -- attention -------------------------------------------------------------------------------------------------------


def plain_attention(projected):
    """As one would write it."""
    queries, keys, values = (part.transpose(0, 1) for part in projected.unbind())
    attention = (queries @ keys.mT).softmax(-1, dtype=torch.promote_types(projected.dtype, torch.float32))
    return (attention.to(values.dtype) @ values).transpose(0, 1), attention


@pytest.mark.parametrize("asked", [(True, False), (False, True), (True, True)], ids=["mixed", "map", "both"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_and_its_gradient_are_the_plain_ones(dtype, asked):
    torch.manual_seed(0)
    projected = torch.randn(3, 5, 4, 6).to(dtype)
    results = []
    for attend in (plain_attention, Attend.apply):
        given = projected.clone().requires_grad_()
        found = attend(given)
        factors = [torch.linspace(-1, 2, part.numel()).view(part.shape) for part in found]
        sum(
            (part * factor).sum() for part, factor, wanted in zip(found, factors, asked, strict=True) if wanted
        ).backward()
        results.append([*found, given.grad])
    bound = 1e-5 if dtype == torch.float32 else 3e-2
    for expected, ours in zip(*results, strict=True):
        assert ours.dtype == expected.dtype
        torch.testing.assert_close(ours, expected, rtol=bound, atol=bound)


def test_attention_has_first_and_second_derivatives():
    projected = torch.randn(3, 3, 2, 2, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(Attend.apply, projected)
    assert torch.autograd.gradgradcheck(Attend.apply, projected)
    assert torch.autograd.gradgradcheck(lambda given: Attend.apply(given)[0], projected)


# -- a layer by hand -------------------------------------------------------------------------------------------------


@pytest.fixture
def toy() -> Layer:
    """Two heads of one channel on tokens of two. After normalisation a token is (1, −1) or (−1, 1)."""
    layer = Layer(width=2, heads=2, head_width=1, mlp_width=2, dropout=0.0)
    layer.attention_norm.eps = 0.0
    with torch.no_grad():
        for parameter in (*layer.heads.parameters(), *layer.mlp.parameters()):
            parameter.zero_()
        first, second = layer.heads
        first.query.copy_(torch.tensor([[math.log(2) / 2, 0]]))  # e^(2·score) = 2: like attends twice as much
        first.key.copy_(torch.tensor([[1.0, 0]]))
        first.value.copy_(torch.tensor([[1.0, 0]]))
        first.output.copy_(torch.tensor([[1.0], [0]]))
        second.value.copy_(torch.tensor([[1.0, 0]]))  # no queries: it attends to all alike
        second.output.copy_(torch.tensor([[0.0], [1]]))
    return layer


TOKENS = torch.tensor([[[3.0, 1], [0, 4], [-1, 1]]])  # normalised: (1, −1), (−1, 1), (−1, 1)
FIRST = torch.tensor([[1 / 2, 1 / 4, 1 / 4], [1 / 5, 2 / 5, 2 / 5], [1 / 5, 2 / 5, 2 / 5]])


def test_attention_of_a_toy_layer(toy):
    """The first head mixes (1, −1, −1) to (0, −0.6, −0.6), the second to −1/3 everywhere."""
    out, attention = toy(TOKENS, torch.zeros(3, 2))
    torch.testing.assert_close(attention, torch.stack([FIRST, torch.full((3, 3), 1 / 3)])[None])
    added = torch.tensor([[[0, -1 / 3], [-0.6, -1 / 3], [-0.6, -1 / 3]]])
    torch.testing.assert_close(out, TOKENS + added)


def test_positions_change_who_looks_at_whom_and_nothing_else(toy):
    """With (2, ·) added to the last token its query and key are 1 instead of −1; what it hands on stays −1."""
    _, attention = toy(TOKENS, torch.tensor([[0.0, 0], [0, 0], [2, 0]]))
    torch.testing.assert_close(attention[0, 0, 0], torch.tensor([2 / 5, 1 / 5, 2 / 5]))
    out, _ = toy(TOKENS, torch.tensor([[0.0, 0], [0, 0], [2, 0]]))
    torch.testing.assert_close(out[0, 0, 0], torch.tensor(3 + 2 / 5 - 1 / 5 - 2 / 5))


def test_a_given_map_takes_the_place_of_the_layers_own(toy):
    """Everybody attends to the first token alone: both heads hand on its 1."""
    given = torch.tensor([[1.0, 0, 0]]).expand(1, 2, 3, 3)
    out, attention = toy(TOKENS, torch.zeros(3, 2), given)
    assert attention is given
    torch.testing.assert_close(out, TOKENS + 1)


def written_out(layer: Layer, tokens: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What each head adds, and the layer's result, head after head."""
    normed = layer.attention_norm(tokens)
    contributions = []
    for head in layer.heads:
        queries, keys = (normed + positions) @ head.query.T, (normed + positions) @ head.key.T
        attention = (queries @ keys.transpose(1, 2) / math.sqrt(queries.shape[2])).softmax(2)
        contributions.append(attention @ (normed @ head.value.T) @ head.output.T)
    tokens = tokens + sum(contributions)
    return torch.stack(contributions), tokens + layer.mlp(layer.mlp_norm(tokens))


@pytest.mark.parametrize("with_map", [True, False])
def test_all_heads_at_once_are_the_heads_one_by_one(with_map):
    """Values and gradients, with the map and where torch's own attention does it without."""
    torch.manual_seed(0)
    layer = Layer(width=8, heads=3, head_width=5, mlp_width=6, dropout=0.1).double().eval()
    tokens, positions = torch.randn(2, 7, 8).double(), torch.randn(7, 8).double()
    out, attention = layer(tokens, positions, None, with_map)
    assert (attention is None) is not with_map
    _, expected = written_out(layer, tokens, positions)
    torch.testing.assert_close(out, expected)
    weights = list(layer.parameters())
    ours, plain = (torch.autograd.grad(result.sin().sum(), weights) for result in (out, expected))
    for mine, wanted in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, wanted)


def test_without_its_output_projection_a_head_adds_nothing():
    torch.manual_seed(0)
    layer = Layer(width=8, heads=3, head_width=5, mlp_width=6, dropout=0.1).double().eval()
    nn.init.zeros_(layer.mlp[3].weight)
    tokens, positions = torch.randn(2, 7, 8).double(), torch.randn(7, 8).double()
    contributions, _ = written_out(layer, tokens, positions)
    before, _ = layer(tokens, positions)
    with torch.no_grad():
        layer.heads[1].output.zero_()
    after, _ = layer(tokens, positions)
    torch.testing.assert_close(before - after, contributions[1])
    assert contributions[1].abs().max() > 0.01


def test_the_heads_sum_starts_no_larger_than_that_of_one_matrix():
    layer = Layer(width=4, heads=4, head_width=16, mlp_width=4, dropout=0)
    largest = max(float(head.output.detach().abs().max()) for head in layer.heads)
    assert 1 / 16 < largest <= 1 / 8  # 1/√(4 · 16)


# -- positions -------------------------------------------------------------------------------------------------------


def test_positions_by_hand():
    """Eight channels on a plane: two frequencies per axis, 1 and 1/100; first the sines, then the cosines."""
    positions = sinusoidal_positions((2, 3), 8)
    expected = [math.sin(1), math.sin(0.01), math.cos(1), math.cos(0.01)]
    expected += [math.sin(2), math.sin(0.02), math.cos(2), math.cos(0.02)]
    torch.testing.assert_close(positions[5], torch.tensor(expected))  # row 1, column 2
    torch.testing.assert_close(positions[0], torch.tensor([0.0, 0, 1, 1, 0, 0, 1, 1]))


@pytest.mark.parametrize(("small", "large"), [((2, 3), (5, 4)), ((2, 3, 2), (3, 4, 5))])
def test_a_place_is_called_the_same_on_every_grid(small, large):
    """Also with channels to spare, which stay zero."""
    width = 15
    inside = sinusoidal_positions(large, width).view(*large, width)[tuple(slice(n) for n in small)]
    assert torch.equal(inside.reshape(-1, width), sinusoidal_positions(small, width))
    assert len(sinusoidal_positions(large, width).unique(dim=0)) == math.prod(large)


# -- features in and out ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.contiguous_format, torch.channels_last])
def test_features_leave_the_transformer_laid_out_as_they_came(kind):
    transformer = BottleneckTransformer(width=6, layers=1, heads=2, head_width=3, mlp_width=4, dropout=0)
    out, maps = transformer(torch.randn(2, 6, 3, 4).to(memory_format=kind), with_maps=False)
    assert (out.shape, maps) == ((2, 6, 3, 4), [])
    assert out.is_contiguous(memory_format=kind)


# -- weights in one piece ----------------------------------------------------------------------------------------------


def test_tensors_are_cast_together_and_their_gradients_come_back():
    matrix, bias = torch.tensor([[1.0, 2], [3, 4]]).requires_grad_(), torch.tensor([5.0]).requires_grad_()
    narrow, alone = cast_together([matrix, bias], torch.bfloat16)
    assert narrow.dtype == torch.bfloat16
    assert (narrow.tolist(), alone.tolist()) == ([[1, 2], [3, 4]], [5])
    (narrow * torch.tensor([[1.0, 2], [3, 4]])).sum().add(alone.sum() * 7).backward()
    assert (matrix.grad.tolist(), bias.grad.tolist()) == ([[1, 2], [3, 4]], [7])
    assert matrix.grad.dtype == bias.grad.dtype == torch.float32


def test_under_autocast_all_layers_use_their_own_weights():
    """Values and gradients as without, but for the rounding; a layer or head in another's place would be far off."""
    torch.manual_seed(0)
    transformer = BottleneckTransformer(width=8, layers=3, heads=2, head_width=5, mlp_width=6, dropout=0)
    features, weights = torch.randn(2, 8, 3, 4), list(transformer.parameters())
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out, maps = transformer(features)
        assert (out.dtype, maps[0].dtype) == (torch.float32, torch.float32)
        loss = out.square().mean() + mean_attention(maps).square().sum()
        results.append((out, *maps, *torch.autograd.grad(loss, weights)))
    for plain, narrow in zip(*results, strict=True):
        assert float((plain - narrow).detach().norm() / plain.detach().norm()) < 0.05


@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_are_laid_out_as_their_weights(autocast):
    """Else each would be copied for the optimiser."""
    transformer = BottleneckTransformer(width=8, layers=2, heads=2, head_width=5, mlp_width=6, dropout=0)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out, _ = transformer(torch.randn(2, 8, 3, 4))
    passed_on = list[torch.Tensor]()
    for weight in transformer.parameters():
        weight.register_hook(passed_on.append)
    out.square().sum().backward()
    assert len(passed_on) == 2 * (2 + 4 + 4) + 2  # matrices of all heads, perceptron, two normalisations; the last one
    assert all(gradient.is_contiguous() for gradient in passed_on)


def test_what_is_kept_from_inference_serves_training():
    transformer = BottleneckTransformer(width=4, layers=1, heads=1, head_width=3, mlp_width=4, dropout=0)
    features = torch.randn(1, 4, 11, 1)  # a grid of which nothing is kept yet
    with torch.inference_mode():
        transformer(features)
    out, _ = transformer(features.requires_grad_())
    out.sum().backward()
    assert features.grad is not None


# -- heads by name -----------------------------------------------------------------------------------------------------


@pytest.fixture
def heads() -> Heads:
    """Three heads of two channels on tokens of four; every weight has a value of its own."""
    made = Heads(width=4, heads=3, head_width=2)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape))
    return made


def test_the_state_dict_tells_of_heads_one_by_one(heads):
    state = heads.state_dict()
    names = [f"{head}.{kind}.weight" for head in range(3) for kind in ("query", "key", "value", "output")]
    assert list(state) == names
    assert all(tuple(state[name].shape) == ((4, 2) if "output" in name else (2, 4)) for name in names)
    # Of the second of three matrices, 4 × 6, columns 2 and 3.
    assert state["1.key.weight"].tolist() == [[26, 32, 38, 44], [27, 33, 39, 45]]
    assert state["2.output.weight"].tolist() == [[4, 5], [10, 11], [16, 17], [22, 23]]
    assert not any(value.requires_grad for value in state.values())
    assert len(list(heads.parameters())) == 2


def test_a_state_dict_changes_the_heads_as_ever(heads):
    """Its tensors are the network's own, not copies."""
    heads.state_dict()["1.output.weight"].zero_()
    assert heads.outputs[0].tolist() == [0, 1, 0, 0, 4, 5]


def test_what_was_saved_is_what_is_loaded(heads):
    other = Heads(width=4, heads=3, head_width=2)
    kept = other.projections
    assert other.load_state_dict(heads.state_dict()) == ([], [])
    assert other.projections is kept
    assert torch.equal(other.projections, heads.projections)
    assert torch.equal(other.outputs, heads.outputs)
    assert kept.requires_grad


def test_heads_that_do_not_fit_are_refused_by_name(heads):
    state = heads.state_dict()
    del state["1.key.weight"]
    state["3.key.weight"] = torch.zeros(2, 4)
    state["0.value.weight"] = torch.zeros(4, 2)
    with pytest.raises(RuntimeError) as refusal:
        Heads(width=4, heads=3, head_width=2).load_state_dict(state)
    reported = str(refusal.value)
    assert 'Missing key(s) in state_dict: "1.key.weight"' in reported
    assert 'Unexpected key(s) in state_dict: "3.key.weight"' in reported
    assert "size mismatch for 0.value.weight: (4, 2) instead of (2, 4)" in reported


def test_heads_cannot_take_over_tensors(heads):
    """They are parts of matrices: what is given is copied."""
    with pytest.raises(RuntimeError, match="load without assign=True"):
        Heads(width=4, heads=3, head_width=2).load_state_dict(heads.state_dict(), assign=True)


def test_there_are_as_many_heads_as_there_are(heads):
    assert len(heads) == len(list(heads)) == 3
    with pytest.raises(IndexError, match="head 3 of 3"):
        heads[3]
