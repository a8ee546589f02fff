"""Preprocessed cases on disk, memory-mapped, keyed by the content of their inputs.

One folder per case: `image.npy` (float16 [X, Y, Z], or [C, X, Y, Z] of several channels), `labels.npy` (integers whose
bit t says "inside structure t") and `case.json`. Bits keep overlapping structures (a tumour inside its organ) in one
small volume. The key hashes the input files and the plan: a changed input gets a new entry, an interrupted one is never
seen. `case.json` holds the checksums of the others; they are compared once per process, and an entry that is damaged is
made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from panorgan.checksums import OncePerProcess, file_checksum, read_json, sealed_json
from panorgan.data.case import Case, Mask
from panorgan.data.file_hashes import FileHashes
from panorgan.data.formats import files_of
from panorgan.errors import DataError
from panorgan.preparation.cache_files import array_bytes, arrays_bytes, mark_used, write_flushed
from panorgan.preparation.cache_use import mark_in_use
from panorgan.preparation.measure import measure_case
from panorgan.preparation.plan import Plan, PlanSettings
from panorgan.preparation.preprocess import Grid, prepare_image, prepare_mask
from panorgan.preparation.site_statistics import CaseMeasurements

_FORMAT = 4
_WHOLE = OncePerProcess()
_log = logging.getLogger(__name__)
# Half-written entries begin so; a day later no process is writing them any more.
INCOMPLETE = ".incomplete-"
_ATTEMPTS = 5
_ABANDONED_SECONDS = 24 * 3600
# Files next to a case that can be made again (see `teacher_predictions`) begin so; they are kept while they are used.
PREDICTION = "companion-"
_UNUSED_SECONDS = 14 * 24 * 3600
# Foreground voxels remembered per structure, for sampling patches near them.
_REMEMBERED_VOXELS = 2000
# Most bits a label volume holds; torch has no unsigned 64-bit shifts.
MOST_STRUCTURES = 63


@dataclass(frozen=True)
class StoredCase:
    """A preprocessed case; arrays are opened when first used."""

    id: str
    patient: str
    site: str
    structures: tuple[str, ...]
    folder: Path

    @cached_property
    def image(self) -> NDArray[np.float16]:
        """[X, Y, Z] in [-1, 1], or [C, X, Y, Z] of several channels; memory-mapped."""
        voxels: NDArray[np.float16] = np.load(self.folder / "image.npy", mmap_mode="r")
        return voxels

    @property
    def shape(self) -> tuple[int, int, int]:
        """Voxels along R, A and S."""
        x, y, z = self.image.shape[-3:]
        return x, y, z

    def part(self, place: Sequence[slice] | NDArray[np.integer]) -> NDArray[np.float16]:
        """A window, or a voxel, of every channel."""
        index: tuple[Any, ...] = (..., *place)
        found: NDArray[np.float16] = self.image[index]
        return found

    @property
    def channels(self) -> int:
        """The number of channels of the image."""
        return self.image.shape[0] if self.image.ndim == 4 else 1

    @cached_property
    def labels(self) -> NDArray[Any]:
        """[X, Y, Z] integers, bit t set inside `structures[t]`, memory-mapped."""
        bits: NDArray[Any] = np.load(self.folder / "labels.npy", mmap_mode="r")
        return bits

    @cached_property
    def foreground(self) -> dict[str, NDArray[np.int32]]:
        """Up to 2000 voxel positions [n, 3] per structure that is present."""
        with np.load(self.folder / "foreground.npz") as stored:
            return {name: stored[name] for name in stored.files}

    @cached_property
    def spacing(self) -> tuple[float, float, float]:
        """Voxel size in mm on the stored grid."""
        x, y, z = read_json((self.folder / "case.json").read_bytes())["spacing_mm"]
        return float(x), float(y), float(z)

    def masks(self) -> Iterator[tuple[str, Mask]]:
        """Name and mask of every annotated structure."""
        for bit, name in enumerate(self.structures):
            yield name, (self.labels >> bit) & 1 != 0


class Store:
    """A folder of preprocessed cases."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._hashes = FileHashes(folder / "hashes")

    def add(self, case: Case, plan: Plan) -> StoredCase:
        """Preprocess a case unless the store already has it."""
        key = self._key(case, f"format {_FORMAT} {plan.model_dump_json()}")
        target = self.folder / key
        mark_in_use(target)
        if _is_whole(target):
            mark_used(target)
        else:
            self._make(case, plan, target)
        return StoredCase(case.id, case.patient, case.site, case.annotated, target)

    def _make(self, case: Case, plan: Plan, target: Path) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        scratch = self._scratch()
        scratch.mkdir()
        try:
            _write(case, plan, scratch)
            self._put_in_place(scratch, target, f"{case.site}/{case.id}")
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _put_in_place(self, scratch: Path, target: Path, name: str) -> None:
        """Move a new entry into place; if another process was faster, its entry stays."""
        for attempt in range(_ATTEMPTS):
            if _is_whole(target):
                return
            old = self._scratch()
            try:
                if target.exists():
                    _log.info("a prepared case is damaged and made again: %s in %s", name, target)
                    os.replace(target, old)
                os.replace(scratch, target)
                return
            except OSError:  # theirs came or went between two lines
                if attempt == _ATTEMPTS - 1:
                    raise
            finally:
                shutil.rmtree(old, ignore_errors=True)

    def check(self, case: Case) -> None:
        """Read a case that is only scored, once, so that its errors show before training."""
        marker = self.folder / f"{self.content_of(case)}.checked"
        if not marker.is_file():
            for _ in case.iter_masks(case.read_image()):
                pass  # reading is the check
            self.folder.mkdir(parents=True, exist_ok=True)
            marker.touch()

    def measure(self, case: Case, settings: PlanSettings) -> CaseMeasurements:
        """A case's measurements for the plan, made once."""
        memory = self.folder / f"{self._key(case, f'format {_FORMAT} measure {settings.crop}')}.measured"
        try:
            return CaseMeasurements.from_json(read_json(memory.read_bytes()))
        except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):  # absent, or damaged
            measured = measure_case(case, settings)
        self.folder.mkdir(parents=True, exist_ok=True)
        scratch = self._scratch()
        write_flushed(scratch, (sealed_json(measured.as_json()).encode(),))
        os.replace(scratch, memory)
        return measured

    def content_of(self, case: Case) -> str:
        """A key of a case's content and how it is read, independent of plan and version."""
        return self._key(case, "content")

    def scan_of(self, case: Case) -> str:
        """A key of the scan, without its annotation; slices count as a set, because their names may differ."""
        digest = hashlib.sha256()
        for one in sorted(self._hashes.of(path) for path in case.image_files):
            digest.update(one)
        return digest.hexdigest()[:32]

    def sweep(self) -> None:
        """Remove leftovers of killed processes, and teachers' predictions that were unused for two weeks."""
        for path in _entries(self.folder):
            if path.name.startswith(INCOMPLETE):
                _remove_older(path, _ABANDONED_SECONDS)
                continue
            for inside in _entries(path):
                if inside.name.startswith(INCOMPLETE):
                    _remove_older(inside, _ABANDONED_SECONDS)
                elif inside.name.startswith(PREDICTION):
                    _remove_older(inside, _UNUSED_SECONDS)

    def _scratch(self) -> Path:
        """A unique path for a new entry; not by `tempfile`, whose folders only their owner may read."""
        return self.folder / f"{INCOMPLETE}{uuid.uuid4().hex}"

    def _key(self, case: Case, recipe: str) -> str:
        """Hash of everything an entry depends on: the files' content, how they are read, what is made of them."""
        digest = hashlib.sha256(f"{recipe}\n{case.annotated!r}".encode())
        labels = [file for path in (case.labels.paths if case.labels else ()) for file in files_of(path)]
        for path in (*case.image_files, *labels):
            if not path.exists():
                raise DataError(
                    "A scan file is missing.",
                    code="image-missing",
                    where=str(path),
                    fix="Check the path, or remove the case.",
                )
            digest.update(self._hashes.of(path))
        if case.labels:
            digest.update(case.labels.recipe().encode())
        if case.channels:
            files = case.image_files
            digest.update(repr([(files.index(c.files[0]), c.recipe()) for c in case.channels]).encode())
        return digest.hexdigest()[:32]


