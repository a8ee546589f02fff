"""Compare an exported network with the one it was made from, on the same random images."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from panorgan.errors import RunError
from panorgan.networks import SegmentationNetwork

TOLERANCE = 1e-3
"""No probability may differ by more; rounding differs by about a ten-thousandth of that."""
_THRESHOLD = 0.5
_SEED = 20_260


@dataclass(frozen=True)
class Agreement:
    """How an exported network agrees with its original.

    Attributes
    ----------
    max_difference : of any probability.
    voxels : compared.
    decided_otherwise : voxels in which the most probable channel (softmax), or an organ above one half, is another.
    """

    max_difference: float
    voxels: int
    decided_otherwise: int


@torch.no_grad()
def compare_networks(
    network: SegmentationNetwork,
    exported: Callable[[torch.Tensor], torch.Tensor],
    shapes: Sequence[tuple[int, ...]],
) -> Agreement:
    """Run both on images of these shapes [B, C, *S]; refuses an export that differs by more than rounding."""
    generator = torch.Generator().manual_seed(_SEED)
    softmax, device = network.activation == "softmax", next(network.parameters()).device
    largest, others, voxels = 0.0, 0, 0
    for shape in shapes:
        image = torch.rand(shape, generator=generator) * 2 - 1
        logits = network(image.to(device)).float().cpu()
        wanted = logits.softmax(1) if softmax else logits.sigmoid()
        found = exported(image)
        difference = float((wanted - found).abs().max()) if found.shape == wanted.shape else math.inf
        if not difference <= TOLERANCE:
            raise _differs(difference, shape)
        decided = [p.argmax(1) if softmax else (p >= _THRESHOLD).flatten(0, 1) for p in (wanted, found)]
        largest = max(largest, difference)
        others += int((decided[0] != decided[1]).sum())
        voxels += image[:, 0].numel()
    return Agreement(largest, voxels, others)


def _differs(difference: float, shape: tuple[int, ...]) -> RunError:
    return RunError(
        "The exported network gives other probabilities than the model.",
        code="export-differs",
        why=f"they differ by {difference:.3g} for an image of shape {shape}; {TOLERANCE:g} is allowed",
        fix="Nothing was kept. Export to another form, or report this with the versions of torch and onnxruntime.",
    )
