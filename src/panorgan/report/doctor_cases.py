"""Every case that the doctor read, as the page's case table; plots refer to its rows."""

from __future__ import annotations

import math

from panorgan.data_doctor import Checkup, Severity
from panorgan.report.case_table import CaseTable, Column

_FINDINGS = 5


def doctor_cases(checkup: Checkup) -> CaseTable:
    """One row per case, in the order in which cases were read."""
    by_case: dict[tuple[str, str], list[Severity]] = {}
    for finding in checkup.findings:
        by_case.setdefault((finding.site, finding.case), []).append(finding.severity)
    folders = {source.site: str(source.folder) for source in checkup.sources}
    sites = {site: place for place, site in enumerate(folders)}
    columns = [
        Column("Case", role="case"),
        Column("Site", choose=True, role="site"),
        Column("Split", choose=True),
        Column("Worst finding", choose=True),
        Column("Folder", digits=0, hidden=True, role="run"),
        Column("Findings", digits=0, better="lower", runs=list(folders.values())),
        Column("Organs", digits=0, better="higher"),
        Column("Longest voxel side (mm)", digits=2, better="lower"),
        Column("Median intensity", digits=0, better="higher"),
    ]
    rows = []
    for case in checkup.cases:
        found = by_case.get((case.site, case.case), [])
        side = max(case.spacing_mm) if case.spacing_mm else math.nan
        rows.append(
            [
                case.case,
                case.site,
                case.split or "–",
                max(found).name if found else "none",
                sites.get(case.site),
                len(found),
                len(case.structures),
                side,
                case.intensity.get("median", math.nan),
            ]
        )
    return CaseTable(columns, rows, leading=_FINDINGS, place="")
