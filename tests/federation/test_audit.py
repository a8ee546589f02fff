"""The audit log: a chain in which every change shows, that survives kills, full disks and a second process."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusing import refused

from panorgan.federation import audit
from panorgan.federation.audit import AuditError, AuditLog, head_path, read_log, verify

TENSORS = [["encoder.weight", [4, 1, 3, 3, 3], "float32"], ["head.bias", [3], "float32"]]


def filled(path: Path, entries: int = 4) -> Path:
    log = AuditLog(path)
    for round_ in range(entries):
        numbers = {"loss": 0.1 * round_, "cases": 3.0}
        log.append({"kind": "sent", "round": round_, "numbers": numbers}, listed=TENSORS)
    return path


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    """A log with an unfinished line in the middle of it, from a process that was killed, and one more list."""
    path = filled(tmp_path_factory.mktemp("sound") / "egress-log.jsonl", 2)
    with path.open("ab") as file:
        file.write(b'{"n":3,"time":"2025-01-')
    log = AuditLog(path)
    log.append({"kind": "sent", "text": "größer"}, listed=TENSORS[:1])
    log.append({"kind": "failed", "code": "memory"})
    assert verify(path).ok
    return path


def test_a_record_can_be_checked_with_nothing_but_sha256(tmp_path):
    """The hash is that of the line without its last field; each record names the hash of the one before."""
    path = filled(tmp_path / "egress-log.jsonl", 3)
    previous = "0" * 64
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        record = json.loads(line)
        body, _, rest = line.rpartition(',"hash":"')
        assert rest == record["hash"] + '"}'
        assert hashlib.sha256((body + "}").encode()).hexdigest() == record["hash"]
        assert (record["n"], record["previous"]) == (number, previous)
        previous = record["hash"]
    assert json.loads(head_path(path).read_text()) == {"n": 3, "hash": previous}
    report = verify(path)
    assert (report.entries, report.ok, report.head, report.torn, report.unfinished) == (3, True, previous, 0, 0)


def test_nothing_has_left_yet(tmp_path):
    assert verify(tmp_path / "egress-log.jsonl") == audit.AuditReport(0, True, "0" * 64)
    assert list(tmp_path.iterdir()) == [], "looking must not leave files"


def test_a_list_is_written_once_and_filled_in_when_read(tmp_path):
    path = filled(tmp_path / "egress-log.jsonl", 2)
    AuditLog(path).append({"kind": "sent"}, listed=TENSORS)  # another process
    AuditLog(path).append({"kind": "sent"}, listed=TENSORS[:1])
    AuditLog(path).append({"kind": "refused"})
    assert ["listed" in json.loads(line) for line in path.read_text().splitlines()] == [True, False, False, True, False]
    _, records = read_log(path)
    assert [record.get("listed") for record in records] == [TENSORS, TENSORS, TENSORS, TENSORS[:1], None]


def test_own_fields_cannot_be_set_from_outside(tmp_path):
    with pytest.raises(ValueError, match="hash"):  # the name of the field
        AuditLog(tmp_path / "log.jsonl").append({"hash": "0"})
    with pytest.raises(ValueError, match="unfinished"):
        AuditLog(tmp_path / "log.jsonl").append({"kind": "torn", "bytes": 3, "sha256": ""})


# -- changes ---------------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), flips=st.integers(1, 255))
def test_any_changed_byte_is_found(sound, tmp_path, data, flips):
    """Anywhere: in a record, a line break, the unfinished line, the head file."""
    content, head = bytearray(sound.read_bytes()), bytearray(head_path(sound).read_bytes())
    place = data.draw(st.integers(0, len(content) + len(head) - 1))
    changed = content if place < len(content) else head
    changed[place if changed is content else place - len(content)] ^= flips
    path = tmp_path / "egress-log.jsonl"
    path.write_bytes(content)
    head_path(path).write_bytes(head)
    report = verify(path)
    assert not report.ok
    assert report.code
    assert report.why
    with refused("audit-log-broken", AuditError):
        AuditLog(path).append({"kind": "sent"})
    assert path.read_bytes() == content, "a log that cannot be trusted is not written to"


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_missing_doubled_or_moved_line_is_found(sound, tmp_path, data):
    lines = sound.read_bytes().splitlines(keepends=True)
    changed = list(lines)
    one = data.draw(st.integers(0, len(lines) - 1))
    how = data.draw(st.sampled_from(["remove", "double", "move", "cut"]))
    if how == "remove":
        del changed[one]
    elif how == "double":
        changed.insert(one, changed[one])
    elif how == "move":
        other = data.draw(st.integers(0, len(lines) - 1).filter(lambda place: place != one))
        changed[one], changed[other] = changed[other], changed[one]
    else:
        changed = changed[:one]
    path = tmp_path / "egress-log.jsonl"
    path.write_bytes(b"".join(changed))
    head_path(path).write_bytes(head_path(sound).read_bytes())
    assert not verify(path).ok


def test_the_verdict_names_the_line(tmp_path):
    path = filled(tmp_path / "egress-log.jsonl")
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:2], lines[2].replace('"cases":3.0', '"cases":9.0'), lines[3]]))
    report = verify(path)
    assert (report.line, report.code, report.entries) == (3, "line-changed", 2)
    path.write_text("".join([*lines[:2], lines[3]]))
    report = verify(path)
    assert (report.line, report.code, report.entries) == (3, "entry-missing", 2)


def test_a_cut_end_is_seen_by_the_head_file_alone(tmp_path):
    path = filled(tmp_path / "egress-log.jsonl")
    head = head_path(path).read_text()
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:3]))
    report = verify(path)
    assert (report.line, report.code, report.entries) == (4, "end-missing", 3)
    head_path(path).unlink()
    assert verify(path).code == "head-missing"
    head_path(path).write_text(head)
    path.unlink()
    report = verify(path)
    assert (report.line, report.code, report.entries) == (1, "end-missing", 0)
    with refused("audit-log-broken", AuditError) as caught:
        AuditLog(path).append({"kind": "sent"})
    assert caught.value.fix


def test_a_log_that_was_replaced_while_in_use_is_seen(tmp_path):
    path = tmp_path / "egress-log.jsonl"
    log = AuditLog(path)
    for _ in range(3):
        log.append({"kind": "sent"})
    other = filled(tmp_path / "other" / "egress-log.jsonl", 5)
    os.replace(other, path)
    with refused("audit-log-broken", AuditError):
        log.append({"kind": "sent"})
    assert verify(path).code == "head-replaced"


def test_a_log_that_was_moved_away_begins_anew(tmp_path):
    """What the error advises; lists are written again, for the new log must stand on its own."""
    path = tmp_path / "egress-log.jsonl"
    log = AuditLog(path)
    log.append({"kind": "sent"}, listed=TENSORS)
    (tmp_path / "old").mkdir()
    for file in (path, head_path(path)):
        os.replace(file, tmp_path / "old" / file.name)
    log.append({"kind": "sent"}, listed=TENSORS)
    assert verify(path).entries == verify(tmp_path / "old" / path.name).entries == 1
    assert verify(path).ok
    assert read_log(path)[1][0]["listed"] == TENSORS


def test_somebody_who_rewrites_both_files_is_not_seen(tmp_path):
    """The limit that the module's text admits: only a hash kept elsewhere helps, and it differs."""
    path = filled(tmp_path / "egress-log.jsonl", 3)
    kept_elsewhere = verify(path).head
    filled(tmp_path / "forged" / "egress-log.jsonl", 2)
    for file in (path, head_path(path)):
        os.replace(tmp_path / "forged" / file.name, file)
    report = verify(path)
    assert report.ok
    assert report.head != kept_elsewhere


