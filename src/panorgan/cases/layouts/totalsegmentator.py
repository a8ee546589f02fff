"""TotalSegmentator: `s0001/ct.nii.gz` (or `mri.nii.gz`) and one mask per organ in `s0001/segmentations/`.

An organ without a file is unknown for that case; an empty mask means that it is known to be absent.
"""

from __future__ import annotations

from pathlib import Path

from panorgan.cases.layouts.base import FoundImage, FoundLabels, FoundMasks, Layout

_SCANS = ("ct.nii.gz", "mri.nii.gz")


def fits(folder: Path) -> bool:
    """At least one case folder with a scan and masks beside it."""
    return any(path.parent.joinpath("segmentations").is_dir() for path in _scans(folder))


def images(folder: Path) -> dict[str, FoundImage]:
    """Every scan."""
    return {path.parent.name: FoundImage(path, path.parent.name) for path in _scans(folder)}


def labels(folder: Path) -> dict[str, FoundLabels]:
    """Every case's masks, by the name of their file."""
    found: dict[str, FoundLabels] = {}
    for masks in sorted(folder.glob("*/segmentations")):
        files = {p.name.removesuffix(".nii.gz"): p for p in sorted(masks.glob("*.nii.gz"))}
        found[masks.parent.name] = FoundMasks(files)
    return found


def _scans(folder: Path) -> list[Path]:
    return sorted(path for name in _SCANS for path in folder.glob(f"*/{name}"))


LAYOUT = Layout("totalsegmentator", "TotalSegmentator case folders", fits, images, labels)
