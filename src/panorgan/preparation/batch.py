"""Training batches: a few patches, or slices, with their annotation.

A batch has two forms, because it has two kinds of reader. Up to the end of augmentation the labels of a voxel are the
bits of one small integer (`PackedBatch`): cutting, copying and resampling cost the same for one structure as for eight.
Formulas need one mask per structure (`Batch`): a rule may read, change and replace masks, and a test can write them
down. `PackedBatch.unpack` is the only way from one to the other. A single class would have to hold both, or unpack
again after every change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from panorgan.preparation.teacher_predictions import as_probabilities


@dataclass(frozen=True)
class Batch:
    """A training batch as a site rule sees it.

    Parameters
    ----------
    image : [B, C, *S] float; C channels, of most scans one.
    masks : [B, T, *S] bool, one channel per structure of `structures`; meaningful where annotated.
    annotated : [B, T] bool; False means unknown, whatever the mask says.
    structures : the T structure names.
    cases : which case each sample came from.
    soft_targets : [B, E, *S] float32 in [0, 1], teachers' probabilities, one channel per name of
        `soft_target_organs`. None where a rule has no teachers' predictions.
    soft_targets_valid : [B, E] bool; False where a case has no such volume (it annotates the organ itself, say).
    slices, depths : [B] int64; sample b is slice `slices[b]`, from 0, of a case with `depths[b]` of them. None for
        patches with a volume.
    """

    image: torch.Tensor
    masks: torch.Tensor
    annotated: torch.Tensor
    structures: tuple[str, ...]
    cases: tuple[str, ...]
    soft_targets: torch.Tensor | None = None
    soft_target_organs: tuple[str, ...] = ()
    soft_targets_valid: torch.Tensor | None = None
    slices: torch.Tensor | None = None
    depths: torch.Tensor | None = None

    def assuming_unknown_is_absent(self) -> Batch:
        """The batch with every structure annotated and unknown ones empty, as in a naive pooling of labels."""
        masks = self.masks & self.annotated[(...,) + (None,) * (self.masks.ndim - 2)]
        return replace(self, masks=masks, annotated=torch.ones_like(self.annotated))


@dataclass(frozen=True)
class PackedBatch:
    """A batch as it is cut from the store, moved to the device and augmented: label bits instead of masks.

    `image` [B, C, *S] float32, `bits` [B, *S] integers (as narrow as they may be) with bit t for `structures[t]`,
    `annotated` [B, T] bool.
    `spacing` [B, D] float32, always on the CPU, is the voxel size in mm along the D axes of *S (None: all alike), and
    `axes` says which of R, A, S (0, 1, 2) those axes are: slices have two.
    `soft_targets` [B, E, *S]: levels (uint8, see `teacher_predictions`) or probabilities (float32).
    `slices` and `depths` [B] int64 say which slice of how many a sample is; None for patches with a volume.
    """

    image: torch.Tensor
    bits: torch.Tensor
    annotated: torch.Tensor
    structures: tuple[str, ...]
    cases: tuple[str, ...]
    spacing: torch.Tensor | None = None
    axes: tuple[int, ...] = (0, 1, 2)
    soft_targets: torch.Tensor | None = None
    soft_target_organs: tuple[str, ...] = ()
    soft_targets_valid: torch.Tensor | None = None
    slices: torch.Tensor | None = None
    depths: torch.Tensor | None = None

    def __len__(self) -> int:
        """The number of samples."""
        return len(self.image)

    def __getitem__(self, samples: slice) -> PackedBatch:
        """Some of the samples."""
        return replace(self._mapped(lambda tensor: tensor[samples]), cases=self.cases[samples])

    def to(self, device: torch.device) -> PackedBatch:
        """The same batch on a device; `spacing` stays where augmentation makes its numbers of it."""
        if device.type == "cpu":
            return self
        # Copying while the device computes needs pinned memory, which is CUDA's.
        ready = self.pinned() if device.type == "cuda" else self
        moved = replace(ready, spacing=None)._mapped(lambda tensor: tensor.to(device, non_blocking=True))
        return replace(moved, spacing=self.spacing)

    def pinned(self) -> PackedBatch:
        """The batch in pinned memory, from which CUDA copies asynchronously; unchanged if it is pinned already."""
        if self.image.is_pinned():
            return self
        return self._mapped(lambda tensor: tensor.pin_memory() if tensor.numel() else tensor)

    def _mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> PackedBatch:
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        changed: dict[str, Any] = {name: change(value) for name, value in tensors.items()}
        return replace(self, **changed)

    def unpack(self) -> Batch:
        """One boolean mask per structure."""
        shape = (1, len(self.structures)) + (1,) * (self.bits.ndim - 1)
        # Comparing with one flag per structure in the bits' own narrow type touches far less memory than shifting.
        flags = (1 << torch.arange(len(self.structures), device=self.bits.device)).to(self.bits.dtype).view(shape)
        masks = (self.bits.unsqueeze(1) & flags) != 0
        return Batch(
            image=self.image,
            masks=masks,
            annotated=self.annotated,
            structures=self.structures,
            cases=self.cases,
            soft_targets=None if self.soft_targets is None else as_probabilities(self.soft_targets),
            soft_target_organs=self.soft_target_organs,
            soft_targets_valid=self.soft_targets_valid,
            slices=self.slices,
            depths=self.depths,
        )
