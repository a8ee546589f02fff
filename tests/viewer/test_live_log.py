"""The log as the live page gets it: every event once, in words, whatever the file went through."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from live_runs import JOINED, SCORES, begin, log_of, write_round

from panorgan.federation.events import DAMAGED, Event, EventLog, mend_tail
from panorgan.viewer.live_log import LogReader, describe_event


@pytest.fixture
def log(tmp_path: Path) -> EventLog:
    return log_of(tmp_path)


def kinds(answer: tuple[bool, list[dict[str, object]]]) -> list[object]:
    return [event["event"] for event in answer[1]]


def test_every_event_comes_once(log: EventLog) -> None:
    assert log.path
    reader = LogReader(log.path)
    assert reader.new() == (False, []), "there is no file yet"
    begin(log)
    assert kinds(reader.new()) == ["started", "joined"]
    assert kinds(reader.new()) == []
    write_round(log, 1)
    assert kinds(reader.new()) == ["round"]


def test_half_a_line_waits_for_its_rest(log: EventLog) -> None:
    assert log.path
    begin(log)
    content = log.path.read_bytes()
    log.path.write_bytes(content[:-20])
    reader = LogReader(log.path)
    assert kinds(reader.new()) == ["started"]
    log.path.write_bytes(content)
    assert kinds(reader.new()) == ["joined"]


def test_a_line_that_a_kill_left_unfinished_is_dropped_when_the_run_resumes(log: EventLog) -> None:
    assert log.path
    begin(log)
    reader = LogReader(log.path)
    reader.new()
    with log.path.open("a") as file:
        file.write('{"time": 5, "event": "rou')
    assert reader.new() == (False, [])
    mend_tail(log.path)
    log.record("resumed", run="r", job="job-2")
    assert (answer := reader.new())[0] is False
    assert kinds(answer) == ["resumed"]


def test_another_run_in_the_same_folder_is_noticed(log: EventLog) -> None:
    """Even if its log is longer already than what was read of the one before."""
    assert log.path
    begin(log)
    reader = LogReader(log.path)
    reader.new()
    log.path.unlink()
    log.record("started", run="another", job="job-9")
    log.record("joined", sites=JOINED, plan={})
    for number in (1, 2, 3):
        write_round(log, number)
    again, events = reader.new()
    assert again
    assert [event["event"] for event in events] == ["started", "joined", "round", "round", "round"]


def test_a_damaged_line_is_named(log: EventLog) -> None:
    assert log.path
    begin(log)
    write_round(log, 1)
    lines = log.path.read_bytes().splitlines(keepends=True)
    log.path.write_bytes(lines[0] + lines[1].replace(b"north", b"nor7h") + lines[2])
    _, events = LogReader(log.path).new()
    assert [event["event"] for event in events] == ["started", DAMAGED, "round"]
    assert (events[1]["level"], "line 2 " in events[1]["line"]) == ("trouble", True)


def test_a_round_keeps_what_the_page_draws(log: EventLog) -> None:
    write_round(log, 2, validation=SCORES, best={"round": 2, "dice": 0.75}, volume={"north": {"liver": 1.0}})
    assert log.path
    (event,) = LogReader(log.path).new()[1]
    assert event["losses"] == {"north": 0.5, "south": 1.0}
    assert (event["validation"], event["best"]) == (SCORES, {"round": 2, "dice": 0.75})
    assert (event["bytes_sent"], event["bytes_received"], event["seconds"]) == (100, 60, 10.0)
    assert "volume" not in event


@pytest.mark.parametrize(
    ("kind", "facts", "level"),
    [
        ("refused", {"number": 1, "site": "south", "code": "not-finite", "reason": "NaN.", "why": ""}, "trouble"),
        ("failed", {"number": 1, "site": "north", "code": "memory"}, "trouble"),
        ("missing", {"number": 1, "sites": ["north"]}, "trouble"),
        ("notice", {"number": 1, "code": "organ-floods", "text": "liver floods"}, "notice"),
        ("resumed", {}, None),
    ],
)
def test_troubles_and_notices_are_marked_with_their_code(kind: str, facts: dict[str, object], level: str) -> None:
    event = describe_event(Event(kind, facts, 5.0))
    assert (event.get("level"), event.get("code")) == (level, facts.get("code"))
    assert event["line"]


def test_names_and_numbers_from_elsewhere_are_harmless() -> None:
    facts = {"number": 1, "code": "x", "text": "\x1b[31mred\u202e", "total": math.nan}
    event = describe_event(Event("notice", facts, 5.0))
    assert json.loads(json.dumps(event, allow_nan=False)) == event
    assert "\x1b" not in event["line"]
    assert "\u202e" not in event["line"]
    assert event["total"] is None


def test_an_event_of_another_version_is_named_and_no_more() -> None:
    assert describe_event(Event("refused", {}, 5.0))["line"] == "refused"
    assert describe_event(Event("unheard-of", {"a": 1}, 5.0))["line"] == ""
