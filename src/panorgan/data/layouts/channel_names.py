"""The names of channels in `dataset.json`, which nnU-Net and the decathlon share, and the files that they name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from panorgan.data.channels import Channel


def channel_names(folder: Path) -> tuple[str, ...]:
    """Names of the channels from `channel_names` of dataset.json, or `modality` of older ones, the first one first."""
    try:
        content = json.loads((folder / "dataset.json").read_text(encoding="utf-8-sig"))
        listed = content.get("channel_names") or content.get("modality") or {}
        return tuple(str(listed[key]).strip() for key in sorted(listed, key=int))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return ()


def numbered_channels(first: Path, ending: str, names: Sequence[str]) -> dict[str, Channel]:
    """The channels `case_0000`, `case_0001`, … of a case that are there, by name."""
    stem = first.name.removesuffix(f"_0000{ending}")
    files = {name: first.with_name(f"{stem}_{number:04d}{ending}") for number, name in enumerate(names)}
    return {name: Channel(name, path) for name, path in files.items() if path.is_file()}
