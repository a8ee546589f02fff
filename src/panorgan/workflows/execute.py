"""Run an experiment on this machine: prepare, train round by round, deliver the model, score it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from panorgan.anatomy import Vocabulary
from panorgan.checksums import sealed_json
from panorgan.config import Experiment
from panorgan.data.splits import RULE
from panorgan.errors import RunError
from panorgan.federation.coordinator import Coordinator, CoordinatorSetup
from panorgan.federation.events import EventLog, Listener, mend_tail
from panorgan.federation.files import write_atomically
from panorgan.federation.limits import LimitSettings
from panorgan.federation.local_models import read_local_models
from panorgan.federation.site import SiteData, SiteSetup, SiteWorker
from panorgan.federation.transports.local import LocalTransport
from panorgan.methods.base import Method
from panorgan.preparation.plan import Plan
from panorgan.workflows.device import use_hardware
from panorgan.workflows.expected_duration import duration_facts
from panorgan.workflows.extend import extend, only_more_rounds, refuse_other_stages
from panorgan.workflows.lock import only_one_process
from panorgan.workflows.manifest import data_fingerprint, make_manifest, scored_fingerprint
from panorgan.workflows.model_bundle import Model, deliver, load_model
from panorgan.workflows.model_card import write_card
from panorgan.workflows.patch_size import CODE, oversized_patch
from panorgan.workflows.prepare import PreparedFederation, PreparedSite, prepare
from panorgan.workflows.run import Run
from panorgan.workflows.scoring import score_federation, score_local_models
from panorgan.workflows.site_cases import cache_folder, read_sites
from panorgan.workflows.starting_model import check_start, other_channels, other_plan, reader_of
from panorgan.workflows.tables import Row, write_metrics
from panorgan.workflows.tensorboard import tensorboard_listener

POOLED = "pooled"
"""Name of the one participant that replaces all sites when data is pooled."""


def train(
    experiment: Experiment,
    folder: str | os.PathLike[str] | None = None,
    resume: bool = False,
    listeners: Sequence[Listener] = (),
    cache: str | os.PathLike[str] | None = None,
    compared_with: Run | None = None,
    estimate: bool = False,
) -> Run:
    """Simulate a federation on this machine: train, deliver the model, score it on the test cases.

    Nothing is written into the folder before the experiment and its data have been checked.

    Parameters
    ----------
    experiment : from `load_experiment`.
    folder : the run folder, new or empty; `runs/<name>` if left out.
    resume : continue where a killed run stopped, with the same final bits; or, with more `training.rounds` than
        before, extend a run.
    listeners : called with every `Event`: `event.kind` such as `round`, `event.facts` as plain data.
    cache : where prepared cases are kept; `PANORGAN_CACHE` or the user's cache if left out.
    compared_with : a run that this one will be compared with: it must have been scored on the same cases.
    estimate : measure a few steps first, and tell the listeners how long training will take (event `estimate`).

    Returns
    -------
    Run : the finished run, with its scores, events, curves and model.
    """
    run = Run(Path("runs") / experiment.name if folder is None else folder)
    cache, listeners = None if cache is None else Path(cache), tuple(listeners)
    check_folder(run, experiment, resume, may_extend=True)
    if resume and run.complete and run.experiment.fingerprint() == experiment.fingerprint():
        _check_comparable(compared_with, run.manifest.get("test_fingerprint"))
        return _with_scores(run)
    if not run.started:
        check_start(experiment)
    device = setup_device(experiment)
    silent = EventLog(None, listeners)
    prepared = prepare(
        experiment,
        cache,
        lambda what, done, total: silent.transient("prepare", what=what, done=done, total=total),
    )
    _check_comparable(compared_with, scored_fingerprint(prepared))
    workers = build_workers(experiment, prepared, run, device, silent)
    resumed = run.started  # --resume may also begin a run: one that was killed while its cases were prepared
    longer = resumed and only_more_rounds(run.experiment, experiment)
    was_complete = resumed and run.complete
    manifest = _start_or_check(run, experiment, prepared, device)
    with only_one_process(run.path):
        if longer:
            mend_tail(run.events_file)
            EventLog(run.events_file, listeners).record("notice", **extend(run, experiment))
        if estimate:
            silent.transient("prepare", what="timing a few steps", done=0, total=1)
            silent.transient("estimate", **duration_facts(experiment, prepared, workers, run))
        return _train_and_score(
            run, experiment, prepared, workers, manifest, device, listeners, resumed, longer and was_complete
        )


def _train_and_score(
    run: Run,
    experiment: Experiment,
    prepared: PreparedFederation,
    workers: dict[str, SiteWorker],
    manifest: dict[str, Any],
    device: torch.device,
    listeners: tuple[Listener, ...],
    resumed: bool,
    extended: bool = False,
) -> Run:
    """Train the remaining rounds, deliver the model, score it. `extended`: more rounds for a complete run."""
    mend_tail(run.events_file)
    events = EventLog(run.events_file, (*listeners, tensorboard_listener(run.tensorboard_folder)))
    how = {"extended": True} if extended else {}
    events.record("resumed" if resumed else "started", run=manifest["run"], method=experiment.method["name"], **how)
    events.record("split", sites={site.name: site.describe()["cases"] for site in prepared.sites})
    if prepared.shared_scans:
        events.record("shared_scans", scans=list(prepared.shared_scans))
    if not resumed and (difference := other_plan(experiment, prepared.plan)):
        events.record("notice", number=0, code="start-other-plan", text=difference)
    if not resumed and (difference := other_channels(experiment)):
        events.record("notice", number=0, code="start-other-channels", text=difference)
    if not resumed and (words := oversized_patch(experiment.training.sampling.patch_size, prepared.largest_scan)):
        events.record("notice", number=0, code=CODE, text=words)
    coordinator = Coordinator.begin(
        _coordinator_setup(experiment, run, manifest["run"], prepared.plan), LocalTransport(workers), run.path, events
    )
    coordinator.run()
    deliver(run, experiment, prepared.plan, coordinator)
    rows = _score(run, load_model(run.model_folder, device), prepared, events)
    events.record("finished", rows=len(rows))
    return Run(run.path)


def evaluate(
    run: str | os.PathLike[str] | Run,
    listeners: Sequence[Listener] = (),
    cache: str | os.PathLike[str] | None = None,
) -> Run:
    """Score the delivered model of a run again, on the data of its manifest, and rewrite `metrics.csv`.

    Parameters
    ----------
    run : a run or its folder.
    listeners, cache : as for `train`.

    Returns
    -------
    Run : the same run with its new scores.
    """
    run = Run(run.path if isinstance(run, Run) else run)
    experiment = run.experiment
    device = setup_device(experiment)
    events, cache = EventLog(None, tuple(listeners)), None if cache is None else Path(cache)
    model = load_model(run.model_folder, device)
    # Scans that are used twice were checked when the run began; `check_data` reports later changes.
    prepared = prepare(experiment.model_copy(update={"allow_shared_scans": True}), cache)
    check_data(run, run.manifest, prepared)
    _score(run, model, prepared, events)
    return run


def _with_scores(run: Run) -> Run:
    """Read the run's scores, so that damage shows now and not later."""
    _ = run.scores
    return run


