"""The coordinator's connection to NVFlare's server: it never outlives an interrupted `start`."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from refusing import refused

pytest.importorskip("nvflare")

from nvflare.fuel.flare_api.api_spec import JobNotFound, JobNotRunning

from panorgan.federation.engine import NotConnectedError, SegmentStatus
from panorgan.federation.transports.nvflare import session as adapter


class Connecting:
    """NVFlare's session, of which every trial to connect ends in the same way."""

    ends_with: BaseException
    made: ClassVar[list[Connecting]] = []

    def __init__(self, user: str, kit: str) -> None:
        self.closed = False
        self.made.append(self)

    def set_timeout(self, seconds: float) -> None:
        assert seconds > 0

    def try_connect(self, seconds: float) -> None:
        raise self.ends_with

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def connecting(monkeypatch):
    monkeypatch.setattr(adapter, "Session", Connecting)
    monkeypatch.setattr(Connecting, "made", [])
    return Connecting


def test_ctrl_c_while_it_connects_leaves_no_threads_behind(connecting, tmp_path, monkeypatch):
    monkeypatch.setattr(connecting, "ends_with", KeyboardInterrupt(), raising=False)
    with pytest.raises(KeyboardInterrupt):
        adapter.NVFlareSession(tmp_path, "coordinator@example.org").look()
    assert [session.closed for session in connecting.made] == [True]


def test_a_server_that_is_away_is_asked_anew_each_time(connecting, tmp_path, monkeypatch):
    monkeypatch.setattr(connecting, "ends_with", OSError("no listener"), raising=False)
    session = adapter.NVFlareSession(tmp_path, "coordinator@example.org")
    for _ in range(2):
        with refused("not-connected", NotConnectedError) as caught:
            session.look()
        assert "no listener" in caught.value.why
    assert [session.closed for session in connecting.made] == [True, True]


# -- what NVFlare's answers mean ----------------------------------------------------------------------------------


class Answering:
    """NVFlare's session: every command ends in the same error."""

    error: Exception

    def __init__(self, user: str, kit: str) -> None:
        """Connects to nobody."""

    def set_timeout(self, seconds: float) -> None: ...

    def try_connect(self, seconds: float) -> None: ...

    def close(self) -> None: ...

    def get_job_meta(self, job: str) -> dict[str, Any]:
        raise self.error

    abort_job = get_job_meta


@pytest.fixture
def answering(monkeypatch):
    monkeypatch.setattr(adapter, "Session", Answering)
    return lambda error: monkeypatch.setattr(Answering, "error", error, raising=False)


def test_a_job_that_the_server_does_not_know_is_done(answering, tmp_path):
    """The server's store was emptied: a driver must not wait for a job that will never end."""
    answering(JobNotFound("no such job"))
    assert adapter.NVFlareSession(tmp_path, "ada@example.org").status("job-1").phase == "ended"
    answering(OSError("no route"))
    with refused("not-connected", NotConnectedError):
        adapter.NVFlareSession(tmp_path, "ada@example.org").status("job-1")


@pytest.mark.parametrize(
    ("error", "ended"), [(JobNotFound("gone"), True), (JobNotRunning("done"), True), (OSError("no route"), False)]
)
def test_a_job_that_does_not_run_any_more_has_ended_as_well(error, ended, answering, tmp_path):
    answering(error)
    assert adapter.NVFlareSession(tmp_path, "ada@example.org").abort("job-1") is ended


@pytest.mark.parametrize(
    ("word", "phase"), [("SUBMITTED", "waiting"), ("RUNNING", "running"), ("FINISHED:EXECUTION_EXCEPTION", "ended")]
)
def test_the_phases_of_a_job(word, phase, monkeypatch, tmp_path):
    monkeypatch.setattr(adapter, "Session", Answering)
    monkeypatch.setattr(Answering, "get_job_meta", lambda self, job: {"status": word})
    assert adapter.NVFlareSession(tmp_path, "ada@example.org").status("job-1") == SegmentStatus(phase, word)


# -- the server's store ------------------------------------------------------------------------------------------


class Store:
    """NVFlare's session with a store of jobs, oldest first."""

    jobs: dict[str, str]

    def __init__(self, user: str, kit: str) -> None:
        """Connects to nobody."""

    def set_timeout(self, seconds: float) -> None: ...

    def try_connect(self, seconds: float) -> None: ...

    def list_jobs(self) -> list[dict[str, Any]]:
        return [
            {"job_id": job, "status": status, "submit_time": f"2026-11-15T17:{number:02d}"}
            for number, (job, status) in enumerate(self.jobs.items())
        ]

    def delete_job(self, job: str) -> None:
        del self.jobs[job]


def test_only_finished_jobs_go_and_the_newest_stay(monkeypatch, tmp_path):
    monkeypatch.setattr(adapter, "Session", Store)
    finished = {f"old-{number}": "FINISHED:COMPLETED" for number in range(8)}
    Store.jobs = {"stuck": "RUNNING", **finished, "now": "RUNNING", "next": "SUBMITTED"}
    assert adapter.NVFlareSession(tmp_path, "ada@example.org").forget_finished(3) == 5
    assert list(Store.jobs) == ["stuck", "old-5", "old-6", "old-7", "now", "next"]
