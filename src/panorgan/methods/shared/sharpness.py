"""The SAM family: step by the gradient at a perturbed point. A piece for methods (`fedasam`, `ufps`, presets).

Ascend along one gradient, take the gradient there, come back, let the optimiser step::

    self.compute_gradients(augmented)
    with ascend(self.model, rho, eta):
        loss = self.compute_gradients(batch)
    self.apply_gradients()

SAM (arXiv:2010.01412) perturbs by ε = ρ g/‖g‖. ASAM (arXiv:2102.11600) measures in the scale of the weights,
T = |w| + η: ε = ρ T² g/‖T g‖. UFPS perturbs only the weights that a mask selects (its eq. 14).

Gradients and masks of a model are flat, [n]: all values of all parameters, in the order of `model.parameters()`. A
parameter without a gradient counts as one whose gradient is zero, so that order and length are the same at every site.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType

import torch
from torch import nn

from panorgan.errors import RunError
from panorgan.methods.base import SiteRule
from panorgan.preparation.batch import Batch


def asam_step(rule: SiteRule, batch: Batch, rho: float, eta: float) -> torch.Tensor:
    """Both gradients on the same batch, with the rule's loss; returns the loss at w, as a plain step does.

    Gradient at w → ε = ρ T² g/‖T g‖, T = |w| + η → gradient at w + ε → the optimiser steps with it from w. With ρ = 0
    it is a plain step, bit for bit and at the cost of one.
    """
    loss = rule.compute_gradients(batch)
    if rho > 0:
        with ascend(rule.model, rho, eta), preserve_statistics(rule.model):
            rule.compute_gradients(batch)
    rule.apply_gradients()
    return loss


@contextmanager
def preserve_statistics(model: nn.Module) -> Iterator[None]:
    """Restore every buffer: a forward pass inside leaves no trace in running statistics.

    Of the two passes of a step, the one at w counts: the model stays there and never at w + ε. Copies are restored
    instead of setting BatchNorm's momentum to 0, which would still count the batch, and would not help with a mean over
    all batches (momentum None). In training, layers normalise by the batch and not by these statistics, so gradients
    are the same.
    """
    buffers = list(model.buffers())
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)


# -- perturb and restore ---------------------------------------------------------------------------------------------


def flat_gradient(model: nn.Module) -> torch.Tensor:
    """The gradients of all parameters, copied, [n]."""
    return _flat(torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters())


class Perturbation:
    """Perturbed weights, until `undo`. As a context manager it undoes itself, also after an error."""

    def __init__(self, parameters: list[torch.Tensor], home: torch.Tensor) -> None:
        self._parameters = parameters
        # A copy of the weights, because (w + ε) − ε is not w in floating point.
        self._home: torch.Tensor | None = home

    def undo(self) -> None:
        """Restore every weight bit for bit. A second call does nothing."""
        if self._home is not None:
            _write(self._parameters, self._home)
            self._home = None

    def __enter__(self) -> Perturbation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


@torch.no_grad()
def ascend(
    model: nn.Module,
    rho: float,
    eta: float = 0.0,
    *,
    mask: torch.Tensor | None = None,
    adaptive: bool = True,
    scale_biases: bool = True,
    draws: torch.Generator | None = None,
) -> Perturbation:
    """Move the weights of a model by ε along the gradients that it holds.

    Parameters
    ----------
    rho : length of ε (in the scale of the weights when adaptive). With 0 nothing changes.
    eta : keeps weights near zero mobile, T = |w| + η. Only when adaptive.
    mask : [n] bool, the weights to perturb; all by default. The norm is that of the *whole* gradient: the mask
        multiplies ε and does not stretch it (eq. 14, and so does the convergence proof). A sparse ε is shorter.
    adaptive : ASAM; otherwise SAM.
    scale_biases : T = |w| + η for biases too. Otherwise T = 1 for them, as in the code released with ASAM.
    draws : on the model's device; with it ε keeps its length and has a random direction.
    """
    parameters: list[torch.Tensor] = list(model.parameters())
    home = _flat(parameters)
    perturbation = Perturbation(parameters, home)
    if mask is not None and mask.shape != home.shape:
        raise RunError(
            "A mask does not fit the model.",
            code="mask-does-not-fit",
            why=f"The mask has the shape {list(mask.shape)}, and the model has {len(home)} values.",
        )
    if rho == 0:  # even w + 0 may change a bit: −0 becomes +0
        return perturbation
    weights = home.to(torch.promote_types(home.dtype, torch.float32))
    step = flat_gradient(model).to(weights)
    scale = weights.abs().add_(eta) if adaptive else None
    if scale is not None:
        if not scale_biases:
            _unscale_biases(scale, model)
        step *= scale
    norm = _norm(step)
    step *= torch.where(norm > 0, rho / norm, 0.0)  # no direction without a gradient
    if scale is not None:
        step *= scale
    if draws is not None:
        direction = torch.randn(step.shape, generator=draws, device=step.device, dtype=step.dtype)
        step = direction * (_norm(step) / _norm(direction))
    step += weights
    _write(parameters, step if mask is None else torch.where(mask, step, weights, out=step))
    return perturbation


def _unscale_biases(scale: torch.Tensor, model: nn.Module) -> None:
    """Write 1 where flat values [n] belong to biases."""
    named = list(model.named_parameters())
    for (name, _), piece in zip(named, scale.split([parameter.numel() for _, parameter in named]), strict=True):
        if name.rpartition(".")[2] == "bias":
            piece.fill_(1.0)


def _flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _norm(values: torch.Tensor) -> torch.Tensor:
    """‖values‖. On a CPU in short pieces: one float is too coarse to accumulate millions of squares, and pieces too
    short to split among threads give the same bits with any number of threads."""
    norms = [torch.linalg.vector_norm(piece) for _, piece in pieces(values, 1 << 14)]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


@torch.no_grad()
def _write(parameters: list[torch.Tensor], values: torch.Tensor) -> None:
    """Overwrite parameters by flat values [n]."""
    pieces = values.split([parameter.numel() for parameter in parameters])
    torch._foreach_copy_(parameters, [piece.view(p.shape) for piece, p in zip(pieces, parameters, strict=True)])
    # Within an outer autocast, the next forward pass would use half-precision copies of the old weights.
    torch.clear_autocast_cache()


def pieces(values: torch.Tensor, length: int) -> Iterable[tuple[int, torch.Tensor]]:
    """(start, slice) one after another on a CPU; other devices get everything at once."""
    length = length if values.device.type == "cpu" else len(values)
    return ((start, values[start : start + length]) for start in range(0, len(values), length))
