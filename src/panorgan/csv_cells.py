"""CSV cells that spreadsheets read as text: a name such as `=HYPERLINK(…)` must not become a formula."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# Characters that begin a formula in some spreadsheet, possibly after quotes of earlier escapes.
_FORMULA = re.compile(r"'*[=+\-@\t\r\n＝＋－＠]")
_QUOTE = "'"


def escape_cell(value: Any) -> Any:
    """The value for a cell: a text that would be a formula gets a leading quote. Numbers stay numbers, also as text."""
    if isinstance(value, str) and _FORMULA.match(value) and not _is_number(value):
        return _QUOTE + value
    return value


def escape_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """All cells of a row."""
    return {name: escape_cell(value) for name, value in row.items()}


def unescape_cell(cell: str) -> str:
    """The value passed to `escape_cell`."""
    return cell[1:] if cell.startswith(_QUOTE) and _FORMULA.match(cell) else cell


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return text == text.strip()
