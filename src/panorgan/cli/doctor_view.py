"""The output of `panorgan doctor`: a summary per source, the findings, and what to do next; or one JSON object."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from panorgan.cli.console import Console
from panorgan.data_doctor import CaseFacts, Checkup, Finding, Severity, StructureFacts
from panorgan.data_doctor.codes import CODES
from panorgan.data_doctor.summary import Group, Place, SourceSummary, Variant, group_findings, summarise_sources

if TYPE_CHECKING:
    from panorgan.cli.doctor import DoctorRequest
    from panorgan.data_doctor.headers import FixedFile

_STYLES = {Severity.error: "bold red", Severity.warning: "bold yellow", Severity.note: "bold cyan"}
_NAMED_CASES = 3
_VARIANTS = 3
_ORGANS = 16
_TEXT_WIDTH = 110  # longer lines are hard to read, however wide the terminal


def show(
    console: Console, checkup: Checkup, request: DoctorRequest, page: Path | None, fixed: Sequence[FixedFile] | None
) -> None:
    """Print the whole result."""
    for summary in summarise_sources(checkup):
        console.print(_source_block(summary))
        console.print()
    groups = group_findings(checkup.findings)
    if groups:
        several = len(checkup.sources) > 1
        console.print(findings_table(groups, several, min(console.width, _TEXT_WIDTH), page))
    console.print(verdict(checkup), highlight=False)
    if not groups:
        console.print(Text(_what_was_checked(checkup), style="dim"), width=min(console.width, _TEXT_WIDTH))
    if fixed is not None:
        _show_fixed(console, fixed, request)
    if page is not None:
        _line(console, f"Page with pictures (stays in the hospital): {page}")
    for line in next_steps(checkup, groups, request):
        _line(console, line)


def _line(console: Console, text: str) -> None:
    """A sentence wraps between words. Text to copy, a path or a line of YAML, never does."""
    copied = text.startswith(" ") or "/" in text
    console.print(text, soft_wrap=copied, markup=False, highlight=False)


def _source_block(summary: SourceSummary) -> Table:
    """Name and folder, then one line per fact."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    cases = f"{_count(summary.cases, 'case')} of {_count(summary.patients, 'patient')}"
    if summary.splits:
        cases += " (" + ", ".join(f"{count} {split}" for split, count in summary.splits.items()) + ")"
    rows = {
        "folder": str(summary.folder),
        "layout": summary.layout or "not recognised",
        "holds": f"{cases}, {summary.modality}" if summary.modality else cases,
        "spacing": f"{summary.spacing_mm} mm" if summary.spacing_mm else "",
        "size": f"{summary.size} voxels" if summary.size else "",
        "organs": _organs(summary) if summary.cases else "",
    }
    table.add_row(Text("site"), Text(summary.site, style="bold"))
    for name, value in rows.items():
        if value:
            table.add_row(Text(name), Text(value))
    return table


def _organs(summary: SourceSummary) -> str:
    """`liver 5, spleen 4 (1 empty)`."""
    words = [
        f"{name} {count.annotated}" + (f" ({count.empty} empty)" if count.empty else "")
        for name, count in summary.structures.items()
    ]
    if len(words) > _ORGANS:
        words = [*words[:_ORGANS], f"and {len(words) - _ORGANS} more"]
    return ", ".join(words) or "none annotated"


def findings_table(groups: Sequence[Group], several_sites: bool, width: int, page: Path | None) -> Table:
    """One row per code, worst first."""
    table = Table(box=box.HORIZONTALS, show_header=False, show_lines=True, width=width, padding=(0, 1))
    table.add_column(no_wrap=True, width=max(len(severity.name) for severity in Severity))
    table.add_column(ratio=1)
    for group in groups:
        severity = Text(group.severity.name, style=_STYLES[group.severity])
        table.add_row(severity, _group_cell(group, several_sites, page))
    return table


