"""What the scripts of an exported bundle need of panorgan's other rooms, in one small file without panorgan.

`bundle_scripts` writes this file into the bundle. Nothing here may import panorgan.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

ORGANS_FILE = "organs.json"
"""Kind, relation, parent, side and `one_piece` of the model's organs and their relatives, next to this file."""


@dataclass(frozen=True)
class Plan:
    """What is done to a scan before the network sees it."""

    spacing_mm: tuple[float, float, float]
    intensity: str
    window_hu: tuple[float, float]
    crop: str = "none"
    image_interpolation: str = "linear"
    label_interpolation: str = "linear"


@dataclass(frozen=True)
class Volume:
    """A scan in memory: `voxels` [X, Y, Z], the 4×4 affine from voxel indices to RAS millimetres, `more` channels."""

    voxels: NDArray[Any]
    affine: NDArray[np.float64]
    more: tuple[NDArray[Any], ...] = ()

    @property
    def channels(self) -> tuple[NDArray[Any], ...]:
        """All of them."""
        return (self.voxels, *self.more)

    @property
    def spacing(self) -> tuple[float, float, float]:
        """Voxel size in mm along the array axes."""
        x, y, z = np.sqrt((self.affine[:3, :3] ** 2).sum(axis=0))
        return float(x), float(y), float(z)


@cache
def catalogue() -> Mapping[str, Any]:
    """The organs by name, in the order of panorgan's catalogue."""
    content = json.loads(Path(__file__).with_name(ORGANS_FILE).read_text(encoding="utf-8"))
    return {organ["name"]: SimpleNamespace(**organ) for organ in content}


def find_organ(name: str) -> Any:
    """The organ of this name."""
    return catalogue()[name]


def ancestors(name: str) -> tuple[str, ...]:
    """Parent, grandparent and so on, nearest first."""
    found = []
    parent = catalogue()[name].parent
    while parent is not None:
        found.append(parent)
        parent = catalogue()[parent].parent
    return tuple(found)


def children(name: str, relation: str | None = None) -> tuple[str, ...]:
    """Direct children in the order of the catalogue: all, or only those with this relation."""
    return tuple(o.name for o in catalogue().values() if o.parent == name and relation in (None, o.relation))


class PanorganError(Exception):
    """An error with a code, and how to fix it."""

    def __init__(self, what: str, **details: str) -> None:
        super().__init__("\n".join([what, *(f"  {label}: {text}" for label, text in details.items() if text)]))


ConfigError = DataError = PanorganError


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """No suggestion: a bundle's names are written by a program."""
    return ""
