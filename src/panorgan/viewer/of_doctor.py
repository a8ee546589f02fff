"""The doctor's findings with their cases. `doctor.html` carries them as data: the page alone is enough to open them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from panorgan.data_doctor.page_data import META
from panorgan.errors import DataError, PanorganError
from panorgan.viewer.of_files import folder_cases
from panorgan.viewer.study import Remark, Study, ViewedCase, known_name

PAGE = "doctor.html"
_WORST_FIRST = ("error", "warning", "note")
Key = tuple[str, str]


def has_findings(page: Path) -> bool:
    """Whether a file is a page of the doctor with its findings inside."""
    return page.is_file() and page.suffix == ".html" and _content(page) is not None


def view_checkup(page: Path) -> Study:
    """Every case that was checked, those with findings first; a duplicate is next to its twin."""
    content = _content(page)
    if content is None:
        raise DataError(
            "The page holds no findings to open.",
            code="no-findings-inside",
            where=str(page),
            why="the doctor of an older version wrote it, or it is another page",
            fix="Run 'panorgan doctor' again, or open the data folder itself: panorgan view FOLDER.",
        )
    several = len(content["sources"]) > 1
    cases: dict[Key, ViewedCase] = {}
    for source in content["sources"]:
        for name, case in _cases_of(source).items():
            cases[source["site"], name] = replace(case, group=source["site"] if several else "")
    remarks = _remarks(content)
    twins = {(site, case): (other[0], other[1]) for site, case, *other in content["twins"]}
    viewed = [_with_twin(key, case, remarks.get(key, ()), cases, twins) for key, case in cases.items()]
    viewed.sort(key=lambda case: _rank(case.remarks))
    if not viewed:
        raise DataError(
            "None of the scans that the doctor checked can be opened.",
            code="no-scans",
            where=str(page),
            why=f"its folders were {', '.join(source['folder'] for source in content['sources'])}",
            fix="Put the data back, or run 'panorgan doctor' again where it is now.",
        )
    return Study("doctor", "doctor", tuple(viewed), page)


def _cases_of(source: Mapping[str, Any]) -> dict[str, ViewedCase]:
    """The cases of a folder that can still be found; a folder that cannot be understood has none."""
    try:
        return folder_cases(Path(source["folder"]), source.get("layout") or "auto")
    except (PanorganError, OSError, ValueError, KeyError, TypeError):
        return {}


def _remarks(content: Mapping[str, Any]) -> dict[Key, tuple[Remark, ...]]:
    found: dict[Key, list[Remark]] = defaultdict(list)
    for one in content["findings"]:
        text = " – ".join(part for part in (one["what"], one["why"]) if part)
        organ = known_name(one["organ"]) if one["organ"] else ""
        at = tuple(one["at_mm"]) if one.get("at_mm") else None
        found[one["site"], one["case"]].append(Remark(one["code"], one["severity"], text, organ, at))
    return {key: tuple(sorted(own, key=lambda r: _WORST_FIRST.index(r.severity))) for key, own in found.items()}


def _rank(remarks: tuple[Remark, ...]) -> int:
    return min((_WORST_FIRST.index(remark.severity) for remark in remarks), default=len(_WORST_FIRST))


def _with_twin(
    key: Key,
    case: ViewedCase,
    remarks: tuple[Remark, ...],
    cases: Mapping[Key, ViewedCase],
    twins: Mapping[Key, Key],
) -> ViewedCase:
    other = cases.get(twins.get(key, ("", "")))
    if other is None:
        return replace(case, remarks=remarks)
    own = replace(case.panes[0], title=case.name)
    twin = replace(other.panes[0], title=f"{other.name}{f' ({other.group})' if other.group else ''}")
    return replace(case, panes=(own, twin), remarks=remarks)


class _Meta(HTMLParser):
    """The content of one meta element."""

    content: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        if tag == "meta" and named.get("name") == META:
            self.content = named.get("content")


def _content(page: Path) -> dict[str, Any] | None:
    parser = _Meta()
    parser.feed(page.read_text(encoding="utf-8").partition("<style>")[0])
    try:
        found = json.loads(parser.content or "")
    except ValueError:
        return None
    return found if isinstance(found, dict) and {"sources", "findings", "twins"} <= found.keys() else None
