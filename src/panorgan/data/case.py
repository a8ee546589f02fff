"""One scan and what is known about it: which structures are annotated, and which are unknown.

A voxel outside every annotated mask is *not* background: it is "none of the annotated structures".
Integers for labels stop here: all other code uses names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from panorgan.data.channels import Channel, channel_files, read_channels
from panorgan.data.formats import files_of
from panorgan.data.volume import Volume, grid_distance_mm, on_grid, read_scan, read_volume, turned_like
from panorgan.errors import DataError

Mask = NDArray[np.bool_]

# How far a label that went through floating point or a scaling factor may lie from its whole number.
ROUNDING = 1e-2


class MaskSource(Protocol):
    """Where a case's masks come from."""

    @property
    def structures(self) -> tuple[str, ...]:
        """What it holds masks of."""

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files whose content decides the masks."""

    def recipe(self) -> str:
        """How the files become masks; together with their content this decides the masks."""

    def read(self, image: Volume) -> Iterator[tuple[str, Mask]]:
        """Name and mask of every structure, on the grid of the image; one at a time, because masks fill the memory."""


@dataclass(frozen=True)
class LabelMap:
    """Masks kept as integers in one file.

    `ids` gives, per structure, every integer that belongs to it, inner structures included (a liver mask contains
    its tumours). `declared` are all integers the data set announces, also those of structures we do not use.
    """

    path: Path
    ids: Mapping[str, tuple[int, ...]]
    declared: frozenset[int]

    @property
    def structures(self) -> tuple[str, ...]:
        """What it holds masks of."""
        return tuple(self.ids)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The one file."""
        return (self.path,)

    def recipe(self) -> str:
        """Ids per structure."""
        return repr(sorted(self.ids.items()))

    def read(self, image: Volume) -> Iterator[tuple[str, Mask]]:
        """Name and mask of every structure, on the grid of the image."""
        labels = _read_on_grid(self.path, image)
        whole = self._whole_numbers(labels.voxels)
        stray = sorted(set(np.unique(whole).tolist()) - self.declared - {0})
        if stray:
            raise DataError(
                f"A label file holds undeclared label ids: {stray}.",
                where=str(self.path),
                fix="Name them under 'labels' in dataset.json, or remove them from the file.",
                code="stray-label",
            )
        for name, ids in self.ids.items():
            yield name, np.isin(whole, ids)

    def _whole_numbers(self, voxels: NDArray[Any]) -> NDArray[Any]:
        """Voxels as integers; refuses what is not nearly whole. NaN must not become some integer."""
        if np.issubdtype(voxels.dtype, np.integer):
            return voxels
        finite = bool(np.isfinite(voxels).all())
        if not finite or np.abs(voxels - np.rint(voxels)).max(initial=0) > ROUNDING:
            raise DataError(
                "A label file holds values that are not whole numbers.",
                where=str(self.path),
                fix="Export it again as a label map (nearest-neighbour interpolation).",
                code="label-not-whole",
            )
        whole: NDArray[np.int32] = np.rint(voxels).astype(np.int32)
        return whole


@dataclass(frozen=True)
class MaskFiles:
    """Masks kept in one file per structure, or per part of it: a voxel belongs where any of the files is not zero."""

    files: Mapping[str, tuple[Path, ...]]

    @property
    def structures(self) -> tuple[str, ...]:
        """What it holds masks of."""
        return tuple(self.files)

    @property
    def paths(self) -> tuple[Path, ...]:
        """Every file once, in a stable order."""
        return tuple(sorted({path for paths in self.files.values() for path in paths}))

    def recipe(self) -> str:
        """File names per structure."""
        return repr(sorted((name, [path.name for path in paths]) for name, paths in self.files.items()))

    def read(self, image: Volume) -> Iterator[tuple[str, Mask]]:
        """Name and mask of every structure, on the grid of the image."""
        for name, paths in self.files.items():
            mask: Mask = np.zeros(image.voxels.shape, dtype=bool)
            for path in paths:
                mask |= _read_on_grid(path, image).voxels > 0.5
            yield name, mask


def _read_on_grid(path: Path, image: Volume) -> Volume:
    """A label file on its image's grid: axes may run the other way, but the voxels must be the same in the world."""
    labels = read_volume(path)
    found = on_grid(labels, image)
    if found is None:
        raise another_grid(path, _difference(turned_like(labels, image), image))
    return found


def another_grid(path: Path, why: str) -> DataError:
    """The error for labels that do not lie on the voxels of their image."""
    return DataError(
        "A label file lies on another grid than its image.",
        where=str(path),
        why=why,
        fix="'panorgan doctor' shows both, and with --fix-headers corrects a header that is off. "
        "Where the voxels really differ, resample the label to the image in your annotation tool.",
        code="grid-mismatch",
    )


def _difference(labels: Volume, image: Volume) -> str:
    """In words, why two grids are not the same."""
    if labels.voxels.shape != image.voxels.shape:
        return f"the label has {labels.voxels.shape} voxels, the image {image.voxels.shape}"
    apart = grid_distance_mm(labels, image)
    return f"their corners lie up to {apart:.3g} mm apart: another origin, spacing or direction"


@dataclass(frozen=True)
class Case:
    """One scan at one site.

    Parameters
    ----------
    image : a file, or the folder of a DICOM series.
    annotated : canonical names of the structures whose masks are given (an empty mask means known to be absent);
        every other structure is unknown.
    slices : the files of the DICOM series, where the folder may hold other things too.
    channels : where the experiment names its channels, those of this scan in its order; `image` is then the first one's
        file, on whose grid the labels lie.
    """

    id: str
    patient: str
    site: str
    image: Path
    annotated: tuple[str, ...]
    labels: MaskSource | None = None
    slices: tuple[Path, ...] = ()
    channels: tuple[Channel, ...] = ()

    @property
    def image_files(self) -> tuple[Path, ...]:
        """The files whose content decides the scan."""
        return channel_files(self.channels) if self.channels else self.slices or files_of(self.image)

    def read_image(self) -> Volume:
        """The scan with its own grid, checked to be finite."""
        return read_channels(self.channels, self.id) if self.channels else read_scan(self.image, self.slices)

    def iter_masks(self, image: Volume) -> Iterator[tuple[str, Mask]]:
        """Name and mask of every annotated structure, on the grid of the image, one at a time."""
        for name, mask in self.labels.read(image) if self.labels is not None else ():
            if name in self.annotated:
                yield name, mask

    def read_masks(self, image: Volume) -> dict[str, Mask]:
        """All masks at once; see `iter_masks` for large cases."""
        found = dict(self.iter_masks(image))
        return {name: found[name] for name in self.annotated}
