"""A plain CSV: `case,image,label,annotated` (and, if wanted, `patient`), for data that follows no convention.

`image` and `label` are paths relative to the file. `annotated` says what the label's integers mean and which structures
are known in that case: `liver=1;spleen=2`. A case without a label is unlabelled.
"""

from __future__ import annotations

import csv
from pathlib import Path

from panorgan.cases.layouts.base import FoundImage, FoundLabelMap, FoundLabels, Layout
from panorgan.errors import DataError

_COLUMNS = {"case", "image", "label", "annotated"}


def fits(folder: Path) -> bool:
    """A CSV file itself, or a folder with a `cases.csv` in it."""
    path = _file(folder)
    if not path.is_file():
        return False
    with path.open(encoding="utf-8-sig", newline="") as file:
        return set(next(csv.reader(file), [])) >= _COLUMNS


def images(folder: Path) -> dict[str, FoundImage]:
    """Every row's scan."""
    base = _file(folder).parent
    return {r["case"]: FoundImage(base / r["image"], r.get("patient") or r["case"]) for r in _rows(folder)}


def labels(folder: Path) -> dict[str, FoundLabels]:
    """Every row that has a label."""
    path = _file(folder)
    return {
        row["case"]: FoundLabelMap(path.parent / row["label"], _ids(row, path)) for row in _rows(folder) if row["label"]
    }


def _file(folder: Path) -> Path:
    return folder if folder.suffix == ".csv" else folder / "cases.csv"


def _rows(folder: Path) -> list[dict[str, str]]:
    path = _file(folder)
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = [{k: (v or "").strip() for k, v in row.items() if k} for row in csv.DictReader(file)]
    names = [row["case"] for row in rows]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(
            f"A case is listed twice: {twice[0]}.", where=str(path), fix="Give every row its own case name."
        )
    return rows


def _ids(row: dict[str, str], path: Path) -> dict[str, tuple[int, ...]]:
    """`liver=1;kidney=2,3` → ids by name."""
    ids: dict[str, tuple[int, ...]] = {}
    for entry in filter(None, (part.strip() for part in row["annotated"].split(";"))):
        name, equals, values = entry.partition("=")
        numbers = [value.strip() for value in values.split(",")]
        if not equals or not all(value.isdigit() and int(value) > 0 for value in numbers):
            raise DataError(
                f"The row of case {row['case']} cannot be understood.",
                where=str(path),
                why=f"annotated is {row['annotated']!r}",
                fix="Write it like liver=1;spleen=2 (or kidney=2,3 for several ids).",
            )
        ids[name.strip()] = tuple(int(value) for value in numbers)
    return ids


LAYOUT = Layout("csv", "a table of cases (cases.csv)", fits, images, labels)
