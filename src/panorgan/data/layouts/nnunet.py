"""nnU-Net v2 raw folders: `dataset.json`, `imagesTr/<case>_0000.nii.gz`, `labelsTr/<case>.nii.gz`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from panorgan.data.layouts import msd
from panorgan.data.layouts.base import FoundImage, FoundLabelMap, FoundLabels, Layout, refuse_ignore_label, visible
from panorgan.data.layouts.channel_names import channel_names, numbered_channels
from panorgan.errors import DataError


def fits(folder: Path) -> bool:
    """A dataset.json that is not the decathlon's."""
    return (folder / "dataset.json").is_file() and not msd.fits(folder)


def images(folder: Path) -> dict[str, FoundImage]:
    """Every training scan, by its first channel, with all channels that it has."""
    ending, _ = _read_description(folder)
    names = channel_names(folder)
    return {
        name: FoundImage(path, name, channels=numbered_channels(path, ending, names))
        for name, path in _scans(folder, ending).items()
    }


def labels(folder: Path) -> dict[str, FoundLabels]:
    """The label that every training scan must have; for a folder without scans, those that lie there."""
    ending, ids = _read_description(folder)
    refuse_ignore_label(ids, folder / "dataset.json")
    names = _scans(folder, ending) or {p.name.removesuffix(ending) for p in visible(folder, f"labelsTr/*{ending}")}
    return {name: FoundLabelMap(folder / "labelsTr" / f"{name}{ending}", ids) for name in sorted(names)}


def problems(folder: Path) -> tuple[DataError, ...]:
    """Cases without their first channel, where the folder has several: `images` goes by that one."""
    ending, _ = _read_description(folder)
    names, first = channel_names(folder), set(_scans(folder, ending))
    found = {
        path.name.removesuffix(f"_{number:04d}{ending}")
        for number in range(1, len(names))
        for path in visible(folder, f"imagesTr/*_{number:04d}{ending}")
    }
    return tuple(
        DataError(
            f"Case {name} has no channel {names[0]}.",
            where=str(folder / "imagesTr" / f"{name}_0000{ending}"),
            why="it is the first channel in dataset.json, and other channels of the case are there",
            fix="Add the file, or move the case's other files out of the folder.",
            code="channel-missing",
        )
        for name in sorted(found - first)
    )


def _scans(folder: Path, ending: str) -> dict[str, Path]:
    mark = f"_0000{ending}"
    return {path.name.removesuffix(mark): path for path in visible(folder, f"imagesTr/*{mark}")}


def _read_description(folder: Path) -> tuple[str, dict[str, tuple[int, ...]]]:
    """File ending and label ids per name, from `dataset.json`."""
    path = folder / "dataset.json"
    if not path.is_file():
        raise DataError(
            "This is not an nnU-Net data folder.",
            where=str(folder),
            why="it has no dataset.json" if folder.is_dir() else "the folder does not exist",
            fix="Point to the folder that holds dataset.json, imagesTr and labelsTr.",
            code="no-layout" if folder.is_dir() else "folder-missing",
        )
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8-sig"))
        labels = content.get("labels", {})
        ids = {
            name: tuple(int(i) for i in value) if isinstance(value, list) else (int(value),)
            for name, value in labels.items()
            if name != "background"
        }
        taken = [name for name, values in ids.items() if min(values, default=1) < 1]
        if taken:
            raise ValueError(f"{', '.join(taken)}: ids start at 1, 0 is the background")
        return str(content.get("file_ending", ".nii.gz")), ids
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(
            "dataset.json cannot be understood.",
            where=str(path),
            why=str(error),
            fix='It must be JSON with "labels": {"background": 0, "liver": 1, …}.',
            code="dataset-json-unreadable",
        ) from error


LAYOUT = Layout("nnunet", "nnU-Net v2 raw", fits, images, labels, problems)
