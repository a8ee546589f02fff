"""`panorgan predict`: scans in, label maps on their own grids out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from panorgan.anatomy import catalogue
from panorgan.cases.volume import read_volume, write_labels
from panorgan.errors import DataError
from panorgan.federation.files import write_atomically
from panorgan.runs.delivered import DeliveredModel, load_model
from panorgan.runs.scoring import predict_labels

_ENDINGS = (".nii.gz", ".nii")


def predict_scans(model: Path, scans: Sequence[Path], out: Path, device: str, as_json: bool) -> None:
    """Predict every scan; nothing is written for a scan that cannot be read."""
    torch.set_flush_denormal(True)
    chosen = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    files = _files(scans)
    delivered = load_model(model, torch.device(chosen))
    out.mkdir(parents=True, exist_ok=True)
    for path in files:
        target = out / f"{_stem(path)}.nii.gz"
        volume = read_volume(path)
        labels = predict_labels(delivered, volume)
        scratch = target.with_name(f".incomplete-{target.name}")
        write_labels(scratch, labels, volume.affine)
        scratch.replace(target)
        side = out / f"{_stem(path)}.json"
        write_atomically(side, json.dumps(describe(delivered, path), indent=1))
        shown = {"scan": str(path), "labels": str(target), "names": str(side)}
        if as_json:
            print(json.dumps(shown), flush=True)
        else:
            Console(soft_wrap=True).print(f"{path.name} → {target}")


def describe(model: DeliveredModel, scan: Path) -> dict[str, object]:
    """What the integers in a label map mean."""
    organs = catalogue()
    return {
        "scan": scan.name,
        "model": model.card["name"],
        "run": model.card["run"],
        "labels": {organ: index + 1 for index, organ in enumerate(model.network.vocabulary)},
        "snomed": {
            organ: {"value": organs[organ].snomed_value, "meaning": organs[organ].snomed_meaning}
            for organ in model.network.vocabulary
        },
    }


def _files(scans: Sequence[Path]) -> list[Path]:
    files: list[Path] = []
    for path in scans:
        if path.is_dir():
            files += sorted(p for p in path.iterdir() if p.name.endswith(_ENDINGS))
        else:
            files.append(path)
    if not files:
        raise DataError(
            "There is no scan to segment.",
            where=", ".join(map(str, scans)),
            why="no file ends in .nii.gz or .nii",
            fix="Name NIfTI files, or a folder that holds some.",
        )
    missing = [path for path in files if not path.is_file()]
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


def _stem(path: Path) -> str:
    for ending in _ENDINGS:
        if path.name.endswith(ending):
            return path.name.removesuffix(ending)
    return path.stem
