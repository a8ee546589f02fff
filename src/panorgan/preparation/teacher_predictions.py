"""Predictions of frozen teachers for the training cases, cut and moved together with image and label.

A frozen teacher always predicts the same for a volume. So it predicts once, its probabilities are stored in 8 bit with
the preprocessed case, and patches are sliced from a memory map. q = round(255 p): |q / 255 − p| ≤ 1/510.
Behind the array, where numpy does not look, the file ends in its checksum.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from panorgan.checksums import OncePerProcess, checksum, ends_in_checksum
from panorgan.errors import DataError
from panorgan.preparation.cache_files import array_bytes, mark_used, write_flushed
from panorgan.preparation.store import INCOMPLETE, PREDICTION, StoredCase

LEVELS = 255
"""The stored number that stands for probability 1."""
_MARKED_EVERY = 24 * 3600
_WHOLE = OncePerProcess()

Predict = Callable[[torch.Tensor, tuple[str, ...]], torch.Tensor]
"""Takes a prepared image [X, Y, Z] or [C, X, Y, Z] and names; gives their probabilities [len(names), X, Y, Z]."""
OnCase = Callable[[int, int], None]
"""Called with how many of how many cases are done."""


class TeacherPredictions:
    """Teachers' predictions for a site's training cases, one channel per name.

    Parameters
    ----------
    cases : the training cases.
    key : hash of everything that the volumes depend on besides the case and the channels' names.
    names_of : the channels of a case; none where it annotates an organ itself, say.
    predict : makes the volumes.
    cached : stored on disk, in 8 bit; otherwise predicted again for every patch, in float32.
    per_step : how many of `names` are drawn for a batch; all if None.
    release : frees what predicting needed (networks on a device).
    """

    def __init__(
        self,
        cases: Sequence[StoredCase],
        key: str,
        names_of: Callable[[StoredCase], tuple[str, ...]],
        predict: Predict,
        cached: bool = True,
        per_step: int | None = None,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        self.cases, self.key, self.cached, self.per_step = tuple(cases), key, cached, per_step
        self._names = {case.folder: tuple(sorted(set(names_of(case)))) for case in self.cases}
        self.names = tuple(sorted({name for names in self._names.values() for name in names}))
        self._predict, self.release = predict, release
        self._open: dict[Path, NDArray[np.uint8]] = {}

    @property
    def dtype(self) -> type[np.uint8] | type[np.float32]:
        """The type of the volumes: levels if stored, else probabilities."""
        return np.uint8 if self.cached else np.float32

    def names_of(self, case: StoredCase) -> tuple[str, ...]:
        """The channels that a case has, sorted."""
        return self._names[case.folder]

    def ensure(self, on_case: OnCase = lambda done, total: None) -> None:
        """Predict and store what is missing; called again, it only marks the files as used."""
        if not self.cached:
            return
        wanted = [case for case in self.cases if self.names_of(case)]
        try:
            for done, case in enumerate(wanted, start=1):
                self._stored(case)
                on_case(done, len(wanted))
        finally:
            self.release()

    def volume(self, case: StoredCase) -> tuple[NDArray[Any], tuple[str, ...]]:
        """All channels of a case and their names: [L, X, Y, Z] levels (memory-mapped), or probabilities."""
        names = self.names_of(case)
        return (self._opened(case) if self.cached else self._predicted(case, names)), names

    def cut(self, case: StoredCase, names: Sequence[str], window: tuple[slice, ...]) -> NDArray[Any]:
        """The named channels inside a window, [len(names), *window]; 0 where the case has no such channel."""
        own = self.names_of(case)
        shape = tuple(part.stop - part.start for part in window)
        patch: NDArray[Any] = np.zeros((len(names), *shape), dtype=self.dtype)
        asked = tuple(name for name in names if name in own)
        if not asked:
            return patch
        found = own if self.cached else asked  # what is not asked for is not predicted
        volume: NDArray[Any] = self._opened(case) if self.cached else self._predicted(case, asked)
        for place, name in enumerate(names):
            if name in asked:
                patch[place] = volume[found.index(name)][window]
        return patch

    def draw(self, cases: Sequence[StoredCase], random: np.random.Generator) -> tuple[str, ...]:
        """The channels of a batch, in the order of `names`: those that one of its cases has come first."""
        if self.per_step is None or self.per_step >= len(self.names):
            return self.names
        present = {name for case in cases for name in self.names_of(case)}
        shuffled = [self.names[place] for place in random.permutation(len(self.names))]
        chosen = sorted(shuffled, key=lambda name: name not in present)[: self.per_step]
        return tuple(sorted(chosen))

    # -- on disk -------------------------------------------------------------------------------------------

    def path(self, case: StoredCase) -> Path:
        """The path of a case's volume."""
        channels = hashlib.sha256("\n".join(self.names_of(case)).encode()).hexdigest()[:16]
        return case.folder / f"{PREDICTION}{self.key}-{channels}.npy"

    def _opened(self, case: StoredCase) -> NDArray[np.uint8]:
        return self._open[case.folder] if case.folder in self._open else self._stored(case)

    def _stored(self, case: StoredCase) -> NDArray[np.uint8]:
        """The memory map of a case's volume, predicted first if there is none (or a damaged one)."""
        path, names = self.path(case), self.names_of(case)
        shape = (len(names), *case.shape)
        volume = _read(path, shape)
        if volume is None:
            levels = quantised(torch.from_numpy(self._predicted(case, names)))
            _write(path, levels.numpy())
            volume = _read(path, shape)
            if volume is None:
                raise DataError(
                    "A volume that was just stored cannot be read.",
                    code="stored-volume-unreadable",
                    where=str(path),
                    fix="Check the disk and its free space, then try again.",
                )
        mark_used(path, _MARKED_EVERY)  # see Store.sweep
        self._open[case.folder] = volume
        return volume

    def _predicted(self, case: StoredCase, names: tuple[str, ...]) -> NDArray[np.float32]:
        """Probabilities [len(names), X, Y, Z], checked."""
        image = torch.from_numpy(np.asarray(case.image, dtype=np.float32))
        probabilities = self._predict(image, names).detach().float().cpu()
        if tuple(probabilities.shape) != (len(names), *case.shape) or not bool(probabilities.isfinite().all()):
            raise DataError(
                "What was predicted for a case cannot be used.",
                code="prediction-unusable",
                where=f"{case.site}/{case.id}",
                why=f"{list(probabilities.shape)} values, some of them perhaps not finite",
                fix="A teacher may have diverged in its training: lower its learning rate.",
            )
        array: NDArray[np.float32] = probabilities.numpy()
        return array


