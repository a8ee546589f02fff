"""The findings as data inside `doctor.html`, so that `panorgan view doctor.html` can open each next to its scan."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from panorgan.data_doctor.findings import CaseFacts, Checkup

META = "panorgan-findings"
"""The name of the page's meta element that holds them."""


def findings_data(checkup: Checkup) -> str:
    """Folders, findings with the place of their organ, and for every duplicate its twin, as JSON.

    `folder` is absolute: the page may be opened from anywhere on the machine.
    """
    layouts = checkup.layouts
    content = {
        "sources": [
            {"site": source.site, "folder": str(source.folder.resolve()), "layout": layouts.get(source.site, "")}
            for source in checkup.sources
        ],
        "findings": [
            {
                "code": finding.code,
                "severity": finding.severity.name,
                "site": finding.site,
                "case": finding.case,
                "what": finding.what,
                "why": finding.why,
                "organ": finding.structure,
                "at_mm": _place(checkup, finding.site, finding.case, finding.structure),
            }
            for finding in checkup.findings
            if finding.case
        ],
        "twins": [[one.site, one.case, other.site, other.case] for one, other in _twins(checkup)],
    }
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _place(checkup: Checkup, site: str, case: str, structure: str) -> list[float] | None:
    """The middle of the organ that a finding is about."""
    for facts in checkup.cases:
        if (facts.site, facts.case) == (site, case):
            for found in facts.structures:
                if found.name == structure and all(map(math.isfinite, found.centre_mm)):
                    return [round(mm, 1) for mm in found.centre_mm]
    return None


def _twins(checkup: Checkup) -> Iterator[tuple[CaseFacts, CaseFacts]]:
    """Cases with the same voxels or the very same label, each with another one: (case, its twin)."""
    first: dict[Any, CaseFacts] = {}
    named: set[tuple[str, str]] = set()
    for what in ("content", "label_content"):
        for facts in checkup.cases:
            key = (what, getattr(facts, what))
            twin = first.setdefault(key, facts)
            if not key[1] or twin is facts or (facts.site, facts.case) in named:
                continue
            named.add((facts.site, facts.case))
            yield facts, twin
            if (twin.site, twin.case) not in named:
                named.add((twin.site, twin.case))
                yield twin, facts
