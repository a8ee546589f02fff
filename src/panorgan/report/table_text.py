"""Tables as Markdown and CSV, and values for JSON."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from panorgan.csv_cells import escape_cell


def table_lines(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table; all columns but the first are numbers."""
    rule = ["---", *(["---:"] * (len(header) - 1))]
    return [f"| {' | '.join(row)} |" for row in (header, rule, *rows)]


def plain(text: str) -> str:
    """Escape Markdown: names must not become markup."""
    return "".join(f"\\{c}" if c in "\\`*_[]<>|#" else c for c in text.replace("\n", " "))


def csv_text(rows: Iterable[Mapping[str, Any]]) -> str:
    """A header and a line per row; undefined values are empty."""
    text = io.StringIO(newline="")
    listed = list(rows)
    writer = csv.DictWriter(text, list(listed[0]) if listed else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: "" if _undefined(v) else escape_cell(v) for k, v in row.items()} for row in listed)
    return text.getvalue()


def defined(content: Any) -> Any:
    """The same with None for NaN, which JSON does not have."""
    if isinstance(content, dict):
        return {key: defined(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [defined(value) for value in content]
    return None if _undefined(content) else content


def _undefined(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
