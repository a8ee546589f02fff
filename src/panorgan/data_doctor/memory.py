"""How many cases may be read at the same time without filling the memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import nibabel as nib
import numpy as np

from panorgan.data.free_memory import free_memory
from panorgan.data_doctor.files import is_nifti
from panorgan.data_doctor.read_case import CaseTask

_MOST_WORKERS = 8
# The scan as stored and in RAS order, its label twice, a picture, and what the checks make of them.
_BYTES_PER_VOXEL = 40
# Slices of DICOM series are nearly always of this size; only to estimate.
_SLICE_VOXELS = 512 * 512


def fitting_workers(tasks: Sequence[CaseTask], cores: int, free_bytes: float | None = None) -> int:
    """Processes for these cases: by cores, and by the largest scan and the free memory where that is known."""
    most = min(cores, _MOST_WORKERS)
    free = free_memory() if free_bytes is None else free_bytes
    if most <= 1 or free is None or not tasks:
        return most
    return max(1, min(most, int(free / (_BYTES_PER_VOXEL * max(1, largest_scan(tasks))))))


def largest_scan(tasks: Iterable[CaseTask]) -> int:
    """Voxels of the largest scan, by headers alone."""
    return max((_voxels(task) for task in tasks), default=0)


def _voxels(task: CaseTask) -> int:
    if task.slices:
        return len(task.slices) * _SLICE_VOXELS
    try:
        if is_nifti(task.image):
            image: Any = nib.load(task.image)
            return int(np.prod(image.shape, dtype=np.float64))
        files = task.image.iterdir() if task.image.is_dir() else [task.image]
        return sum(path.stat().st_size for path in files)
    except Exception:  # what cannot be read becomes a finding when it is read
        return 0
