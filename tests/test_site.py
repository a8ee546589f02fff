"""The site's own tools: links between repository and site, the check of the built pages, and notebooks that run."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pages, check, notebooks = script("site_pages"), script("check_site"), script("run_notebooks")
versions = script("keep_docs")


# -- links -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page", "written", "expected"),
    [
        ("compare.md", "[a](results.md#runs-at-once)", "[a](results.md#runs-at-once)"),
        ("index.md", "[a](../SECURITY.md), [b](../README.md)", "[a](security.md), [b](index.md)"),
        ("index.md", "[a](notebooks/five-minutes.ipynb)", "[a](notebooks/five-minutes.md)"),
        ("notebooks/x.md", "[a](partial-label.ipynb) [b](../doctor.md)", "[a](partial-label.md) [b](../doctor.md)"),
        ("notebooks/x.md", "[a](../../examples/acdc.yaml)", "[a](../examples/acdc.yaml)"),
        ("security.md", "[a](docs/deploy.md#8) [b](CHANGELOG.md)", "[a](deploy.md#8) [b](changelog.md)"),
        ("methods.md", "[a](#fedavg) [b](https://arxiv.org/abs/1)", "[a](#fedavg) [b](https://arxiv.org/abs/1)"),
    ],
)
def test_links_of_the_repository_become_links_of_the_site(page, written, expected):
    assert pages.relinked(written, page) == expected


# -- the check of the built pages ------------------------------------------------------------------------------

GOOD = """<html><head><meta http-equiv="Content-Security-Policy" content="default-src 'self'">
<link rel="stylesheet" href="a.css"></head><body><p id="here">Text - with dashes</p><pre>
- code</pre><img src="data:image/png;base64,AA"><a href="https://example.org">out</a><a href="#here">x</a>
<a href="/index.html#here">root</a></body></html>"""


def built(folder: Path, page: str, style: str = "body { color: red }") -> list[str]:
    (folder / "index.html").write_text(page)
    (folder / "a.css").write_text(style)
    return check.problems(folder)


def test_a_site_that_keeps_to_itself_passes(tmp_path):
    assert built(tmp_path, GOOD) == []
    assert check.problems(tmp_path / "nothing") != []


@pytest.mark.parametrize(
    "added",
    [
        '<script src="https://cdn.example.org/a.js"></script>',
        '<img src="//cdn.example.org/a.png">',
        '<img srcset="https://cdn.example.org/a.png 2x">',
        '<link rel="preconnect" href="https://fonts.example.org">',
        '<style>@import "https://fonts.example.org/css";</style>',
        '<p style="background: url(https://example.org/a.png)">x</p>',
        '<img src="missing.png">',
        '<a href="missing.html">x</a>',
        '<a href="#nowhere">x</a>',
        "<p>A list:\n- one\n- two</p>",
        "<details>\n| a |\n| --- |\n</details>",
    ],
)
def test_what_is_fetched_missing_or_lost_is_found(tmp_path, added):
    assert len(built(tmp_path, GOOD.replace("</body>", f"{added}</body>"))) == 1


def test_a_policy_and_styles_are_looked_at(tmp_path):
    assert len(built(tmp_path, GOOD.replace("default-src 'self'", "default-src https:"))) == 1
    assert len(built(tmp_path, GOOD.replace("http-equiv", "name"))) == 1
    assert len(built(tmp_path, GOOD, "@font-face { src: url('https://fonts.example.org/a.woff2') }")) == 1


# -- versions --------------------------------------------------------------------------------------------------


def test_a_version_is_kept_beside_the_others_and_replaces_itself(tmp_path):
    folder = tmp_path / "versions"
    folder.mkdir()
    site = tmp_path / "site"
    site.mkdir()
    (site / "index.html").write_text("old")
    for version in ("0.9.0", "0.10.0"):
        assert versions.keep(site, folder, version)[0] == version  # newest first, by number
    (site / "index.html").write_text("new")
    (site / "more.html").write_text("")
    assert versions.keep(site, folder, "0.9.0") == ["0.10.0", "0.9.0"]
    assert [(folder / v / "index.html").read_text() for v in ("0.9.0", "0.10.0")] == ["new", "old"]
    assert (folder / "index.html").read_text().index("0.10.0") < (folder / "index.html").read_text().index("0.9.0")


# -- notebooks -------------------------------------------------------------------------------------------------


def cell(source: str) -> dict[str, object]:
    return {"cell_type": "code", "source": source.splitlines(keepends=True), "outputs": [], "metadata": {}}


def test_cells_share_names_and_show_what_jupyter_would():
    drawing = cell("import matplotlib.pyplot as plt\nfigure = plt.figure(figsize=(1, 1))")
    ran = notebooks.run({"cells": [cell("x = 2\nprint('hello')"), cell("x + 1"), drawing]})
    assert notebooks.texts(ran) == ["hello\n", "3", ""]
    (picture,) = ran["cells"][2]["outputs"]
    assert list(picture["data"]) == ["image/png"]
    page = pages.as_markdown({"cells": [{"cell_type": "markdown", "source": ["# Title\n"]}, *ran["cells"]]}, "a.ipynb")
    assert page.startswith('# Title\n\n<a class="notebook" href="a.ipynb"')
    assert "```text {.output}\nhello\n```" in page
    assert 'src="data:image/png;base64,' in page


def test_a_cell_that_fails_is_told():
    with pytest.raises(ZeroDivisionError):
        notebooks.run({"cells": [cell("1 / 0")]})


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run_and_their_outputs_are_fresh(path):
    """But for numbers, whose last digits depend on the machine."""
    kept = json.loads(path.read_text(encoding="utf-8"))
    ran = notebooks.run(kept)
    fresh, stored = ([re.sub(r"[-+]?\d[\d.]*", "0", text) for text in notebooks.texts(one)] for one in (ran, kept))
    assert fresh == stored, f"outputs are stale; run: python scripts/run_notebooks.py {path.relative_to(ROOT)}"
    assert [len(c.get("outputs", ())) for c in ran["cells"]] == [len(c.get("outputs", ())) for c in kept["cells"]]
    assert notebooks.as_text(kept) == path.read_text(encoding="utf-8")


def test_there_are_notebooks():
    assert [path.stem for path in NOTEBOOKS] == ["five-minutes", "partial-label"]
