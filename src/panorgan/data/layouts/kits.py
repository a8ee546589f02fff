"""KiTS: `case_00000/imaging.nii.gz` and `case_00000/segmentation.nii.gz`; 1 kidney, 2 tumour, 3 cyst."""

from __future__ import annotations

from pathlib import Path

from panorgan.data.layouts.base import FoundImage, FoundLabelMap, FoundLabels, Layout, visible

_IDS = {"kidney": (1,), "kidney_tumour": (2,), "kidney_cyst": (3,)}


def fits(folder: Path) -> bool:
    """At least one case folder with a scan in it."""
    return bool(visible(folder, "case_*/imaging.nii.gz"))


def images(folder: Path) -> dict[str, FoundImage]:
    """Every scan."""
    return {p.parent.name: FoundImage(p, p.parent.name) for p in visible(folder, "case_*/imaging.nii.gz")}


def labels(folder: Path) -> dict[str, FoundLabels]:
    """Every segmentation; the later challenges' `aggregated_*` files lie elsewhere and are not mistaken for it."""
    return {p.parent.name: FoundLabelMap(p, _IDS) for p in visible(folder, "case_*/segmentation.nii.gz")}


LAYOUT = Layout("kits", "KiTS case folders", fits, images, labels)
