"""Training patches from stored cases: foreground-biased, deterministic, cut from memory maps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, PositiveInt, field_validator

from panorgan.errors import DataError
from panorgan.preparation.batch import PackedBatch
from panorgan.preparation.store import MOST_STRUCTURES, StoredCase, bits_type
from panorgan.preparation.teacher_predictions import TeacherPredictions
from panorgan.seeds import derive_seed
from panorgan.settings import SettingError, Settings


class SamplingSettings(Settings):
    """How patches are drawn."""

    patch_size: tuple[PositiveInt, PositiveInt, PositiveInt] = Field(
        (64, 64, 64), description="voxels (R, A, S) on the plan's grid; 1 along an axis cuts slices across it"
    )
    batch_size: int = Field(2, ge=1)
    foreground: float = Field(0.66, ge=0, le=1, description="share of patches centred on the foreground")
    foreground_is: Literal["annotated", "tissue"] = Field(
        "annotated",
        description="annotated: an annotated structure; tissue: any voxel above the middle of the window (HU > 0 in "
        "one of [-500, 500]), and all other patches are then centred on voxels that are not",
    )

    @field_validator("patch_size")
    @classmethod
    def _at_most_one_slice(cls, size: tuple[int, int, int]) -> tuple[int, int, int]:
        if size.count(1) > 1:
            raise SettingError(
                "only one axis may be 1: [64, 64, 1] are slices across the third axis", code="several-flat-axes"
            )
        return size


def sliced_axis(patch_size: tuple[int, ...]) -> int | None:
    """The axis (0 = R, 1 = A, 2 = S) across which patches are single slices; None for patches with a volume."""
    return patch_size.index(1) if 1 in patch_size else None


def patches_per_pass(cases: Sequence[StoredCase], patch_size: tuple[int, ...]) -> int:
    """The number of patches in one pass over the cases: one per case, or all slices."""
    axis = sliced_axis(patch_size)
    return len(cases) if axis is None else sum(case.shape[axis] for case in cases)


# Voxels that are looked at for a centre in tissue: of a scan with a hundredth of it, nine in ten searches find some.
_TRIES = 256

Place = tuple[tuple[slice, ...], tuple[slice, ...]]
"""The part of a case that a patch covers, and where that part lies in the patch."""


class PatchSampler:
    """Draws batches of patches from a site's training cases, with teachers' predictions if there are any."""

    def __init__(
        self,
        cases: Sequence[StoredCase],
        structures: tuple[str, ...],
        settings: SamplingSettings,
        predictions: TeacherPredictions | None = None,
    ) -> None:
        if not cases:
            raise DataError(
                "There is nothing to train on.",
                code="nobody-to-train-on",
                why="the training split is empty",
                fix="Add cases to the site, or lower 'splits.validation' and 'splits.test'.",
            )
        if len(structures) > MOST_STRUCTURES:
            raise DataError(
                f"The training cases annotate {len(structures)} structures; {MOST_STRUCTURES} is the most.",
                code="too-many-structures",
                why="label bits of one batch share a 64-bit integer",
                fix="Restrict 'annotated' of the site.",
            )
        self.cases = sorted(cases, key=lambda case: (case.site, case.id))
        self.structures = structures
        self.settings = settings
        self.predictions = predictions if predictions is not None and predictions.names else None
        self._channels = self.cases[0].channels
        self._sliced = sliced_axis(settings.patch_size)
        self._axes = tuple(axis for axis in range(3) if axis != self._sliced)

    def batches(self, steps: int, seed: int) -> Iterator[PackedBatch]:
        """`steps` batches that depend on `seed` alone; patches are the same with and without soft targets."""
        random, drawing = np.random.default_rng(seed), np.random.default_rng(derive_seed(seed, "companions"))
        for _ in range(steps):
            chosen = [self.cases[random.integers(len(self.cases))] for _ in range(self.settings.batch_size)]
            images, bits = self._empty(len(chosen))
            places = [
                self._cut(case, random, image, labels) for case, image, labels in zip(chosen, images, bits, strict=True)
            ]
            if self._sliced is not None:
                images, bits = images.squeeze(2 + self._sliced), bits.squeeze(1 + self._sliced)
            batch = PackedBatch(
                image=torch.from_numpy(images),
                bits=torch.from_numpy(bits),
                annotated=torch.tensor(
                    [[name in case.structures for name in self.structures] for case in chosen], dtype=torch.bool
                ),
                structures=self.structures,
                cases=tuple(case.id for case in chosen),
                spacing=torch.tensor([[case.spacing[axis] for axis in self._axes] for case in chosen]),
                axes=self._axes,
            )
            if self._sliced is not None:
                batch = self._with_depth(batch, self._sliced, chosen, places)
            yield batch if self.predictions is None else self._with_soft_targets(batch, chosen, places, drawing)

    def _with_depth(
        self, batch: PackedBatch, axis: int, chosen: Sequence[StoredCase], places: Sequence[Place]
    ) -> PackedBatch:
        """The batch with each sample's slice number along `axis`."""
        slices = torch.tensor([int(window[axis].start) for window, _ in places])
        return replace(batch, slices=slices, depths=torch.tensor([case.shape[axis] for case in chosen]))

    def _with_soft_targets(
        self, batch: PackedBatch, chosen: Sequence[StoredCase], places: Sequence[Place], random: np.random.Generator
    ) -> PackedBatch:
        """The batch with the teachers' predictions of the same patches; 0 where a patch reaches beyond its case."""
        predictions = self.predictions
        assert predictions is not None
        names = predictions.draw(chosen, random)
        soft_targets = np.zeros((len(chosen), len(names), *self.settings.patch_size), dtype=predictions.dtype)
        for case, patch, (window, inside) in zip(chosen, soft_targets, places, strict=True):
            patch[(slice(None), *inside)] = predictions.cut(case, names, window)
        if self._sliced is not None:
            soft_targets = soft_targets.squeeze(2 + self._sliced)
        known = [[name in predictions.names_of(case) for name in names] for case in chosen]
        return replace(
            batch,
            soft_targets=torch.from_numpy(soft_targets),
            soft_target_organs=names,
            soft_targets_valid=torch.tensor(known, dtype=torch.bool),
        )

    def _empty(self, count: int) -> tuple[NDArray[np.float32], NDArray[Any]]:
        """Room for the images [count, C, X, Y, Z] and the bits [count, X, Y, Z] of patches."""
        size = self.settings.patch_size
        images = np.empty((count, self._channels, *size), dtype=np.float32)
        return images, np.empty((count, *size), dtype=bits_type(len(self.structures)))

    def _cut(
        self, case: StoredCase, random: np.random.Generator, image: NDArray[np.float32], bits: NDArray[Any]
    ) -> Place:
        """Write one patch into `image` [C, X, Y, Z] and `bits`, in their middle where the case is smaller."""
        size = np.array(self.settings.patch_size)
        shape = np.array(case.shape)
        centre = self._centre(case, random, size, shape)
        start = np.clip(centre - size // 2, 0, np.maximum(shape - size, 0))
        window = tuple(slice(int(a), int(min(a + n, m))) for a, n, m in zip(start, size, shape, strict=True))
        found = np.minimum(size, shape)
        if (found < size).any():
            image.fill(-1.0)
            bits.fill(0)
        inside = tuple(slice(m // 2, m // 2 + n) for m, n in zip(size - found, found, strict=True))
        # Out of the memory map first, then torch: it widens half precision many times faster than NumPy.
        halves = torch.from_numpy(np.array(case.part(window)))
        torch.from_numpy(image[(slice(None), *inside)]).copy_(halves)
        bits[inside] = self._common_bits(np.asarray(case.labels[window]), case)
        return window, inside

    def _centre(
        self, case: StoredCase, random: np.random.Generator, size: NDArray[Any], shape: NDArray[Any]
    ) -> NDArray[Any]:
        """The centre of a patch, before the patch is moved inside its case."""
        if self.settings.foreground_is == "tissue":
            return _voxel_of_tissue(case, random, shape, wanted=bool(random.random() < self.settings.foreground))
        present = [name for name in case.foreground if name in self.structures]
        if present and random.random() < self.settings.foreground:
            positions = case.foreground[present[random.integers(len(present))]]
            # Off-centre by up to a quarter patch, so that the structure is not always in the middle.
            return np.asarray(positions[random.integers(len(positions))]) + random.integers(-(size // 4), size // 4 + 1)
        return random.integers(0, shape)

    def _common_bits(self, bits: NDArray[Any], case: StoredCase) -> NDArray[Any]:
        """Move the case's own bit places to those of `structures`."""
        if case.structures == self.structures[: len(case.structures)]:
            return bits
        kind = bits_type(len(self.structures))
        # Few structures have few combinations: a table is faster than moving bits voxel by voxel.
        own = np.arange(256, dtype=np.uint8) if bits.dtype == np.uint8 else bits
        common: NDArray[Any] = np.zeros(own.shape, dtype=kind)
        for place, name in enumerate(case.structures):
            if name in self.structures:
                inside: NDArray[Any] = ((own >> place) & 1).astype(kind)
                common |= inside << self.structures.index(name)
        return common[bits] if bits.dtype == np.uint8 else common


def _voxel_of_tissue(case: StoredCase, random: np.random.Generator, shape: NDArray[Any], wanted: bool) -> NDArray[Any]:
    """Draw a voxel that is above the middle of the window (or is not); any voxel if several draws fail."""
    drawn = random.integers(0, shape, size=(_TRIES, 3))
    for voxel in drawn:
        if bool(np.any(case.part(voxel) > 0)) == wanted:
            return np.asarray(voxel)
    return np.asarray(drawn[-1])


def whole_scan(case: StoredCase, patch_size: tuple[int, int, int]) -> PackedBatch:
    """A case as a network that trains on such patches sees it when nothing is drawn.

    All its slices in order, or of patches with a volume just one; of each the middle, cut or filled up to the size of a
    patch. The bits are those of the case's own structures, all of which are annotated.
    """
    axis = sliced_axis(patch_size)
    depth = 1 if axis is None else case.shape[axis]
    size = tuple(depth if along == axis else n for along, n in enumerate(patch_size))
    window, inside = zip(*(_middle(n, m) for n, m in zip(case.shape, size, strict=True)), strict=True)
    image = np.full((case.channels, *size), -1.0, dtype=np.float32)
    bits = np.zeros(size, dtype=case.labels.dtype)
    image[(slice(None), *inside)], bits[inside] = case.part(window), case.labels[window]
    # The slices become samples, or the whole of it the only one.
    if axis is None:
        image, bits = image[None], bits[None]
    else:
        image, bits = (np.ascontiguousarray(np.moveaxis(x, at, 0)) for x, at in ((image, 1 + axis), (bits, axis)))
    axes = tuple(along for along in range(3) if along != axis)
    return PackedBatch(
        image=torch.from_numpy(image),
        bits=torch.from_numpy(bits),
        annotated=torch.ones(depth, len(case.structures), dtype=torch.bool),
        structures=case.structures,
        cases=(case.id,) * depth,
        spacing=torch.tensor([[case.spacing[along] for along in axes]] * depth),
        axes=axes,
        slices=None if axis is None else torch.arange(depth),
        depths=None if axis is None else torch.full((depth,), depth),
    )


def _middle(length: int, wanted: int) -> tuple[slice, slice]:
    """Slices that align the centres of an axis and of a shorter or longer frame."""
    common = min(length, wanted)
    start, inside = (length - common) // 2, (wanted - common) // 2
    return slice(start, start + common), slice(inside, inside + common)
