"""The plane through the weights: where its middle is, how long its directions are, that nothing is left changed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from panorgan.evaluation.landscape import filter_normalised_direction, loss_plane, plane_steps, weights_by_name
from panorgan.methods.fediod.bottleneck_attention import Heads


def test_every_filter_of_a_direction_is_as_long_as_the_models():
    weight = torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, 2.0]])
    kernel = torch.randn(4, 2, 3, 3, 3)
    bias = torch.tensor([1.0, 2.0])
    direction = filter_normalised_direction([weight, kernel, bias], seed=5)
    torch.testing.assert_close(direction[0].norm(dim=1), torch.tensor([5.0, 0.0, 2.0]))
    torch.testing.assert_close(direction[1].flatten(1).norm(dim=1), kernel.flatten(1).norm(dim=1))
    assert direction[1].shape == kernel.shape
    assert direction[2].tolist() == [0.0, 0.0], "biases stay where they are"
    again = filter_normalised_direction([weight, kernel, bias], seed=5)
    assert all(torch.equal(a, b) for a, b in zip(direction, again, strict=True))
    assert not torch.equal(filter_normalised_direction([weight, kernel, bias], seed=6)[1], direction[1])


def test_steps_have_the_model_in_their_middle():
    assert plane_steps(0.5, 5).tolist() == [-0.5, -0.25, 0.0, 0.25, 0.5]


def test_a_quadratic_has_the_plane_that_its_formula_says():
    """f = w₁² + 3 w₂² around (1, 0) along the axes: (1 + a)² + 3 b²."""
    weights = torch.tensor([1.0, 0.0], requires_grad=True)

    def loss():
        return weights[0] ** 2 + 3 * weights[1] ** 2

    steps, rows = [-1.0, 0.0, 1.0], []
    axes = ([torch.tensor([1.0, 0.0])], [torch.tensor([0.0, 1.0])])
    planes = loss_plane({"a": [loss], "b": [loss, lambda: loss() + 1]}, [weights], axes, steps, rows.append)
    assert planes["a"].tolist() == [[3.0, 0.0, 3.0], [4.0, 1.0, 4.0], [7.0, 4.0, 7.0]]
    np.testing.assert_allclose(planes["b"], planes["a"] + 0.5)
    assert rows == [1, 2, 3]
    assert weights.tolist() == [1.0, 0.0]


def test_the_middle_is_the_loss_to_the_bit_and_the_weights_come_back_to_the_bit():
    torch.manual_seed(0)
    layer = torch.nn.Linear(5, 3)
    inputs = torch.randn(7, 5)
    parameters = list(layer.parameters())
    before = [p.detach().clone() for p in parameters]
    directions = tuple(filter_normalised_direction(parameters, seed) for seed in (1, 2))
    expected = layer(inputs).square().mean().item()
    plane = loss_plane({"x": [lambda: layer(inputs).square().mean()]}, parameters, directions, plane_steps(1.0, 3))["x"]
    assert plane[1, 1] == expected
    assert len(np.unique(plane)) == 9
    assert all(torch.equal(p, b) for p, b in zip(parameters, before, strict=True))


def test_the_weights_come_back_when_the_loss_fails():
    weights = torch.tensor([[1.0, 2.0]], requires_grad=True)

    def fails():
        raise ZeroDivisionError

    direction = [torch.ones(1, 2)]
    with pytest.raises(ZeroDivisionError):
        loss_plane({"x": [fails]}, [weights], (direction, direction), [-1.0, 0.0, 1.0])
    assert weights.tolist() == [[1.0, 2.0]]


def test_heads_of_a_transformer_have_filters_of_their_own():
    """Though they lie in one matrix: each is as long in a direction as it is itself, however long the others are."""
    heads = Heads(width=4, heads=2, head_width=3)
    with torch.no_grad():
        heads[0].query.mul_(20)
        heads[1].output.zero_()
    weights = weights_by_name(heads)
    for own, step in zip(weights, filter_normalised_direction(weights, seed=1), strict=True):
        torch.testing.assert_close(step.norm(dim=1), own.norm(dim=1))
    planes = loss_plane({"sum": [lambda: heads.projections.sum()]}, weights, _directions(weights), [0.0, 1.0])
    assert planes["sum"][0, 0] != planes["sum"][1, 0], "the network reads what is moved"


def test_weights_by_name_are_the_parameters_of_a_plain_network():
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    found = {weight.data_ptr() for weight in weights_by_name(network)}
    assert {parameter.data_ptr() for parameter in network.parameters()} < found
    assert all(weight.is_floating_point() for weight in weights_by_name(network))


def _directions(weights):
    first, second = (filter_normalised_direction(weights, seed) for seed in (1, 2))
    return first, second
