"""ACDC: `patient001/patient001_frame01.nii.gz` and `…_gt.nii.gz`; 1 right ventricle, 2 myocardium, 3 left ventricle.

A patient has two labelled frames (end-diastole and end-systole); both belong to the same patient, so a split never
separates them. The cine series (`…_4d.nii.gz`) is not used.
"""

from __future__ import annotations

from pathlib import Path

from panorgan.cases.layouts.base import FoundImage, FoundLabelMap, FoundLabels, Layout

_IDS = {"heart_right_ventricle": (1,), "heart_myocardium": (2,), "heart_left_ventricle": (3,)}


def fits(folder: Path) -> bool:
    """At least one patient folder with a frame in it."""
    return any(folder.glob("patient*/patient*_frame*.nii*"))


def images(folder: Path) -> dict[str, FoundImage]:
    """Every frame that is not a ground truth."""
    return {_stem(p): FoundImage(p, p.parent.name) for p in _frames(folder) if not _stem(p).endswith("_gt")}


def labels(folder: Path) -> dict[str, FoundLabels]:
    """Every ground truth."""
    return {_stem(p).removesuffix("_gt"): FoundLabelMap(p, _IDS) for p in _frames(folder) if _stem(p).endswith("_gt")}


def _frames(folder: Path) -> list[Path]:
    return sorted(folder.glob("patient*/patient*_frame*.nii*"))


def _stem(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".nii")


LAYOUT = Layout("acdc", "ACDC patient folders", fits, images, labels)
