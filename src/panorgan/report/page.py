"""Write `report.html`: one file that opens from disk, needs no network, prints, and is readable without its script."""

from __future__ import annotations

import os
import time
from functools import cache as remembered
from pathlib import Path
from typing import Any

import yaml

from panorgan.anatomy import catalogue
from panorgan.data.case import Case
from panorgan.federation.events import DAMAGED, Event
from panorgan.federation.files import write_atomically
from panorgan.report import figures, tables
from panorgan.report.analyses import analysis_section
from panorgan.report.baselines import baseline_models, baseline_rows, gains
from panorgan.report.federation_page import is_federation, write_federation_report
from panorgan.report.first_screen import last_step, next_steps, worst_organ, worst_site
from panorgan.report.forgetting import forgetting_table
from panorgan.report.method_words import describe_method
from panorgan.report.overlays import CaseKey, Overlay, draw_overlays
from panorgan.report.page_tables import latex_of
from panorgan.report.run_cases import dice_points, run_cases
from panorgan.report.sections import MethodSection, method_section, try_to_draw
from panorgan.report.templates import fill_in
from panorgan.workflows.run import Run
from panorgan.workflows.site_cases import cache_folder, read_sites


def write_report(run: str | os.PathLike[str] | Run, cache: str | os.PathLike[str] | None = None) -> Path:
    """Write the report of a scored run into its folder and return its path; next to it, its tables as `report.tex`.

    If the scans can no longer be read, the page says so instead of showing pictures. The run of a federation's server
    has no scans and no test scores: its page is about rounds, sites and troubles, and may be written at any time.

    Parameters
    ----------
    run : a run or its folder.
    cache : where prepared cases are kept, as for `train`.
    """
    run = Run(run.path if isinstance(run, Run) else run)
    if is_federation(run):
        return write_federation_report(run)
    _ = run.manifest, run.scores, run.sites, run.rounds  # an unfinished run is refused before anything is drawn
    cases = remembered(lambda: _test_cases(run, Path(cache) if cache else cache_folder()))
    overlays, missing = try_to_draw(lambda: draw_overlays(run, cases()))
    page = render(run, overlays or {}, missing, method_section(run, cases))
    write_atomically(run.report_file, page)
    write_atomically(run.report_file.with_suffix(".tex"), latex_of(page))
    return run.report_file


def render(
    run: Run,
    overlays: dict[str, list[Overlay]],
    overlays_missing: str = "",
    section: MethodSection | None = None,
) -> str:
    """The page as text. `overlays_missing` is shown where there are no overlays; `section` is the method's own."""
    scores = tables.make_scores(run)
    baselines = baseline_models(run)
    method = describe_method(run.manifest["experiment"]["method"]["name"])
    return fill_in(
        "template.html.j2",
        tables.FILTERS,
        [section.package] if section else [],
        run=run,
        experiment=run.manifest["experiment"],
        method=method,
        scores=scores,
        matrix=tables.annotation_matrix(run),
        heat=tables.heat_map(run, scores),
        worst_organ=worst_organ(run, scores),
        worst_site=worst_site(scores),
        last_step=last_step(scores),
        steps=next_steps(run, scores, bool(baselines), method.pooled),
        baselines=baselines,
        baseline_rows=baseline_rows(baselines, run.organs),
        gains=gains(baselines),
        forgetting=forgetting_table(run),
        analyses=analysis_section(run),
        cost=tables.make_cost(run),
        colours={organ: catalogue()[organ].colour for organ in run.organs},
        pictures={
            "loss": figures.loss_curve(run),
            "dice": figures.dice_curve(run),
            "time": figures.time_bars(run),
            "traffic": figures.traffic_bars(run),
        },
        cases=run_cases(run),
        points=dice_points(run),
        overlays=overlays,
        overlays_missing=overlays_missing,
        section=section,
        phase_names=figures.PHASE_NAMES,
        happenings=[describe_happening(event) for event in run.notable_events],
        created=run.manifest["created"].replace("T", " ", 1).replace("+0000", " UTC"),
        experiment_yaml=yaml.safe_dump(run.manifest["experiment"], sort_keys=False, allow_unicode=True),
    )


def describe_happening(event: Event) -> tuple[str, str]:
    """When, and what, in a sentence."""
    facts: dict[str, Any] = event.facts
    if event.kind == "resumed":
        longer = facts.get("extended")
        what = "The run went on with more rounds." if longer else "The run was interrupted and resumed."
    elif event.kind == "refused":
        what = f"Round {facts.get('number', '?')}: the update of {facts.get('site', '?')} was refused. "
        what += " ".join(str(part) for part in (facts.get("reason"), facts.get("why"), facts.get("fix")) if part)
    elif event.kind == DAMAGED:
        what = f"Line {facts['line']} of events.jsonl is damaged: its content is missing on this page."
    elif event.kind == "start_from":
        what = str(facts.get("text", ""))
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


def _test_cases(run: Run, cache: Path) -> dict[CaseKey, Case]:
    """The scored cases with the labels they were scored with, by site and id."""
    sites = read_sites(run.experiment, cache, lambda what, done, total: None)
    return {(site.name, case.id): case for site in sites for case in site.test}
