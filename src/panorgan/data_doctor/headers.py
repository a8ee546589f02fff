"""Corrected copies of files whose header, or form of storage, is wrong in a way that leaves no room for guessing.

Never in place: a whole folder in the same layout is written, corrected files and untouched ones together.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import nibabel as nib
import numpy as np
from numpy.typing import NDArray

from panorgan.data.volume import Volume, on_grid
from panorgan.data_doctor.files import forms_apart_mm, is_nifti, look, unit_factor
from panorgan.data_doctor.findings import Checkup, Source
from panorgan.data_doctor.folders import open_source
from panorgan.data_doctor.geometry import lies_on_voxels
from panorgan.data_doctor.labels import label_paths, whole_numbers
from panorgan.data_doctor.opened_source import OpenedSource
from panorgan.data_doctor.read_case import CaseTask
from panorgan.errors import DataError

FIXABLE = frozenset(
    {"singleton-axis", "forms-disagree", "implausible-spacing", "not-finite", "label-nearly-whole"}
    | {"spacing-mismatch", "direction-mismatch", "origin-mismatch", "grid-mismatch"}
)
"""What may be corrected in a copy; whether it can be without guessing depends on the file."""


@dataclass(frozen=True)
class FixedFile:
    """A corrected copy: the file as it was, the copy, and what was corrected."""

    path: Path
    copy: Path
    reason: str


def fix_headers(checkup: Checkup, out: Path, on_progress: Callable[[int, int], None] | None = None) -> list[FixedFile]:
    """Write corrected copies of every source below `out` (below `out/<site>` where there are several).

    `out` appears only once it is complete, and not at all where nothing can be corrected or a source cannot be opened.
    `on_progress` hears (files written, files in all).
    """
    check_place(out, checkup.sources)
    broken = {(found.site, found.case) for found in checkup.findings if found.code in FIXABLE}
    if not broken:
        return []
    several = len(checkup.sources) > 1
    copies = [copy for source in checkup.sources for copy in _plan(source, broken, several)]
    # What may be corrected comes first: where nothing is, the rest need not be copied.
    copies.sort(key=lambda copy: copy.role is None)
    out.parent.mkdir(parents=True, exist_ok=True)
    building = Path(mkdtemp(prefix=f".{out.name}-", suffix="-building", dir=out.parent))
    fixed: list[FixedFile] = []
    try:
        for done, copy in enumerate(copies, start=1):
            if copy.role is None and not fixed:
                return []
            (building / copy.place).parent.mkdir(parents=True, exist_ok=True)
            reason = _write_copy(copy.path, building / copy.place, copy.role)
            if reason:
                fixed.append(FixedFile(copy.path, out / copy.place, reason))
            if on_progress is not None:
                on_progress(done, len(copies))
        if not fixed:
            return []
        building.chmod(0o755)
        if out.exists():
            out.rmdir()  # it is empty
        os.replace(building, out)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return sorted(fixed, key=lambda file: file.copy)


@dataclass(frozen=True)
class _Role:
    """What a file is in its case: the scan itself, or a label of it."""

    task: CaseTask
    label: bool


@dataclass(frozen=True)
class _Copy:
    """A file, its place below `out`, and its role where something may be corrected."""

    path: Path
    place: Path
    role: _Role | None


def _plan(source: Source, broken: set[tuple[str, str]], several: bool) -> list[_Copy]:
    """What to write for a source."""
    opened = open_source(source)
    if not opened.tasks:
        where = str(source.folder)
        fix = "Correct first what the doctor says about it, or leave it out of the command."
        raise DataError(
            "Nothing can be copied from a folder that cannot be opened.", code="folder-not-opened", where=where, fix=fix
        )
    files = _files_of(opened)
    _check_complete(opened, files)
    roles = _roles(opened, broken)
    below = Path(source.site) if several else Path()
    root = _root(source)
    return [_Copy(path, below / path.relative_to(root), roles.get(path.resolve())) for path in files]


def _root(source: Source) -> Path:
    return source.folder.parent if source.folder.is_file() else source.folder


def check_place(out: Path, sources: Sequence[Source]) -> None:
    """Refuse a place for copies: the originals must stay as they are, and nothing else may be overwritten."""
    target = out.resolve()
    for root in (_root(source).resolve() for source in sources):
        if target == root or root in target.parents or target in root.parents:
            raise DataError(
                "Corrected copies cannot be written there.",
                code="output-overlaps-data",
                where=str(out),
                why=f"it is, contains or lies inside the data folder {root}",
                fix="Choose a folder next to the data.",
            )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(
            "Corrected copies cannot be written there.",
            code="output-not-empty",
            where=str(out),
            why="it exists and is not empty",
            fix="Choose a new folder, or empty this one.",
        )


def _files_of(opened: OpenedSource) -> list[Path]:
    """Every file of the folder; for a table the files that it names, which must lie beside or below it."""
    source, root = opened.source, _root(opened.source)
    if opened.layout != "csv":
        return list(_walk(root, frozenset()))
    named = [source.folder if source.folder.is_file() else root / "cases.csv"]
    for task in opened.tasks:
        found = [task.image, *(label_paths(task.labels) if task.labels is not None else ())]
        named += [p for path in found for p in (_walk(path, frozenset()) if path.is_dir() else [path]) if p.is_file()]
    outside = [path for path in named if not _below(path, root)]
    if outside:
        raise DataError(
            "The table names files outside of its folder.",
            code="table-leaves-folder",
            where=str(outside[0]),
            why="a copy of the table would still point to the original",
            fix="Move cases.csv to a folder above all its files.",
        )
    return list(dict.fromkeys(named))


def _walk(folder: Path, above: frozenset[Path]) -> Iterator[Path]:
    """Every file below a folder, hidden ones too. Links are followed, but not back to a folder that is being read."""
    real = folder.resolve()
    if real in above:
        return
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            yield from _walk(path, above | {real})
        elif path.is_file():
            yield path


def _check_complete(opened: OpenedSource, files: Sequence[Path]) -> None:
    """Nothing that a case needs may be left behind."""
    copied = set(files)
    for task in opened.tasks:
        labels = label_paths(task.labels) if task.labels is not None else ()
        for path in (*(task.slices or (task.image,)), *labels):
            if path.is_file() and path not in copied:
                raise DataError(
                    "A file of a case would be missing in the copy.",
                    code="file-outside-folder",
                    where=str(path),
                    why=f"case {task.case} needs it, but it does not lie below {_root(opened.source)}",
                    fix="Put all files of the data set below one folder, by links if need be.",
                )


def _below(path: Path, root: Path) -> bool:
    """Whether the path as the table writes it stays inside the folder."""
    return path.is_relative_to(root) and ".." not in path.relative_to(root).parts


def _roles(opened: OpenedSource, broken: set[tuple[str, str]]) -> dict[Path, _Role]:
    """The files of cases in which something was found that can be corrected."""
    roles: dict[Path, _Role] = {}
    for task in opened.tasks:
        if (task.site, task.case) not in broken:
            continue
        roles[task.image.resolve()] = _Role(task, label=False)
        paths = label_paths(task.labels) if task.labels is not None else ()
        roles |= {path.resolve(): _Role(task, label=True) for path in paths}
    return roles


def _write_copy(path: Path, copy: Path, role: _Role | None) -> str:
    """Write the file, corrected if it can be; returns what was corrected, empty for a plain copy."""
    mended = _mend(path, role) if role is not None and is_nifti(path) else None
    if mended is None or not mended.reasons:
        shutil.copy2(path, copy)
        return ""
    mended.save(copy)
    return "; ".join(mended.reasons)


class _Mended:
    """A NIfTI file in memory, as stored (unscaled), with corrections applied one by one."""

    def __init__(self, image: Any) -> None:
        self.image = image
        self.stored: NDArray[Any] = np.asanyarray(image.dataobj.get_unscaled())
        self.slope, self.intercept = float(image.dataobj.slope), float(image.dataobj.inter)
        self.affine: NDArray[np.float64] = np.asarray(image.affine, dtype=np.float64)
        self.reasons: list[str] = []

    @property
    def volume(self) -> Volume:
        """The voxels with their scaling, and the affine as corrected so far."""
        plain = self.slope == 1 and self.intercept == 0
        return Volume(self.stored if plain else self.stored * self.slope + self.intercept, self.affine)

    def drop_axis(self) -> None:
        """A fourth axis of length one."""
        shape = self.stored.shape
        while self.stored.ndim > 3 and self.stored.shape[-1] == 1:
            self.stored = self.stored[..., 0]
        if self.stored.shape != shape:
            self.reasons.append(f"{shape} became {self.stored.shape}")

    def join_forms(self) -> None:
        """Both forms as the sform says."""
        apart = forms_apart_mm(self.image)
        if apart > max(0.1, 0.5 * min(self.volume.spacing)):
            words = f"{apart:.3g} mm apart" if np.isfinite(apart) else "it was no rotation"
            self.reasons.append(f"qform set to the sform ({words})")

    def to_millimetres(self) -> None:
        """Metres or micrometres."""
        factor = unit_factor(self.affine, self.stored.shape)
        if factor:
            self.affine = np.diag([factor, factor, factor, 1.0]) @ self.affine
            self.reasons.append(f"spacing multiplied by {factor:g} to be in millimetres")

    def fill(self) -> None:
        """NaN and infinity in a scan become the lowest finite value."""
        finite = np.isfinite(self.stored) if self.stored.dtype.kind == "f" else np.ones(1, dtype=np.bool_)
        if finite.all() or not finite.any():
            return
        lowest = self.stored[finite].min() if self.slope >= 0 else self.stored[finite].max()
        self.stored = np.where(finite, self.stored, lowest)
        self.reasons.append(f"{np.count_nonzero(~finite)} values that were not finite set to the lowest finite one")

    def round(self) -> None:
        """Label values that are nearly whole."""
        whole, problem = whole_numbers(self.volume.voxels, "")
        if problem is None or whole is None:
            return
        kind = np.uint8 if whole.min() >= 0 and whole.max() < 256 else whole.dtype
        self.stored, self.slope, self.intercept = whole.astype(kind), 1.0, 0.0
        self.reasons.append("label values rounded to whole numbers")

    def move_to(self, image: Volume) -> None:
        """A label that was drawn on the image's voxels gets the image's affine."""
        if on_grid(self.volume, image) is None and lies_on_voxels(self.volume, image):
            self.affine = image.affine
            self.reasons.append("affine copied from the image")

    def save(self, path: Path) -> None:
        """Write; both forms say the same, and the scaling stays what it was."""
        header = self.image.header.copy()
        header.set_data_dtype(self.stored.dtype)
        written = type(self.image)(self.stored, self.affine, header)
        code = max(int(header["sform_code"]), int(header["qform_code"]), 1)
        written.set_sform(self.affine, code=code)
        written.set_qform(self.affine, code=code)
        if not np.allclose(written.get_qform(), self.affine, atol=1e-2):
            written.header["qform_code"] = 0  # a qform cannot be sheared, and two places are worse than one
        written.header.set_xyzt_units("mm")
        if (self.slope, self.intercept) != (1.0, 0.0):
            written.header.set_slope_inter(self.slope, self.intercept)
        nib.save(written, path)


def _mend(path: Path, role: _Role) -> _Mended | None:
    """The file with every correction that applies; None where it cannot be read at all."""
    try:
        image = nib.load(path)
        if not isinstance(image, nib.Nifti1Image) or image.get_data_dtype().kind not in "iuf":
            return None
        mended = _Mended(image)
    except Exception:  # damaged in one of many ways; the check-up says how, the copy stays as it is
        return None
    mended.drop_axis()
    if mended.stored.ndim != 3 or not np.isfinite(mended.affine).all():
        return None
    mended.to_millimetres()
    mended.join_forms()
    if not role.label:
        mended.fill()
        return mended
    mended.round()
    scan = _scan(role.task.image, role.task.slices)
    if scan is not None:
        mended.move_to(scan)
    return mended


@lru_cache(maxsize=1)  # the masks of a case come one after the other
def _scan(path: Path, slices: tuple[Path, ...]) -> Volume | None:
    """The scan of a case, corrected as its own copy will be."""
    mended = _mend(path, _Role(CaseTask("", path, "", "", path), label=False)) if is_nifti(path) else None
    return mended.volume if mended is not None else look(path, "", slices)[0]
