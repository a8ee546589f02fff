"""`panorgan predict`: scans in, label maps on their own grids out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from panorgan.anatomy import catalogue
from panorgan.cases.formats import ITK_ENDINGS
from panorgan.cases.volume import read_scan, write_labels
from panorgan.errors import DataError
from panorgan.evaluation.inference import label_ids
from panorgan.federation.files import write_atomically
from panorgan.runs.delivered import DeliveredModel, load_model
from panorgan.runs.device import choose_device
from panorgan.runs.scoring import predict_labels

_ENDINGS = (".nii.gz", ".nii", *ITK_ENDINGS)


def predict_scans(model: Path, scans: Sequence[Path], out: Path, device: str, as_json: bool) -> None:
    """Predict every scan that can be read, then fail for those that cannot; nothing is written for them."""
    files = _files(scans)
    _refuse_overwriting(files, out)
    delivered = load_model(model, choose_device(device, "--device"))
    out.mkdir(parents=True, exist_ok=True)
    failures: list[DataError] = []
    for path in files:
        try:
            shown = _predict_one(delivered, path, out)
        except DataError as error:
            failures.append(error)
            continue
        if as_json:
            print(json.dumps(shown), flush=True)
        else:
            line = f"{path.name} → {shown['labels']}"
            Console(soft_wrap=True).print(line, markup=False, highlight=False)
    if len(failures) == 1:
        raise failures[0]
    if failures:
        raise DataError(
            f"{len(failures)} of {len(files)} scans could not be segmented.",
            where="\n".join(error.where for error in failures),
            why="\n".join(error.what for error in failures),
            fix=failures[0].fix,
        )


def _predict_one(delivered: DeliveredModel, path: Path, out: Path) -> dict[str, str]:
    """Write the label map and its names; the map appears only once it is complete."""
    target, side = _target(path, out), out / f"{_stem(path)}.json"
    volume = read_scan(path)
    labels = predict_labels(delivered, volume)
    scratch = target.with_name(f".incomplete-{target.name}")
    try:
        write_labels(scratch, labels, volume.affine)
        scratch.replace(target)
    finally:
        scratch.unlink(missing_ok=True)
    write_atomically(side, json.dumps(describe(delivered, path), indent=1))
    return {"scan": str(path), "labels": str(target), "names": str(side)}


def _refuse_overwriting(files: Sequence[Path], out: Path) -> None:
    """A label map is named like its scan: in the same folder it would take the scan's place."""
    scans = {path.resolve() for path in files}
    for path in files:
        if _target(path, out).resolve() in scans:
            raise DataError(
                "A label map would overwrite a scan.",
                where=str(_target(path, out)),
                why="--out is the folder of the scans",
                fix="Choose another folder with --out.",
            )


def _target(path: Path, out: Path) -> Path:
    return out / f"{_stem(path)}.nii.gz"


def describe(model: DeliveredModel, scan: Path) -> dict[str, object]:
    """What the integers in a label map mean."""
    organs = catalogue()
    return {
        "scan": scan.name,
        "model": model.card["name"],
        "run": model.card["run"],
        "labels": label_ids(model.network.vocabulary),
        "snomed": {
            organ: {"value": organs[organ].snomed_value, "meaning": organs[organ].snomed_meaning}
            for organ in model.network.vocabulary
        },
    }


def _files(scans: Sequence[Path]) -> list[Path]:
    files: list[Path] = []
    for path in scans:
        if path.is_dir() and not _holds_slices(path):
            files += sorted(p for p in path.iterdir() if p.name.endswith(_ENDINGS))
        else:
            files.append(path)
    if not files:
        raise DataError(
            "There is no scan to segment.",
            where=", ".join(map(str, scans)),
            why=f"no file ends in {', '.join(_ENDINGS)} and none is DICOM",
            fix="Name scans, or a folder that holds some (of an nnU-Net folder: imagesTs or imagesTr).",
        )
    missing = [path for path in files if not path.exists()]
    if missing:
        raise DataError("A scan file is missing.", where=str(missing[0]), fix="Check the path.")
    stems = [_stem(path) for path in files]
    twice = {stem for stem in stems if stems.count(stem) > 1}
    if twice:
        raise DataError(
            f"Two scans have the same name: {sorted(twice)[0]}.",
            why="their label maps would overwrite each other",
            fix="Predict them into different folders.",
        )
    return files


def _holds_slices(folder: Path) -> bool:
    """Whether a folder holds DICOM slices, and so is one scan. Their names tell nothing: the first few are opened."""
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
