"""Small volumes for the viewer, on a grid whose voxels are not cubes and whose axes run against the world's."""

from __future__ import annotations

from pathlib import Path

import nibabel as nib
import numpy as np

SHAPE = (20, 16, 12)
AFFINE = np.array([[-2.0, 0, 0, 30], [0, -1.5, 0, 20], [0, 0, 3, -40], [0, 0, 0, 1]])
VOXEL_ML = 2 * 1.5 * 3 / 1000


def save(path: Path, voxels: np.ndarray, affine: np.ndarray = AFFINE) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.save(nib.Nifti1Image(voxels, affine), path)
    return path
