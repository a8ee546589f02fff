"""One segment of a run, at the server: its rounds, and how it ended. The engine starts it in a process of its own."""

from __future__ import annotations

import contextlib
import time
import traceback
import uuid
from typing import Any

from panorgan.agreement import Agreement
from panorgan.anatomy import Vocabulary
from panorgan.checksums import sealed_json
from panorgan.deployment.control import Control, JobNews, read_json
from panorgan.deployment.disk_space import disk_full_message, is_disk_full
from panorgan.deployment.folders import ServerKit
from panorgan.deployment.kit_files import load_agreed, load_coordinator_file
from panorgan.deployment.settings import CoordinatorFile
from panorgan.deployment.versions import versions_here
from panorgan.errors import PanorganError, RunError
from panorgan.federation.coordinator import Coordinator, CoordinatorSetup, SitesMissingError
from panorgan.federation.engine import NetworkTransport, SegmentAbortedError
from panorgan.federation.events import EventLog, Listener, mend_tail
from panorgan.federation.files import write_atomically
from panorgan.federation.settings import Patience
from panorgan.federation.transports.base import Transport
from panorgan.preparation.plan import Plan
from panorgan.workflows.lock import ORPHANS_END_WITHIN, BusyError, only_one_process
from panorgan.workflows.mlflow_log import mlflow_listener
from panorgan.workflows.model_bundle import deliver
from panorgan.workflows.run import Run
from panorgan.workflows.starting_model import reader_of
from panorgan.workflows.tensorboard import tensorboard_listener


def run_and_report(kit: ServerKit, transport: NetworkTransport, job: str) -> None:
    """Run the next segment; the driver reads from `outcome.json` how it ended."""
    settings = load_coordinator_file(kit)
    control = Control(kit.control(settings))
    transport.gone = lambda: control.gone(job)
    try:
        run_segment(kit, settings, transport, job)
    except SegmentAbortedError:
        raise
    except Exception as error:
        write_outcome(control, job, error)


def write_outcome(control: Control, job: str, error: Exception | None) -> None:
    """For the driver: how the segment ended. The server is the coordinator's own, so errors are given in full."""
    outcome: dict[str, Any] = {"job": job, "time": time.time(), "kind": "ended"}
    if isinstance(error, SitesMissingError):
        outcome |= {
            "kind": "missing",
            "code": error.code,
            "what": error.what,
            "why": error.why,
            "sites": list(error.sites),
        }
    elif error is not None and is_disk_full(error):
        message = disk_full_message(error, control.folder.parent)
        outcome |= {"kind": "retry", "what": f"The round could not be saved: {message}"}
    elif isinstance(error, OSError | BusyError):
        outcome |= {"kind": "retry", "what": f"The server could not do it just then: {error}"}
    elif isinstance(error, PanorganError):
        outcome |= {"kind": "error", "code": error.code}
        outcome |= {"what": error.what, "where": error.where, "why": error.why, "fix": error.fix}
    elif error is not None:
        outcome |= {
            "kind": "error",
            "code": "internal",
            "what": "Something unexpected happened.",
            "why": "".join(traceback.format_exception(error)),
        }
    with contextlib.suppress(OSError):  # a full disk: the driver sees that there was no progress
        write_atomically(control.outcome, sealed_json(outcome))


def run_segment(kit: ServerKit, settings: CoordinatorFile, transport: Transport, job: str) -> None:
    """The next rounds of the run, and after the last one the model."""
    agreement = load_agreed(kit, settings.experiment_fingerprint)
    run, control = Run(kit.run(settings)), Control(kit.control(settings))
    run.path.mkdir(parents=True, exist_ok=True)
    with only_one_process(run.path, wait=ORPHANS_END_WITHIN):
        resumed = run.started
        manifest = _manifest(run, agreement, settings)
        mend_tail(run.events_file)
        events = EventLog(run.events_file, _listeners(run, control, settings))
        events.record("resumed" if resumed else "started", run=manifest["run"], job=job)
        coordinator = Coordinator.begin(_setup(kit, agreement, settings, manifest["run"]), transport, run.path, events)
        coordinator.run(settings.rounds.per_segment, control.should_end)
        if coordinator.finished:
            _finish(run, control, agreement, coordinator, events)
        write_outcome(control, job, None)


def _listeners(run: Run, control: Control, settings: CoordinatorFile) -> tuple[Listener, ...]:
    others = () if settings.mlflow is None else (mlflow_listener(settings.mlflow, run),)
    return JobNews(control.job), tensorboard_listener(run.tensorboard_folder), *others


def _setup(kit: ServerKit, agreement: Agreement, settings: CoordinatorFile, run: str) -> CoordinatorSetup:
    rounds = settings.rounds
    waits = rounds.on_missing == "wait"
    begin_with = sorted(name for name, site in settings.sites.items() if not site.joins_later)
    return CoordinatorSetup(
        run,
        Vocabulary(agreement.vocabulary),
        agreement.build_method(),
        agreement.network,
        agreement.training,
        agreement.seed,
        experiment=agreement.fingerprint(),
        plan=agreement.plan,
        limits=agreement.limits,
        # To wait is to wait: a slow site is not given up, or it would be asked for the same round again and again.
        patience=Patience(None if waits else rounds.deadline_minutes * 60, rounds.on_missing, rounds.retries),
        required=tuple(begin_with) if waits else (),
        awaited=tuple(sorted(settings.sites.keys() - set(begin_with) if waits else settings.sites)),
        listed=frozenset(settings.sites),
        start=reader_of(agreement, kit.start),
    )


def _manifest(run: Run, agreement: Agreement, settings: CoordinatorFile) -> dict[str, Any]:
    """What this run is; written once."""
    if run.started:
        manifest = run.manifest
        if manifest["fingerprint"] != agreement.fingerprint():
            raise RunError(
                "The run in this folder is another experiment.",
                code="another-experiment",
                where=str(run.path),
                fix="Choose another run folder: 'run' in local/coordinator.yaml.",
            )
        return manifest
    manifest = {
        "format": 1,
        "run": uuid.uuid4().hex,
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "federation": settings.federation,
        "experiment": agreement.as_json(),
        "fingerprint": agreement.fingerprint(),
        "versions": versions_here(),
    }
    write_atomically(run.manifest_file, sealed_json(manifest, indent=1), durable=True)
    return manifest


def _finish(run: Run, control: Control, agreement: Agreement, coordinator: Coordinator, events: EventLog) -> None:
    """Write the model, and send it to every site that does not have it yet."""
    assert coordinator.state.plan is not None
    card = deliver(run, agreement, Plan(**coordinator.state.plan), coordinator)
    have = set(read_json(control.delivered).get("sites", []))
    have |= set(coordinator.deliver(card, sorted(set(coordinator.members) - have)))
    write_atomically(control.delivered, sealed_json({"sites": sorted(have)}))
    missing = sorted(set(coordinator.members) - have)
    if missing and coordinator.setup.patience.on_missing == "wait":
        raise SitesMissingError(
            f"The model is ready, but {', '.join(missing)} could not be given it yet.",
            missing,
            code="model-not-received",
            fix="They receive it when they are back.",
        )
    events.record("finished", rounds=coordinator.state.rounds_done, sites=sorted(have), without=missing)
    write_atomically(
        control.finished,
        sealed_json({"rounds": coordinator.state.rounds_done, "sites": sorted(have), "without": missing}),
    )
