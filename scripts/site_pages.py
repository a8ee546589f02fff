"""mkdocs' hooks: pages of the site that do not lie in docs/, and links that hold in the repository and on the site."""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # tests look at links and notebooks without mkdocs
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
# Files of the repository → where the site has them.
PAGES = {
    "README.md": "index.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
COPIED = "examples/"
WIDE = {"results.md"}  # its tables need the space of both side columns
_LINK = re.compile(r"(?<=\]\()(?!#)([^)\s#:]+)(?=[)#])")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the repository's root, the examples, and a page for every notebook."""
    from mkdocs.structure.files import File

    for source, page in PAGES.items():
        if files.get_file_from_path(page) is None:
            files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for path in sorted((ROOT / COPIED).rglob("*.yaml")):
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        notebook = json.loads(file.content_string)
        page = file.src_uri.replace(".ipynb", ".md")
        files.append(File.generated(config, page, content=as_markdown(notebook, posixpath.basename(file.src_uri))))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """What repositories understand → what the site's Markdown understands."""
    if page.file.src_uri in WIDE:
        page.meta["hide"] = ["navigation", "toc"]
    return relinked(markdown, page.file.src_uri).replace("<details>", '<details markdown="1">')


def relinked(markdown: str, page: str) -> str:
    """The links of one page of the site, which need not lie where its source lies."""
    sources = {there: here for here, there in PAGES.items() if there != "index.md"}
    source = sources.get(page, f"docs/{page}")

    def moved(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[1]))
        target = PAGES.get(target, target.removeprefix("docs/"))
        if target.endswith(".ipynb"):
            target = target.replace(".ipynb", ".md")
        return posixpath.relpath(target, posixpath.dirname(page) or ".")

    return _LINK.sub(moved, markdown)


def as_markdown(notebook: dict[str, Any], name: str) -> str:
    """A notebook's cells and the outputs that were kept, with a link to the notebook itself under the title."""
    text = "\n\n".join(_cell(cell) for cell in notebook["cells"])
    download = f'<a class="notebook" href="{name}" download>Download this page as a notebook</a>'
    title, _, rest = text.partition("\n")
    return f"{title}\n\n{download}\n{rest}\n"


def _cell(cell: dict[str, Any]) -> str:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return source
    return "\n\n".join([f"```python\n{source}\n```", *(_output(output) for output in cell["outputs"])])


def _output(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        return f'<img class="output" alt="" src="data:image/png;base64,{"".join(data["image/png"]).strip()}">'
    text = "".join(output.get("text", data.get("text/plain", ""))).rstrip("\n")
    return f"```text {{.output}}\n{text}\n```"
