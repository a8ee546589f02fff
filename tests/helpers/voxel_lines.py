"""One sample, a line of voxels: for labels that are checked by hand."""

from __future__ import annotations

from dataclasses import replace

import torch

from panorgan.preparation.batch import Batch


def make_batch(
    structures: tuple[str, ...], masks: list, annotated: list, teachers: dict[str, list] | None = None
) -> Batch:
    """Masks [T][voxels], annotated [T], and what teachers say about each voxel."""
    mask = torch.tensor([masks], dtype=torch.bool)
    batch = Batch(torch.zeros(1, 1, mask.shape[-1]), mask, torch.tensor([annotated]), structures, ("case",))
    if not teachers:
        return batch
    soft_targets = torch.tensor([list(teachers.values())], dtype=torch.float32)
    return replace(
        batch,
        soft_targets=soft_targets,
        soft_target_organs=tuple(teachers),
        soft_targets_valid=torch.ones(1, len(teachers), dtype=torch.bool),
    )
