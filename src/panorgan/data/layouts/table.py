"""A plain CSV: `case,image,label,annotated` (and, if wanted, `patient` and `modality`), for data without a convention.

`image` and `label` are paths relative to the file. `annotated` says what the label's integers mean and which structures
are known in that case: `liver=1;spleen=2`. Where every structure has a file of its own, `label` is empty and
`annotated` names the files: `liver=masks/a_liver.nii.gz;spleen=masks/a_spleen.nii.gz`. A case without either is
unlabelled. `modality` is CT or MR. Scans of several channels have a column for each instead of `image`: `image:t1`,
`image:t2`; labels lie on the first one.
"""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path

from panorgan.data.channels import Channel
from panorgan.data.layouts.base import FoundImage, FoundLabelMap, FoundLabels, FoundMasks, Layout
from panorgan.errors import DataError

_COLUMNS = ("case", "image", "label", "annotated")
_CHANNEL = "image:"
_MODALITIES = {"": "", "CT": "CT", "MR": "MR", "MRI": "MR"}

_Row = dict[str, str]


def fits(folder: Path) -> bool:
    """A CSV file itself, or a folder with a `cases.csv` that has some of the columns; reading reports the rest."""
    path = _file(folder)
    if not path.is_file():
        return False
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        header = file.readline()
    return path == folder or bool(set(next(csv.reader([header], delimiter=_delimiter(header)), [])) & set(_COLUMNS))


def images(folder: Path) -> dict[str, FoundImage]:
    """Every row's scan."""
    base = _file(folder).parent
    found = {}
    for row in _sorted(folder)[0]:
        channels = {name: Channel(name, base / file) for name, file in _channels(row).items()}
        path = base / (row.get("image") or next(iter(_channels(row).values())))
        patient = row.get("patient") or row["case"]
        found[row["case"]] = FoundImage(path, patient, modality=_MODALITIES[_modality(row)], channels=channels)
    return found


def labels(folder: Path) -> dict[str, FoundLabels]:
    """Every row that has a label, or masks."""
    path = _file(folder)
    return {row["case"]: _labels(row, path) for row in _sorted(folder)[0] if row["label"] or row["annotated"]}


def _labels(row: _Row, path: Path) -> FoundLabels:
    if row["label"]:
        return FoundLabelMap(path.parent / row["label"], _ids(row, path))
    files = {name: path.parent / file for name, file in _entries(row, path).items()}
    return FoundMasks(files, listed=True)


def problems(folder: Path) -> tuple[DataError, ...]:
    """Rows that cannot be understood."""
    return _sorted(folder)[1]


def _file(folder: Path) -> Path:
    return folder if folder.suffix == ".csv" else folder / "cases.csv"


def _delimiter(header: str) -> str:
    """Spreadsheets of some countries separate by semicolons; the header has no other use for them."""
    return max(",;\t", key=header.count)


def _channels(row: _Row) -> dict[str, str]:
    """File by channel, in the order of the columns; channels that a case lacks are left out."""
    return {key.removeprefix(_CHANNEL).strip(): file for key, file in row.items() if key.startswith(_CHANNEL) and file}


def _modality(row: _Row) -> str:
    return row.get("modality", "").upper()


def _sorted(folder: Path) -> tuple[list[_Row], tuple[DataError, ...]]:
    """Rows that can be used, and what is wrong with the others."""
    path = _file(folder)
    good, bad = [], []
    rows = _rows(path)
    counts = Counter(row["case"] for _, row in rows)
    reported: set[str] = set()
    for line, row in rows:
        if row["case"] and counts[row["case"]] > 1:
            if row["case"] not in reported:
                bad.append(_twice(row["case"], path))
            reported.add(row["case"])
            continue
        try:
            _check(row, line, path)
            good.append(row)
        except DataError as error:
            bad.append(error)
    return good, tuple(bad)


