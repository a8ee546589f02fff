"""Look through the built site: nothing is fetched from elsewhere, every link leads somewhere, every list is a list.

    python scripts/check_site.py build/site

mkdocs checks links that are written in Markdown; this checks the pages as they are, with what theme, plugins and
notebooks have put into them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

POLICY = "Content-Security-Policy"
_LOADED = {"src", "srcset", "poster", "data", "background", "action", "formaction"}
_RELATIONS = {"stylesheet", "icon", "preload", "prefetch", "preconnect", "dns-prefetch", "modulepreload", "manifest"}
_AS_IS = {"pre", "code", "style", "script"}
_IN_STYLES = re.compile(r"(?:url\(|@import)\s*[\"']?\s*((?:https?:)?//[^\"')\s]+)", re.IGNORECASE)
_LOST_LIST = re.compile(r"\n(?:[-*+]|\d+\.) \S")
_LOST_BLOCK = re.compile(r"^(?:\| ---|```)", re.MULTILINE)


class Page(HTMLParser):
    """What a page loads, where it leads, what it calls its places, and what was meant as a list or a table."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.leads_to: list[str] = []
        self.places: set[str] = set()
        self.lost: list[str] = []
        self.policy = ""
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what a tag asks for."""
        given = {name: value or "" for name, value in attrs}
        self.places |= {given[name] for name in ("id", "name") if name in given}
        self.loads += [given[name] for name in _LOADED & given.keys() if not given[name].startswith("data:")]
        self.loads += _IN_STYLES.findall(given.get("style", ""))
        if tag == "link" and _RELATIONS & set(given.get("rel", "").split()):
            self.loads.append(given.get("href", ""))
        elif tag == "a" and "href" in given:
            self.leads_to.append(given["href"])
        elif tag == "meta" and given.get("http-equiv") == POLICY:
            self.policy = given.get("content", "")
        if tag in _AS_IS or tag == "p":
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Leave what `handle_data` asks about."""
        if tag in self._open:
            self._open.remove(tag)

    def handle_data(self, data: str) -> None:
        """Lines that begin with a dash were meant as a list, those with bars as a table: repositories show them so."""
        if "style" in self._open:
            self.loads += _IN_STYLES.findall(data)
        if not _AS_IS & set(self._open) and (
            _LOST_BLOCK.search(data) or ("p" in self._open and _LOST_LIST.search(data))
        ):
            self.lost.append(data.strip()[:60])


def problems(site: Path) -> list[str]:
    """What is wrong, one line each."""
    site = site.resolve()
    pages = {path: _read(path) for path in sorted(site.rglob("*.html"))}
    found = [] if pages else [f"{site} has no pages"]
    for path, page in pages.items():
        found += [f"{path.relative_to(site)}: {text}" for text in _wrong(path, page, pages, site)]
    for path in sorted(site.rglob("*.css")):
        found += [f"{path.relative_to(site)} loads {one}" for one in _IN_STYLES.findall(path.read_text("utf-8"))]
    return found


def _read(path: Path) -> Page:
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def _wrong(path: Path, page: Page, pages: dict[Path, Page], site: Path) -> Iterator[str]:
    if not page.policy or "http" in page.policy or "*" in page.policy:
        yield f"its {POLICY} does not keep it to itself: {page.policy or 'it has none'}"
    for target in page.loads:
        if _is_elsewhere(target):
            yield f"loads {target}"
        elif not _file(path, target, site).exists():
            yield f"loads {target}, which is not there"
    for target in page.leads_to:
        if _is_elsewhere(target):
            continue
        file, place = _file(path, target, site), unquote(urlsplit(target).fragment)
        if not file.exists() or (place and file in pages and place not in pages[file].places):
            yield f"links to {target}, which is not there"
    for text in page.lost:
        yield f"shows a list, a table or code as text (is there a blank line before it?): {text!r}"


def _is_elsewhere(target: str) -> bool:
    return bool(urlsplit(target).scheme or urlsplit(target).netloc)


def _file(path: Path, target: str, site: Path) -> Path:
    """What a page calls `target`; a leading slash means the site's root."""
    named = unquote(urlsplit(target).path)
    if not named:
        return path
    return site / named.lstrip("/") if named.startswith("/") else (path.parent / named).resolve()


if __name__ == "__main__":
    if bad := problems(Path(sys.argv[1])):
        sys.exit("\n".join(["The site is not as it should be:", *bad]))
