"""A site's machine: answers the coordinator's requests, and lets nothing leave that the policy does not name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from logging.handlers import RotatingFileHandler

import torch

from panorgan.agreement import Agreement
from panorgan.anatomy import Vocabulary
from panorgan.deployment.approval import require_approved
from panorgan.deployment.folders import SiteKit
from panorgan.deployment.kept_model import check_delivered, replace_model
from panorgan.deployment.kit_files import load_agreed, load_site_file
from panorgan.deployment.settings import SiteFile
from panorgan.errors import ConfigError
from panorgan.federation.audit import AuditLog
from panorgan.federation.egress import Egress, EgressPolicy, image_shapes, parse_policy, weights_of_site
from panorgan.federation.engine import TaskAbortedError
from panorgan.federation.failures import NotAgreedError, code_of
from panorgan.federation.message import Message
from panorgan.federation.optional_numbers import without_kept
from panorgan.federation.refused_requests import note_refusal
from panorgan.federation.run_record import read_record
from panorgan.federation.site import SiteData, SiteSetup, SiteWorker
from panorgan.federation.tasks import Task, answer_meta, failure_meta
from panorgan.federation.tensor_store import RunTensorStores
from panorgan.methods.protocol import Federation, SiteInfo
from panorgan.printable import PrintableFormatter
from panorgan.workflows.device import use_hardware
from panorgan.workflows.lock import ORPHANS_END_WITHIN, only_one_process
from panorgan.workflows.one_site import SiteFolder
from panorgan.yaml_files import read_yaml

Known = dict[str, torch.Tensor]
Shapes = set[tuple[int, ...]]


class SiteMachine:
    """Answers requests: asks the worker, guards what leaves, and turns errors into codes.

    Settings, policy and experiment are read again for every job, so a hospital's change applies from the next job on.
    """

    def __init__(self, kit: SiteKit, name: str, check_abort: Callable[[], None] = lambda: None) -> None:
        self.kit, self.name, self._check_abort = kit, name, check_abort
        self._log = _log_of(kit)
        self._audit = AuditLog(kit.audit_log)
        self._lock = ExitStack()
        self._worker: SiteWorker | None = None
        self._known: tuple[Mapping[str, SiteInfo], SiteData, Known, Shapes] | None = None

    def handle(self, request: bytes) -> bytes:
        """The answer to a request. Whatever goes wrong here, nothing but a code leaves."""
        try:
            task = Task.from_meta(Message.outline(request).meta)
        except Exception:
            self._log.exception("a request that cannot be read")
            raise  # it is unknown what was asked, so there is nothing to answer
        self._log.info("asked: %s", task.label)
        try:
            worker = self._open()
            answer = self._keep_model(worker, request, task) if task.kind == "deliver" else worker.handle(request)
            guard = self._guard(worker, task)
            if task.kind == "evaluate":
                answer, kept = without_kept(answer, guard.policy)
                if kept:
                    self._log.info("kept here, as the policy does not name it: %s", ", ".join(kept))
            released = guard.release(answer, task.kind, task.round_info.round, task.round_info.stage)
        except TaskAbortedError:
            self._log.info("no longer wanted: %s", task.label)
            raise
        except Exception as error:
            code = code_of(error)
            self._log.exception("could not answer %s (%s)", task.label, code)
            if isinstance(error, NotAgreedError):
                note_refusal(self._audit, request, task, error)
            return self._failure(task, code)
        self._log.info("answered: %s, %d bytes", task.label, len(released))
        return released

    def _open(self) -> SiteWorker:
        require_approved(self.kit)
        if self._worker is None:
            settings = load_site_file(self.kit)
            state = self.kit.state(settings)
            state.mkdir(parents=True, exist_ok=True)
            with ExitStack() as lock:  # kept only if all goes well: the next try must not wait for this one
                lock.enter_context(only_one_process(state, wait=ORPHANS_END_WITHIN))
                self._worker = self._make_worker(settings, load_agreed(self.kit, settings.experiment_fingerprint))
                self._lock = lock.pop_all()
        return self._worker

    def _make_worker(self, settings: SiteFile, agreement: Agreement) -> SiteWorker:
        if settings.name != self.name:
            raise ConfigError(
                f"This kit's certificate belongs to {self.name}, its site.yaml to {settings.name}.",
                code="wrong-participant",
                where=str(self.kit.settings),
                fix="Use the site.yaml that came with the kit.",
            )
        hardware = settings.hardware
        device = use_hardware(hardware)
        source = SiteFolder(
            self.name,
            settings.data,
            agreement,
            self.kit.cache(settings),
            hardware.workers,
            lambda what, done, total: self._check_abort(),
            settings.cache_limit_gb,
        )
        setup = SiteSetup(
            Vocabulary(agreement.vocabulary),
            agreement.build_method(),
            agreement.network,
            agreement.training,
            agreement.seed,
            device,
            experiment=agreement.fingerprint(),
            plan=agreement.plan,
        )
        folder = self.kit.state(settings)
        return SiteWorker(self.name, source, setup, folder, lambda site, step, steps: self._check_abort())

    def _guard(self, worker: SiteWorker, task: Task) -> Egress:
        """What may leave as an answer to this task. The policy is read every time, and must be the approved one."""
        require_approved(self.kit)
        weights, shapes = self._known_to(worker, task) if task.kind in ("train", "evaluate") else ({}, set())
        return Egress(self._policy(), weights, self._audit, shapes)

    def _known_to(self, worker: SiteWorker, task: Task) -> tuple[Known, Shapes]:
        """The site's weights and the shapes of its images; looked up again when the sites or the cases change."""
        setup, data = worker.setup, worker.data
        if self._known is None or self._known[0] != task.sites or self._known[1] is not data:
            federation = Federation(setup.vocabulary, task.sites)
            weights = weights_of_site(setup.method, setup.network, federation, self.name)
            shapes = image_shapes((*data.train, *data.validation), setup.training.sampling.patch_size)
            self._known = (task.sites, data, weights, shapes)
        return self._known[2:]

    def _failure(self, task: Task, code: str) -> bytes:
        answer = Message(meta=failure_meta(task, self.name, code)).to_bytes()
        guard = Egress(self._policy(), {}, self._audit)
        return guard.release(answer, task.kind, task.round_info.round, task.round_info.stage)

    def _policy(self) -> EgressPolicy:
        path = self.kit.egress_policy
        return parse_policy(read_yaml(path, "egress policy"), str(path))

    def _keep_model(self, worker: SiteWorker, request: bytes, task: Task) -> bytes:
        """The finished model stays at the site; the answer says that it arrived, and nothing else."""
        worker.check(task)
        settings = load_site_file(self.kit)
        state = self.kit.state(settings)
        agreement = load_agreed(self.kit, settings.experiment_fingerprint)
        record, weights = read_record(state, task.run), Message.from_bytes(request).tensors
        check_delivered(task, weights, agreement, None if record is None else record.plan)
        replace_model(self.kit.model, self.kit.previous_model, weights, task.card or {})
        RunTensorStores(state).remove()  # the run is over, and its teachers have served
        return Message(meta=answer_meta(task, self.name)).to_bytes()


def _log_of(kit: SiteKit) -> logging.Logger:
    """The site's own log: full errors, for the site's own eyes."""
    log = logging.getLogger(f"panorgan.site.{kit.path}")
    if not log.handlers:
        handler = RotatingFileHandler(kit.log, maxBytes=5_000_000, backupCount=3, encoding="utf-8", delay=True)
        handler.setFormatter(PrintableFormatter("%(asctime)s %(levelname)s %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False  # not into the engine's own logs
    return log
