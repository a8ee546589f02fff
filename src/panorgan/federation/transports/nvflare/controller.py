"""The server's half of a segment: the coordinator as an NVFlare controller. One job is one segment of a run."""

from __future__ import annotations

import os
import shutil
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

from nvflare.apis.client import Client
from nvflare.apis.controller_spec import ClientTask, Task
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from panorgan.federation.engine import SegmentAbortedError
from panorgan.federation.transports.base import MakeRequest, OnReply
from panorgan.federation.transports.nvflare.jobs import is_job_id
from panorgan.federation.transports.nvflare.parcels import unpacked

MESSAGE = "message"
"""Under this key our own bytes travel, in both directions."""
TASK = "panorgan"

_LOOK_EVERY = 0.05
_LOOK_FOR_PARENT_EVERY = 0.5


class NVFlareTransport:
    """Implements `federation.engine.NetworkTransport`: carries requests as NVFlare tasks, one per site."""

    def __init__(self, controller: Controller, fl_ctx: FLContext, abort_signal: Signal) -> None:
        self._controller, self._context, self._abort = controller, fl_ctx, abort_signal
        self.gone: Callable[[], set[str]] = set

    @property
    def sites(self) -> Sequence[str]:
        """The sites that take part in this job."""
        return tuple(sorted(str(client.name) for client in self._context.get_engine().get_clients()))

    def exchange(
        self, sites: Sequence[str], make_request: MakeRequest, on_reply: OnReply, deadline: float | None = None
    ) -> None:
        """Ask every site that takes part in this job, and wait for their answers."""
        news = _News()
        asked = {site: self._ask(site, make_request, on_reply, news) for site in sites if site in self.sites}
        ends = None if deadline is None else time.monotonic() + deadline
        while waiting := [site for site, task in asked.items() if not (task.completion_status or site in news.heard)]:
            if self._abort.triggered:
                for site in waiting:  # an answer that is being read is read to its end
                    self._cancel(asked[site])
                raise SegmentAbortedError("The job was stopped.", fix="It goes on with the next one.")
            if news.errors:
                break
            late = ends is not None and time.monotonic() > ends
            for site in waiting:
                if late or site in self.gone():
                    self._cancel(asked[site])
                elif len(asked[site].client_tasks) > 1:
                    with asked[site].cb_lock:
                        _forget_resends(asked[site])
            news.wait(_LOOK_EVERY)
        for site in waiting:
            self._cancel(asked[site])
        if news.errors:
            raise news.errors[0]

    def _cancel(self, task: Task) -> None:
        # NVFlare looks at a task's state under this lock: an answer that is being read is read to its end, and counts;
        # a later one is dropped.
        with task.cb_lock:
            _forget_resends(task)
            self._controller.cancel_task(task)

    def _ask(self, site: str, make_request: MakeRequest, on_reply: OnReply, news: _News) -> Task:
        # NVFlare calls these one at a time, under a lock of its own, and swallows what they raise.
        def before_sending(client_task: ClientTask, fl_ctx: FLContext) -> None:
            try:
                client_task.task.data = Shareable({MESSAGE: make_request(site)})
            except Exception as error:
                news.errors.append(error)
                raise

        def after_sending(client_task: ClientTask, fl_ctx: FLContext) -> None:
            client_task.task.data = Shareable()  # the request is on its way: no need to keep it until the answer

        def on_result(client_task: ClientTask, fl_ctx: FLContext) -> None:
            result, client_task.result = client_task.result, None
            _forget_resends(client_task.task, client_task)
            answer = unpacked(result.get(MESSAGE)) if result.get_return_code() == ReturnCode.OK else None
            if answer is not None and not news.errors:
                try:
                    on_reply(site, answer)
                except Exception as error:
                    news.errors.append(error)
            news.came_from(site)

        task = Task(
            TASK,
            Shareable(),
            before_task_sent_cb=before_sending,
            after_task_sent_cb=after_sending,
            result_received_cb=on_result,
        )
        self._controller.send(task, self._context, targets=[site])
        return task


def _forget_resends(task: Task, kept: ClientTask | None = None) -> None:
    """A task that was sent twice (the line broke) stands twice in NVFlare's list, and its monitor would die of that."""
    unique = {client_task.id: client_task for client_task in task.client_tasks}
    task.client_tasks[:] = [kept] if kept is not None else list(unique.values())


class _News:
    """What NVFlare's threads report to the one that waits, so that it need not poll."""

    def __init__(self) -> None:
        self.errors: list[Exception] = []
        self.heard: set[str] = set()
        self._came = threading.Event()

    def came_from(self, site: str) -> None:
        """A site's answer has been handled, whatever it was."""
        self.heard.add(site)
        self._came.set()

    def wait(self, seconds: float) -> None:
        """Until something came, but not longer."""
        self._came.wait(seconds)
        self._came.clear()


def end_with_parent() -> None:
    """End this job's process when the one that started it is gone.

    NVFlare looks whether the parent's process id exists, which a dead process keeps until its own parent collects it.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_FOR_PARENT_EVERY)
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def tidy_jobs(kit: Path, current: str) -> None:
    """Remove the folders of earlier jobs: a long run has hundreds, and everything worth keeping is elsewhere."""
    for folder in kit.iterdir():
        if is_job_id(folder.name) and folder.name != current and folder.is_dir():
            shutil.rmtree(folder, ignore_errors=True)


class SegmentController(Controller):
    """Runs one segment when its job starts; subclasses say what a segment does."""

    def __init__(self) -> None:
        super().__init__(task_check_period=_LOOK_EVERY)

    @abstractmethod
    def run_segment(self, transport: NVFlareTransport, kit: Path, job: str) -> None:
        """Do the segment's rounds. `kit` is the server's folder."""

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Called by NVFlare once the sites of the job are ready."""
        root = Path(fl_ctx.get_engine().get_workspace().get_root_dir()).resolve()
        end_with_parent()
        tidy_jobs(root, fl_ctx.get_job_id())
        transport = NVFlareTransport(self, fl_ctx, abort_signal)
        try:
            self.run_segment(transport, root, fl_ctx.get_job_id())
        except SegmentAbortedError:
            self.log_info(fl_ctx, "the segment was aborted")

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Nothing to prepare."""

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Nothing to tidy up."""

    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        """An answer that came after the deadline, or that was never asked for."""
        self.log_warning(fl_ctx, f"an answer of {client.name} came too late or was not asked for; it is dropped")
