"""Tables of a run as plain rows, and the CSV files they are kept in."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from panorgan.csv_cells import escape_row, unescape_cell
from panorgan.errors import RunError
from panorgan.evaluation.metrics import METRICS
from panorgan.federation.files import read_with_checksum, write_atomically, write_with_checksum

Row = dict[str, Any]


def columns(own_models: bool = False) -> tuple[str, ...]:
    """The columns of `metrics.csv`; scores of sites' `own_models` say first whose model it is."""
    return (*(("model",) if own_models else ()), "split", "site", "case", "organ", *METRICS)


class Table(list[Row]):
    """A list of rows, each a dict of column → value; `pandas.DataFrame(table)` accepts it."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column that some row has, in the order in which they first appear."""
        return tuple(dict.fromkeys(name for row in self for name in row))

    def where(self, **values: Any) -> Table:
        """The rows that hold these values, such as ``scores.where(organ="liver", split="test")``."""
        return Table(row for row in self if all(row.get(name) == value for name, value in values.items()))

    def column(self, name: str) -> list[Any]:
        """The values of one column, None where a row has none."""
        return [row.get(name) for row in self]

    def to_csv(self, path: str | os.PathLike[str]) -> Path:
        """Write the rows to a file, floats in full precision; names cannot act as formulas in a spreadsheet."""
        target = Path(path)
        write_atomically(target, _as_csv(self, self.columns))
        return target


def write_metrics(path: Path, rows: Iterable[Row], own_models: bool = False) -> None:
    """Write `metrics.csv`; floats in full precision, so equal runs give equal files."""
    plain = ({name: float(value) if name in METRICS else value for name, value in row.items()} for row in rows)
    write_with_checksum(path, _as_csv(plain, columns(own_models)))


def read_metrics(path: Path) -> Table:
    """The rows of a `metrics.csv`, metrics as floats."""
    if not path.is_file():
        raise RunError(
            "The run has no scores yet.",
            code="no-scores",
            where=str(path),
            fix="Finish it with 'panorgan train --resume', or run 'panorgan evaluate'.",
        )
    try:
        return Table(_parse_rows(csv.DictReader(io.StringIO(read_with_checksum(path), newline=""))))
    except ValueError as error:
        raise RunError(
            "The scores of a run are damaged.",
            code="scores-damaged",
            where=str(path),
            why=str(error),
            fix="Score the model again with 'panorgan evaluate'.",
        ) from error


def _as_csv(rows: Iterable[Row], columns: Sequence[str]) -> str:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        plain = {name: repr(float(value)) if isinstance(value, float) else value for name, value in row.items()}
        writer.writerow(escape_row(plain))
    return text.getvalue()


def _parse_rows(rows: Iterable[dict[str, str]]) -> Iterator[Row]:
    for row in rows:
        yield {name: float(value) if name in METRICS else unescape_cell(value) for name, value in row.items()}
