"""The opened volumes of a study: read where they are, or converted once into a temporary folder."""

from __future__ import annotations

import tempfile
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import nibabel as nib

from panorgan.data.case import MaskSource
from panorgan.data.channels import read_image_of
from panorgan.data.volume import read_volume
from panorgan.errors import DataError
from panorgan.viewer.labels import Grid, LabelVolume, merge_masks, merged_labels, open_labels
from panorgan.viewer.other_process import in_another_process
from panorgan.viewer.study import Pane, Scan
from panorgan.viewer.voxels import VoxelFile, nifti_pieces, open_voxels

T = TypeVar("T")
# A coarse copy of a scan takes a few megabytes; so the next case and the last ones are there at once.
_COARSE_KEPT = 24
COARSE = 4_000_000
"""Voxels of the largest copy that is kept in memory."""
# Converted files are as large as their scans.
_CONVERTED_KEPT = 8


class Volumes:
    """Opens scans and labels on request, each once. `close` removes what was converted."""

    def __init__(self) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="panorgan-view-", ignore_cleanup_errors=True)
        self._opened: OrderedDict[Hashable, Any] = OrderedDict()
        self._coarse: OrderedDict[Hashable, bytes] = OrderedDict()
        self._locks: defaultdict[Hashable, threading.Lock] = defaultdict(threading.Lock)
        self._guard = threading.Lock()
        self._number = 0

    def close(self) -> None:
        """Remove the temporary folder."""
        self._scratch.cleanup()

    def scan(self, scan: Scan) -> VoxelFile:
        """A scan that can be read in slabs."""
        return self._once(scan, lambda: None if scan.slices else open_voxels(scan.path), lambda: self._convert(scan))

    def labels(self, key: Hashable, pane: Pane) -> LabelVolume:
        """The labels of a pane that has some, as a label map."""
        source = pane.labels
        assert source is not None
        return self._once(key, lambda: open_labels(source), lambda: self._merge(source, self.scan(pane.scan)))

    def scan_pieces(self, scan: Scan, most: int | None) -> Iterator[bytes]:
        """A scan as a NIfTI file; with `most`, coarser where it has more voxels."""
        return self._pieces(("scan", scan), most, lambda: nifti_pieces(self.scan(scan), most))

    def label_pieces(self, key: Hashable, pane: Pane, most: int | None) -> Iterator[bytes]:
        """The labels of a pane likewise."""
        return self._pieces(("labels", key), most, lambda: self.labels(key, pane).pieces(most))

    def _pieces(self, key: Hashable, most: int | None, read: Callable[[], Iterator[bytes]]) -> Iterator[bytes]:
        """Coarse copies are kept; whatever is larger is read again."""
        if not most or most > COARSE:
            return read()
        place = (key, most)
        with self._lock_of(place):
            if place not in self._coarse:
                self._keep(self._coarse, place, b"".join(read()), _COARSE_KEPT)
            return iter((self._coarse[place],))

    def _once(self, key: Hashable, as_it_is: Callable[[], T | None], convert: Callable[[], T]) -> T:
        with self._lock_of(key):
            if key not in self._opened:
                found = as_it_is()
                self._keep(self._opened, key, convert() if found is None else found)
            opened: T = self._opened[key]
            return opened

    def _lock_of(self, key: Hashable) -> threading.Lock:
        with self._guard:
            return self._locks[key]

    def _keep(self, kept: OrderedDict[Hashable, Any], key: Hashable, value: Any, most: int | None = None) -> None:
        with self._guard:
            kept[key] = value
            while most is not None and len(kept) > most:
                kept.popitem(last=False)

    def _convert(self, scan: Scan) -> VoxelFile:
        target = self._new_file()
        in_another_process(_write_scan, scan.path, scan.slices, target)
        return self._reopen(target)

    def _merge(self, source: MaskSource, scan: VoxelFile) -> LabelVolume:
        target = self._new_file()
        counted = in_another_process(merge_masks, source, Grid(scan.shape, scan.affine), target)
        return merged_labels(source, self._reopen(target), counted)

    def _reopen(self, target: Path) -> VoxelFile:
        """A converted file; the oldest go when there are many, and are converted again when they are wanted."""
        found = open_voxels(target)
        if found is None:
            raise DataError("A volume cannot be shown.", code="volume-not-shown", where=str(target))
        with self._guard:
            converted = [key for key, own in self._opened.items() if self._is_converted(own)]
            for key in converted[: max(0, len(converted) - _CONVERTED_KEPT + 1)]:
                _file_of(self._opened.pop(key)).unlink(missing_ok=True)
        return found

    def _is_converted(self, opened: VoxelFile | LabelVolume) -> bool:
        return _file_of(opened).parent == Path(self._scratch.name)

    def _new_file(self) -> Path:
        with self._guard:
            self._number += 1
            return Path(self._scratch.name) / f"{self._number}.nii"


def _file_of(opened: VoxelFile | LabelVolume) -> Path:
    return (opened.file if isinstance(opened, LabelVolume) else opened).path


def _write_scan(path: Path, slices: tuple[Path, ...], target: Path) -> None:
    """A scan of any kind as an uncompressed NIfTI file; of a file with several images the first one."""
    try:
        volume = read_volume(path, slices)
    except DataError as error:
        if error.code != "not-3d":
            raise
        volume = read_image_of(path, 0)
    kept = volume.voxels.dtype.str[1:] in ("u1", "i1", "i2", "u2", "i4", "f4")
    nib.save(nib.Nifti1Image(volume.voxels if kept else volume.voxels.astype("f4"), volume.affine), target)
