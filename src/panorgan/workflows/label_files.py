"""Reads label files: their ids with volumes, and how a case looks with its scan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from panorgan.data.layouts.base import FoundImage, FoundLabels
from panorgan.data.volume import Volume, read_scan, read_volume
from panorgan.data_doctor import intensity, plausible
from panorgan.data_doctor.geometry import to_ras
from panorgan.data_doctor.guess_organs import Look, look_at
from panorgan.data_doctor.label_like import looks_like_labels
from panorgan.data_doctor.labels import label_names, read_labels, whole_numbers
from panorgan.data_doctor.read_case import MR_AIR
from panorgan.errors import DataError

# A label map of a whole body has a hundred and some; a picture has thousands of values.
_MOST_IDS = 400


@dataclass(frozen=True)
class LabelFile:
    """Volume in ml by id; without ids, `trouble` says why the file is no label map."""

    path: Path
    volumes: Mapping[int, float]
    trouble: str = ""


def read_label_file(path: Path) -> LabelFile:
    """Ids and volumes of one file, or what is wrong with it."""
    try:
        label = read_volume(path)
    except DataError as error:
        return LabelFile(path, {}, f"{error.what} {error.why}".strip())
    whole, problem = whole_numbers(label.voxels, "")
    if whole is None:
        return LabelFile(
            path, {}, f"its values are not whole numbers: {problem.why}" if problem else "no whole numbers"
        )
    ids, counts = np.unique(whole[whole > 0], return_counts=True)
    if len(ids) > _MOST_IDS:
        return LabelFile(path, {}, f"it holds {len(ids)} different values, as a scan does")
    voxel_ml = abs(float(np.linalg.det(label.affine[:3, :3]))) / 1000
    return LabelFile(path, {int(i): float(n) * voxel_ml for i, n in zip(ids, counts, strict=True)})


def holds_labels(path: Path) -> bool:
    """Whether a file is a label map, by its content; one that cannot be read counts as a scan."""
    try:
        return looks_like_labels(read_volume(path).voxels)
    except DataError:
        return False


def look_at_case(image: FoundImage, labels: FoundLabels) -> tuple[Look, dict[str, float]] | str:
    """Shapes and volumes in ml by the folder's names; or why the case cannot be looked at."""
    trouble: list[str] = []
    try:
        stored = read_scan(image.path, image.slices)
    except DataError as error:
        return f"{error.what} {error.why}".strip()
    names = {name: name for name in label_names(labels)}
    read = read_labels(labels, names, stored, "", lambda problem, file: trouble.append(problem.what))
    if not read.masks and trouble:
        return trouble[0]
    ras = to_ras(Volume(stored.voxels, stored.affine))
    values = intensity.measure(ras.voxels)
    modality = image.modality or intensity.guess_modality(values)
    air = {"CT": plausible.AIR_HU, "MR": MR_AIR * values.percentiles["p99"]}.get(modality, float("nan"))
    voxel_ml = abs(float(np.linalg.det(ras.affine[:3, :3]))) / 1000
    volumes = {name: float(np.count_nonzero(mask.inside)) * voxel_ml for name, mask in read.masks.items()}
    return look_at(ras, read.masks, modality, air), volumes
