"""The state on the live page: of a simulation from its folder, of a federation from the server's kit."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from live_runs import begin, log_of, write_round

from panorgan.checksums import sealed_json
from panorgan.config import Experiment
from panorgan.viewer.live_status import DrivenRun, LatestStatus, LiveStatus, SimulatedRun
from panorgan.workflows.lock import only_one_process
from panorgan.workflows.run import Run


@pytest.fixture
def folder(tiny: Callable[..., Experiment], tmp_path: Path) -> Path:
    """A run of three rounds that has just begun."""
    run = Run(tmp_path / "run")
    run.path.mkdir()
    run.manifest_file.write_text(sealed_json({"run": "r", "experiment": tiny().as_json(), "sites": {}}))
    return run.path


def look(folder: Path, running: bool = False, now: float | None = None) -> LiveStatus:
    moment = time.time() if now is None else now
    if not running:
        return SimulatedRun(folder).look(moment)
    with only_one_process(folder):
        return SimulatedRun(folder).look(moment)


def test_a_run_that_has_not_begun(tmp_path: Path) -> None:
    status = look(tmp_path / "later")
    assert (status.state, status.title, status.rounds_done, status.total) == ("new", "later", 0, None)
    assert not (tmp_path / "later").exists(), "looking makes nothing"


def test_a_run_that_goes_on(folder: Path) -> None:
    log = log_of(folder)
    begin(log)
    write_round(log, 1)
    now = time.time() + 4
    status = look(folder, running=True, now=now)
    assert (status.state, status.title, status.detail) == ("running", "tiny", "fedavg")
    assert (status.number, status.rounds_done, status.total, status.round_seconds) == (2, 1, 3, 10.0)
    # Two rounds of 10 s are left, of which 4 s have passed.
    assert status.eta_seconds == pytest.approx(16, abs=0.5)
    assert [site.name for site in status.sites] == ["north", "south"]


def test_a_run_that_was_killed(folder: Path) -> None:
    log = log_of(folder)
    begin(log)
    write_round(log, 1)
    status = look(folder)
    assert (status.state, status.doing, status.eta_seconds) == ("interrupted", "", 20.0)
    assert "--resume" in status.advice


def test_after_the_last_round_the_test_cases_are_scored(folder: Path) -> None:
    log = log_of(folder)
    begin(log)
    for number in (1, 2, 3):
        write_round(log, number)
    status = look(folder, running=True)
    assert (status.rounds_done, status.number, status.eta_seconds) == (3, 3, None)
    assert status.doing != look(folder).doing
    Run(folder).scores_file.write_text("split,site,case,organ,dice\n")
    assert look(folder).state == "finished"
    assert look(folder, running=True).state == "running", "scored again, or continued"


def test_a_manifest_that_cannot_be_read_does_not_prevent_the_page(folder: Path) -> None:
    Run(folder).manifest_file.write_text("{")
    assert (look(folder).state, look(folder).title) == ("interrupted", "run")


def test_the_state_is_read_once_for_all_browsers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = SimulatedRun(folder)
    seen: list[float] = []
    original = source.look
    monkeypatch.setattr(source, "look", lambda now: seen.append(now) or original(now))
    latest = LatestStatus(source)
    assert latest() is latest()
    assert len(seen) == 1


# -- a federation --------------------------------------------------------------------------------------------------


class TestFederation:
    @pytest.fixture
    def kit(self, tiny: Callable[..., Experiment], tmp_path: Path):
        pytest.importorskip("cryptography", reason="the network extra is not installed")
        from trial_federation import write_server_kit

        return write_server_kit(tmp_path / "server", tiny().agreement())

    def test_nothing_has_been_started(self, kit) -> None:
        status = DrivenRun(kit).look(1000)
        assert (status.state, status.title, status.total, status.waits) == ("new", "pilot", 3, ())
        assert DrivenRun(kit).events_file == kit.path / "run" / "events.jsonl"

    def test_who_is_waited_for_before_the_start(self, kit) -> None:
        """A site that joins later is not waited for."""
        status = _driven(kit, "waiting", why="for south", connected={"north": 999})
        assert status.state == "waiting"
        assert [wait.site for wait in status.waits] == ["south"]

    def test_who_is_waited_for_in_a_round(self, kit) -> None:
        """The one that trains, and the one whose connection is gone; not the one that has answered."""
        log = log_of(kit.path / "run")
        begin(log)
        now = time.time() + 1
        _job(kit, now, ["north", "south"], {"north": 2.0})
        status = _driven(kit, "running", job="job-1", connected={"north": now, "south": now}, now=now + 5)
        assert status.doing
        assert [(wait.site, wait.since) for wait in status.waits] == [("south", now)]
        assert {site.name: site.state for site in status.sites} == {
            "north": "answered", "south": "working", "west": "absent"
        }  # fmt: skip
        status = _driven(kit, "running", job="job-1", connected={"north": now}, now=now + 5)
        assert [(wait.site, wait.why) for wait in status.waits] == [("south", "not connected")]

    def test_settings_that_are_being_edited_do_not_end_the_page(self, kit) -> None:
        source = DrivenRun(kit)
        before = source.events_file
        kit.settings.write_text("federation: [")
        assert source.look(1000).state == "silent"
        assert source.events_file == before


def _driven(kit, state: str, now: float = 1001, **facts) -> LiveStatus:
    from panorgan.deployment.control import Control

    control = Control(kit.path / "run" / "control")
    control.folder.mkdir(parents=True, exist_ok=True)
    content = {"state": state, "why": "", "segment": 1, "job": "", "updated": now - 1, **facts}
    control.driver.write_text(json.dumps(content))
    with only_one_process(control.folder):
        return DrivenRun(kit).look(now)


def _job(kit, since: float, asked: list[str], answered: dict[str, float]) -> None:
    from panorgan.deployment.control import Control

    control = Control(kit.path / "run" / "control")
    control.folder.mkdir(parents=True, exist_ok=True)
    content = {"kind": "train", "round": 1, "total": 3, "stage": "train", "since": since}
    control.job.write_text(json.dumps({**content, "asked": asked, "answered": answered}))
