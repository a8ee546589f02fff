"""Write `doctor.html`: what the doctor checked and found, with pictures; one file, no network."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import panorgan
from panorgan.anatomy import catalogue
from panorgan.data_doctor import CaseFacts, Checkup, Severity
from panorgan.data_doctor.codes import CODES
from panorgan.data_doctor.page_data import META, findings_data
from panorgan.data_doctor.summary import (
    Group,
    Place,
    SourceSummary,
    StructureCount,
    Variant,
    axis_ranges,
    group_findings,
    summarise_sources,
)
from panorgan.federation.files import write_atomically
from panorgan.report.doctor_cases import doctor_cases
from panorgan.report.strips import make_strips
from panorgan.report.tables import plural
from panorgan.report.templates import fill_in
from panorgan.report.thumbnails import Picture, colour_of, draw

GALLERY = 60
"""Cases in the gallery; more would make the page slow to open."""
PER_FINDING = 12
"""Pictures under one finding."""
_ROWS = 40
_NAMES = 30


@dataclass(frozen=True)
class Card:
    """One case with its picture. `anchor` names it in the page, `picture` is an id in the page's store of pictures."""

    site: str
    case: str
    anchor: str
    picture: str
    spoken: str
    size: str
    spacing: str
    facts: CaseFacts


@dataclass(frozen=True)
class Row:
    """One variant of a finding: names of cases, how many were left out, and the sentences."""

    site: str
    cases: str
    what: str
    why: str
    fix: str


@dataclass(frozen=True)
class FindingView:
    """All findings of one code as the page shows them."""

    group: Group
    meaning: str
    rows: tuple[Row, ...]
    rows_left: int
    cards: tuple[Card, ...]
    cards_left: int


def write_doctor_page(checkup: Checkup, path: Path) -> Path:
    """Write the page and return its path. It holds slices of scans and case ids, and must stay in the hospital."""
    write_atomically(path, render(checkup))
    return path


def render(checkup: Checkup, created: str | None = None) -> str:
    """The page as text; `created` is shown as the time of the check (default: now)."""
    summaries = summarise_sources(checkup)
    cards = _make_cards(checkup.cases)
    findings = [_view(group, cards) for group in group_findings(checkup.findings)]
    gallery = list(cards.values())[:GALLERY]
    shown = {card.picture: card.facts for view in findings for card in view.cards}
    shown |= {card.picture: card.facts for card in gallery}
    return fill_in(
        "doctor.html.j2",
        {"plural": plural, "title_of": _title, "colour_of": colour_of},
        created=created or time.strftime("%Y-%m-%d %H:%M"),
        version=panorgan.__version__,
        heading=_heading(summaries),
        verdict=verdict(checkup),
        counts={severity.name: sum(f.severity == severity for f in checkup.findings) for severity in Severity},
        worst=checkup.worst.name if checkup.worst is not None else "",
        checkup=checkup,
        findings_meta={"name": META, "content": findings_data(checkup)},
        sources=summaries,
        has_splits=any(summary.splits for summary in summaries),
        matrix=organ_matrix(summaries),
        findings=findings,
        strips=make_strips(checkup, _title),
        cases=doctor_cases(checkup),
        gallery=gallery,
        gallery_left=len(checkup.cases) - len(gallery),
        anchors={card.anchor for card in gallery},
        pictures=_draw_all(shown),
        several=len(checkup.sources) > 1,
    )


def verdict(checkup: Checkup) -> str:
    """The result of the check, in a sentence or two."""
    counts = {severity: sum(f.severity == severity for f in checkup.findings) for severity in Severity}
    errors, warnings, notes = (counts[severity] for severity in sorted(Severity, reverse=True))
    cases = plural(len(checkup.cases), "case")
    if not checkup.findings:
        return f"No problem was found in {cases}. The data can be used for training."
    if errors:
        must = f"{plural(errors, 'error')} must be fixed before training"
        look = f", and {plural(warnings, 'warning')} should be checked" if warnings else ""
        return f"In {cases}, {must}{look}."
    if warnings:
        return f"In {cases} nothing is broken, but {plural(warnings, 'warning')} should be checked before training."
    return f"In {cases} nothing is wrong; {plural(notes, 'note')} for information."


def organ_matrix(summaries: Sequence[SourceSummary]) -> list[tuple[str, list[StructureCount | None]]]:
    """Per organ, in catalogue order, each source's annotation; None if it does not annotate the organ."""
    names = {name for summary in summaries for name in summary.structures}
    places = {name: number for number, name in enumerate(catalogue())}
    ordered = sorted(names, key=lambda name: (places.get(name, len(places)), name))
    return [(name, [summary.structures.get(name) for summary in summaries]) for name in ordered]


def _view(group: Group, cards: Mapping[Place, Card]) -> FindingView:
    rows = [row for variant in group.variants for row in _rows(group, variant)]
    own = [cards[place] for place in group.places if place in cards and cards[place].picture]
    return FindingView(
        group=group,
        meaning=_meaning(group.code),
        rows=tuple(rows[:_ROWS]),
        rows_left=max(0, len(rows) - _ROWS),
        cards=tuple(own[:PER_FINDING]),
        cards_left=max(0, len(own) - PER_FINDING),
    )


def _rows(group: Group, variant: Variant) -> list[Row]:
    """One row per site; sentences that the whole group shares are left out."""
    by_site: dict[str, list[str]] = {}
    for place in variant.places:
        by_site.setdefault(place.site, []).append(place.case)
    what, fix = ("" if group.what else variant.what), ("" if group.fix else variant.fix)
    return [Row(site, _names(cases), what, variant.why, fix) for site, cases in by_site.items()]


def _names(cases: Sequence[str]) -> str:
    named = [case or "the whole folder" for case in cases]
    more = f" and {len(named) - _NAMES} more" if len(named) > _NAMES else ""
    return ", ".join(named[:_NAMES]) + more


def _make_cards(cases: Sequence[CaseFacts]) -> dict[Place, Card]:
    cards = {}
    for number, case in enumerate(cases):
        anchor = f"case-{number}-" + re.sub(r"[^A-Za-z0-9]+", "-", case.case)
        structures = ", ".join(_title(structure.name) for structure in case.structures)
        plane = f"{case.thumbnail.plane} slice" if case.thumbnail else "no picture"
        cards[Place(case.site, case.case)] = Card(
            site=case.site,
            case=case.case,
            anchor=anchor,
            picture=f"picture-{number}" if case.thumbnail else "",
            spoken=f"Case {case.case} of {case.site}: {plane}, {structures or 'nothing annotated'}",
            size=axis_ranges([case.shape]) if case.shape else "",
            spacing=axis_ranges([case.spacing_mm]) if case.spacing_mm else "",
            facts=case,
        )
    return cards


def _draw_all(shown: Mapping[str, CaseFacts]) -> dict[str, Picture]:
    """Every picture once, however often the page shows it."""
    return {name: draw(case.thumbnail) for name, case in shown.items() if case.thumbnail is not None}


def _heading(summaries: Sequence[SourceSummary]) -> str:
    names = [summary.site for summary in summaries]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _meaning(code: str) -> str:
    """The general meaning of a code; empty for one that is not documented."""
    return CODES[code].meaning if code in CODES else ""


def _title(name: str) -> str:
    """The organ's readable name; a name outside the catalogue stays as it is."""
    organ = catalogue().get(name)
    return organ.title if organ else name
