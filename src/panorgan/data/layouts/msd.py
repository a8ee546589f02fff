"""Medical Segmentation Decathlon and nnU-Net v1: `dataset.json` whose labels run from id to name.

`{"labels": {"0": "background", "1": "Anterior"}, "training": [{"image": "./imagesTr/a.nii.gz", "label": …}]}`
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from panorgan.data.channels import Channel
from panorgan.data.layouts.base import FoundImage, FoundLabelMap, FoundLabels, Layout, refuse_ignore_label
from panorgan.data.layouts.channel_names import channel_names, numbered_channels
from panorgan.errors import DataError


def fits(folder: Path) -> bool:
    """A dataset.json with a list of training cases and ids as keys of its labels."""
    try:
        content = json.loads((folder / "dataset.json").read_text(encoding="utf-8-sig"))
        return isinstance(content.get("training"), list) and "0" in content.get("labels", {})
    except (OSError, ValueError, AttributeError):
        return False


def images(folder: Path) -> dict[str, FoundImage]:
    """Every training scan, with the channels that dataset.json names: images of one 4-D file, or nnU-Net's files."""
    names = channel_names(folder)
    found = {}
    for case, pair in _training(folder)[0].items():
        path = _inside(folder, pair["image"])
        found[case] = FoundImage(path, case, channels=_channels(path, names))
    return found


def labels(folder: Path) -> dict[str, FoundLabels]:
    """Every training label."""
    names: dict[str, str] = _description(folder)["labels"]
    refuse_ignore_label(names.values(), folder / "dataset.json")
    ids: dict[str, tuple[int, ...]] = {}
    for key, name in names.items():
        if int(key) != 0:
            ids[name] = (*ids.get(name, ()), int(key))
    return {name: FoundLabelMap(_inside(folder, pair["label"]), ids) for name, pair in _training(folder)[0].items()}


def problems(folder: Path) -> tuple[DataError, ...]:
    """Cases that are listed twice."""
    return _training(folder)[1]


def _training(folder: Path) -> tuple[dict[str, dict[str, str]], tuple[DataError, ...]]:
    """Image and label by case, and an error for every name that is there twice."""
    found: dict[str, list[dict[str, str]]] = {}
    for pair in _description(folder)["training"]:
        file = Path(pair["image"]).name
        if not file.startswith("."):
            # nnU-Net v1 lists `case.nii.gz` and stores `case_0000.nii.gz`; the decathlon stores what it lists.
            found.setdefault(file.removesuffix(".nii.gz").removesuffix("_0000"), []).append(pair)
    twice = tuple(
        DataError(
            f"dataset.json lists case {name} more than once.",
            where=str(folder / "dataset.json"),
            why=", ".join(pair["image"] for pair in pairs),
            fix="Keep it once under 'training', or give the files names of their own.",
            code="case-named-twice",
        )
        for name, pairs in found.items()
        if len(pairs) > 1
    )
    return {name: pairs[0] for name, pairs in found.items() if len(pairs) == 1}, twice


def _channels(path: Path, names: Sequence[str]) -> dict[str, Channel]:
    """The decathlon keeps channels in one file, nnU-Net v1 one file for each."""
    if path.name.endswith("_0000.nii.gz"):
        return numbered_channels(path, ".nii.gz", names)
    several = len(names) > 1
    return {name: Channel(name, path, index=number if several else None) for number, name in enumerate(names)}


def _inside(folder: Path, listed: str) -> Path:
    path = folder / listed
    if not path.is_file():
        with_channel = path.with_name(path.name.removesuffix(".nii.gz") + "_0000.nii.gz")
        return with_channel if with_channel.is_file() else path
    return path


def _description(folder: Path) -> dict[str, Any]:
    path = folder / "dataset.json"
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8-sig"))
        _ = [int(key) for key in content["labels"]], [pair["image"] + pair["label"] for pair in content["training"]]
        return content
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            "dataset.json cannot be understood.",
            where=str(path),
            why=f"{type(error).__name__}: {error}",
            fix='It must hold "labels": {"0": "background", "1": …} and "training": [{"image": …, "label": …}].',
            code="dataset-json-unreadable",
        ) from error


LAYOUT = Layout("msd", "Medical Segmentation Decathlon, nnU-Net v1", fits, images, labels, problems)
