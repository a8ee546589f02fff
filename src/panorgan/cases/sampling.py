"""Training patches from stored cases: foreground-biased, deterministic, cut from memory maps."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, PositiveInt

from panorgan.cases.store import MOST_STRUCTURES, StoredCase
from panorgan.errors import DataError
from panorgan.settings import Settings


class SamplingSettings(Settings):
    """How patches are drawn."""

    patch_size: tuple[PositiveInt, PositiveInt, PositiveInt] = Field(
        (64, 64, 64), description="voxels (R, A, S) on the plan's grid"
    )
    batch_size: int = Field(2, ge=1)
    foreground: float = Field(0.66, ge=0, le=1, description="share of patches centred on an annotated structure")


@dataclass(frozen=True)
class Batch:
    """A training batch.

    Parameters
    ----------
    image : [B, 1, *S] float.
    masks : [B, T, *S] bool, one channel per structure of `structures`; meaningful where annotated.
    annotated : [B, T] bool; False means unknown, whatever the mask says.
    structures : the T structure names.
    cases : which case each sample came from.
    """

    image: torch.Tensor
    masks: torch.Tensor
    annotated: torch.Tensor
    structures: tuple[str, ...]
    cases: tuple[str, ...]

    def assuming_unknown_is_absent(self) -> Batch:
        """Every structure counts as annotated, unknown ones as empty: what a naive pooling of labels does."""
        masks = self.masks & self.annotated[(...,) + (None,) * (self.masks.ndim - 2)]
        return replace(self, masks=masks, annotated=torch.ones_like(self.annotated))


@dataclass(frozen=True)
class PackedBatch:
    """A batch as it is cut from the store: label bits instead of masks, to move and augment little data.

    `image` [B, 1, *S] float32, `bits` [B, *S] int64 with bit t for `structures[t]`, `annotated` [B, T] bool.
    """

    image: torch.Tensor
    bits: torch.Tensor
    annotated: torch.Tensor
    structures: tuple[str, ...]
    cases: tuple[str, ...]

    def to(self, device: torch.device) -> PackedBatch:
        """The same batch on a device."""
        if device.type == "cpu":
            return self
        # Copying while the device computes needs pinned memory, which is CUDA's.
        pinned = device.type == "cuda"

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.pin_memory().to(device, non_blocking=True) if pinned else tensor.to(device)

        return replace(self, image=move(self.image), bits=move(self.bits), annotated=self.annotated.to(device))

    def unpack(self) -> Batch:
        """One boolean mask per structure."""
        shape = (1, len(self.structures)) + (1,) * (self.bits.ndim - 1)
        places = torch.arange(len(self.structures), device=self.bits.device).view(shape)
        masks = (self.bits.unsqueeze(1) >> places) & 1 != 0
        return Batch(self.image, masks, self.annotated, self.structures, self.cases)


class PatchSampler:
    """Draws batches of patches from a site's training cases."""

    def __init__(self, cases: Sequence[StoredCase], structures: tuple[str, ...], settings: SamplingSettings) -> None:
        if not cases:
            raise DataError(
                "There is nothing to train on.",
                why="the training split is empty",
                fix="Add cases to the site, or lower 'splits.validation' and 'splits.test'.",
            )
        if len(structures) > MOST_STRUCTURES:
            raise DataError(
                f"The training cases annotate {len(structures)} structures; {MOST_STRUCTURES} is the most.",
                why="label bits of one batch share a 64-bit integer",
                fix="Restrict 'annotated' of the site.",
            )
        self.cases = sorted(cases, key=lambda case: (case.site, case.id))
        self.structures = structures
        self.settings = settings

    def batches(self, steps: int, seed: int) -> Iterator[PackedBatch]:
        """`steps` batches that depend on `seed` alone."""
        random = np.random.default_rng(seed)
        for _ in range(steps):
            chosen = [self.cases[random.integers(len(self.cases))] for _ in range(self.settings.batch_size)]
            patches = [self._patch(case, random) for case in chosen]
            yield PackedBatch(
                image=torch.from_numpy(np.stack([image for image, _ in patches]))[:, None],
                bits=torch.from_numpy(np.stack([bits for _, bits in patches])),
                annotated=torch.tensor(
                    [[name in case.structures for name in self.structures] for case in chosen], dtype=torch.bool
                ),
                structures=self.structures,
                cases=tuple(case.id for case in chosen),
            )

    def _patch(self, case: StoredCase, random: np.random.Generator) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Image and label bits of one patch, padded where the case is smaller."""
        size = np.array(self.settings.patch_size)
        shape = np.array(case.image.shape)
        present = [name for name in case.foreground if name in self.structures]
        if present and random.random() < self.settings.foreground:
            positions = case.foreground[present[random.integers(len(present))]]
            # Off-centre by up to a quarter patch, so that the structure is not always in the middle.
            centre = positions[random.integers(len(positions))] + random.integers(-(size // 4), size // 4 + 1)
        else:
            centre = random.integers(0, shape)
        start = np.clip(centre - size // 2, 0, np.maximum(shape - size, 0))
        window = tuple(slice(a, min(a + n, m)) for a, n, m in zip(start, size, shape, strict=True))
        image = np.asarray(case.image[window], dtype=np.float32)
        bits = self._common_bits(np.asarray(case.labels[window]), case)
        missing = size - image.shape
        if missing.any():
            pad = [(m // 2, m - m // 2) for m in missing]
            image, bits = np.pad(image, pad, constant_values=-1.0), np.pad(bits, pad)
        return image, bits

    def _common_bits(self, bits: NDArray[Any], case: StoredCase) -> NDArray[np.int64]:
        """Move the case's own bit places to those of `structures`."""
        common = np.zeros(bits.shape, dtype=np.int64)
        for own, name in enumerate(case.structures):
            if name in self.structures:
                common |= ((bits >> own) & 1).astype(np.int64) << self.structures.index(name)
        return common


def prefetched(batches: Iterator[PackedBatch], ahead: int = 4) -> Iterator[PackedBatch]:
    """The same batches in the same order, cut by a background thread while the device works."""
    ready: queue.Queue[PackedBatch | BaseException | None] = queue.Queue(maxsize=ahead)
    stop = threading.Event()

    def put(item: PackedBatch | BaseException | None) -> bool:
        while not stop.is_set():
            try:
                ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for batch in batches:
                if not put(batch):
                    return
            put(None)
        except BaseException as error:  # handed over and raised where the batches are used
            put(error)

    thread = threading.Thread(target=work, name="patches", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stop.set()
        thread.join()
