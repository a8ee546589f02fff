"""Run the notebooks of docs/notebooks and keep their outputs in them.

    python scripts/run_notebooks.py [docs/notebooks/NAME.ipynb …]

Cells run in this process, one after the other, as Jupyter would run them: the last expression of a cell is shown, and
so are figures. Of Jupyter nothing more is needed here than its file format, which is JSON.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "notebooks"
_DPI = 80

Notebook = dict[str, Any]
Output = dict[str, Any]


def main() -> int:
    """Run them and write them back."""
    for path in [Path(name) for name in sys.argv[1:]] or sorted(FOLDER.glob("*.ipynb")):
        path.write_text(as_text(run(json.loads(path.read_text(encoding="utf-8")))), encoding="utf-8")
    return 0


def run(notebook: Notebook) -> Notebook:
    """The notebook with the outputs of a fresh run, in an empty folder; an error in a cell is raised."""
    names: dict[str, Any] = {"__name__": "__main__"}
    with _empty_folder(), _figures_in_memory():
        cells = [_run(cell, number, names) for number, cell in enumerate(notebook["cells"], start=1)]
    return {**notebook, "cells": cells}


def as_text(notebook: Notebook) -> str:
    """As Jupyter writes it, so that opening and saving there changes little."""
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def texts(notebook: Notebook) -> list[str]:
    """What the cells printed or showed as text, one entry per code cell."""
    return ["".join(_text(output) for output in cell.get("outputs", ())) for cell in notebook["cells"]]


def _run(cell: dict[str, Any], number: int, names: dict[str, Any]) -> dict[str, Any]:
    if cell["cell_type"] != "code":
        return cell
    body = ast.parse("".join(cell["source"]))
    last = body.body.pop() if body.body and isinstance(body.body[-1], ast.Expr) else None
    place, printed, value = f"<cell {number}>", io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(body, place, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), place, "eval"), names)
    return {**cell, "outputs": list(_outputs(printed.getvalue(), value))}


def _outputs(printed: str, value: object) -> Iterator[Output]:
    """In the order in which Jupyter shows them: what was printed, the value, figures."""
    if printed:
        yield {"name": "stdout", "output_type": "stream", "text": printed.splitlines(keepends=True)}
    if value is not None:
        data = {"text/plain": repr(value).splitlines(keepends=True)}
        yield {"data": data, "execution_count": None, "metadata": {}, "output_type": "execute_result"}
    for picture in _figures():
        data = {"image/png": base64.b64encode(picture).decode()}
        yield {"data": data, "metadata": {}, "output_type": "display_data"}


def _figures() -> Iterator[bytes]:
    """The open figures as PNG; closes them."""
    from matplotlib import pyplot

    for number in pyplot.get_fignums():
        file = io.BytesIO()
        pyplot.figure(number).savefig(file, format="png", dpi=_DPI, bbox_inches="tight", metadata={"Software": None})
        yield file.getvalue()
    pyplot.close("all")


def _text(output: Output) -> str:
    return "".join(output.get("text", output.get("data", {}).get("text/plain", "")))


@contextlib.contextmanager
def _empty_folder() -> Iterator[None]:
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


@contextlib.contextmanager
def _figures_in_memory() -> Iterator[None]:
    """Matplotlib without a window, and as it was afterwards."""
    import matplotlib
    from matplotlib import pyplot

    before = matplotlib.get_backend()
    pyplot.switch_backend("agg")
    try:
        yield
    finally:
        pyplot.close("all")
        pyplot.switch_backend(before)


if __name__ == "__main__":
    sys.exit(main())
