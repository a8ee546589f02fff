"""The same data path made of MONAI's dictionary transforms, for `data_pipeline.py` to compare with."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.data import CacheDataset, DataLoader, Dataset, PersistentDataset
from monai.transforms import (
    Compose,
    EnsureChannelFirstd,
    EnsureTyped,
    FgBgToIndicesd,
    LoadImaged,
    Orientationd,
    RandAdjustContrastd,
    RandAffined,
    RandCropByPosNegLabeld,
    RandGaussianNoised,
    RandGaussianSmoothd,
    RandScaleIntensityd,
    RandShiftIntensityd,
    ScaleIntensityRanged,
    Spacingd,
    SpatialPadd,
)
from torch.utils.data import RandomSampler

from panorgan.data.case import Case
from panorgan.preparation.augment import AugmentSettings
from panorgan.preparation.plan import Plan
from panorgan.preparation.sampling import SamplingSettings

BOTH = ("image", "label")
# The standard deviation of a 3-tap mean, which is panorgan's blur.
BLUR_SIGMA = math.sqrt(2 / 3)


class MonaiPipelines:
    """Loaders over the same files, with the same ranges of augmentation, and what it cost to set them up."""

    def __init__(
        self,
        cases: Sequence[Case],
        plan: Plan,
        sampling: SamplingSettings,
        augment: AugmentSettings,
        workers: int,
        folder: Path,
    ) -> None:
        self.files = [{"image": str(case.image), "label": str(case.labels.paths[0])} for case in cases if case.labels]
        self.plan, self.sampling, self.augment = plan, sampling, augment
        self.workers, self.folder = workers, folder
        self.seconds: dict[str, float] = {}
        """Seconds to prepare all cases, by kind of caching."""
        self.memory_bytes = 0
        """What `CacheDataset` holds in memory."""

    def from_files(self, visits: int) -> DataLoader:
        """Every visit reads and prepares the NIfTI files again."""
        return self._loader(Dataset(self.files, Compose([*self._prepare(), *self._random()])), visits)

    def persistent(self, visits: int) -> DataLoader:
        """Prepared scans on disk, as one file each."""
        transform = Compose([*self._prepare(), *self._random()])
        dataset = PersistentDataset(self.files, transform, cache_dir=self.folder)
        began = time.perf_counter()
        for item in dataset.data:
            dataset._cachecheck(item)
        self.seconds["persistent"] = time.perf_counter() - began
        return self._loader(dataset, visits)

    def cached(self, visits: int) -> DataLoader:
        """Prepared scans in memory, with the positions of their foreground."""
        steps = [*self._prepare(), FgBgToIndicesd("label"), *self._random("label_fg_indices", "label_bg_indices")]
        began = time.perf_counter()
        dataset = CacheDataset(self.files, Compose(steps), num_workers=self.workers, progress=False, copy_cache=False)
        self.seconds["cached"] = time.perf_counter() - began
        self.memory_bytes = sum(_size(value) for item in dataset._cache for value in item.values())
        return self._loader(dataset, visits)

    def _loader(self, dataset: Dataset, visits: int) -> DataLoader:
        """One visit of a scan gives one batch; one pass of the loader makes `visits`."""
        sampler = RandomSampler(dataset, replacement=True, num_samples=visits)
        return DataLoader(
            dataset, batch_size=1, sampler=sampler, num_workers=self.workers, persistent_workers=self.workers > 0
        )

    def _prepare(self) -> list[Any]:
        """What is the same every time. Plain tensors from here on: tracking metadata through random steps is slow."""
        low, high = self.plan.window_hu
        return [
            LoadImaged(BOTH, reader="NibabelReader"),
            EnsureChannelFirstd(BOTH),
            Orientationd(BOTH, axcodes="RAS", labels=None),
            Spacingd(BOTH, pixdim=self.plan.spacing_mm, mode=("bilinear", "nearest")),
            ScaleIntensityRanged("image", low, high, -1.0, 1.0, clip=True),
            SpatialPadd(BOTH, self.sampling.patch_size),
            EnsureTyped(BOTH, track_meta=False),
        ]

    def _random(self, foreground: str | None = None, background: str | None = None) -> list[Any]:
        """Cropping and augmentation, with panorgan's ranges and probabilities."""
        change, share = self.augment, self.sampling.foreground
        angle = math.radians(change.rotation_degrees)
        return [
            RandCropByPosNegLabeld(
                BOTH,
                "label",
                self.sampling.patch_size,
                pos=share,
                neg=1 - share,
                num_samples=self.sampling.batch_size,
                fg_indices_key=foreground,
                bg_indices_key=background,
            ),
            RandAffined(
                BOTH,
                prob=change.geometry_probability,
                rotate_range=(angle,) * 3,
                scale_range=(change.scale,) * 3,
                mode=("bilinear", "nearest"),
                padding_mode="border",
            ),
            RandAdjustContrastd("image", prob=1.0, gamma=(1 - change.gamma, 1 + change.gamma)),
            RandScaleIntensityd("image", factors=change.contrast, prob=1.0),
            RandShiftIntensityd("image", offsets=change.brightness, prob=1.0),
            RandGaussianSmoothd("image", *((BLUR_SIGMA, BLUR_SIGMA),) * 3, prob=change.blur_probability),
            RandGaussianNoised("image", prob=1.0, std=change.noise),
        ]


def _size(value: Any) -> int:
    """Bytes of a tensor or array, 0 of anything else."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return value.nbytes if isinstance(value, np.ndarray) else 0