# -- kills, full disks, company -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", ["nothing", "a part", "all but the line break", "all"])
@pytest.mark.parametrize("entries", [0, 2])
def test_a_write_that_was_cut_short_is_told_and_the_log_goes_on(tmp_path, kept, entries):
    path = filled(tmp_path / "egress-log.jsonl", entries)
    head = head_path(path).read_bytes() if entries else None
    before = path.read_bytes() if entries else b""
    AuditLog(path).append({"kind": "sent", "round": 7})
    line = path.read_bytes()[len(before) :]
    left = {"nothing": 0, "a part": 40, "all but the line break": len(line) - 1, "all": len(line)}[kept]
    path.write_bytes(before + line[:left])  # the head file was not reached
    head_path(path).unlink() if head is None else head_path(path).write_bytes(head)

    report = verify(path)
    assert report.ok
    assert report.unfinished == (left if kept != "all" else 0)
    assert report.entries == entries + (kept == "all")

    AuditLog(path).append({"kind": "sent", "round": 8})
    report, records = read_log(path)
    assert report.ok
    assert (report.unfinished, report.torn) == (0, int(kept == "a part"))
    assert before + line[:left] == path.read_bytes()[: len(before) + left], "what was there stays there"
    reported = [(record["bytes"], record["sha256"]) for record in records if record["kind"] == "torn"]
    assert reported == ([(left, hashlib.sha256(line[:left]).hexdigest())] if kept == "a part" else [])
    sent = [record["round"] for record in records if record["kind"] == "sent"]
    assert sent[entries:] == ([7, 8] if kept.startswith("all") else [8])


def test_a_second_write_that_was_cut_short_right_after_the_first(tmp_path):
    path = filled(tmp_path / "egress-log.jsonl", 2)
    head = head_path(path).read_bytes()
    for length in (30, 60, 90):
        whole = path.read_bytes()
        AuditLog(path).append({"kind": "sent"})
        path.write_bytes(path.read_bytes()[: len(whole) + length])
        head_path(path).write_bytes(head)
    AuditLog(path).append({"kind": "sent", "round": 9})
    report, records = read_log(path)
    assert report.ok
    assert [record["kind"] for record in records] == ["sent", "sent", "torn", "sent"]
    assert records[2]["bytes"] == 180


def test_a_full_disk_keeps_the_message_here_and_the_log_usable(tmp_path, monkeypatch):
    path = filled(tmp_path / "egress-log.jsonl", 1)
    log, room, write = AuditLog(path), [20], os.write

    def nearly_full(handle: int, content: memoryview) -> int:
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(handle, content[: room.pop()])

    monkeypatch.setattr(audit.os, "write", nearly_full)
    with pytest.raises(OSError) as caught:  # noqa: PT011
        log.append({"kind": "sent", "round": 5})
    assert caught.value.errno == errno.ENOSPC
    monkeypatch.undo()
    assert verify(path).unfinished == 20
    log.append({"kind": "sent", "round": 6})
    report, records = read_log(path)
    assert report.ok
    assert [record.get("round") for record in records] == [0, None, 6]


_APPENDING = """
import sys
from pathlib import Path
from panorgan.federation.audit import AuditLog
path, who, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
log = AuditLog(path)
for number in range(count):
    log.append({"kind": "sent", "who": who, "round": number}, listed=[["head.bias", [3], "float32"]])
    print(number, flush=True)
"""


def appending(path: Path, who: str, count: int) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", _APPENDING, str(path), who, str(count)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)


def test_a_process_that_is_killed_loses_nothing_it_had_returned_from(tmp_path):
    path = tmp_path / "egress-log.jsonl"
    returned = 0
    for kills, lines in enumerate((1, 2, 5, 9), start=1):
        with appending(path, "site", 10**6) as process:
            seen = [process.stdout.readline() for _ in range(lines)]
            process.kill()
            seen += process.stdout.readlines()
        returned += len(seen)
        report, records = read_log(path)
        assert report.ok
        # A kill may come between the record and the word that it is written.
        assert returned <= sum(record["kind"] == "sent" for record in records) <= returned + kills


def test_two_processes_of_a_site_share_one_chain(tmp_path):
    path = tmp_path / "egress-log.jsonl"
    with appending(path, "first", 30) as first, appending(path, "second", 30) as second:
        assert [len(process.communicate()[0].splitlines()) for process in (first, second)] == [30, 30]
    report, records = read_log(path)
    assert report.ok
    assert report.entries == 60
    assert path.read_text().count('"listed"') == 1
    for who in ("first", "second"):
        assert [record["round"] for record in records if record["who"] == who] == list(range(30))
