"""LiTS: `volume-0.nii` and `segmentation-0.nii` side by side (or in sub-folders); 1 liver, 2 tumour."""

from __future__ import annotations

import re
from pathlib import Path

from panorgan.data.dicom import walk_files
from panorgan.data.layouts.base import FoundImage, FoundLabelMap, FoundLabels, Layout, PairedFiles, paired
from panorgan.errors import DataError

_IDS = {"liver": (1,), "liver_tumour": (2,)}


def fits(folder: Path) -> bool:
    """At least one numbered volume."""
    return any(_number("volume", path) for path in walk_files(folder))


def images(folder: Path) -> dict[str, FoundImage]:
    """Every volume; the number names case and patient."""
    volumes, _, _ = _sorted(folder)
    return {name: FoundImage(path, name) for name, path in volumes.items()}


def labels(folder: Path) -> dict[str, FoundLabels]:
    """Every segmentation."""
    _, segmentations, _ = _sorted(folder)
    return {name: FoundLabelMap(path, _IDS) for name, path in segmentations.items()}


def problems(folder: Path) -> tuple[DataError, ...]:
    """Numbers that occur twice, for example in two batches."""
    return _sorted(folder)[2]


def _sorted(folder: Path) -> PairedFiles:
    files = list(walk_files(folder))
    volumes = (path for path in files if _number("volume", path))
    segmentations = (path for path in files if _number("segmentation", path))
    return paired(volumes, segmentations, lambda path: f"lits_{int(_number('volume|segmentation', path)):03d}")


def _number(kind: str, path: Path) -> str:
    """`volume-12.nii.gz` → 12; empty for other files."""
    found = re.fullmatch(rf"(?:{kind})-([0-9]+)\.nii(\.gz)?", path.name)
    return found[1] if found else ""


LAYOUT = Layout("lits", "LiTS volumes and segmentations", fits, images, labels, problems)
