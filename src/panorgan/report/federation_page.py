"""The coordinator's report of a real federation: one file without a scan, a script or anything from the network."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from panorgan.anatomy import catalogue
from panorgan.deployment.control import Control, read_json
from panorgan.federation.events import read_events
from panorgan.federation.files import write_atomically
from panorgan.report import figures, tables
from panorgan.report.federation_log import notices, pauses, score_table, site_parts, troubles
from panorgan.report.method_words import describe_method
from panorgan.report.templates import fill_in
from panorgan.workflows.run import Run

if TYPE_CHECKING:
    from panorgan.deployment.folders import ServerKit


def write_kit_report(kit: ServerKit) -> Path:
    """Write the report of a server's kit into its run folder, and return its path; the run may still go on."""
    from panorgan.deployment.kit_files import load_coordinator_file
    from panorgan.deployment.status import read_status
    from panorgan.deployment.status_words import state_in_words

    return write_federation_report(Run(kit.run(load_coordinator_file(kit))), state_in_words(read_status(kit)))


def write_federation_report(run: Run, state: str = "") -> Path:
    """The same from the run folder alone, where it was copied from the server. `state`: as far as it is known."""
    write_atomically(run.report_file, render_federation(run, state))
    return run.report_file


def is_federation(run: Run) -> bool:
    """Whether a run folder is that of a server, whose manifest describes the federation but not the sites' data."""
    return "federation" in run.manifest and "sites" not in run.manifest


def render_federation(run: Run, state: str = "") -> str:
    """The page as text."""
    events = list(read_events(run.events_file))
    ends = [event for event in events if event.kind == "finished"]
    delivered = read_json(Control(run.path / "control").delivered).get("sites", ())
    if not delivered and ends:
        delivered = ends[-1].facts.get("sites", ())
    experiment: dict[str, Any] = run.manifest["experiment"]
    scores = score_table(run.rounds, run.delivered_round)
    happened = troubles(events)
    return fill_in(
        "federation.html.j2",
        {**tables.FILTERS, **FILTERS},
        run=run,
        experiment=experiment,
        federation=run.manifest["federation"],
        state=state or ("finished" if ends else "not finished"),
        method=describe_method(experiment["method"]["name"]),
        created=run.manifest["created"].replace("T", " ", 1).replace("+0000", " UTC"),
        written=time.time(),
        began=events[0].time if events else None,
        last=events[-1].time if events else None,
        vocabulary=tuple(run.vocabulary),
        colours={organ: known.colour for organ, known in catalogue().items()},
        sites=site_parts(events, delivered),
        scores=scores,
        pauses=pauses(events),
        troubles=happened,
        refused=sum(event.kind == "refused" for event in events),
        failed=sum(event.kind == "failed" for event in events),
        notices=notices(events),
        cost=tables.make_cost(run),
        phase_names=figures.PHASE_NAMES,
        pictures={
            "loss": figures.loss_curve(run),
            "dice": figures.dice_curve(run),
            "time": figures.time_bars(run),
            "traffic": figures.traffic_bars(run),
        },
        experiment_yaml=yaml.safe_dump(experiment, sort_keys=False, allow_unicode=True),
    )


def moment(seconds: float) -> str:
    """`2026-11-18 19:01:15 UTC`."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def step_of(value: float) -> int:
    """Dice in steps of a tenth, for the colour of a cell."""
    return round(10 * min(max(value, 0.0), 1.0))


FILTERS = {"moment": moment, "step_of": step_of}
"""Functions for the templates of a federation's pages."""
