"""`panorgan predict`: scans in, label maps on their own grids out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from panorgan import Model, load_model
from panorgan.cli.console import Console
from panorgan.data.dicom import case_names, read_tree
from panorgan.data.formats import ITK_ENDINGS, import_pydicom
from panorgan.errors import DataError, PanorganError
from panorgan.workflows.device import choose_device

_ENDINGS = (".nii.gz", ".nii", *ITK_ENDINGS)


@dataclass(frozen=True)
class Scan:
    """A scan to segment: a file, or the slices of a DICOM series. The label map is named after it."""

    path: Path
    name: str
    slices: tuple[Path, ...] = ()


def predict_scans(model: Path, scans: Sequence[Path], out: Path, device: str, as_json: bool) -> None:
    """Predict every readable scan, then fail for the others; nothing is written for them."""
    files = _found(scans)
    _refuse_overwriting(files, out)
    loaded = load_model(model, choose_device(device, "--device"))
    out.mkdir(parents=True, exist_ok=True)
    failures: list[DataError] = []
    for scan in files:
        try:
            shown = _predict_one(loaded, scan, out)
        except DataError as error:
            failures.append(error)
            continue
        if as_json:
            print(json.dumps(shown), flush=True)
        else:
            line = f"{scan.name} → {shown['labels']}"
            Console(soft_wrap=True).print(line, markup=False, highlight=False)
    if len(failures) == 1:
        raise failures[0]
    if failures:
        raise DataError(
            f"{len(failures)} of {len(files)} scans could not be segmented.",
            code="scans-failed",
            where="\n".join(error.where for error in failures),
            why="\n".join(error.what for error in failures),
            fix=failures[0].fix,
        )


def _predict_one(model: Model, scan: Scan, out: Path) -> dict[str, str]:
    """Write the label map and its names."""
    target = _target(scan, out)
    side = model.predict(scan.path, slices=scan.slices).save(target)
    return {"scan": str(scan.path), "labels": str(target), "names": str(side)}


def _refuse_overwriting(files: Sequence[Scan], out: Path) -> None:
    """A label map is named like its scan: in the same folder it would overwrite the scan."""
    scans = {scan.path.resolve() for scan in files}
    for scan in files:
        if _target(scan, out).resolve() in scans:
            raise DataError(
                "A label map would overwrite a scan.",
                code="overwrites-scan",
                where=str(_target(scan, out)),
                why="--out is the folder of the scans",
                fix="Choose another folder with --out.",
            )


def _target(scan: Scan, out: Path) -> Path:
    return out / f"{scan.name}.nii.gz"


def _found(scans: Sequence[Path]) -> list[Scan]:
    """All requested scans, each with a unique name."""
    found = [scan for path in scans for scan in _scans_at(path)]
    if not found:
        raise DataError(
            "There is no scan to segment.",
            code="no-scans",
            where=", ".join(map(str, scans)),
            why=f"no file ends in {', '.join(_ENDINGS)} and none is DICOM",
            fix="Name scans, or a folder that holds some (of an nnU-Net folder: imagesTs or imagesTr).",
        )
    names = [scan.name for scan in found]
    twice = {name for name in names if names.count(name) > 1}
    # Series are often called CT, one per patient: the parent folder distinguishes them.
    found = [replace(s, name=f"{s.path.resolve().parent.name}_{s.name}") if s.name in twice else s for s in found]
    names = [scan.name for scan in found]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise DataError(
            f"Two scans have the same name: {sorted(twice)[0]}.",
            code="scan-names-clash",
            why="their label maps would overwrite each other",
            fix="Predict them into different folders.",
        )
    return found


def _scans_at(path: Path) -> list[Scan]:
    """A file, a folder with one DICOM series, a folder of files, or a DICOM tree."""
    if not path.exists():
        raise DataError("A scan file is missing.", code="image-missing", where=str(path), fix="Check the path.")
    if not path.is_dir() or _holds_slices(path):
        return [Scan(path, _stem(path))]
    files = sorted(p for p in path.iterdir() if p.name.endswith(_ENDINGS) and not p.name.startswith("."))
    if files:
        return [Scan(file, _stem(file)) for file in files]
    try:
        import_pydicom()
    except PanorganError:
        return []
    return [Scan(series.folder, name, series.files) for name, series in case_names(read_tree(path)).items()]


def _holds_slices(folder: Path) -> bool:
    """Whether a folder holds DICOM slices, and so is one scan. Names do not tell: the first few files are opened."""
    for path in [path for path in sorted(folder.iterdir()) if path.is_file()][:5]:
        with path.open("rb") as file:
            if file.read(132)[128:] == b"DICM":
                return True
    return False


def _stem(path: Path) -> str:
    for ending in _ENDINGS:
        if path.name.endswith(ending):
            return path.name.removesuffix(ending)
    return path.name if path.is_dir() else path.stem