def _group_cell(group: Group, several_sites: bool, page: Path | None) -> Table:
    """The code and what it is about, then where and why, then the fix."""
    cell = Table.grid(padding=(0, 2))
    cell.add_column(no_wrap=True)
    cell.add_column(ratio=1)
    head = Table.grid()
    head.add_row(_heading(group))
    meaning = CODES[group.code].meaning if group.code in CODES else ""
    if group.what or meaning:
        head.add_row(Text(group.what or meaning))
    for variant in group.variants[:_VARIANTS]:
        cell.add_row(Text("at", style="dim"), Text(places_in_words(variant.places, several_sites), style="cyan"))
        for label, words in _reasons(group, variant):
            cell.add_row(Text(label, style="dim"), Text(words))
    rest = [place for variant in group.variants[_VARIANTS:] for place in variant.places]
    if rest:
        more = f"and {len(rest)} more like these ({f'on {page.name}' if page else '--json lists them'})"
        cell.add_row(Text("at", style="dim"), Text(places_in_words(rest, several_sites), style="cyan"))
        cell.add_row(Text(""), Text(more, style="dim"))
    if group.fix:
        cell.add_row(Text("fix", style="bold"), Text(group.fix))
    head.add_row(cell)
    return head


def _heading(group: Group) -> Text:
    count = f"  {_count(group.cases, 'case')}" if group.cases > 1 else ""
    return Text.assemble((group.code, "bold"), (count, "dim"))


def _reasons(group: Group, variant: Variant) -> list[tuple[str, str]]:
    """What this variant adds to the text of its group."""
    rows = [("", "" if group.what else variant.what), ("why", variant.why), ("fix", "" if group.fix else variant.fix)]
    return [(label, words) for label, words in rows if words]


def places_in_words(places: Sequence[Place], several_sites: bool) -> str:
    """`case_1, case_2, case_3 and 12 more`; with its site in front where there are several."""
    by_site: dict[str, list[str]] = {}
    for place in places:
        by_site.setdefault(place.site, []).append(place.case or "the whole folder")
    words = []
    for site, cases in by_site.items():
        # One more name is shorter than "and 1 more".
        shown = cases if len(cases) <= _NAMED_CASES + 1 else cases[:_NAMED_CASES]
        rest = f" and {len(cases) - len(shown)} more" if len(shown) < len(cases) else ""
        words.append((f"{site}: " if several_sites else "") + ", ".join(shown) + rest)
    return "; ".join(words)


def verdict(checkup: Checkup) -> Text:
    """One line: how many findings of each severity."""
    if not checkup.findings:
        return Text.assemble(("Nothing found", "bold green"), f" in {_count(len(checkup.cases), 'case')}.")
    words = []
    for severity in sorted(Severity, reverse=True):
        count = sum(finding.severity == severity for finding in checkup.findings)
        if count:
            words.append(Text(_count(count, severity.name), style=_STYLES[severity]))
    return Text.assemble(Text(", ").join(words), f" in {_count(len(checkup.cases), 'case')}.")


def _what_was_checked(checkup: Checkup) -> str:
    labels = " labels against images, label names and ids, empty, tiny, huge, overlapping and misplaced masks,"
    labelled = any(case.structures for case in checkup.cases)
    return f"Checked: every file opens, geometry, orientation, intensities,{labels if labelled else ''} duplicates."


def next_steps(checkup: Checkup, groups: Sequence[Group], request: DoctorRequest) -> list[str]:
    """What to do now: fix errors, check warnings, or continue with an experiment."""
    errors = [group.code for group in groups if group.severity == Severity.error]
    if errors and request.fix_headers is not None and request.fix_headers.exists():  # else nothing could be corrected
        copy = request.fix_headers
        several = len(checkup.sources) > 1
        places = [copy / source.site for source in checkup.sources] if several else [copy]
        lines = ["Next: check the copy for remaining errors.", f"  panorgan doctor {' '.join(map(str, places))}"]
        if any(path.suffix in (".yaml", ".yml") for path in request.paths):
            lines.append("Then set each site's 'folder' in the experiment file to it.")
        return lines
    if errors:
        return [f"Next: fix {_first_few(errors)}, then run the same command again."]
    warnings = [group.code for group in groups if group.severity == Severity.warning]
    look = f"look at {_first_few(warnings)}; if all is well, " if warnings else ""
    experiments = [path for path in request.paths if path.suffix in (".yaml", ".yml")]
    if experiments:
        return [f"Next: {look}train.", *(f"  panorgan train {path}" for path in experiments)]
    if not any(case.structures for case in checkup.cases):
        return [f"Next: {look}add labels: no organ is annotated, so a site cannot train on this."]
    lines = [f"Next: {look}add it to your experiment file.", "  sites:"]
    for source in checkup.sources:
        name = "".join(sign if sign.isascii() and sign.isalnum() else "_" for sign in source.site).strip("_")
        lines += [f"    {name or 'hospital'}:", f"      folder: {source.folder.resolve()}"]
        if source.layout != "auto":
            lines.append(f"      layout: {source.layout}")
    return lines


