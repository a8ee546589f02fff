"""A hospital's report: the delivered model on its own test cases, and what has left the building. It stays there."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from panorgan.agreement import Agreement
from panorgan.anatomy import catalogue
from panorgan.config import load_agreement
from panorgan.data.case import Case
from panorgan.deployment.folders import SiteKit
from panorgan.deployment.kit_files import load_site_file
from panorgan.deployment.score import score_site
from panorgan.deployment.settings import SiteFile
from panorgan.evaluation.metrics import LEADING, further_metrics
from panorgan.evaluation.statistics import organ_site_table
from panorgan.federation.files import write_atomically
from panorgan.report import figures, tables
from panorgan.report.egress_summary import summarise_egress
from panorgan.report.federation_page import FILTERS
from panorgan.report.method_words import describe_method
from panorgan.report.overlays import CaseKey, Overlay, draw_overlays
from panorgan.report.sections import try_to_draw
from panorgan.report.templates import fill_in
from panorgan.workflows.one_site import SiteFolder
from panorgan.workflows.run import Run


def write_site_report(kit: SiteKit, on_case: Callable[[int, int], None] = lambda done, total: None) -> Path:
    """Write the report of a site into its kit's `scores` folder, and return its path.

    The delivered model is scored first, unless it was since it arrived. Before that, the page has no scores.
    """
    settings, agreement = load_site_file(kit), load_agreement(kit.experiment)
    if kit.model.is_dir() and not is_scored(kit):
        score_site(kit, on_case)
    run = scored_run(kit, settings, agreement)
    overlays: dict[str, list[Overlay]] = {}
    missing = ""
    if run.complete:
        drawn, missing = try_to_draw(lambda: draw_overlays(run, _test_cases(kit, settings, agreement)))
        overlays = drawn or {}
    path = kit.scores / run.report_file.name
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, render_site(kit, settings, agreement, run, overlays, missing))
    return path


def is_scored(kit: SiteKit) -> bool:
    """Whether the scores are those of the model that the kit holds now."""
    scores, model = Run(kit.scores).scores_file, Run(kit.path).model_folder / "model.json"
    return scores.is_file() and (not model.is_file() or scores.stat().st_mtime >= model.stat().st_mtime)


def scored_run(kit: SiteKit, settings: SiteFile, agreement: Agreement) -> Run:
    """The scores of a site as a run of one site: figures and overlays read it like any other."""
    run = Run(kit.scores)
    run.manifest = {"experiment": agreement.as_json(), "sites": {}}
    run.card = dict(Run(kit.path).card)
    return run


def render_site(
    kit: SiteKit,
    settings: SiteFile,
    agreement: Agreement,
    run: Run,
    overlays: Mapping[str, list[Overlay]],
    overlays_missing: str = "",
) -> str:
    """The page as text."""
    egress, rounds = summarise_egress(kit.audit_log, _rounds_before(agreement))
    run.rounds = tuple(rounds)
    rows = run.scores if run.complete else []
    further = further_metrics("report", rows) if rows else []
    return fill_in(
        "site.html.j2",
        {**tables.FILTERS, **FILTERS},
        run=run,
        site=settings.name,
        federation=settings.federation,
        server=settings.server,
        experiment=agreement,
        fingerprint=agreement.fingerprint(),
        method=describe_method(agreement.method["name"]),
        written=time.time(),
        scored=run.scores_file.stat().st_mtime if run.complete else None,
        vocabulary=tuple(agreement.vocabulary),
        organs=[organ for organ in run.organs if any(row["organ"] == organ for row in rows)] if rows else [],
        colours={organ: known.colour for organ, known in catalogue().items()},
        dice=organ_site_table(rows, LEADING) if rows else None,
        further=further,
        tables={metric.name: organ_site_table(rows, metric.name) for metric in further},
        cases=_by_case(rows),
        egress=egress,
        pictures={"loss": figures.loss_curve(run), "dice": figures.dice_curve(run)},
        overlays=overlays,
        overlays_missing=overlays_missing,
    )


def _by_case(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Case → organ → Dice; the case with the lowest mean first."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        found.setdefault(row["case"], {})[row["organ"]] = row[LEADING]
    return dict(sorted(found.items(), key=lambda item: (sum(item[1].values()) / len(item[1]), item[0])))


def _rounds_before(agreement: Agreement) -> dict[str, int]:
    """How many rounds come before each stage."""
    before: dict[str, int] = {}
    done = 0
    for stage in agreement.build_method().stages(agreement.training.rounds):
        before[stage.name] = done
        done += stage.rounds
    return before


def _test_cases(kit: SiteKit, settings: SiteFile, agreement: Agreement) -> dict[CaseKey, Case]:
    source = SiteFolder(settings.name, settings.data, agreement, kit.cache(settings))
    return {(settings.name, case.id): case for case in source.cases.test}
