"""One `panorgan view`: what its addresses answer. Cases and panes are numbers; no address holds a path."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from html import escape, unescape
from importlib import resources
from math import inf
from statistics import fmean
from typing import Any
from urllib.parse import urlencode

from panorgan.errors import PanorganError
from panorgan.viewer.labels import colours, title
from panorgan.viewer.local_server import LocalServer, Request, Response, Route, as_json, html, not_found
from panorgan.viewer.study import Pane, Remark, Study, ViewedCase, known_name
from panorgan.viewer.volumes import Volumes

STATIC = {
    "niivue.umd.js": "text/javascript; charset=utf-8",
    "viewer.js": "text/javascript; charset=utf-8",
    "page_links.js": "text/javascript; charset=utf-8",
    "panes.js": "text/javascript; charset=utf-8",
    "lists.js": "text/javascript; charset=utf-8",
    "viewer.css": "text/css; charset=utf-8",
}
# A page of panorgan states its own, stricter policy; this one holds besides, and keeps everything on this machine.
PAGE_POLICY = (
    "default-src 'none'; img-src data:; font-src data:; style-src 'unsafe-inline'; script-src 'self' 'unsafe-inline'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
FIRST = 1_000_000
"""Voxels of the first picture of a scan; the page asks for the rest afterwards."""
_NIFTI = "application/octet-stream"
_META_POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)"')


class Session:
    """A study and its server.

    Parameters
    ----------
    case, organ : what is shown first; the first case if left out.
    port : 0 takes a free one.
    """

    def __init__(self, study: Study, case: str = "", organ: str = "", port: int = 0) -> None:
        self.study = study
        number = str(study.index_of(case)) if case else ""
        self._first = {"number": number, "organ": study.organ_of(organ) if organ else ""}
        self._volumes = Volumes()
        self._static = resources.files("panorgan.viewer") / "static"
        routes: dict[str, Route] = {
            "": lambda _: html((self._static / "index.html").read_text(encoding="utf-8")),
            "static": self._static_file,
            "study": lambda _: as_json(self._about()),
            "case": self._for_case(lambda case, number: as_json(self._about_case(case, number))),
            "scan": self._for_pane(self._scan),
            "labels": self._for_pane(self._labels),
            "volumes": self._for_pane(self._organ_volumes),
            "page": lambda _: self._page(),
        }
        self.server = LocalServer(routes, port)

    @property
    def url(self) -> str:
        """The address to open."""
        chosen = urlencode({name: value for name, value in self._first.items() if value})
        return f"{self.server.url}?{chosen}" if chosen else self.server.url

    def __enter__(self) -> Session:
        self.server.start()
        # While the browser starts, the first case is read.
        threading.Thread(target=self._warm_up, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.stop()
        self._volumes.close()

    def _warm_up(self) -> None:
        number = int(self._first["number"] or worst(self.study.cases, self._first["organ"]))
        for index, pane in enumerate(self.study.cases[number].panes):
            try:
                self._volumes.scan_pieces(pane.scan, FIRST)
                if pane.labels is not None:
                    self._volumes.label_pieces((number, index), pane, FIRST)
            except (PanorganError, OSError):  # the page asks again, and shows what is wrong
                return

    # -- data ------------------------------------------------------------------------------------------------------

    def _about(self) -> dict[str, Any]:
        names = self.study.organ_names()
        by_name = colours(names)
        return {
            "title": self.study.title,
            "kind": self.study.kind,
            "first_voxels": FIRST,
            "page": self.study.page is not None and self.study.page.is_file(),
            "organs": [{"name": name, "title": title(name), "colour": by_name[name]} for name in names],
            "cases": [_entry(case) for case in self.study.cases],
        }

    def _about_case(self, case: ViewedCase, number: int) -> dict[str, Any]:
        scans: dict[Any, int] = {}
        return {
            "ct": case.ct,
            "panes": [
                self._about_pane(pane, (number, index), scans.setdefault(pane.scan, index))
                for index, pane in enumerate(case.panes)
            ],
        }

    def _about_pane(self, pane: Pane, key: tuple[int, int], same_scan_as: int) -> dict[str, Any]:
        """`scan` is the first pane with the same scan: the page fetches it once."""
        about = {"title": pane.title, "reference": pane.reference, "dice": dict(pane.dice), "scan": same_scan_as}
        try:
            file = self._volumes.scan(pane.scan)
            about |= {"voxels": file.voxels, "shape": file.shape, "spacing": file.spacing}
            if pane.labels is not None:
                labels = self._volumes.labels(key, pane)
                about["labels"] = [known_name(name) for name in labels.names]
        except PanorganError as error:
            about["problem"] = " ".join(part for part in (error.what, error.why, error.fix) if part)
        return about

    def _scan(self, pane: Pane, key: tuple[int, int], request: Request) -> Response:
        return Response(self._volumes.scan_pieces(pane.scan, _most(request)), _NIFTI)

    def _labels(self, pane: Pane, key: tuple[int, int], request: Request) -> Response:
        if pane.labels is None:
            return not_found()
        return Response(self._volumes.label_pieces(key, pane, _most(request)), _NIFTI)

    def _organ_volumes(self, pane: Pane, key: tuple[int, int], request: Request) -> Response:
        if pane.labels is None:
            return not_found()
        return as_json({known_name(n): ml for n, ml in self._volumes.labels(key, pane).volumes_ml().items()})

    # -- pages -----------------------------------------------------------------------------------------------------

    def _static_file(self, request: Request) -> Response:
        name = "/".join(request.parts)
        if name not in STATIC:
            return not_found()
        return Response((self._static / name).read_bytes(), STATIC[name])

    def _page(self) -> Response:
        """The report, the comparison or the doctor's page, with links into this viewer."""
        if self.study.page is None or not self.study.page.is_file():
            return not_found()
        return html(with_links(self.study.page.read_text(encoding="utf-8")), PAGE_POLICY)

    def _for_case(self, answer: Callable[[ViewedCase, int], Response]) -> Route:
        def route(request: Request) -> Response:
            numbers = _numbers(request, 1)
            if numbers is None or numbers[0] >= len(self.study.cases):
                return not_found()
            return answer(self.study.cases[numbers[0]], numbers[0])

        return route

    def _for_pane(self, answer: Callable[[Pane, tuple[int, int], Request], Response]) -> Route:
        def route(request: Request) -> Response:
            numbers = _numbers(request, 2)
            if numbers is None or numbers[0] >= len(self.study.cases):
                return not_found()
            panes = self.study.cases[numbers[0]].panes
            return (
                answer(panes[numbers[1]], (numbers[0], numbers[1]), request) if numbers[1] < len(panes) else not_found()
            )

        return route


