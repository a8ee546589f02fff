"""What a driver does besides driving: waits for room on a disk, reports refused sites, tidies the server's store."""

from __future__ import annotations

import errno
import json

import pytest
from driven_run import SITES, at

from panorgan.deployment import drive
from panorgan.deployment.control import Control, read_json
from panorgan.deployment.drive import Driver
from panorgan.federation.engine import NotConnectedError
from panorgan.federation.events import read_events
from panorgan.federation.revocation import revoke


@pytest.mark.parametrize("now", [False, True])
def test_stop_on_a_finished_run_says_so_and_leaves_no_wish_behind(now, pilot):
    pilot.finish()
    assert pilot.stop(now) == "finished"
    assert not pilot.control.stop_requested()
    pilot.control.finished.unlink()
    assert pilot.stop() is None
    assert pilot.control.stop_requested()


def test_stop_on_a_stopped_run_says_so(pilot):
    pilot.control.driver.parent.mkdir(parents=True, exist_ok=True)
    pilot.control.driver.write_text(json.dumps({"state": "stopped", "job": None}))
    assert pilot.stop(now=True) == "stopped"
    assert not pilot.control.stop_requested()


# -- no room on the disk -----------------------------------------------------------------------------------------

NO_ROOM = [
    pytest.param(OSError(errno.ENOSPC, "No space left on device"), id="os"),
    pytest.param(OSError("4096 requested and 100 written"), id="numpy"),
]


@pytest.mark.parametrize("error", NO_ROOM)
def test_a_full_disk_makes_the_driver_wait_name_the_folder_and_go_on(error, pilot, monkeypatch):
    """Neither the job's folder nor the driver's own file can be written, until there is room."""
    full = True
    submit, write = pilot.server.submit, drive.write_atomically

    def unless_full(function):
        def call(*arguments, **more):
            if full:
                raise error
            return function(*arguments, **more)

        return call

    def make_room() -> None:
        nonlocal full
        full = False

    def submitted(job: str) -> None:
        pilot.server.phases[job] = "ended"
        pilot.finish()

    monkeypatch.setattr(pilot.server, "submit", unless_full(submit))
    monkeypatch.setattr(drive, "write_atomically", unless_full(write))
    pilot.server.on_submit = submitted
    at(pilot.clock, lambda: None, lambda: None, make_room)
    pilot.drive()
    (why,) = [why for why in pilot.said("waiting") if "no room" in why]
    assert str(pilot.kit.path / "run") in why
    assert len(pilot.server.invited) == 1
    assert read_json(pilot.control.driver)["state"] == "finished"


def test_a_job_that_runs_while_the_disk_is_full_is_not_ended(pilot, monkeypatch):
    """To tell the job who is gone needs a file; the driver tries again, and watches the same job."""
    tries = 0

    def say_gone(self, job: str, sites: set[str]) -> None:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        pilot.server.phases[job] = "ended"
        pilot.finish()

    monkeypatch.setattr(Control, "say_gone", say_gone)
    pilot.write_settings("proceed")

    def submitted(job: str) -> None:
        pilot.server.phases[job] = "running"
        pilot.server.inside[job] = set(SITES)

    def leave() -> None:
        if pilot.clock.now > 1010.0:
            pilot.server.inside["job-1"].discard("west")

    pilot.server.on_submit = submitted
    pilot.clock.then = leave
    pilot.drive()
    assert pilot.server.aborted == []
    assert pilot.server.invited == [list(SITES)]
    assert tries == 3


def test_a_full_disk_at_the_server_is_not_taken_for_a_lost_connection(pilot):
    def submitted(job: str) -> None:
        if job == "job-1":
            raise NotConnectedError("The server does not answer.", why="x") from OSError(errno.ENOSPC, "No space left")
        pilot.server.phases[job] = "ended"
        pilot.finish()

    pilot.server.on_submit = submitted
    pilot.server.abort = lambda job: pilot.server.phases.pop(job)
    pilot.drive()
    assert any(str(pilot.kit.path / "run") in why for why in pilot.said("waiting"))
    assert not any("cannot be reached" in why for why in pilot.said("waiting"))


def test_what_is_shown_may_lie_on_the_full_disk(pilot):
    def submitted(job: str) -> None:
        pilot.server.phases[job] = "ended"
        pilot.finish()

    def cannot_print(event: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    pilot.server.on_submit = submitted
    pilot.control.folder.mkdir(parents=True)
    Driver(pilot.kit, pilot.engine, cannot_print).run()
    assert len(pilot.server.invited) == 1


# -- what the server's message filter refuses --------------------------------------------------------------------


def test_a_twin_is_told_by_name_in_the_events_once(pilot):
    reported = {"code": "twin", "why": "Two machines answer as north.", "time": 5.0}

    def knock() -> None:
        reported["time"] += 10.0
        (pilot.kit.path / "door.json").write_text(json.dumps({"north": reported}))

    def end() -> None:
        pilot.server.phases["job-1"] = "ended"
        pilot.finish()

    at(pilot.clock, knock, knock, knock, end)
    pilot.drive()
    events = [event.facts for event in read_events(pilot.control.folder.parent / "events.jsonl")]
    assert [(facts["site"], facts["code"], facts["reason"]) for facts in events] == [("north", "twin", reported["why"])]


def test_who_waits_for_a_revoked_kit_reads_the_way_out(pilot):
    pilot.server.connected.remove("west")
    revoke(pilot.kit.local / "revoked.yaml", "west", 1000.0)
    at(pilot.clock, lambda: None, lambda: pilot.stop())
    pilot.drive()
    (why,) = pilot.said("waiting")
    assert why.startswith("for west (a kit of west was revoked")


# -- the server's store ------------------------------------------------------------------------------------------


def test_finished_jobs_are_forgotten_after_every_segment(pilot):
    def submitted(job: str) -> None:
        pilot.server.phases[job] = "ended"
        if job == "job-3":
            pilot.finish()

    pilot.server.on_submit = submitted
    pilot.drive()
    assert pilot.server.kept == [drive.KEPT_SEGMENTS] * 3
