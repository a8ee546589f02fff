"""The coordinator as a person: submit a job, look at it, see who is connected."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from nvflare.fuel.flare_api.api_spec import JobNotFound, JobNotRunning
from nvflare.fuel.flare_api.flare_api import Session

from panorgan.errors import RunError

Result = TypeVar("Result")

_DONE = "FINISHED"
_QUEUED = ("SUBMITTED", "APPROVED", "DISPATCHED")
_UNHEARD = ("error", "no_reply", "no reply")
_FORGET_AT_ONCE = 50
_COMMAND_TIMEOUT = 8.0
_CONNECT_TIMEOUT = 10.0


class NotConnectedError(RunError):
    """The server cannot be reached just now."""

    code = "not-connected"


@dataclass(frozen=True)
class JobState:
    """What NVFlare says of a job. Its end says little: the checkpoint knows what was done."""

    status: str

    @property
    def done(self) -> bool:
        """Whether nothing of it runs any more."""
        return self.status.startswith(_DONE)

    @property
    def running(self) -> bool:
        """Whether it was started and has not ended."""
        return self.status == "RUNNING"


@dataclass(frozen=True)
class SystemState:
    """`server_started` changes when the server was restarted, and all its jobs are gone then."""

    server_started: str
    connected: dict[str, float]
    jobs: frozenset[str]


class AdminSession:
    """A connection to the server with the coordinator's own certificate; opened when needed, and again if it broke."""

    def __init__(self, kit: Path, user: str) -> None:
        self._kit, self._user = kit, user
        self._session: Session | None = None

    def submit(self, job: Path) -> str:
        """Hand a job folder over; returns its id."""
        return self._ask(lambda session: str(session.submit_job(str(job))))

    def job(self, job: str) -> JobState:
        """How a job is doing. One that the server does not know (any more) is done."""
        try:
            return self._ask(lambda session: JobState(str(session.get_job_meta(job).get("status", "UNKNOWN"))))
        except NotConnectedError as error:
            if isinstance(error.__cause__, JobNotFound):
                return JobState(f"{_DONE}:UNKNOWN")
            raise

    def look(self) -> SystemState:
        """Who is connected and what runs, as the server itself sees it."""
        info = self._ask(lambda session: session.get_system_info())
        return SystemState(
            str(info.server_info.start_time),
            {str(client.name): float(client.last_connect_time) for client in info.client_info},
            frozenset(str(job.job_id) for job in info.job_info),
        )

    def queued_jobs(self) -> list[str]:
        """Ids of jobs that wait for their start."""
        jobs = self._ask(lambda session: session.list_jobs())
        return [str(job["job_id"]) for job in jobs if str(job.get("status", "")) in _QUEUED]

    def forget_jobs(self, keep: int) -> int:
        """Remove finished jobs from the server's store, except the newest; returns how many went."""
        jobs = self._ask(lambda session: session.list_jobs())
        finished = [job for job in jobs if str(job.get("status", "")).startswith(_DONE)]
        newest_first = sorted(finished, key=lambda job: str(job.get("submit_time", "")), reverse=True)
        gone = [str(job["job_id"]) for job in newest_first[keep:][:_FORGET_AT_ONCE]]
        for job in gone:
            self._forget(job)
        return len(gone)

    def _forget(self, job: str) -> None:
        self._ask(lambda session: session.delete_job(job))

    def abort(self, job: str) -> bool:
        """End a job now; one that has ended already is as good. False if the server could not be told."""
        try:
            self._ask(lambda session: session.abort_job(job))
        except NotConnectedError as error:
            return isinstance(error.__cause__, JobNotFound | JobNotRunning)
        return True

    def sites_in_jobs(self) -> dict[str, set[str]] | None:
        """Ids of the jobs that run at each connected site; None if the sites could not be asked."""
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
        """Let go of the connection."""
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
            # NVFlare's own errors are many; all of them mean that this session is of no use any more.
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
