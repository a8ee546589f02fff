"""Preprocessed cases on disk, memory-mapped, keyed by the content of their inputs.

One folder per case: `image.npy` (float16 [X, Y, Z]), `labels.npy` (integers whose bit t says "inside structure t")
and `case.json`. Bits keep overlapping structures (a tumour inside its organ) in one small volume. The key hashes the
input files and the plan: a changed input gets a new entry, an interrupted one is never seen.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from panorgan.cases.case import Case, Mask
from panorgan.cases.content import ContentHashes
from panorgan.cases.planning import CaseMeasurements, measure_case
from panorgan.cases.preprocess import Grid, Plan, PlanChoices, prepare_image, prepare_mask
from panorgan.errors import DataError

_FORMAT = 3
# Half-written entries begin so; a day later nobody is writing them any more.
_INCOMPLETE = ".incomplete-"
_ABANDONED_SECONDS = 24 * 3600
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
        """[X, Y, Z] in [-1, 1], memory-mapped."""
        voxels: NDArray[np.float16] = np.load(self.folder / "image.npy", mmap_mode="r")
        return voxels

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
        x, y, z = json.loads((self.folder / "case.json").read_text())["spacing_mm"]
        return float(x), float(y), float(z)

    def masks(self) -> Iterator[tuple[str, Mask]]:
        """Name and mask of every annotated structure."""
        for bit, name in enumerate(self.structures):
            yield name, (self.labels >> bit) & 1 != 0


class Store:
    """A folder of preprocessed cases."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._hashes = ContentHashes(folder / "hashes")

    def add(self, case: Case, plan: Plan) -> StoredCase:
        """Preprocess a case unless the store already has it."""
        key = self._key(case, plan.model_dump_json())
        target = self.folder / key
        if not (target / "case.json").is_file():
            self.folder.mkdir(parents=True, exist_ok=True)
            scratch = Path(tempfile.mkdtemp(prefix=_INCOMPLETE, dir=self.folder))
            try:
                _write(case, plan, scratch)
                if target.exists() and not (target / "case.json").is_file():
                    shutil.rmtree(target)  # an entry that somebody has damaged
                os.replace(scratch, target)
            except OSError:
                # Another process may have finished the same entry first; theirs is as good.
                if not (target / "case.json").is_file():
                    raise
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
        return StoredCase(case.id, case.patient, case.site, case.annotated, target)

    def check(self, case: Case, plan: Plan) -> str:
        """Read a case that is only scored, once, so that what is wrong with it shows before training.

        Returns the key of its content.
        """
        key = self._key(case, plan.model_dump_json())
        marker = self.folder / f"{key}.checked"
        if not marker.is_file():
            case.read_masks(case.read_image())
            self.folder.mkdir(parents=True, exist_ok=True)
            marker.touch()
        return key

    def measure(self, case: Case, choices: PlanChoices) -> CaseMeasurements:
        """What a plan needs to know of a case; measured once."""
        memory = self.folder / f"{self._key(case, f'measure {choices.crop}')}.measured"
        try:
            return CaseMeasurements.from_json(json.loads(memory.read_text()))
        except (FileNotFoundError, ValueError, KeyError):
            measured = measure_case(case, choices)
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", prefix=_INCOMPLETE, dir=self.folder, delete=False) as file:
            json.dump(measured.as_json(), file)
        os.replace(file.name, memory)
        return measured

    def sweep(self) -> None:
        """Remove what killed processes have left; what is young may still be in use."""
        for path in self.folder.glob(f"{_INCOMPLETE}*"):
            with contextlib.suppress(OSError):  # another process may sweep too
                if time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _key(self, case: Case, recipe: str) -> str:
        """Hash of everything an entry depends on: the files' content, how they are read, what is made of them."""
        digest = hashlib.sha256(f"format {_FORMAT}\n{recipe}\n".encode())
        digest.update(repr(case.annotated).encode())
        for path in (*case.image_files, *(case.labels.paths if case.labels else ())):
            if not path.exists():
                raise DataError("A scan file is missing.", where=str(path), fix="Check the path, or remove the case.")
            digest.update(self._hashes.of(path))
        if case.labels:
            digest.update(case.labels.recipe().encode())
        return digest.hexdigest()[:32]


def _write(case: Case, plan: Plan, folder: Path) -> None:
    if len(case.annotated) > MOST_STRUCTURES:
        raise DataError(
            f"A case annotates {len(case.annotated)} structures; {MOST_STRUCTURES} is the most.",
            where=f"{case.site}/{case.id}",
            fix="Restrict 'annotated' of the site.",
        )
    volume = case.read_image()
    grid = Grid.of(volume, plan)
    image = prepare_image(volume, plan, grid)
    masks = case.read_masks(volume)
    bits = np.zeros(image.shape, dtype=bits_type(len(case.annotated)))
    foreground = {}
    for bit, name in enumerate(case.annotated):
        mask = prepare_mask(masks[name], grid, plan)
        bits |= mask.astype(bits.dtype) << bit
        positions = np.argwhere(mask).astype(np.int32)
        if len(positions):
            # Evenly spaced picks: representative without randomness.
            picks = np.linspace(0, len(positions) - 1, min(len(positions), _REMEMBERED_VOXELS)).astype(int)
            foreground[name] = positions[picks]
    np.save(folder / "image.npy", image.numpy().astype(np.float16))
    np.save(folder / "labels.npy", bits)
    np.savez(folder / "foreground.npz", **foreground)
    spacing = [mm * n / m for mm, n, m in zip(grid.ras_spacing, grid.ras_shape, image.shape, strict=True)]
    description = {
        "case": case.id,
        "structures": case.annotated,
        "spacing_mm": spacing,
        "plan": plan.as_json(),
    }
    (folder / "case.json").write_text(json.dumps(description, indent=1))


def bits_type(structures: int) -> type[np.uint8] | type[np.int32] | type[np.int64]:
    """The narrowest integers that hold a bit per structure."""
    if structures <= 8:
        return np.uint8
    return np.int32 if structures <= 31 else np.int64
