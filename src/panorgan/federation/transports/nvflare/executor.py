"""The site's half of a segment: the site's request handler as an NVFlare executor."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path

from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal

from panorgan.federation.engine import TaskAbortedError
from panorgan.federation.transports.base import RequestHandler
from panorgan.federation.transports.nvflare.controller import MESSAGE, end_with_parent, tidy_jobs
from panorgan.federation.transports.nvflare.parcels import packed


class SiteExecutor(Executor):
    """Passes requests to the site's handler, which subclasses open."""

    def __init__(self) -> None:
        super().__init__()
        self._handler: RequestHandler | None = None
        self._abort: Signal | None = None

    @abstractmethod
    def open_site(self, kit: Path, name: str) -> RequestHandler:
        """The handler of requests. `kit` is the site's folder, `name` is in its certificate."""

    def check_abort(self) -> None:
        """Called in long work: raises when the answer is no longer wanted."""
        if self._abort is not None and self._abort.triggered:
            raise TaskAbortedError

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """Called by NVFlare for every task."""
        request = shareable.get(MESSAGE)
        if not isinstance(request, bytes):
            return make_reply(ReturnCode.BAD_TASK_DATA)
        self._abort = abort_signal
        try:
            if self._handler is None:
                root = Path(fl_ctx.get_engine().get_workspace().get_root_dir()).resolve()
                end_with_parent()
                tidy_jobs(root, fl_ctx.get_job_id())
                self._handler = self.open_site(root, fl_ctx.get_identity_name())
            return Shareable({MESSAGE: packed(self._handler.handle(request))})
        except TaskAbortedError:
            return make_reply(ReturnCode.TASK_ABORTED)
        except Exception:
            # Not even a code may leave: the policy forbids it, or the request could not be read. Details stay here.
            self.logger.exception("no answer")
            return make_reply(ReturnCode.EXECUTION_EXCEPTION)