def _score(run: Run, model: Model, prepared: PreparedFederation, events: EventLog) -> list[Row]:
    """Predict and score the test cases; metrics.csv appears when all are done."""

    def on_case(site: str, done: int, total: int) -> None:
        events.transient("score", site=site, done=done, total=total)

    scores = score_federation(model, prepared, run.predictions_folder, on_case)
    if scores.own_models:
        write_metrics(run.own_models_file, scores.own_models, own_models=True)
    if files := read_local_models(run.local_models_folder):
        local = score_local_models(model, scores.rows, files, prepared, on_case)
        write_metrics(run.local_models_file, local, own_models=True)
    write_metrics(run.scores_file, scores.rows)
    write_card(Run(run.path))
    return scores.rows


def setup_device(experiment: Experiment) -> torch.device:
    """The experiment's device, with its threads and its setting for reproducible bits."""
    return use_hardware(experiment.hardware)


def build_workers(
    experiment: Experiment,
    prepared: PreparedFederation,
    run: Run,
    device: torch.device,
    events: EventLog,
) -> dict[str, SiteWorker]:
    """One worker per training site, or a single pooled one."""
    method = experiment.build_method()
    data = {site.name: SiteData(site.train, site.validation, site.watch) for site in prepared.training}
    factor = 1
    if method.pooled:
        train = tuple(case for site in data.values() for case in site.train)
        validation = tuple(case for site in data.values() for case in site.validation)
        factor = len(data)
        data = {POOLED: SiteData(train, validation, partial(_watch_all, prepared.training))}
    setup = SiteSetup(
        Vocabulary(experiment.vocabulary),
        method,
        experiment.network,
        experiment.training,
        experiment.seed,
        device,
        experiment=experiment.agreement().fingerprint(),
        steps_factor=factor,
    )

    def on_step(site: str, step: int, steps: int) -> None:
        events.transient("step", site=site, step=step, steps=steps)

    def on_validated(site: str, done: int, total: int) -> None:
        events.transient("validate", site=site, done=done, total=total)

    return {
        name: SiteWorker(name, own, setup, run.site_folder(name), on_step, on_validated) for name, own in data.items()
    }


def _watch_all(sites: Sequence[PreparedSite]) -> dict[str, str]:
    """The current content of the cases of several sites."""
    return {f"{site.name}/{case}": key for site in sites for case, key in site.watch().items()}


def _coordinator_setup(experiment: Experiment, folder: Run, run: str, plan: Plan) -> CoordinatorSetup:
    method = experiment.build_method()
    # Where sites' models are never averaged, they are scored one by one already.
    apart = method.pooled or type(method).own_models is not Method.own_models
    return CoordinatorSetup(
        run,
        Vocabulary(experiment.vocabulary),
        method,
        experiment.network,
        experiment.training,
        experiment.seed,
        experiment=experiment.agreement().fingerprint(),
        plan=plan,
        limits=_limits(experiment, method),
        joins_at=experiment.late_sites(),
        keep_local_models=folder.local_models_folder if experiment.local_models and not apart else None,
        local_models_after=experiment.local_models,
        start=reader_of(experiment),
    )


