"""The coordinator's connection to NVFlare's server: submit a job, watch it, see which sites are connected."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from nvflare.fuel.flare_api.api_spec import JobNotFound, JobNotRunning
from nvflare.fuel.flare_api.flare_api import Session

from panorgan.federation.engine import NotConnectedError, Segment, SegmentStatus, ServerState
from panorgan.federation.transports.nvflare.jobs import CONTROLLER, EXECUTOR, write_job

Result = TypeVar("Result")

_DONE = "FINISHED"
_QUEUED = ("SUBMITTED", "APPROVED", "DISPATCHED")
_UNHEARD = ("error", "no_reply", "no reply")
_FORGET_AT_ONCE = 50
_COMMAND_TIMEOUT = 8.0
_CONNECT_TIMEOUT = 10.0


class NVFlareSession:
    """Implements `federation.engine.AdminSession` with the coordinator's own certificate. A segment is a job here."""

    def __init__(self, kit: Path, user: str) -> None:
        self._kit, self._user = kit, user
        self._session: Session | None = None

    def look(self) -> ServerState:
        """As the server itself sees it."""
        info = self._ask(lambda session: session.get_system_info())
        return ServerState(
            str(info.server_info.start_time),
            {str(client.name): float(client.last_connect_time) for client in info.client_info},
            frozenset(str(job.job_id) for job in info.job_info),
        )

    def submit(self, segment: Segment, folder: Path) -> str:
        """Write the job that starts panorgan's own two classes, and hand it over."""
        write_job(folder, segment.name, CONTROLLER, EXECUTOR, segment.min_sites, segment.required, sites=segment.sites)
        return self.submit_folder(folder)

    def submit_folder(self, job: Path) -> str:
        """Hand a job folder over; returns its id."""
        return self._ask(lambda session: str(session.submit_job(str(job))))

    def status(self, segment: str) -> SegmentStatus:
        """From the job's record in the server's store."""
        try:
            word = self._ask(lambda session: str(session.get_job_meta(segment).get("status", "UNKNOWN")))
        except NotConnectedError as error:
            if isinstance(error.__cause__, JobNotFound):
                return SegmentStatus("ended", f"{_DONE}:UNKNOWN")
            raise
        if word.startswith(_DONE):
            return SegmentStatus("ended", word)
        return SegmentStatus("running" if word == "RUNNING" else "waiting", word)

    def unfinished(self) -> set[str]:
        """Jobs that run, and those in the store that wait."""
        running = self.look().running
        jobs = self._ask(lambda session: session.list_jobs())
        return {*running, *(str(job["job_id"]) for job in jobs if str(job.get("status", "")) in _QUEUED)}

    def forget_finished(self, keep: int) -> int:
        """A few at a time: each takes a command of its own."""
        jobs = self._ask(lambda session: session.list_jobs())
        finished = [job for job in jobs if str(job.get("status", "")).startswith(_DONE)]
        newest_first = sorted(finished, key=lambda job: str(job.get("submit_time", "")), reverse=True)
        gone = [str(job["job_id"]) for job in newest_first[keep:][:_FORGET_AT_ONCE]]
        for job in gone:
            self._forget(job)
        return len(gone)

    def _forget(self, job: str) -> None:
        self._ask(lambda session: session.delete_job(job))

    def abort(self, segment: str) -> bool:
        """A job that NVFlare no longer knows, or that does not run, has ended."""
        try:
            self._ask(lambda session: session.abort_job(segment))
        except NotConnectedError as error:
            return isinstance(error.__cause__, JobNotFound | JobNotRunning)
        return True

    def sites_in_segments(self) -> dict[str, set[str]] | None:
        """The server asks each site."""
        found: list[dict[str, Any]] | None = self._ask(lambda session: session.get_client_job_status())
        if found is None:
            return None
        jobs: dict[str, set[str]] = {}
        for row in found:
            if str(row.get("status", "")).lower() in _UNHEARD:
                continue
            own = jobs.setdefault(str(row.get("client_name", "")), set())
            if job := row.get("job_id"):
                own.add(str(job))
        return jobs

    def close(self) -> None:
        """Release the connection."""
        if self._session is not None:
            with contextlib.suppress(Exception), _quietly():
                self._session.close()
            self._session = None

    def _connected(self) -> Session:
        """A new session. One that was interrupted while it connected (Ctrl-C) is closed too.

        Its threads would keep the process alive for ever, which NVFlare's own `new_secure_session` lets happen.
        """
        session = Session(self._user, str(self._kit))
        session.set_timeout(_COMMAND_TIMEOUT)
        try:
            session.try_connect(_CONNECT_TIMEOUT)
        except BaseException:
            with contextlib.suppress(Exception):
                session.close()
            raise
        return session

    def _ask(self, question: Callable[[Session], Result]) -> Result:
        try:
            with _quietly():
                if self._session is None:
                    self._session = self._connected()
                return question(self._session)
        except Exception as error:
            # NVFlare raises many kinds of errors; after each of them this session is of no use any more.
            self.close()
            raise NotConnectedError(
                "The server does not answer.",
                why=f"{type(error).__name__}: {error}",
                fix="Is 'panorgan federation server' running? It is tried again.",
            ) from error


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """NVFlare prints to the terminal, which belongs to the command line."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield
