"""The driver of a run, with a fake engine: no NVFlare, no processes, no network, and a clock of the test's own."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from driven_run import SITES, Clock, Federation, at
from refusing import refused

from panorgan.deployment import watched_segment
from panorgan.deployment.control import read_json
from panorgan.deployment.segment import write_outcome
from panorgan.deployment.watched_segment import Backoff
from panorgan.errors import RunError
from panorgan.federation.engine import NotConnectedError

# -- the loop over segments --------------------------------------------------------------------------------------


def test_after_a_segment_that_failed_the_next_one_goes_on_from_the_checkpoint(pilot):
    """The engine ends the first one in the middle, without a word from the segment itself."""

    def submitted(job: str) -> None:
        pilot.server.phases[job] = "ended"
        if job == "job-1":
            pilot.save_round(2)
        else:
            pilot.save_round(3)
            pilot.finish()

    pilot.server.on_submit = submitted
    pilot.drive()
    assert pilot.server.invited == [list(SITES)] * 2
    assert [segment.name for segment in pilot.server.segments] == ["pilot-1", "pilot-2"]
    assert pilot.clock.now == 1000.0, "a segment that made progress is followed at once"
    assert read_json(pilot.control.driver)["state"] == "finished"


def test_segments_without_progress_follow_after_longer_pauses(pilot):
    began: list[float] = []

    def submitted(job: str) -> None:
        began.append(pilot.clock.now)
        pilot.server.phases[job] = "ended"
        if job == "job-5":
            pilot.finish()

    pilot.save_round(1)
    pilot.server.on_submit = submitted
    pilot.drive()
    assert [later - earlier for earlier, later in pairwise(began)] == [0.0, 2.0, 4.0, 8.0]
    assert "the last segment ended before a round was done" in pilot.said("waiting")


def test_the_driver_waits_for_a_missing_site_and_names_it(pilot):
    pilot.server.connected.remove("west")
    segments_before: list[int] = []

    def come() -> None:
        segments_before.append(len(pilot.server.segments))
        pilot.server.connected.add("west")

    def submitted(job: str) -> None:
        pilot.server.phases[job] = "ended"
        pilot.finish()

    pilot.server.on_submit = submitted
    at(pilot.clock, lambda: None, lambda: None, come)
    pilot.drive()
    assert segments_before == [0]
    assert pilot.said("waiting")[0] == "for west"
    assert pilot.server.required == [list(SITES)]


def test_the_driver_says_that_the_server_is_gone_and_goes_on_when_it_is_back(pilot):
    """The server comes back without its segments, and still reports the old one as running."""

    def submitted(job: str) -> None:
        pilot.server.phases[job] = "running"
        if job == "job-2":
            pilot.server.phases[job] = "ended"
            pilot.finish()

    def back() -> None:
        pilot.server.reachable = True
        pilot.server.restart()

    pilot.server.on_submit = submitted
    at(pilot.clock, lambda: setattr(pilot.server, "reachable", False), lambda: None, back)
    pilot.drive()
    assert "the server cannot be reached: it is down" in pilot.said("waiting")
    assert pilot.server.aborted == ["job-1"], "the old segment is in the way of the next"
    assert len(pilot.server.segments) == 2
    assert read_json(pilot.control.driver)["state"] == "finished"


def test_a_driver_that_was_killed_watches_its_last_segment_on(pilot):
    pilot.server.phases = {"job-7": "running", "job-6": "waiting"}
    pilot.control.folder.mkdir(parents=True)
    pilot.control.driver.write_text('{"job": "job-7", "segment": 7}')

    def end() -> None:
        pilot.server.phases["job-7"] = "ended"
        pilot.finish()

    at(pilot.clock, lambda: None, end)
    pilot.drive()
    assert pilot.server.segments == []
    assert pilot.server.aborted == ["job-6"], "one that the driver did not submit last"


# -- stop --------------------------------------------------------------------------------------------------------


def test_stop_is_heeded_while_a_job_is_queued(pilot):
    """The engine might not start it for hours, too long to wait."""
    at(pilot.clock, lambda: None, lambda: pilot.stop())
    pilot.drive()
    assert pilot.server.aborted == ["job-1"]
    assert read_json(pilot.control.driver)["state"] == "stopped"


def test_stop_is_heeded_while_the_server_is_down(pilot):
    at(pilot.clock, lambda: setattr(pilot.server, "reachable", False), lambda: pilot.stop())
    pilot.drive()
    assert read_json(pilot.control.driver)["state"] == "stopped"
    assert "the server cannot be reached: it is down" in pilot.said("waiting")


def test_stop_lets_a_running_job_end_by_itself(pilot):
    """The control: the round under way is not thrown away."""
    pilot.server.on_submit = lambda job: pilot.server.phases.update({job: "running"})

    def end() -> None:
        pilot.server.phases["job-1"] = "ended"

    at(pilot.clock, lambda: pilot.stop(), lambda: None, lambda: None, end)
    pilot.drive()
    assert pilot.server.aborted == []
    assert read_json(pilot.control.driver)["state"] == "stopped"


@pytest.mark.parametrize("reachable", [True, False])
def test_stop_now_says_when_the_server_could_not_be_reached(reachable, pilot):
    pilot.control.folder.mkdir(parents=True)
    pilot.control.driver.write_text('{"job": "job-1"}')
    pilot.server.reachable = reachable
    if reachable:
        pilot.stop(now=True)
        assert pilot.server.aborted == ["job-1"]
    else:
        with refused("round-not-ended", NotConnectedError) as caught:
            pilot.stop(now=True)
        assert caught.value.why
        assert caught.value.fix
    assert pilot.control.stop_requested(), "in any case the run stops after the round"


# -- jobs that cannot begin, settings that cannot be read, errors that pass --------------------------------------


def test_a_queued_job_is_ended_when_a_needed_site_has_gone(pilot):
    """The engine would try again after ever longer pauses; a new job begins as soon as the site is back."""

    def submitted(job: str) -> None:
        if job == "job-2":
            pilot.server.phases[job] = "ended"
            pilot.finish()

    pilot.server.on_submit = submitted
    at(
        pilot.clock,
        lambda: pilot.server.connected.remove("west"),
        lambda: None,
        lambda: None,
        lambda: pilot.server.connected.add("west"),
    )
    pilot.drive()
    assert pilot.server.aborted == ["job-1"]
    assert "for west" in pilot.said("waiting")
    assert pilot.server.required == [list(SITES)] * 2


def test_a_queued_job_may_begin_without_a_site_if_the_others_proceed(pilot):
    """The control."""
    pilot.write_settings("proceed")

    def end() -> None:
        pilot.server.phases["job-1"] = "ended"
        pilot.finish()

    at(pilot.clock, lambda: pilot.server.connected.remove("west"), lambda: None, lambda: None, end)
    pilot.drive()
    assert pilot.server.aborted == []
    assert len(pilot.server.invited) == 1


@pytest.mark.parametrize("half", ["sites: {north: [", "federation: pilot\n", None], ids=["cut off", "lacks", "away"])
def test_settings_that_are_being_edited_make_the_driver_wait_and_say_why(half, pilot):
    driver = pilot.driver()
    if half is None:
        pilot.kit.settings.unlink()
    else:
        pilot.kit.settings.write_text(half)

    def submitted(job: str) -> None:
        pilot.server.phases[job] = "ended"
        pilot.finish()

    pilot.server.on_submit = submitted
    at(pilot.clock, lambda: None, lambda: pilot.write_settings(sites={"north": {}, "west": {}}))
    driver.run()
    assert any(str(pilot.kit.settings) in why for why in pilot.said("waiting"))
    assert pilot.server.invited == [["north", "west"]], "as it was written at last"


def test_another_run_folder_is_not_slipped_under_a_driver(pilot):
    driver = pilot.driver()
    pilot.write_settings(run="elsewhere")
    with refused("run-folder-changed", RunError):
        driver.run()


@pytest.mark.parametrize(("kind", "goes_on"), [("retry", True), ("missing", True), ("error", False)])
def test_the_driver_goes_on_after_an_error_that_passes(kind, goes_on, pilot):
    def submitted(job: str) -> None:
        pilot.server.phases[job] = "ended"
        if job == "job-1":
            pilot.control.outcome.write_text(json.dumps({"job": job, "kind": kind, "what": "The disk is full."}))
        else:
            pilot.finish()

    pilot.server.on_submit = submitted
    if goes_on:
        pilot.drive()
        assert len(pilot.server.invited) == 2
        assert "The disk is full." in pilot.said("waiting")
    else:
        with refused("segment-failed", RunError) as caught:  # an older job tells no code
            pilot.drive()
        assert caught.value.what == "The disk is full."


def test_the_error_of_a_segment_keeps_its_code(pilot):
    def submitted(job: str) -> None:
        pilot.server.phases[job] = "ended"
        write_outcome(pilot.control, job, RunError("None can be read.", code="no-readable-checkpoint", fix="Restore."))

    pilot.server.on_submit = submitted
    with refused("no-readable-checkpoint", RunError) as caught:
        pilot.drive()
    assert caught.value.fix == "Restore."


# -- a site that never comes into a job --------------------------------------------------------------------------


class Segments:
    """Jobs that run for `seconds` without `broken` sites inside; those that have one invited end without a round."""

    def __init__(self, pilot: Federation, broken: set[str], jobs: int, seconds: float = 10.0) -> None:
        self.pilot, self.broken, self.jobs, self.seconds = pilot, broken, jobs, seconds
        self.rounds = 0
        self.began: dict[str, float] = {}
        pilot.save_round(0)
        pilot.server.on_submit = self.begin
        pilot.clock.then = self.go_on

    def begin(self, job: str) -> None:
        server = self.pilot.server
        self.began[job] = self.pilot.clock.now
        server.phases[job] = "running"
        server.inside[job] = set(server.invited[-1]) - self.broken

    def go_on(self) -> None:
        server, now = self.pilot.server, self.pilot.clock.now
        for job, began in self.began.items():
            if server.phases[job] == "running" and now - began > self.seconds:
                server.phases[job] = "ended"
                if not self.broken & set(server.invited[-1]):
                    self.rounds += 1
                    self.pilot.save_round(self.rounds)
                    outcome = {"job": job, "kind": "ended"}
                    self.pilot.control.outcome.write_text(json.dumps(outcome))
                if len(self.began) == self.jobs:
                    self.pilot.finish()


def test_a_site_that_never_comes_into_a_job_is_left_out_of_the_next_and_named(pilot):
    pilot.write_settings("proceed")
    Segments(pilot, {"west"}, jobs=2)
    pilot.drive()
    assert pilot.server.invited == [["east", "north", "west"], ["east", "north"]]
    assert [why for why in pilot.said("waiting") if "west never came into it" in why]
    assert not [why for why in pilot.said("waiting") if "north" in why]


def test_a_needed_site_that_never_comes_into_a_job_is_asked_again_and_named(pilot):
    """To wait is to wait. The operator reads whose fault it is."""
    Segments(pilot, {"west"}, jobs=2)
    pilot.drive()
    assert pilot.server.invited == [list(SITES)] * 2
    assert [why for why in pilot.said("waiting") if "west never came into it" in why]


def test_a_site_that_was_left_out_gets_another_chance_after_ever_longer_pauses(pilot):
    """Jobs take about 10 s: left out for 30 s, tried again, left out for 60 s."""
    pilot.write_settings("proceed")
    Segments(pilot, {"west"}, jobs=14)
    pilot.drive()
    tries = [number for number, sites in enumerate(pilot.server.invited) if "west" in sites]
    assert len(tries) >= 3
    pauses = [later - earlier for earlier, later in pairwise(tries)]
    assert pauses[0] > 1, "it was left out meanwhile"
    assert pauses[1] > pauses[0]


def test_a_site_that_did_well_once_is_left_out_no_longer_than_the_first_time(pilot):
    """It fails in its first and third job, and does well in its second."""
    pilot.write_settings("proceed")
    segments = Segments(pilot, set(), jobs=12)

    def begin(job: str) -> None:
        chances = sum("west" in sites for sites in pilot.server.invited)
        segments.broken = {"west"} if chances in (1, 3) else set()
        segments.begin(job)

    pilot.server.on_submit = begin
    pilot.drive()
    first, second, third, fourth = [n for n, sites in enumerate(pilot.server.invited) if "west" in sites][:4]
    assert third == second + 1
    assert fourth - third == second - first > 1


def test_those_left_out_are_better_than_none(pilot):
    """If a job needs them all to have enough, all are asked again."""
    pilot.write_settings("proceed")
    pilot.server.connected = {"west"}
    Segments(pilot, {"west"}, jobs=2)
    pilot.drive()
    assert pilot.server.invited == [["west"], ["west"]]


def test_a_site_that_is_left_out_does_not_end_a_segment_by_knocking(pilot):
    """It is connected and outside all the time; to make room for it would cost the others a restart every time."""
    pilot.write_settings("proceed")
    segments = Segments(pilot, {"west"}, jobs=2, seconds=20.0)
    knocks: set[int] = set()
    go_on = pilot.clock.then

    def look() -> None:
        go_on()
        if pilot.control.should_end():
            knocks.add(len(segments.began))

    pilot.clock.then = look
    pilot.drive()
    assert pilot.server.invited[1] == ["east", "north"]
    assert 2 not in knocks


def test_a_site_that_comes_while_a_segment_runs_may_knock(pilot):
    """The control: a site in good order is let in soon, and not when ten rounds are over."""
    pilot.write_settings("proceed")
    pilot.server.connected.remove("west")
    segments = Segments(pilot, set(), jobs=1, seconds=40.0)
    knocked: list[float] = []
    go_on = pilot.clock.then

    def look() -> None:
        go_on()
        if segments.began:
            pilot.server.connected.add("west")
        if pilot.control.should_end():
            knocked.append(pilot.clock.now - segments.began["job-1"])

    pilot.clock.then = look
    pilot.drive()
    assert pilot.server.invited == [["east", "north"]]
    assert knocked


# -- pauses ------------------------------------------------------------------------------------------------------


def test_every_further_chance_comes_after_twice_the_time_up_to_an_hour(monkeypatch):
    """30, 60, 120, 240, 480, 960, 1920 s, then 3600 s for ever."""
    clock = Clock()
    monkeypatch.setattr(watched_segment, "time", clock)
    backoff = Backoff()
    for pause in (30, 60, 120, 240, 480, 960, 1920, 3600, 3600):
        assert backoff.ready("west")
        backoff.tried("west")
        clock.now += pause
        assert not backoff.ready("west")
        clock.now += 0.5
    assert backoff.ready("north"), "another site's first chance is at once"


def test_trouble_that_is_over_is_forgiven(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(watched_segment, "time", clock)
    backoff = Backoff()
    for _ in range(3):
        backoff.tried("west")
    backoff.reset("west")
    assert backoff.ready("west")
    backoff.tried("west")
    clock.now += 30.5
    assert backoff.ready("west"), "its next trouble is its first"


# -- after the end -----------------------------------------------------------------------------------------------


def test_a_new_start_brings_the_model_to_those_who_are_back(pilot):
    pilot.save_round(1)
    pilot.finish(without=("west",))

    def submitted(job: str) -> None:
        assert not pilot.control.finished.exists()
        pilot.server.phases[job] = "ended"
        pilot.finish()

    pilot.server.on_submit = submitted
    pilot.drive()
    assert pilot.server.invited == [list(SITES)]
    assert read_json(pilot.control.finished)["without"] == []


@pytest.mark.parametrize("why", ["still away", "server down", "everybody has it"])
def test_a_new_start_of_a_finished_run_does_nothing_otherwise(why, pilot):
    pilot.save_round(1)
    pilot.finish(without=() if why == "everybody has it" else ("west",))
    pilot.server.reachable = why != "server down"
    if why == "still away":
        pilot.server.connected.remove("west")
    pilot.drive()
    assert pilot.server.invited == []
    assert pilot.control.finished.exists()
    assert read_json(pilot.control.driver)["state"] == "finished"
