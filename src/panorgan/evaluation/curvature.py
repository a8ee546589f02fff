"""The curvature of a loss around given weights: the Hessian's largest eigenvalues and its trace.

The Hessian H itself is never formed (it has a row per weight); products H·v cost about as much as two gradients. A loss
is the mean of several closures, one per batch: only one batch's graph is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse.linalg import ArpackError, ArpackNoConvergence, LinearOperator, eigsh

from panorgan.errors import RunError

Loss = Callable[[], torch.Tensor]
"""Computes the scalar loss of one batch from the weights as they are."""
Product = Callable[[torch.Tensor], torch.Tensor]
"""v [P] → H·v [P], where P counts the weights."""

_TOLERANCE = 1e-3
"""Of H·x = λ·x, relative; the error of λ goes with its square. Products in float32 carry about six digits."""
_RESTARTS = 100


@dataclass(frozen=True)
class Eigenvalues:
    """The largest eigenvalues, largest first, and the number of products."""

    values: tuple[float, ...]
    products: int


@dataclass(frozen=True)
class Trace:
    """The mean over random probes, and its standard error (NaN for a single probe)."""

    mean: float
    standard_error: float

    @classmethod
    def of(cls, samples: NDArray[np.float64]) -> Trace:
        """From vᵀHv of each probe."""
        spread = float(samples.std(ddof=1)) / len(samples) ** 0.5 if len(samples) > 1 else float("nan")
        return cls(float(samples.mean()), spread)


def loss_and_gradient(losses: Sequence[Loss], parameters: Sequence[torch.Tensor]) -> tuple[float, torch.Tensor]:
    """The mean loss and its gradient [P]."""
    total, gradient = 0.0, _zeros(parameters)
    for loss in losses:
        value = loss()
        gradient += _flat(torch.autograd.grad(value, parameters, allow_unused=True), parameters)
        total += value.item()
    return total / len(losses), gradient / len(losses)


def hessian_vector_product(
    losses: Sequence[Loss], parameters: Sequence[torch.Tensor], vector: torch.Tensor
) -> torch.Tensor:
    """H·v [P] of the mean loss for v [P]: the gradient of (gradient · v)."""
    pieces = _like(vector, parameters)
    product = _zeros(parameters)
    for loss in losses:
        gradients = torch.autograd.grad(loss(), parameters, create_graph=True, allow_unused=True)
        # A weight that the loss does not depend on (another site's head) has a row of zeros; so has one with a constant
        # gradient.
        seen = [(g, v) for g, v in zip(gradients, pieces, strict=True) if g is not None and g.requires_grad]
        if seen:
            along = torch.stack([(gradient * piece).sum() for gradient, piece in seen]).sum()
            product += _flat(torch.autograd.grad(along, parameters, allow_unused=True), parameters)
    return product / len(losses)


def top_eigenvalues(product: Product, size: int, count: int, seed: int, device: torch.device) -> Eigenvalues:
    """The `count` algebraically largest eigenvalues of a symmetric `size` × `size` operator, count < size.

    Lanczos with implicit restarts (ARPACK), started from a vector that depends on the seed alone.
    """
    if count >= size:
        raise RunError(
            f"{count} eigenvalues are requested of a Hessian of {size} weights.",
            code="too-many-eigenvalues",
            fix="Ask for fewer with --eigenvalues, such as 5.",
        )
    asked = 0

    def multiply(vector: NDArray[np.float32]) -> NDArray[np.float32]:
        nonlocal asked
        asked += 1
        moved = torch.from_numpy(np.ascontiguousarray(vector.ravel(), dtype=np.float32)).to(device)
        return product(moved).cpu().numpy()

    operator = LinearOperator((size, size), matvec=multiply, dtype=np.float32)
    start = np.random.default_rng(seed).standard_normal(size).astype(np.float32)
    try:
        values = eigsh(
            operator, count, which="LA", v0=start, tol=_TOLERANCE, maxiter=_RESTARTS, return_eigenvectors=False
        )
    except ArpackNoConvergence as error:
        raise RunError(
            f"The {count} largest eigenvalues of the Hessian were not found.",
            code="eigenvalues-not-converged",
            why=f"only {len(error.eigenvalues)} have converged after {asked} products",
            fix="Ask for fewer with --eigenvalues, or for other patches with --batches.",
        ) from error
    except ArpackError as error:
        raise RunError(
            "The Hessian has no eigenvalues that can be computed.",
            code="no-eigenvalues",
            why="products with it are all zero, or not finite: the model has diverged, or its loss does not change",
            fix="Look at the run's losses; --eigenvalues 0 leaves them out.",
        ) from error
    return Eigenvalues(tuple(sorted((float(value) for value in values), reverse=True)), asked)


def trace_samples(
    product: Product, size: int, probes: int, seed: int, device: torch.device, on_probe: Callable[[int], None]
) -> NDArray[np.float64]:
    """Hutchinson: vᵀHv for random signs v, [probes]; each has the trace of H as its expectation."""
    generator = torch.Generator().manual_seed(seed)  # on the CPU: the same signs on every device
    samples = np.empty(probes)
    for index in range(probes):
        signs = torch.randint(0, 2, (size,), generator=generator).mul_(2).sub_(1).to(device, torch.float32)
        samples[index] = torch.dot(signs.double(), product(signs).double()).item()
        on_probe(index + 1)
    return samples


def _zeros(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    return parameters[0].new_zeros(sum(parameter.numel() for parameter in parameters))


def _like(vector: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """[P] cut into pieces of the parameters' shapes."""
    pieces = vector.split([parameter.numel() for parameter in parameters])
    return [piece.view_as(parameter) for piece, parameter in zip(pieces, parameters, strict=True)]


def _flat(gradients: Sequence[torch.Tensor | None], parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """All gradients in one row [P]; zeros where there is none."""
    both = zip(gradients, parameters, strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g.detach()).reshape(-1) for g, p in both])