def _rows(path: Path) -> list[tuple[int, _Row]]:
    """Line number and cells of every row that is not empty."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            header = file.readline()
            file.seek(0)
            reader = csv.DictReader(file, delimiter=_delimiter(header))
            columns = [name.strip() for name in reader.fieldnames or ()]
            reader.fieldnames = columns
            channels = any(name.startswith(_CHANNEL) for name in columns)
            missing = [name for name in _COLUMNS if name not in columns and not (channels and name == "image")]
            if missing:
                raise ValueError(f"it has no column {', '.join(missing)}; it has {', '.join(columns) or 'none'}")
            rows = [(reader.line_num, {k: (v or "").strip() for k, v in row.items() if k}) for row in reader]
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(
            "The table of cases cannot be read.",
            where=str(path),
            why=str(error),
            fix=f"It must be UTF-8 text, separated by commas, semicolons or tabs, with columns {','.join(_COLUMNS)}.",
            code="table-unreadable",
        ) from error
    return [(line, row) for line, row in rows if any(row.values())]


def _check(row: _Row, line: int, path: Path) -> None:
    """Refuse what would be read as something else, or not at all."""
    if not row["case"] or not (row.get("image") or _channels(row)):
        why, fix = f"line {line} has no {'image' if row['case'] else 'case'}", "Fill it in, or remove the row."
    elif row["label"] and not row["annotated"]:
        why = "it has a label, but nothing says what the label's integers mean"
        fix = "Write it under annotated, like liver=1;spleen=2."
    elif not row["label"] and any(map(_is_ids, _entries(row, path).values())):
        why, fix = f"annotated is {row['annotated']!r}, but there is no label", "Name the label, or leave both empty."
    elif _modality(row) not in _MODALITIES:
        why, fix = f"modality is {row['modality']!r}", "Write CT or MR, or leave it empty."
    else:
        _labels(row, path)
        return
    raise _not_understood(row, path, why, fix)


def _ids(row: _Row, path: Path) -> dict[str, tuple[int, ...]]:
    """`liver=1;kidney=2,3` → ids by name."""
    entries = _entries(row, path)
    if not all(map(_is_ids, entries.values())):
        fix = "Write it like liver=1;spleen=2 (or kidney=2,3 for several ids)."
        raise _not_understood(row, path, f"annotated is {row['annotated']!r}", fix)
    return {name: tuple(int(number) for number in values.split(",")) for name, values in entries.items()}


def _is_ids(values: str) -> bool:
    """Whether these are ids, `2,3`, and no file."""
    numbers = [number.strip() for number in values.split(",")]
    return all(number.isdecimal() and int(number) > 0 for number in numbers)


def _entries(row: _Row, path: Path) -> dict[str, str]:
    """What stands behind every name of `annotated`."""
    found: dict[str, str] = {}
    for entry in filter(None, (part.strip() for part in row["annotated"].split(";"))):
        name, _, value = (part.strip() for part in entry.partition("="))
        if not name or not value:
            fix = "Write it like liver=1;spleen=2; for masks in files of their own like liver=liver.nii.gz."
            raise _not_understood(row, path, f"annotated is {row['annotated']!r}", fix)
        if name in found:
            fix = f"Write several ids of a structure like {name}=1,2."
            raise _not_understood(row, path, f"annotated names {name} twice: {row['annotated']!r}", fix)
        found[name] = value
    return found


def _not_understood(row: _Row, path: Path, why: str, fix: str) -> DataError:
    what = f"The row of case {row['case']} cannot be understood." if row["case"] else "A row cannot be understood."
    return DataError(what, where=str(path), why=why, fix=fix, code="row-unreadable")


def _twice(case: str, path: Path) -> DataError:
    return DataError(
        f"A case is listed twice: {case}.",
        where=str(path),
        fix="Give every row its own case name.",
        code="case-named-twice",
    )


LAYOUT = Layout("csv", "a table of cases (cases.csv)", fits, images, labels, problems)
