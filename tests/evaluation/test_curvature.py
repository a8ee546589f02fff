"""Hessian-vector products, eigenvalues and trace against matrices that can be written down."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from scipy.sparse import linalg
from torch import nn

from panorgan.anatomy import Vocabulary
from panorgan.errors import RunError
from panorgan.evaluation import curvature
from panorgan.evaluation.curvature import (
    Trace,
    hessian_vector_product,
    loss_and_gradient,
    top_eigenvalues,
    trace_samples,
)
from panorgan.losses import partial_dice_ce
from panorgan.networks import UNet, UNetSettings, organ_network
from panorgan.networks.second_derivatives import PlainInstanceNorm, use_plain_norms
from panorgan.preparation.batch import Batch

CPU = torch.device("cpu")


def quadratic(matrix: torch.Tensor, weights: torch.Tensor):
    """½ wᵀAw, whose Hessian is A."""
    return lambda: 0.5 * weights @ matrix @ weights


def test_the_hessian_of_a_quadratic_is_its_matrix():
    matrix = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
    weights = torch.tensor([1.0, -1.0], requires_grad=True)
    loss, gradient = loss_and_gradient([quadratic(matrix, weights)], [weights])
    assert loss == pytest.approx(1.5)  # ½ (2 − 2 + 3)
    assert gradient.tolist() == [1.0, -2.0]
    product = hessian_vector_product([quadratic(matrix, weights)], [weights], torch.tensor([1.0, 2.0]))
    assert product.tolist() == [4.0, 7.0]


def test_batches_are_averaged():
    weights = torch.tensor([1.0, 1.0], requires_grad=True)
    losses = [quadratic(torch.diag(torch.tensor(values)), weights) for values in ([2.0, 0.0], [4.0, 6.0])]
    loss, gradient = loss_and_gradient(losses, [weights])
    assert loss == pytest.approx(3.0)  # (1 + 5) / 2
    assert gradient.tolist() == [3.0, 3.0]
    assert hessian_vector_product(losses, [weights], torch.ones(2)).tolist() == [3.0, 3.0]


def test_weights_that_the_loss_does_not_see_or_sees_linearly_have_no_curvature():
    seen, linear, unseen = (torch.ones(2, requires_grad=True) for _ in range(3))

    def loss():
        return seen.square().sum() + linear.sum()

    product = hessian_vector_product([loss], [seen, linear, unseen], torch.ones(6))
    assert product.tolist() == [2.0, 2.0, 0.0, 0.0, 0.0, 0.0]
    assert hessian_vector_product([linear.sum], [linear], torch.ones(2)).tolist() == [0.0, 0.0]


def small_network() -> tuple[nn.Module, list[torch.Tensor], list]:
    """61 weights, smooth, and two batches."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))
    data = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(2)]
    losses = [lambda x=x, y=y: nn.functional.mse_loss(network(x), y) for x, y in data]
    return network, list(network.parameters()), losses


def dense_hessian(network: nn.Module, losses: list) -> torch.Tensor:
    """By torch itself, as a function of one long vector of weights."""
    names, shapes = zip(*((name, p.shape) for name, p in network.named_parameters()), strict=True)
    sizes = [math.prod(shape) for shape in shapes]
    start = torch.cat([p.detach().flatten() for p in network.parameters()])
    modules = dict(network.named_modules())
    owners = [(modules[name.rpartition(".")[0]], name.rpartition(".")[2]) for name in names]

    def total(vector):
        for (module, name), piece, shape in zip(owners, vector.split(sizes), shapes, strict=True):
            del module._parameters[name]
            module._parameters[name] = piece.view(shape)
        return sum(loss() for loss in losses) / len(losses)

    kept = [module._parameters[name] for module, name in owners]
    try:
        return torch.autograd.functional.hessian(total, start)
    finally:
        for (module, name), parameter in zip(owners, kept, strict=True):
            module._parameters[name] = parameter


