"""Keep the documentation of this version beside those of others: FOLDER/0.1.0, and a page that lists them.

    python scripts/keep_docs.py build/site FOLDER

The folder can be served as it is. A version that is kept again replaces itself; the others stay as they are.
"""

from __future__ import annotations

import html
import re
import shutil
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
_VERSION = re.compile(r"\d+(?:\.\d+)*\w*")


def keep(site: Path, folder: Path, version: str) -> list[str]:
    """Copy a built site; the versions that are there now, newest first."""
    scratch, target = folder / f".{version}.incomplete", folder / version
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(site, scratch)
    shutil.rmtree(target, ignore_errors=True)
    scratch.rename(target)
    found = sorted((p.name for p in folder.iterdir() if p.is_dir() and _VERSION.fullmatch(p.name)), key=_order)[::-1]
    entries = "".join(
        f'<li><a href="{html.escape(one)}/index.html">panorgan {html.escape(one)}</a></li>' for one in found
    )
    head = '<!doctype html><html lang="en"><meta charset="utf-8"><title>panorgan</title><h1>panorgan</h1>'
    (folder / "index.html").write_text(f"{head}<ul>{entries}</ul></html>\n", encoding="utf-8")
    return found


def _order(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


if __name__ == "__main__":
    number = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    place = Path(sys.argv[2])
    place.mkdir(parents=True, exist_ok=True)
    print(f"{place}: {', '.join(keep(Path(sys.argv[1]), place, number))}")
