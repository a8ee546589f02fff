"""`volumes.csv`: one row per scan and organ, next to the label maps."""

from __future__ import annotations

import csv
from pathlib import Path

from panorgan.csv_cells import unescape_cell
from panorgan.errors import DataError
from panorgan.evaluation.organ_statistics import OrganStatistics
from panorgan.workflows.prediction import Prediction
from panorgan.workflows.tables import Table

NAME = "volumes.csv"
COLUMNS = ("labels", "scan", "organ", "label", "voxels", "volume_ml", "mean_intensity", "cut_off")


def check_volumes(folder: Path) -> None:
    """Refuse a `volumes.csv` that predict has not written, before anything is predicted."""
    _read(folder / NAME)


def add_volumes(folder: Path, labels: Path, scan: str, prediction: Prediction) -> Path:
    """Add the rows of a scan; those of an earlier label map of the same name are replaced."""
    path = folder / NAME
    kept = [row for row in _read(path) if row["labels"] != labels.name]
    ids = prediction.names
    rows = [
        {"labels": labels.name, "scan": scan, "organ": organ, "label": ids[organ], **_cells(found)}
        for organ, found in prediction.organs.items()
    ]
    return Table([*kept, *rows]).to_csv(path)


def _cells(found: OrganStatistics) -> dict[str, str | int | float]:
    """The numbers of the JSON file; empty where an organ has none."""
    facts = found.as_json()
    filled = {name: "" if value is None else value for name, value in facts.items()}
    return {**filled, "cut_off": " ".join(found.cut_off)}


def _read(path: Path) -> Table:
    if not path.exists():
        return Table()
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            if tuple(reader.fieldnames or ()) == COLUMNS:
                return Table({name: unescape_cell(cell or "") for name, cell in row.items()} for row in reader)
    except (OSError, ValueError, csv.Error):
        pass
    raise DataError(
        "A table of volumes would overwrite another file.",
        code="overwrites-file",
        where=str(path),
        why="its columns are not those that predict writes",
        fix="Choose another folder with --out, or move the file away.",
    )
