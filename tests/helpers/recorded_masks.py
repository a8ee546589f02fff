"""Pairs of masks that are the same on every machine, for scores that were written down once."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Pair = tuple[str, NDArray[np.bool_], NDArray[np.bool_], tuple[float, ...]]
"""Name, prediction, truth, spacing."""


def blobs(seed: int, shape: tuple[int, ...]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Two overlapping ellipsoids with ragged edges, one of them cut by the image border."""
    generator = np.random.default_rng(seed)
    grid = np.stack(np.meshgrid(*(np.linspace(-1, 1, n) for n in shape), indexing="ij"))
    masks = []
    for _ in range(2):
        centre = generator.uniform(-0.5, 0.5, len(shape)).reshape(-1, *[1] * len(shape))
        masks.append(((grid - centre) ** 2).sum(axis=0) + generator.uniform(0, 0.2, shape) < 0.45)
    return masks[0], masks[1]


def recorded_masks() -> Iterator[Pair]:
    """Ragged blobs in 3D and 2D, on anisotropic and rounded spacings, and every way in which a mask can be empty."""
    for seed in range(4):
        yield f"3d-{seed}", *blobs(seed, (9, 17, 15)), (3.0, 0.8, 1.3)
        yield f"2d-{seed}", *blobs(seed, (24, 31)), (float(np.float32(0.7)), 2.0)
    mask, _ = blobs(4, (9, 17, 15))
    empty, full = np.zeros_like(mask), np.ones_like(mask)
    whole = {"itself": (mask, mask), "nothing": (empty, empty), "not-found": (empty, mask), "made-up": (mask, empty)}
    for name, (prediction, truth) in {**whole, "full": (full, mask), "too-small": (mask, full)}.items():
        yield name, prediction, truth, (2.5, 1.0, 1.0)
