"""Status: what three kinds of files say together, and what is said when some are missing or old."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="the network extra is not installed")

from trial_federation import write_server_kit

from panorgan.config import Experiment
from panorgan.deployment.control import Control, JobNews
from panorgan.deployment.folders import ServerKit
from panorgan.deployment.kit_files import load_coordinator_file
from panorgan.deployment.site_status import STALE_SECONDS, SiteStatus
from panorgan.deployment.status import FederationStatus, read_status
from panorgan.federation.events import Event
from panorgan.federation.failures import MEANING
from panorgan.workflows.lock import only_one_process

JOINED = {
    "north": {"train_cases": 3, "annotated": {"liver": 3}},
    "south": {"train_cases": 2, "annotated": {"spleen": 2, "kidney": 2}},
}
SCORES = {"north": {"liver": 0.9}, "south": {"spleen": 0.5, "kidney": 0.7}}


class Run:
    """A run folder as the job and the driver leave it. Time begins at 1000; a round takes 10 s."""

    def __init__(self, kit: ServerKit) -> None:
        self.kit = kit
        settings = load_coordinator_file(kit)
        self.folder = kit.run(settings)
        self.control = Control(kit.control(settings))
        self.control.folder.mkdir(parents=True)

    def event(self, time: float, kind: str, **facts: Any) -> None:
        with (self.folder / "events.jsonl").open("a") as file:
            file.write(json.dumps({"time": time, "event": kind, **facts}) + "\n")

    def begin(self) -> None:
        self.event(1000, "started", job="job-1")
        self.event(1001, "joined", sites=JOINED, plan={"spacing": 1})

    def round(self, time: float, number: int, seconds: float = 10.0, **facts: Any) -> None:
        content = {
            "number": number, "stage": "train", "round": number, "rounds": 3, "total": 3,
            "sites": {"north": {"loss": 0.5}, "south": {"loss": 0.7}}, "validation": None, "best": None,
            "bytes_sent": 100, "bytes_received": 60,
            "seconds": {"sites": seconds - 1, "aggregate": 1.0, "validate": 0.0, "checkpoint": 0.0},
        }  # fmt: skip
        self.event(time, "round", **{**content, **facts})

    def driver(self, state: str, updated: float, **facts: Any) -> None:
        content = {"state": state, "why": "", "segment": 1, "job": "job-1", "updated": updated, "pid": 1}
        connected = {"north": updated - 3, "south": updated - 5}
        self.control.driver.write_text(json.dumps({**content, "connected": connected, **facts}))

    def job(self, since: float, kind: str, number: int, asked: list[str], answered: dict[str, float]) -> None:
        """As the job itself writes it."""
        reported = JobNews(self.control.job)
        if kind != "join":
            reported(Event("round_started", {"number": number, "stage": "train", "total": 3}, since))
        reported(Event("asked", {"task": kind, "sites": asked}, since))
        for site, seconds in answered.items():
            reported(Event("answered", {"site": site, "seconds": seconds}, since + seconds))

    def status(self, now: float, driven: bool = True) -> FederationStatus:
        """Read it while a driver holds its lock, or not."""
        if not driven:
            return read_status(self.kit, now)
        with only_one_process(self.control.folder):
            return read_status(self.kit, now)


@pytest.fixture
def run(tiny: Callable[..., Experiment], tmp_path: Path) -> Run:
    return Run(write_server_kit(tmp_path / "server", tiny().agreement(), rounds={"per_segment": 2}))


def sites(status: FederationStatus) -> dict[str, SiteStatus]:
    return {site.name: site for site in status.sites}


def states(status: FederationStatus) -> dict[str, str]:
    return {site.name: site.state for site in status.sites}


# -- the whole ---------------------------------------------------------------------------------------------------


def test_nothing_has_been_started(run: Run) -> None:
    status = run.status(1000, driven=False)
    assert (status.state, status.number, status.rounds_done, status.total) == ("new", 1, 0, 3)
    assert (status.experiment, status.method, status.federation) == ("tiny", "fedavg", "pilot")
    assert status.advice == f"Start it with: panorgan federation start {run.kit.path}"
    assert states(status) == {"north": "unknown", "south": "unknown", "west": "unknown"}
    assert status.eta_seconds is None


def test_not_even_a_run_folder(run: Run) -> None:
    run.control.folder.rmdir()
    run.folder.rmdir()
    assert run.status(1000, driven=False).state == "new"


def test_a_driver_that_waits_says_for_what(run: Run) -> None:
    run.driver("waiting", 1000, why="for south", connected={"north": 999})
    status = run.status(1001)
    assert (status.state, status.why, status.advice) == ("waiting", "for south", "")
    assert states(status) == {"north": "connected", "south": "absent", "west": "absent"}
    assert sites(status)["west"].detail == "joins later"
    assert sites(status)["north"].last_seen == 999


def test_a_driver_that_was_killed_is_noticed_at_once(run: Run) -> None:
    """Its file is fresh, but its lock is free."""
    run.begin()
    run.driver("running", 1002)
    assert run.status(1003).state == "running"
    status = run.status(1003, driven=False)
    assert (status.state, status.why) == ("interrupted", "the driver is not running")
    assert "panorgan federation start" in status.advice
    assert set(states(status).values()) == {"unknown"}


def test_a_driver_that_hangs(run: Run) -> None:
    run.driver("running", 1000)
    assert run.status(1000 + STALE_SECONDS - 1).state == "running"
    assert run.status(1000 + STALE_SECONDS + 1).state == "silent"


def test_a_run_without_a_driver_file(run: Run) -> None:
    run.begin()
    assert run.status(1003, driven=False).state == "interrupted"


@pytest.mark.parametrize("state", ["stopped", "failed"])
def test_an_end_that_the_driver_told_stays_true(run: Run, state: str) -> None:
    run.begin()
    run.driver(state, 1000, why="because")
    status = run.status(99999, driven=False)
    assert (status.state, status.why) == (state, "because")
    assert "panorgan federation start" in status.advice


def test_a_finished_run(run: Run) -> None:
    run.begin()
    for number in (1, 2, 3):
        run.round(1010 + 10 * number, number)
    run.event(1050, "finished", rounds=3)
    run.driver("finished", 1051)
    run.control.delivered.write_text('{"sites": ["north", "south"]}')
    status = run.status(99999, driven=False)
    assert (status.state, status.rounds_done, status.number, status.eta_seconds) == ("finished", 3, 3, 0.0)
    assert status.advice == f"The model is in {run.folder / 'model'}"
    assert states(status) == {"north": "done", "south": "done", "west": "unknown"}


def test_damaged_files_do_not_keep_anyone_from_the_status(run: Run) -> None:
    run.begin()
    run.control.driver.write_text('{"state": "runn')
    run.control.job.write_text("[]")
    run.kit.experiment.write_text("vocabulary: [unicorn]\n")
    with (run.folder / "events.jsonl").open("a") as file:
        file.write('{"time": 5, "ev')
    status = run.status(1003, driven=False)
    assert (status.state, status.total, status.method) == ("interrupted", None, "")


# -- time --------------------------------------------------------------------------------------------------------


def test_time_left_comes_from_the_median_of_the_last_rounds(run: Run) -> None:
    """Rounds of 9 (alone: only its own work counts), 20 and 10 s: the median is 10 s."""
    run.begin()
    for time, number, seconds in ((1010, 1, 9.0), (1030, 2, 20.0), (1040, 3, 10.0)):
        run.round(time, number, seconds, total=7)
    run.driver("running", 1044)
    status = run.status(1044)
    assert status.round_seconds == 10
    # Four rounds are left: 40 s, of which 4 s have passed. One per job more: there was no pause to measure yet.
    assert status.eta_seconds == 36
    assert run.status(1090).eta_seconds == 30, "a round that takes long counts as about to end"
    assert run.status(1090, driven=False).eta_seconds == 40, "nothing passes while nothing runs"


def test_pauses_between_jobs_are_counted_apart(run: Run) -> None:
    """Two rounds per job of 10 s, and 30 s until the next job has begun."""
    run.begin()
    run.round(1011, 1, total=8)
    run.round(1021, 2, total=8)
    run.event(1051, "resumed", job="job-2")
    run.round(1061, 3, total=8)
    run.driver("running", 1061, job="job-2")
    status = run.status(1061)
    assert status.round_seconds == 10
    # Five rounds of 10 s, and two more pauses of 30 s.
    assert status.eta_seconds == 5 * 10 + 2 * 30


def test_a_round_told_twice_counts_once(run: Run) -> None:
    run.begin()
    run.round(1010, 1)
    run.round(1011, 1)
    status = run.status(1012, driven=False)
    assert (status.rounds_done, status.number, status.bytes_sent, status.bytes_received) == (1, 2, 100, 60)


# -- scores and troubles -----------------------------------------------------------------------------------------


def test_scores_are_the_newest_ones(run: Run) -> None:
    run.begin()
    run.round(1010, 1, validation=SCORES, best={"round": 1, "dice": 0.75})
    run.round(1020, 2, best={"round": 1, "dice": 0.75})
    score = run.status(1021, driven=False).validation
    assert score is not None
    # North's mean is 0.9, south's (0.5 + 0.7) / 2 = 0.6.
    assert (score.number, score.mean, score.best, score.best_round) == (1, pytest.approx(0.75), 0.75, 1)
    assert score.structures == {"kidney": 0.7, "liver": 0.9, "spleen": 0.5}


def test_refusals_and_failures_are_listed_with_their_reason(run: Run) -> None:
    run.begin()
    run.event(1005, "refused", number=1, site="south", code="not-finite", reason="Site south sent NaN.", why="key a")
    run.event(1006, "failed", number=1, site="north", code="memory")
    status = run.status(1007, driven=False)
    assert [(t.site, t.number, t.code, t.reason, t.why) for t in status.refusals] == [
        ("south", 1, "not-finite", "Site south sent NaN.", "key a")
    ]
    assert [(t.site, t.code, t.reason, t.why) for t in status.failures] == [
        ("north", "memory", "memory", MEANING["memory"])
    ]
    (reported,) = status.as_json()["refusals"]
    assert reported["code"] == "not-finite"
    for second in range(100):
        run.event(1010 + second, "failed", number=1, site="north", code="memory")
    status = run.status(1200, driven=False)
    assert (status.failure_count, len(status.failures)) == (101, 50)


# -- sites -------------------------------------------------------------------------------------------------------


def test_who_has_answered_and_who_works(run: Run) -> None:
    run.begin()
    run.driver("running", 1020)
    run.job(1010, "train", 1, ["north", "south"], {"north": 7.5})
    status = run.status(1020)
    assert states(status) == {"north": "answered", "south": "working", "west": "absent"}
    assert sites(status)["north"].seconds == 7.5
    assert sites(status)["south"].detail == "train"
    assert (status.task, status.stage, status.since) == ("train", "train", 1010)
    assert sites(status)["south"].annotated == ("kidney", "spleen")
    assert sites(status)["south"].train_cases == 2


def test_sites_that_introduce_themselves(run: Run) -> None:
    run.event(1000, "started", job="job-1")
    run.driver("running", 1002)
    run.job(1001, "join", 0, ["north", "south"], {"south": 1.0})
    status = run.status(1003)
    assert (status.task, states(status)["north"], states(status)["south"]) == ("join", "working", "answered")
    assert sites(status)["north"].detail == "join"


def test_a_site_that_drops_out_while_it_works(run: Run) -> None:
    run.begin()
    run.job(1010, "train", 1, ["north", "south"], {})
    run.driver("running", 1020, connected={"north": 1019})
    assert states(run.status(1020))["south"] == "absent"


def test_the_job_file_of_a_round_that_is_over_says_nothing(run: Run) -> None:
    run.begin()
    run.job(1010, "train", 1, ["north", "south"], {"north": 7.5, "south": 8})
    run.round(1020, 1)
    run.driver("running", 1021)
    status = run.status(1021)
    assert (status.task, states(status)["north"], status.number) == ("", "connected", 2)


def test_the_job_file_of_an_earlier_job_says_nothing(run: Run) -> None:
    """A job that ended in the middle of a round leaves its file; the next one begins with an event."""
    run.begin()
    run.job(1010, "train", 1, ["north", "south"], {"north": 7.5})
    run.driver("running", 1030, job="job-2")
    assert run.status(1031).task == ""
    run.event(1040, "resumed", job="job-2")
    assert run.status(1041).task == ""
    run.job(1042, "train", 1, ["south"], {})
    status = run.status(1043)
    assert (status.task, states(status)["south"]) == ("train", "working")


def test_a_failure_holds_until_the_site_is_asked_again(run: Run) -> None:
    run.begin()
    run.driver("running", 1050)
    run.job(1010, "train", 1, ["north", "south"], {"north": 7.5})
    run.event(1020, "failed", number=1, site="south", code="data")
    status = run.status(1021)
    assert (states(status)["south"], sites(status)["south"].code) == ("failed", "data")
    assert MEANING["data"] in sites(status)["south"].detail
    run.job(1030, "train", 1, ["south"], {})
    assert states(run.status(1031))["south"] == "working"


def test_missing_says_less_than_a_failure(run: Run) -> None:
    run.begin()
    run.event(1020, "failed", number=1, site="south", code="disk")
    run.event(1021, "missing", number=1, sites=["north", "south"])
    run.driver("waiting", 1022)
    assert states(run.status(1023)) == {"north": "missing", "south": "failed", "west": "absent"}
    run.round(1030, 1)
    assert states(run.status(1031))["south"] == "connected", "a new round is a new chance"


def test_a_refused_update_is_shown_with_its_reason(run: Run) -> None:
    run.begin()
    run.event(1020, "refused", number=1, site="south", code="not-finite", reason="Site south sent NaN.", why="")
    run.driver("running", 1021)
    site = sites(run.status(1021))["south"]
    assert (site.state, site.code, site.detail) == ("refused", "not-finite", "Site south sent NaN.")


def test_a_kit_that_was_refused_and_renewed_is_not_shown_as_refused_after_its_next_round(run: Run) -> None:
    run.begin()
    run.event(1020, "refused", number=0, site="south", reason="This kit of south was revoked.", why="")
    run.driver("running", 1031)
    assert states(run.status(1031))["south"] == "refused"
    run.round(1030, 1)
    assert states(run.status(1031))["south"] == "connected"


def test_a_refused_introduction_holds_until_the_site_has_joined(run: Run) -> None:
    run.begin()
    run.event(1020, "refused", number=0, site="west", reason="Another vocabulary.", why="")  # as in an older log
    run.round(1030, 1)
    run.driver("running", 1031, connected={"west": 1030})
    assert sites(run.status(1031))["west"].detail == "Another vocabulary."
    run.event(1040, "late_join", number=2, site="west", train_cases=4, annotated={"liver": 4})
    site = sites(run.status(1041))["west"]
    assert (site.state, site.joined, site.train_cases, site.annotated) == ("connected", True, 4, ("liver",))


# -- JSON --------------------------------------------------------------------------------------------------------


def test_as_json_is_plain_and_short(run: Run) -> None:
    run.begin()
    run.round(1010, 1, validation=SCORES)
    content = json.loads(json.dumps(run.status(1011, driven=False).as_json()))
    assert content["sites"][0]["name"] == "north"
    assert content["validation"]["structures"]["liver"] == 0.9
    assert content["recent"][1] == {"time": 1001, "event": "joined", "sites": ["north", "south"]}
    assert "validation" not in content["recent"][2]