def _show_fixed(console: Console, fixed: Sequence[FixedFile], request: DoctorRequest) -> None:
    """What was corrected; without anything to correct there is no copy."""
    if not fixed:
        _line(console, "Nothing can be corrected without guessing, so no copy was written.")
        return
    reasons = Counter(file.reason for file in fixed)
    _line(console, f"A copy of the data, {_count(len(fixed), 'file')} corrected: {request.fix_headers}")
    for reason, count in reasons.items():
        console.print(Text(f"  {_count(count, 'file')}: {reason}"), width=min(console.width, _TEXT_WIDTH))


def as_json(checkup: Checkup, page: Path | None, fixed: Sequence[FixedFile] | None) -> str:
    """Everything but the pictures, as one JSON object; NaN becomes null."""
    content: dict[str, Any] = {
        "sources": [
            {
                "site": s.site,
                "folder": str(s.folder),
                "layout": s.layout,
                "cases": s.cases,
                "patients": s.patients,
                "splits": dict(s.splits),
                "structures": {n: {"cases": c.annotated, "empty": c.empty} for n, c in s.structures.items()},
            }
            for s in summarise_sources(checkup)
        ],
        "cases": [_case_json(case) for case in checkup.cases],
        "findings": [_finding_json(finding) for finding in checkup.findings],
        "worst": checkup.worst.name if checkup.worst is not None else None,
        "html": str(page) if page else None,
    }
    if fixed is not None:
        content["fixed"] = [{"path": str(f.path), "copy": str(f.copy), "reason": f.reason} for f in fixed]
    return json.dumps(_finite(content), allow_nan=False)


def _case_json(case: CaseFacts) -> dict[str, Any]:
    return {
        "site": case.site,
        "case": case.case,
        "patient": case.patient,
        "image": str(case.image),
        "labels": [str(path) for path in case.label_files],
        "split": case.split,
        "shape": [int(size) for size in case.shape],
        "spacing_mm": None if case.spacing_mm is None else [float(mm) for mm in case.spacing_mm],
        "orientation": case.orientation,
        "modality": case.modality,
        "intensity": {name: float(value) for name, value in case.intensity.items()},
        "content": case.content,
        "structures": {structure.name: _structure_json(structure) for structure in case.structures},
    }


def _structure_json(structure: StructureFacts) -> dict[str, Any]:
    return {
        "voxels": int(structure.voxels),
        "volume_ml": float(structure.volume_ml),
        "centre_mm": [float(mm) for mm in structure.centre_mm],
        "pieces": int(structure.pieces),
        "largest_piece": float(structure.largest_piece),
        "median": float(structure.median),
    }


def _finding_json(finding: Finding) -> dict[str, Any]:
    names = ("code", "site", "case", "what", "why", "fix", "file", "structure")
    return {"severity": finding.severity.name} | {name: getattr(finding, name) for name in names}


def _finite(content: Any) -> Any:
    """The same with None for NaN and infinity, which JSON does not have."""
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _first_few(words: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b, c and 4 more`."""
    shown = [*words[:3], f"{len(words) - 3} more"] if len(words) > 3 else list(words)
    return shown[0] if len(shown) == 1 else ", ".join(shown[:-1]) + " and " + shown[-1]