def test_a_small_network_agrees_with_its_dense_hessian():
    network, parameters, losses = small_network()
    hessian = dense_hessian(network, losses)
    size = len(hessian)
    product = partial(hessian_vector_product, losses, parameters)
    vector = torch.randn(size)
    torch.testing.assert_close(product(vector), hessian @ vector, rtol=1e-4, atol=1e-5)
    expected = np.linalg.eigvalsh(hessian.double().numpy())[::-1][:5]
    found = top_eigenvalues(product, size, 5, seed=0, device=CPU)
    np.testing.assert_allclose(found.values, expected, rtol=1e-4)
    assert found.products < size, "Lanczos needs fewer products than there are columns"
    samples = trace_samples(product, size, 400, seed=3, device=CPU, on_probe=lambda done: None)
    trace = Trace.of(samples)
    assert abs(trace.mean - hessian.trace().item()) < 4 * trace.standard_error


def test_the_largest_eigenvalues_are_the_algebraically_largest():
    values = torch.tensor([-50.0, 7.0, 3.0, 2.0, 1.0, 0.5, -1.0, 0.0])
    found = top_eigenvalues(lambda v: values * v, 8, 3, seed=0, device=CPU)
    np.testing.assert_allclose(found.values, [7.0, 3.0, 2.0], rtol=1e-4)
    assert found.values == top_eigenvalues(lambda v: values * v, 8, 3, seed=0, device=CPU).values


def test_the_trace_of_a_diagonal_is_exact_with_every_probe():
    """Signs square to one, so nothing is left to chance."""
    values, reported = torch.tensor([1.0, 2.0, 3.5]), []
    samples = trace_samples(lambda v: values * v, 3, 4, seed=0, device=CPU, on_probe=reported.append)
    assert samples.tolist() == [6.5] * 4
    assert reported == [1, 2, 3, 4]
    assert Trace.of(samples) == Trace(6.5, 0.0)


def test_the_standard_error_is_that_of_the_mean():
    trace = Trace.of(np.array([1.0, 3.0, 5.0, 7.0]))
    assert trace.mean == 4.0
    assert trace.standard_error == pytest.approx(math.sqrt(20 / 3) / 2)
    assert math.isnan(Trace.of(np.array([1.0])).standard_error)


def test_eigenvalues_that_do_not_converge_are_an_error_with_a_way_out(monkeypatch):
    def gives_up(*_, **__):
        raise linalg.ArpackNoConvergence("no convergence", np.array([3.0]), np.zeros((8, 1)))

    monkeypatch.setattr(curvature, "eigsh", gives_up)
    with pytest.raises(RunError) as error:
        top_eigenvalues(lambda v: v, 8, 5, seed=0, device=CPU)
    assert error.value.code == "eigenvalues-not-converged"
    assert "only 1" in error.value.why
    assert "--eigenvalues" in error.value.fix


@pytest.mark.parametrize("factor", [0.0, math.nan, math.inf])
def test_a_hessian_of_nothing_or_of_a_diverged_model_is_told(factor):
    with pytest.raises(RunError) as error:
        top_eigenvalues(lambda v: v * factor, 50, 2, seed=0, device=CPU)
    assert error.value.code == "no-eigenvalues"
    assert "--eigenvalues 0" in error.value.fix


def test_no_more_eigenvalues_than_weights():
    with pytest.raises(RunError) as error:
        top_eigenvalues(lambda v: v, 8, 8, seed=0, device=CPU)
    assert error.value.code == "too-many-eigenvalues"


# -- networks and losses -----------------------------------------------------------------------------------------

VOCABULARY = Vocabulary(["liver", "spleen"])
KINDS = ("channels", "heads", "task_blocks", "decoders", "encoders")