def _is_whole(entry: Path) -> bool:
    """Whether an entry exists and is undamaged."""
    try:
        files = dict(read_json((entry / "case.json").read_bytes())["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return all(
        _WHOLE.holds(entry / name, lambda path, expected=expected: file_checksum(path) == expected)  # type: ignore[misc]
        for name, expected in files.items()
    )


def _entries(folder: Path) -> list[Path]:
    """The content of a folder; empty if it is not a folder, not readable, or gone: a store has many users."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _remove_older(path: Path, seconds: float) -> None:
    with contextlib.suppress(OSError):  # another process may sweep too
        if time.time() - path.stat().st_mtime > seconds:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _write(case: Case, plan: Plan, folder: Path) -> None:
    if len(case.annotated) > MOST_STRUCTURES:
        raise DataError(
            f"A case annotates {len(case.annotated)} structures; {MOST_STRUCTURES} is the most.",
            code="too-many-structures",
            where=f"{case.site}/{case.id}",
            fix="Restrict 'annotated' of the site.",
        )
    volume = case.read_image()
    grid = Grid.of(volume, plan)
    image = prepare_image(volume, plan, grid)
    shape = image.shape[-3:]
    bits = np.zeros(shape, dtype=bits_type(len(case.annotated)))
    foreground = {}
    for name, whole in case.iter_masks(volume):
        _refuse_cut(name, whole, grid, case)
        bit, mask = case.annotated.index(name), prepare_mask(whole, grid, plan)
        bits |= mask.astype(bits.dtype) << bit
        positions = np.argwhere(mask).astype(np.int32)
        if len(positions):
            # Evenly spaced picks: representative without randomness.
            picks = np.linspace(0, len(positions) - 1, min(len(positions), _REMEMBERED_VOXELS)).astype(int)
            foreground[name] = positions[picks]
    contents = {
        "image.npy": array_bytes(image.numpy().astype(np.float16)),
        "labels.npy": array_bytes(bits),
        "foreground.npz": arrays_bytes(foreground),
    }
    spacing = [mm * n / m for mm, n, m in zip(grid.ras_spacing, grid.ras_shape, shape, strict=True)]
    description = {
        "site": case.site,
        "case": case.id,
        "source": str(case.image),
        "structures": case.annotated,
        "spacing_mm": spacing,
        "plan": plan.as_json(),
        "files": {name: write_flushed(folder / name, (content,)) for name, content in contents.items()},
    }
    write_flushed(folder / "case.json", (sealed_json(description, indent=1).encode(),))


def _refuse_cut(name: str, mask: Mask, grid: Grid, case: Case) -> None:
    """What was annotated must not be lost with the air around the body."""
    if math.prod(grid.ras_shape) == mask.size:
        return  # nothing was cut
    cut = int(np.count_nonzero(mask)) - int(np.count_nonzero(grid.turn_to_ras(mask)))
    if cut:
        raise DataError(
            f"Cropping to the body cuts off a part of {name}.",
            code="crop-cuts-organ",
            where=str(case.image),
            why=f"{cut} of its voxels lie outside of what was taken for the body",
            fix="Set 'plan: {crop: none}', or check that label and scan belong together with 'panorgan doctor'.",
        )


def bits_type(structures: int) -> type[np.uint8] | type[np.int32] | type[np.int64]:
    """The narrowest integers that hold a bit per structure."""
    if structures <= 8:
        return np.uint8
    return np.int32 if structures <= 31 else np.int64
