"""LiTS: `volume-0.nii` and `segmentation-0.nii` side by side (or in sub-folders); 1 liver, 2 tumour."""

from __future__ import annotations

from pathlib import Path

from panorgan.cases.layouts.base import FoundImage, FoundLabelMap, FoundLabels, Layout

_IDS = {"liver": (1,), "liver_tumour": (2,)}


def fits(folder: Path) -> bool:
    """At least one numbered volume."""
    return bool(_numbered(folder, "volume"))


def images(folder: Path) -> dict[str, FoundImage]:
    """Every volume; the number names case and patient."""
    return {name: FoundImage(path, name) for name, path in _numbered(folder, "volume").items()}


def labels(folder: Path) -> dict[str, FoundLabels]:
    """Every segmentation."""
    return {name: FoundLabelMap(path, _IDS) for name, path in _numbered(folder, "segmentation").items()}


def _numbered(folder: Path, kind: str) -> dict[str, Path]:
    found = {}
    for path in sorted(folder.rglob(f"{kind}-*.nii*")):
        number = path.name.removesuffix(".gz").removesuffix(".nii").removeprefix(f"{kind}-")
        if number.isdigit() and path.name.endswith((".nii", ".nii.gz")):
            found[f"lits_{int(number):03d}"] = path
    return found


LAYOUT = Layout("lits", "LiTS volumes and segmentations", fits, images, labels)
