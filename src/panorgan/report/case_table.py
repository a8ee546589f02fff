"""A page's table of single cases: every row once, as data that the page's script sorts, filters and shows."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

from panorgan.evaluation.metrics import Metric

Cell = str | float | None


@dataclass
class Column:
    """One column.

    Attributes
    ----------
    digits : of numbers; None for words.
    better : of numbers, as in `Metric`.
    choose : the reader may choose one of the words.
    hidden : it is not shown, but the script needs it.
    keys : of words: what stands for each in a command, where that is not the word itself.
    role : `case`, `organ`, `site`, or `run` (which of `runs`), for what the script must know to name a case.
    runs : of numbers: the folder, below `place`, of the run that is scored; one for each seed, None where there is no
        such run.
    """

    name: str
    digits: int | None = None
    better: str = ""
    choose: bool = False
    hidden: bool = False
    role: str = ""
    runs: Sequence[str | None] = ()
    keys: dict[str, str] = field(default_factory=dict)


def metric_column(metric: Metric, digits: int, name: str = "", runs: Sequence[str | None] = ()) -> Column:
    """A column of one metric's values."""
    return Column(name or metric.column, digits=digits, better=metric.better, runs=runs)


@dataclass(frozen=True)
class CaseTable:
    """All rows, in the order in which plots refer to them.

    `leading` is the number that rows are sorted by at first, and that plots show. `best`: the best of the numbers in
    each row is marked. `place` is the name of the page's folder, for which a page that was opened from disk takes the
    whole path; where it is empty, `runs` are whole paths.
    """

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    leading: int
    place: str
    best: bool = False

    def as_script(self) -> Markup:
        """The table as JSON for a page: words once, rows as numbers; escaped, so that no name can close the element."""
        coded = [_coded(column, [row[i] for row in self.rows]) for i, column in enumerate(self.columns)]
        content = {
            "leading": self.leading,
            "place": self.place,
            "best": self.best,
            "columns": [about for about, _ in coded],
            "rows": list(map(list, zip(*(values for _, values in coded), strict=True))) if self.rows else [],
        }
        text = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def _coded(column: Column, values: Iterable[Cell]) -> tuple[dict[str, Any], list[Any]]:
    """A column for the script: its description, and its values as numbers or as indices into its list of words."""
    about: dict[str, Any] = {"name": column.name}
    about |= {name: True for name in ("choose", "hidden") if getattr(column, name)}
    about |= {name: getattr(column, name) for name in ("better", "role") if getattr(column, name)}
    if column.digits is not None:
        about |= {"digits": column.digits, **({"runs": list(column.runs)} if column.runs else {})}
        return about, [_rounded(value, column.digits + 1) for value in values]
    listed = [str(value) for value in values]
    words = list(dict.fromkeys(listed))
    about["words"] = words
    if column.keys:
        about["keys"] = [column.keys[word] for word in words]
    places = {word: place for place, word in enumerate(words)}
    return about, [places[word] for word in listed]


def _rounded(value: Cell, places: int) -> float | None:
    if value is None or isinstance(value, str) or not math.isfinite(value):
        return None
    return round(value, places)
