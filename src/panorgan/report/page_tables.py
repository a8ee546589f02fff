"""Every table of a page as LaTeX (booktabs), read from the page itself: the same rules as in page_tables.js."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from html.parser import HTMLParser

_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": "$<$",
    ">": "$>$",
    "±": r"$\pm$",
    "×": r"$\times$",
    "−": "$-$",
    "–": "--",
    "▲": r"$\uparrow$",
    "▼": r"$\downarrow$",
    "●": r"$\bullet$",
    "○": r"$\circ$",
    "✓": r"\checkmark{}",
    "λ": r"$\lambda$",
    "·": r"$\cdot$",
    "\u00a0": "~",
}
_UNSEEN = {"hidden", "no-mark"}
_NO_END = {"wbr", "br", "img", "meta", "input", "link"}
PACKAGES = r"% \usepackage{booktabs,amssymb}"


@dataclass(frozen=True)
class Cell:
    """A cell: its text, and its small print. `span`: its number of columns; 0 if the cell to the left covers it."""

    main: str = ""
    small: str = ""
    span: int = 1
    best: bool = False


@dataclass
class PageTable:
    """One table: the caption, and its rows as slots, all of one width."""

    caption: str
    section: str
    parts: dict[str, list[list[Cell]]] = field(default_factory=lambda: {"thead": [], "tbody": [], "tfoot": []})


def latex_of(page: str) -> str:
    """All tables of a page, each an environment of its own, with its section in a comment."""
    reader = _Reader()
    reader.feed(page)
    return "\n".join(f"% {_comment(table.section)}\n{latex(table)}" for table in reader.tables)


def latex(table: PageTable) -> str:
    """One table."""
    parts = table.parts
    width = max((len(row) for rows in parts.values() for row in rows), default=1)
    head, body, foot = ([_line(row) for row in parts[name]] for name in ("thead", "tbody", "tfoot"))
    lines = [
        PACKAGES,
        r"\begin{table}",
        r"  \centering",
        rf"  \caption{{{latex_text(table.caption)}}}",
        rf"  \begin{{tabular}}{{l{'r' * (width - 1)}}}",
        r"    \toprule",
        *head,
        r"    \midrule",
        *body,
        *([r"    \midrule", *foot] if foot else []),
        r"    \bottomrule",
        r"  \end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def latex_text(text: str) -> str:
    """Text escaped for LaTeX."""
    return "".join(_LATEX.get(letter, letter) for letter in text)


def _line(row: list[Cell]) -> str:
    cells = (_cell(cell, column) for column, cell in enumerate(cell for cell in row if cell.span))
    return f"    {' & '.join(cells)} \\\\"


def _cell(cell: Cell, column: int) -> str:
    text = latex_text(cell.main)
    if cell.best:
        text = rf"\textbf{{{text}}}"
    if cell.small:
        text = " ".join(filter(None, (text, rf"{{\scriptsize {latex_text(cell.small)}}}")))
    return rf"\multicolumn{{{cell.span}}}{{{'c' if column else 'l'}}}{{{text}}}" if cell.span > 1 else text


def _comment(text: str) -> str:
    return " ".join(text.split())


class _Reader(HTMLParser):
    """Collects the tables in a `.table` box, except those of pictures (`.looks`)."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[PageTable] = []
        self._table: PageTable | None = None
        self._part = "tbody"
        self._caption = self._section = ""
        self._cell: Cell | None = None
        self._rows = 1
        self._within: list[str] = []  # tags open within the cell: "", "unseen" or "small" each
        self._taken: dict[tuple[int, int], Cell] = {}
        self._smalls: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        classes = set(found.get("class", "").split())
        if tag == "section":
            self._section = found.get("id", "")
        elif tag == "div" and "table" in classes:
            self._caption = found.get("aria-label", "")
        elif tag == "table":
            if self._caption and "looks" not in classes:
                self._table = PageTable(self._caption, self._section)
            self._caption = ""
        elif self._table is None:
            pass
        elif tag in self._table.parts:
            self._part, self._taken = tag, self._taken if tag == self._part == "tbody" else {}
        elif tag == "tr":
            self._table.parts[self._part].append([])
        elif tag in ("td", "th"):
            self._cell = Cell(span=int(found.get("colspan", 1)), best="best" in classes)
            self._rows, self._within, self._smalls = int(found.get("rowspan", 1)), [], []
        elif self._cell is not None and tag not in _NO_END:
            unseen = bool(classes & _UNSEEN) or tag == "title"
            self._within.append("unseen" if unseen else "small" if "sub" in classes else "")
            if "sub" in classes:
                self._smalls.append("")

    def handle_endtag(self, tag: str) -> None:
        if self._table is None:
            return
        if tag == "table":
            self.tables.append(self._table)
            self._table = None
        elif tag in ("td", "th") and self._cell is not None:
            self._place(replace(self._cell, small=" ".join(filter(None, map(_tidy, self._smalls)))))
        elif self._cell is not None and self._within and tag not in _NO_END:
            self._within.pop()

    def handle_data(self, data: str) -> None:
        if self._cell is None or "unseen" in self._within:
            return
        if "small" in self._within:
            self._smalls[-1] += data
        else:
            self._cell = replace(self._cell, main=self._cell.main + data)

    def _place(self, cell: Cell) -> None:
        """Put a cell into the next free slots of the row; slots below a cell of several rows are empty."""
        assert self._table is not None
        rows = self._table.parts[self._part]
        row, at = rows[-1], len(rows) - 1
        while (at, len(row)) in self._taken:
            row.append(self._taken[at, len(row)])
        cell = replace(cell, main=_tidy(cell.main))
        for index in range(cell.span):
            for below in range(1, self._rows):
                self._taken[at + below, len(row)] = Cell()
            row.append(replace(cell, span=0) if index else cell)
        self._cell = None


def _tidy(text: str) -> str:
    """As a browser shows it; no-break blanks stay."""
    return " ".join(filter(None, text.replace("\t", " ").replace("\r", " ").replace("\n", " ").split(" ")))
