"""Write `report.html`: one file that opens from disk, needs no network and no script, and prints."""

from __future__ import annotations

import time
from functools import cache as remembered
from pathlib import Path
from typing import Any

import yaml

from panorgan.anatomy import catalogue
from panorgan.cases.case import Case
from panorgan.config import parse_experiment
from panorgan.federation.events import DAMAGED, Event
from panorgan.federation.files import write_atomically
from panorgan.report import figures, tables
from panorgan.report.analyses import analysis_section
from panorgan.report.beside import beside_models, beside_rows
from panorgan.report.forgetting import forgetting_table
from panorgan.report.method_words import describe_method
from panorgan.report.overlays import CaseKey, Overlay, draw_overlays
from panorgan.report.record import RunRecord, read_record
from panorgan.report.sections import MethodSection, method_section, try_to_draw
from panorgan.report.templates import fill_in
from panorgan.runs.site_cases import cache_folder, read_sites


def write_report(run_folder: Path, cache: Path | None = None) -> Path:
    """Write the report of a scored run into its folder and return its path.

    `cache` is where prepared cases are kept (default as for training). When the scans cannot be read any more, the
    page says so in place of the pictures.
    """
    record = read_record(run_folder)
    cases = remembered(lambda: _test_cases(record, cache))
    overlays, missing = try_to_draw(lambda: draw_overlays(record, cases()))
    page = render(record, overlays or {}, missing, method_section(record, cases))
    write_atomically(record.folder.report, page)
    return record.folder.report


def render(
    record: RunRecord,
    overlays: dict[str, list[Overlay]],
    overlays_missing: str = "",
    section: MethodSection | None = None,
) -> str:
    """The page as text. `overlays_missing` is said where there are no overlays; `section` is the method's own."""
    scores = tables.make_scores(record)
    beside = beside_models(record)
    return fill_in(
        "template.html.j2",
        tables.FILTERS,
        [section.package] if section else [],
        record=record,
        experiment=record.manifest["experiment"],
        method=describe_method(record.manifest["experiment"]["method"]["name"]),
        scores=scores,
        matrix=tables.annotation_matrix(record),
        heat=tables.heat_map(record, scores),
        heat_scale=tables.heat_scale(),
        beside=beside,
        beside_rows=beside_rows(beside, record.organs),
        forgetting=forgetting_table(record),
        analyses=analysis_section(record.folder),
        cost=tables.make_cost(record),
        colours={organ: catalogue()[organ].colour for organ in record.organs},
        pictures={
            "loss": figures.loss_curve(record),
            "dice": figures.dice_curve(record),
            "boxes": figures.dice_boxes(record),
            "time": figures.time_bars(record),
            "traffic": figures.traffic_bars(record),
        },
        overlays=overlays,
        overlays_missing=overlays_missing,
        section=section,
        phase_names=figures.PHASE_NAMES,
        happenings=[describe_happening(event) for event in record.happenings],
        created=record.manifest["created"].replace("T", " ", 1).replace("+0000", " UTC"),
        experiment_yaml=yaml.safe_dump(record.manifest["experiment"], sort_keys=False, allow_unicode=True),
    )


def describe_happening(event: Event) -> tuple[str, str]:
    """When, and what, in a sentence."""
    facts: dict[str, Any] = event.facts
    if event.kind == "resumed":
        what = "The run was interrupted and resumed."
    elif event.kind == "refused":
        what = f"Round {facts.get('number', '?')}: the update of {facts.get('site', '?')} was refused. "
        what += " ".join(str(part) for part in (facts.get("reason"), facts.get("why")) if part)
    elif event.kind == DAMAGED:
        what = f"Line {facts['line']} of events.jsonl is damaged: what it said is missing on this page."
    elif event.kind == "notice":
        what = f"Round {facts.get('number', '?')}: {facts.get('text', '')}"
    elif event.kind == "late_join":
        organs = ", ".join(facts.get("annotated", {})).replace("_", " ")
        cases = tables.plural(int(facts.get("train_cases", 0)), "training case")
        what = f"Round {facts.get('number', '?')}: {facts.get('site', '?')} joined, with {cases} of {organs}."
    elif event.kind == "shared_scans":
        what = f"Scans that are used twice: {'; '.join(facts.get('scans', ()))}."
    else:
        what = f"{event.kind}: " + ", ".join(f"{key} {value}" for key, value in facts.items())
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(event.time)), what


def _test_cases(record: RunRecord, cache: Path | None) -> dict[CaseKey, Case]:
    """The scored cases with the labels they were scored with, by site and id."""
    experiment = parse_experiment(record.manifest["experiment"], str(record.folder.manifest))
    sites = read_sites(experiment, cache or cache_folder(), lambda what, done, total: None)
    return {(site.name, case.id): case for site in sites for case in site.test}
