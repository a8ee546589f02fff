"""ACDC: `patient001/patient001_frame01.nii.gz` and `…_gt.nii.gz`; 1 right ventricle, 2 myocardium, 3 left ventricle.

A patient has two labelled frames (end-diastole and end-systole); both belong to the same patient, so a split never
separates them. The cine series (`…_4d.nii.gz`) is not used.
"""

from __future__ import annotations

from pathlib import Path

from panorgan.data.layouts.base import FoundImage, FoundLabelMap, FoundLabels, Layout, PairedFiles, paired, visible
from panorgan.errors import DataError

_IDS = {"heart_right_ventricle": (1,), "heart_myocardium": (2,), "heart_left_ventricle": (3,)}


def fits(folder: Path) -> bool:
    """At least one patient folder with a frame in it."""
    return bool(_frames(folder))


def images(folder: Path) -> dict[str, FoundImage]:
    """Every frame that is not a ground truth."""
    scans, _, _ = _sorted(folder)
    return {name: FoundImage(path, path.parent.name) for name, path in scans.items()}


def labels(folder: Path) -> dict[str, FoundLabels]:
    """Every ground truth."""
    _, truths, _ = _sorted(folder)
    return {name: FoundLabelMap(path, _IDS) for name, path in truths.items()}


def problems(folder: Path) -> tuple[DataError, ...]:
    """Frames and ground truths that are there twice."""
    return _sorted(folder)[2]


def _sorted(folder: Path) -> PairedFiles:
    frames = _frames(folder)
    scans = (path for path in frames if not _stem(path).endswith("_gt"))
    truths = (path for path in frames if _stem(path).endswith("_gt"))
    return paired(scans, truths, lambda path: _stem(path).removesuffix("_gt"))


def _frames(folder: Path) -> list[Path]:
    return [p for p in visible(folder, "patient*/patient*_frame*.nii*") if p.name.endswith((".nii", ".nii.gz"))]


def _stem(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".nii")


LAYOUT = Layout("acdc", "ACDC patient folders", fits, images, labels, problems)