def worst(cases: Sequence[ViewedCase], organ: str) -> int:
    """The case that the page opens where none is named: the one with the lowest Dice, as its list is sorted."""

    def score(number: int) -> float:
        dice = cases[number].dice
        return dice.get(organ, inf) if any(organ in case.dice for case in cases) else fmean(dice.values() or [inf])

    return min(range(len(cases)), key=score)


def with_links(page: str) -> str:
    """A page of panorgan with a script that makes links of its commands; its own policy stays, and lets this one in."""
    policy = _META_POLICY.search(page)
    if policy is not None:
        mended = escape(_with_own_scripts(unescape(policy[1])))
        page = page[: policy.start(1)] + mended + page[policy.end(1) :]
    return page.replace("</body>", '<script src="static/page_links.js"></script></body>')


def _with_own_scripts(policy: str) -> str:
    rules = [rule.strip() for rule in policy.split(";") if rule.strip()]
    scripts = next((rule for rule in rules if rule.startswith("script-src ")), "script-src")
    return "; ".join([*(rule for rule in rules if rule != scripts), f"{scripts} 'self'"])


def _entry(case: ViewedCase) -> dict[str, Any]:
    return {
        "name": case.name,
        "group": case.group,
        "note": case.note,
        "dice": case.dice,
        "remarks": [_remark(remark) for remark in case.remarks],
    }


def _remark(remark: Remark) -> dict[str, Any]:
    facts = {"code": remark.code, "severity": remark.severity, "text": remark.text, "organ": remark.organ}
    return facts | ({"at_mm": remark.at_mm} if remark.at_mm else {})


def _numbers(request: Request, count: int) -> list[int] | None:
    """The numbers of an address; None where it is no such address."""
    parts = request.parts
    if len(parts) != count or not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        return None
    return [int(part) for part in parts]


def _most(request: Request) -> int | None:
    """How many voxels are wanted at most; all if the address does not say."""
    text = request.query.get("most", "")
    return max(1, int(text)) if text.isascii() and text.isdigit() and len(text) < 12 else None
