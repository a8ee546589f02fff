"""TotalSegmentator: `s0001/ct.nii.gz` (or `mri.nii.gz`) and one mask per organ in `s0001/segmentations/`.

An organ without a file is unknown for that case; an empty mask means that it is known to be absent.
"""

from __future__ import annotations

from pathlib import Path

from panorgan.data.layouts.base import FoundImage, FoundLabels, FoundMasks, Layout, named_once, visible
from panorgan.errors import DataError

_MODALITIES = {"ct.nii.gz": "CT", "mri.nii.gz": "MR"}


def fits(folder: Path) -> bool:
    """At least one case folder with a scan and masks next to it."""
    return any(path.parent.joinpath("segmentations").is_dir() for path in _scans(folder))


def images(folder: Path) -> dict[str, FoundImage]:
    """Every scan."""
    once, _ = named_once(_scans(folder), _case)
    return {name: FoundImage(path, name, modality=_MODALITIES[path.name]) for name, path in once.items()}


def labels(folder: Path) -> dict[str, FoundLabels]:
    """Every case's masks, by the name of their file."""
    _, twice = named_once(_scans(folder), _case)
    found: dict[str, FoundLabels] = {}
    for masks in visible(folder, "*/segmentations"):
        if masks.parent.name not in twice:
            files = {path.name.removesuffix(".nii.gz"): path for path in visible(masks, "*.nii.gz")}
            found[masks.parent.name] = FoundMasks(files)
    return found


def problems(folder: Path) -> tuple[DataError, ...]:
    """Case folders with a CT and an MR scan: the masks belong to one of them."""
    _, twice = named_once(_scans(folder), _case)
    return tuple(twice.values())


def _case(scan: Path) -> str:
    return scan.parent.name


def _scans(folder: Path) -> list[Path]:
    return sorted(path for name in _MODALITIES for path in visible(folder, f"*/{name}"))


LAYOUT = Layout("totalsegmentator", "TotalSegmentator case folders", fits, images, labels, problems)