def check_by_differences(parameters, loss, step: float, tolerance: float) -> None:
    """H·v is how the gradient changes along v; along the gradient, where it changes most clearly."""
    _, gradient = loss_and_gradient([loss], parameters)
    product = hessian_vector_product([loss], parameters, gradient)
    pieces = gradient.split([p.numel() for p in parameters])
    before = [p.detach().clone() for p in parameters]
    gradients = []
    for sign in (1, -1):
        with torch.no_grad():
            for p, start, piece in zip(parameters, before, pieces, strict=True):
                p.copy_(start + sign * step * piece.view_as(p))
        gradients.append(loss_and_gradient([loss], parameters)[1])
    differences = (gradients[0] - gradients[1]) / (2 * step)
    error = (product - differences).norm() / differences.norm()
    assert error < tolerance, f"relative error {error:.2e}"


def segmentation(kind: str, patch: int, device: torch.device = CPU, **changes):
    """Weights of a network of a kind in double precision, and a smooth function of its logits."""
    torch.manual_seed(1)
    settings = UNetSettings(**{"features": (4, 8), "organs": kind, **changes})
    network = UNet(VOCABULARY, settings) if kind == "channels" else organ_network(VOCABULARY, settings)
    network = network.to(device, torch.float64).eval()
    use_plain_norms(network)
    image = torch.randn(2, 1, *(patch,) * 3, device=device, dtype=torch.float64)
    weights = torch.randn(2, 1, *(patch,) * 3, device=device, dtype=torch.float64)
    return list(network.parameters()), lambda: (network(image).sigmoid() * weights).mean()


# The steps are so small that no voxel crosses the kink of a leaky ReLU, which has no second derivative.


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_network_can_be_derived_twice(kind):
    check_by_differences(*segmentation(kind, 8), step=1e-6, tolerance=1e-4)


@pytest.mark.parametrize(
    "changes",
    [{"norm": "group", "groups": 4}, {"norm": "batch"}, {"residual": True}, {"weight_standardisation": True}],
    ids=lambda changes: next(iter(changes)),
)
def test_normalisations_and_blocks_can_be_derived_twice(changes):
    check_by_differences(*segmentation("channels", 8, **changes), step=1e-6, tolerance=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu_too(kind):
    """With patches so large that kernels of our own would take over."""
    check_by_differences(*segmentation(kind, 64, torch.device("cuda")), step=1e-6, tolerance=1e-3)


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_the_loss_can_be_derived_twice(activation):
    torch.manual_seed(0)
    channels = 3 if activation == "softmax" else 2
    logits = torch.randn(2, channels, 2, 2, 2, requires_grad=True)
    masks = torch.rand(2, 3, 2, 2, 2) > 0.6
    annotated = torch.tensor([[True, False, False], [True, True, False]])
    batch = Batch(torch.zeros(2, 1, 2, 2, 2), masks, annotated, ("liver", "spleen", "kidney"), ("a", "b"))

    def loss():
        return partial_dice_ce(logits, batch, VOCABULARY, activation).mean()

    check_by_differences([logits], loss, step=1e-2, tolerance=1e-2)


class _FastNorm(nn.modules.instancenorm._InstanceNorm):
    """Stands for a normalisation that can be derived only once."""

    def forward(self, input):
        raise AssertionError("still in use")


def test_fast_norms_are_replaced_by_plain_ones_with_the_same_weights():
    fast = _FastNorm(3, affine=True)
    nn.init.normal_(fast.weight)
    network = nn.Sequential(nn.Sequential(fast), nn.InstanceNorm3d(3, affine=True), nn.BatchNorm3d(3)).eval()
    image = torch.randn(2, 3, 4, 4, 4)
    expected = nn.functional.instance_norm(image, weight=fast.weight, bias=fast.bias)
    others = list(network)[1:]
    use_plain_norms(network)
    assert isinstance(network[0][0], PlainInstanceNorm)
    assert network[0][0].weight is fast.weight
    assert not network[0][0].training
    assert list(network)[1:] == others
    assert torch.equal(network[0](image), expected)
