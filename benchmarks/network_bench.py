"""What the job processes of `network_round.py` load: sites that do no work, and a stopwatch for NVFlare's FedAvg.

This folder must be on PYTHONPATH, and `network_bench.` on the allow list of the kits. Only the benchmark's own kits
have it there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nvflare.apis.executor import Executor
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.app_event_type import AppEventType
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.app_opt.pt.decomposers import TensorDecomposer
from nvflare.fuel.utils import fobs

from panorgan.agreement import Agreement
from panorgan.anatomy import Vocabulary
from panorgan.deployment.folders import SiteKit
from panorgan.deployment.settings import SiteFile
from panorgan.deployment.site_job import SiteJob
from panorgan.deployment.site_machine import SiteMachine
from panorgan.federation.run_record import RunRecord
from panorgan.federation.site import SiteData, SiteSetup, SiteWorker
from panorgan.federation.tasks import Task
from panorgan.methods.protocol import Federation, Payload, Scalars
from panorgan.networks import UNet, UNetSettings

VOCABULARY = ("liver",)
FEATURES = (32, 64, 128, 256, 440)
"""A U-Net with these channels has 20.1 M parameters: 80 MB in float32."""
CASES = 3


def stopwatch_file(kit: Path, job: str) -> Path:
    """Where the server's job writes down when its rounds began."""
    return kit / f"stopwatch-{job}.json"


# -- ours: everything a hospital's site does, except training ------------------------------------------------------


class NoData:
    """A site's cases, as far as the coordinator asks for them."""

    def counts(self) -> tuple[int, Mapping[str, int]]:
        """Some."""
        return CASES, dict.fromkeys(VOCABULARY, CASES)

    def statistics(self) -> Scalars:
        """Nothing to measure: the plan is fixed."""
        return {}

    def prepared(self, plan: Mapping[str, Any] | None) -> SiteData:
        """None."""
        return SiteData([])

    def contents(self) -> Mapping[str, str]:
        """Nothing that could change."""
        return {}


class EchoWorker(SiteWorker):
    """Reads the request as a worker does, does no training, and answers with the weights it received."""

    def _recall(self, task: Task) -> RunRecord:
        return RunRecord(task.run)  # it keeps no state, and has none to lose

    def _train(self, task: Task, received: Payload, federation: Federation) -> bytes:
        return self._answer(task, Payload(received.tensors, {"cases": float(CASES)})).to_bytes()


class EchoMachine(SiteMachine):
    """A site's machine with all that surrounds the worker: parsing, egress guard, audit log, the site's log."""

    def _make_worker(self, settings: SiteFile, agreement: Agreement) -> SiteWorker:
        setup = SiteSetup(
            Vocabulary(agreement.vocabulary),
            agreement.build_method(),
            agreement.network,
            agreement.training,
            experiment=agreement.fingerprint(),
        )
        return EchoWorker(self.name, NoData(), setup, self.kit.state(settings))


class EchoJob(SiteJob):
    """The executor that a site's job process runs."""

    def open_site(self, kit: Path, name: str) -> SiteMachine:
        """Called once per job."""
        return EchoMachine(SiteKit(kit), name, self.check_abort)


# -- NVFlare's own FedAvg ------------------------------------------------------------------------------------------


class Model(UNet):
    """The same network, as NVFlare's persistor wants it: a class that it can build by itself."""

    def __init__(self) -> None:
        super().__init__(Vocabulary(VOCABULARY), UNetSettings(features=FEATURES))


class EchoExecutor(Executor):
    """The leanest site of NVFlare: it hands back the very parameters it was given."""

    def __init__(self) -> None:
        super().__init__()
        fobs.register(TensorDecomposer)  # as its PyTorch executors do

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """Called by NVFlare for every task."""
        model = FLModelUtils.from_shareable(shareable)
        return FLModelUtils.to_shareable(FLModel(params=model.params, params_type=model.params_type))


class Stopwatch(FLComponent):
    """Writes down when rounds begin. The last one of a job is begun, but not timed."""

    def __init__(self) -> None:
        super().__init__()
        self._began: list[float] = []

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Called by NVFlare."""
        if event_type == AppEventType.ROUND_STARTED:
            self._began.append(time.time())
            root = Path(fl_ctx.get_engine().get_workspace().get_root_dir())
            stopwatch_file(root, fl_ctx.get_job_id()).write_text(json.dumps(self._began))