def quantised(probabilities: torch.Tensor) -> torch.Tensor:
    """Probabilities as levels 0…255 in 8 bit, each within 1/510."""
    return (probabilities.clamp(0, 1) * LEVELS).round().to(torch.uint8)


def as_probabilities(volume: torch.Tensor) -> torch.Tensor:
    """Levels back to float32 in [0, 1]; probabilities stay as they are."""
    return volume.float() / LEVELS if volume.dtype == torch.uint8 else volume


def _read(path: Path, shape: tuple[int, ...]) -> NDArray[np.uint8] | None:
    """The memory map, or None if there is no such file, or one that is damaged."""
    try:
        if not _WHOLE.holds(path, ends_in_checksum):
            return None
        volume: NDArray[np.uint8] = np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError):
        return None
    return volume if volume.shape == shape and volume.dtype == np.uint8 else None


@contextlib.contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A name of its own; what is left there in the end is removed."""
    scratch = path.with_name(f"{INCOMPLETE}{uuid.uuid4().hex}.npy")
    try:
        yield scratch
    finally:
        scratch.unlink(missing_ok=True)


def _write(path: Path, levels: NDArray[np.uint8]) -> None:
    content = array_bytes(levels)
    with _beside(path) as scratch:
        write_flushed(scratch, (content, checksum((content,)).encode()))
        os.replace(scratch, path)
