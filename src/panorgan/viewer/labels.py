"""Masks as one label map that a browser can draw, and the volume of every organ in it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from panorgan.anatomy import ancestors, catalogue, find_organ
from panorgan.data.case import LabelMap, MaskSource
from panorgan.data.volume import Volume
from panorgan.errors import AnatomyError
from panorgan.viewer.voxels import VoxelFile, nifti_pieces, open_voxels

# Labels are sent as one byte per voxel.
MOST_NAMES = 255


def drawing_order(source: MaskSource) -> tuple[str, ...]:
    """Names of a source, what contains others first, so that a tumour is drawn over its organ."""
    ids = source.ids if isinstance(source, LabelMap) else {}
    return tuple(sorted(source.structures, key=lambda name: (-len(ids.get(name, ())), _depth(name), name)))[:MOST_NAMES]


def _depth(name: str) -> int:
    """How many organs contain this one; 0 for a name outside the catalogue."""
    try:
        return len(ancestors(find_organ(name).name))
    except AnatomyError:
        return 0


class LabelVolume:
    """A label map that is read in slabs: the i-th name is drawn as i + 1. Counts voxels in the first full pass.

    Parameters
    ----------
    names : in the order of drawing; a later one lies over an earlier one.
    ids : the integers of every name in the file, those of what lies inside included.
    counted : voxels by name, where they are known already.
    """

    def __init__(
        self,
        file: VoxelFile,
        names: Sequence[str],
        ids: dict[str, tuple[int, ...]],
        counted: dict[str, int] | None = None,
    ) -> None:
        self.file, self.names, self.ids = file, tuple(names), ids
        # Small integers are looked up as they are stored, as unsigned ones: integers without a name mean nothing.
        self._plain = file.dtype.kind in "iu" and file.dtype.itemsize < 4 and (file.slope, file.inter) == (1.0, 0.0)
        largest = max((i for own in ids.values() for i in own), default=0)
        self._table = np.zeros(256**file.dtype.itemsize if self._plain else largest + 2, dtype=np.uint8)
        for number, name in enumerate(self.names, start=1):
            self._table[[i for i in ids[name] if i < len(self._table)]] = number
        self._counted = counted
        self._counting = threading.Lock()

    def pieces(self, most: int | None = None) -> Iterator[bytes]:
        """As a NIfTI file, piece by piece; with `most`, coarser where it has more voxels."""
        return nifti_pieces(self.file, most, lambda stored: self._table[self._places(stored)])

    def volumes_ml(self) -> dict[str, float]:
        """The volume of every organ, in the file's full resolution."""
        with self._counting:
            if self._counted is None:
                counts = np.zeros(len(self._table), dtype=np.int64)
                for _, slab in self.file.slabs():
                    counts += np.bincount(self._places(slab).ravel(order="K"), minlength=len(counts))
                self._counted = {
                    name: int(sum(counts[i] for i in self.ids[name] if i < len(counts))) for name in self.names
                }
        return {name: count * self.file.voxel_ml for name, count in self._counted.items()}

    def _places(self, stored: NDArray[Any]) -> NDArray[Any]:
        """Stored values as rows of the table; in a table that ends early the last row is for values without a name."""
        if self._plain:
            return stored.astype(f"u{stored.dtype.itemsize}", copy=False)
        if stored.dtype.kind == "f" or (self.file.slope, self.file.inter) != (1.0, 0.0):
            stored = np.rint(np.nan_to_num(stored) * self.file.slope + self.file.inter).astype(np.int64)
        last = len(self._table) - 1
        return np.where((stored < 0) | (stored > last), last, stored).astype(np.intp)


def open_labels(source: MaskSource) -> LabelVolume | None:
    """Labels that can be read where they are; None for masks that must be merged first."""
    if not isinstance(source, LabelMap):
        return None
    file = open_voxels(source.path)
    ids = {name: tuple(i for i in own if i > 0) for name, own in source.ids.items()}
    return LabelVolume(file, drawing_order(source), ids) if file else None


@dataclass(frozen=True)
class Grid:
    """Where masks are wanted: a scan without its voxels."""

    shape: tuple[int, int, int]
    affine: NDArray[np.float64]

    def volume(self) -> Volume:
        """As masks ask for it. Its voxels take no memory, because masks look at shape and place only."""
        return Volume(np.broadcast_to(np.uint8(0), self.shape), self.affine)


def merge_masks(source: MaskSource, grid: Grid, target: Path) -> dict[str, int]:
    """Write all masks as one label map; returns the voxels of every name, overlaps included.

    Masks come one at a time and in any order: what is drawn later may be hidden below what came before.
    """
    places = {name: number for number, name in enumerate(drawing_order(source), start=1)}
    merged = np.zeros(grid.shape, dtype=np.uint8, order="F")
    counted = dict.fromkeys(places, 0)
    for name, mask in source.read(grid.volume()):
        if name in places:
            counted[name] = int(np.count_nonzero(mask))
            np.maximum(merged, np.uint8(places[name]), out=merged, where=mask)
    _write(target, merged, grid.affine)
    return counted


def merged_labels(source: MaskSource, file: VoxelFile, counted: dict[str, int]) -> LabelVolume:
    """What `merge_masks` wrote."""
    names = drawing_order(source)
    return LabelVolume(file, names, {name: (number,) for number, name in enumerate(names, start=1)}, counted)


def _write(target: Path, voxels: NDArray[np.uint8], affine: NDArray[np.float64]) -> None:
    import nibabel as nib

    nib.save(nib.Nifti1Image(voxels, affine), target)


def colours(names: Sequence[str]) -> dict[str, str]:
    """`#rrggbb` by name: the catalogue's, and for other names colours that differ from each other."""
    organs = catalogue()
    spare = iter(range(len(names)))
    found = {}
    for name in names:
        try:
            found[name] = organs[find_organ(name).name].colour
        except AnatomyError:
            found[name] = _SPARE[next(spare) % len(_SPARE)]
    return found


def title(name: str) -> str:
    """The organ's readable name; a name outside the catalogue stays as it is."""
    organ = catalogue().get(name)
    return organ.title if organ else name


_SPARE = ("#8dd3c7", "#bebada", "#fb8072", "#80b1d3", "#fdb462", "#b3de69", "#fccde5", "#bc80bd", "#ccebc5", "#ffed6f")
