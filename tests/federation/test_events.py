"""The event log: complete lines, listeners notified, torn lines skipped."""

from __future__ import annotations

from panorgan.deployment.events_tail import EventsTail
from panorgan.federation.events import EventLog, mend_tail, read_events


def test_recorded_events_are_written_and_told_transient_ones_only_told(tmp_path):
    heard = []
    log = EventLog(tmp_path / "events.jsonl", (heard.append,))
    log.record("round", number=1, loss=0.25)
    log.transient("step", site="north")
    written = list(read_events(tmp_path / "events.jsonl"))
    assert [event.kind for event in heard] == ["round", "step"]
    assert [(event.kind, event.facts) for event in written] == [("round", {"number": 1, "loss": 0.25})]
    assert written[0].time > 0


def test_an_event_is_never_later_than_the_clock_and_the_same_for_all(tmp_path, monkeypatch):
    heard = []
    monkeypatch.setattr("time.time", lambda: 1_700_000_000.0006)  # rounds up to the next millisecond
    EventLog(tmp_path / "events.jsonl", (heard.append,)).record("started")
    [written] = read_events(tmp_path / "events.jsonl")
    assert written.time == heard[0].time <= 1_700_000_000.0006


def test_a_line_torn_by_a_kill_does_not_swallow_the_next(tmp_path):
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.record("round", number=1)
    with path.open("a") as file:
        file.write('{"time": 1, "event": "rou')
    mend_tail(path)
    log.record("round", number=2)
    assert [event.facts["number"] for event in read_events(path)] == [1, 2]


def test_no_file_means_no_events(tmp_path):
    mend_tail(tmp_path / "absent.jsonl")
    assert list(read_events(tmp_path / "absent.jsonl")) == []


def test_lines_that_are_no_events_are_passed_over_by_both_readers(tmp_path):
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.record("round", number=1)
    deep = b"[" * 100_000
    for damage in (b'{"time": 1, "event": "round\xff\xfe"}', b"\xff\xfe\x00", b"[1]", b'"text"', b"7", deep, b"null"):
        with path.open("ab") as file:
            file.write(damage + b"\n")
    with path.open("ab") as file:
        file.write(b'{"time": "now", "event": "round"}\n{"time": 1, "event": ["round"]}\n')
    log.record("round", number=2)
    for events in (read_events(path), EventsTail(path, from_start=True).new()):
        assert [event.facts for event in events if event.kind == "round"] == [{"number": 1}, {"number": 2}]