def _limits(experiment: Experiment, method: Method) -> LimitSettings:
    """The limits of the experiment; a pooled site may have the cases of all sites."""
    if not method.pooled:
        return experiment.limits
    sites = len(experiment.sites if experiment.phantom is None else experiment.phantom.sites)
    return experiment.limits.model_copy(update={"most_cases_per_site": experiment.limits.most_cases_per_site * sites})


def check_folder(run: Run, experiment: Experiment, resume: bool, may_extend: bool = False) -> None:
    """Check that a new run's folder is empty, and that a resumed run is of the same experiment, or with more rounds."""
    if not run.started:
        if run.path.exists() and not _is_vacant(run.path):
            raise RunError(
                "The run folder exists and holds other files.",
                code="folder-not-empty",
                where=str(run.path),
                fix="Choose another folder with --run.",
            )
        return
    if not resume:
        raise RunError(
            "There already is a run in this folder.",
            code="run-exists",
            where=str(run.path),
            fix="Continue it with --resume, or choose another folder with --run.",
        )
    known = run.experiment
    if may_extend and only_more_rounds(known, experiment):
        refuse_other_stages(run, experiment)
    elif known.fingerprint() != experiment.fingerprint():
        raise RunError(
            "The run in this folder is of another experiment.",
            code="other-experiment",
            where=str(run.path),
            why="these settings differ (there, and now): "
            + "; ".join(_differences(known.as_json(), experiment.as_json())),
            fix="Resume with the same file and the same --set options, or choose another folder. "
            "A run can be extended by more training.rounds, not shortened.",
        )


def check_run(
    experiment: Experiment, folder: Path, resume: bool, cache: Path | None = None, may_extend: bool = False
) -> None:
    """Find errors before hours of training: in the folder, the experiment and the lists of cases."""
    check_folder(Run(folder), experiment, resume, may_extend)
    if not Run(folder).started:
        check_start(experiment)
    read_sites(experiment, cache or cache_folder(), lambda what, done, total: None)


def _check_comparable(compared_with: Run | None, tested: str | None) -> None:
    if compared_with is not None and tested != compared_with.manifest.get("test_fingerprint"):
        raise RunError(
            "Two runs side by side must be scored on the same cases.",
            code="other-test-cases",
            where=str(compared_with.path),
            why="the data has changed since that run, or it is from an older panorgan version",
            fix="Train both again in a new folder.",
        )


def _differences(old: Any, new: Any, place: str = "") -> list[str]:
    """Dotted names of the settings in which two experiments differ, with both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted(old.keys() | new.keys())
        return [d for key in keys for d in _differences(old.get(key), new.get(key), f"{place}.{key}".lstrip("."))]
    return [] if old == new else [f"{place} {_short(old)}, {_short(new)}"]


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:59]}…"


def _is_vacant(path: Path) -> bool:
    """Whether a folder is empty, or holds a run that was killed before its manifest was written."""
    return path.is_dir() and all(child.name.endswith(".incomplete") for child in path.iterdir())


def _start_or_check(
    run: Run, experiment: Experiment, prepared: PreparedFederation, device: torch.device
) -> dict[str, Any]:
    """Write the manifest of a new run; for a resumed one, check that the data is the same."""
    if not run.started:
        manifest = make_manifest(experiment, prepared, device)
        write_atomically(run.manifest_file, sealed_json(manifest, indent=1))
        return manifest
    manifest = run.manifest
    check_data(run, manifest, prepared)
    return manifest


def check_data(run: Run, manifest: dict[str, Any], prepared: PreparedFederation) -> None:
    """Refuse changed data or another rule to split it: training cases might be scored as test cases."""
    if manifest.get("split_rule") != RULE and manifest["data_fingerprint"] != data_fingerprint(prepared):
        raise RunError(
            "This run was split by an older panorgan version, in another way.",
            code="other-split-rule",
            where=str(run.path),
            why="today's test cases may have been trained on",
            fix="Use the version that began the run, or start a new run.",
        )
    # Manifests without a plan are from an older version, with a different fingerprint.
    if "plan" in manifest and manifest["plan"] != prepared.plan.as_json():
        raise RunError(
            "The plan of this run can no longer be reproduced.",
            code="plan-changed",
            where=str(run.path),
            why="the data has changed, or panorgan measures it differently: "
            + "; ".join(_differences(manifest["plan"], prepared.plan.as_json())),
            fix="Restore the data and the panorgan version, or start a new run.",
        )
    if manifest["data_fingerprint"] != data_fingerprint(prepared):
        raise RunError(
            "The data has changed since this run began.",
            code="data-changed",
            where=str(run.path),
            fix="Restore the data, or start a new run.",
        )
