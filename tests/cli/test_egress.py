"""`panorgan federation egress`."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest
import torch
import typer
from refusing import refused
from typer.testing import CliRunner, Result

from panorgan.cli.egress import egress
from panorgan.deployment.folders import ServerKit, SiteKit
from panorgan.federation.audit import AuditLog, head_path, verify
from panorgan.federation.egress import Egress, EgressPolicy
from panorgan.federation.failures import EgressError, TooManyQuestionsError
from panorgan.federation.message import Message
from panorgan.federation.refused_requests import note_refusal
from panorgan.federation.tasks import Task
from panorgan.methods.protocol import RoundInfo

META = {"run": "tiny", "site": "north"}


def ask(*arguments: str | Path) -> Result:
    app = typer.Typer()
    app.command()(egress)
    return CliRunner(env={"COLUMNS": "80"}).invoke(app, [str(a) for a in arguments], catch_exceptions=False)


@pytest.fixture
def kit(tmp_path) -> SiteKit:
    """A site that joined, trained twice in two stages, failed once and was refused once."""
    kit = SiteKit(tmp_path / "north")
    kit.local.mkdir(parents=True)
    kit.settings.write_text("name: north\n")
    weights = {"head.bias": torch.zeros(25_000)}
    policy = EgressPolicy(weights=True, numbers=("train_cases", "loss"), failures=True)
    guard = Egress(policy, weights, AuditLog(kit.audit_log))

    def send(task: str, round_: int, stage: str, tensors, numbers, **meta: str) -> None:
        meta = {**META, "answers": f"{task}/{stage}/{round_}", **meta}
        guard.release(Message(tensors, numbers, meta).to_bytes(), task, round_, stage)

    send("join", 0, "", {}, {"train_cases": 3.0})
    send("train", 1, "pretrain", weights, {"loss": 0.9})
    send("train", 1, "train", weights, {"loss": 0.5})
    send("train", 2, "train", {}, {}, failed="memory")
    with pytest.raises(EgressError):
        send("train", 3, "train", weights, {"age[mean]": 61.0})
    return kit


def test_a_person_sees_what_left_and_that_the_log_is_sound(kit):
    shown = ask(kit.path)
    assert shown.exit_code == 0
    cells = [line.split() for line in shown.output.splitlines() if re.match(r" +\d+ +20\d\d-", line)]
    hashes = [json.loads(line)["sha256"][:8] for line in kit.audit_log.read_text().splitlines()]
    assert [[row[0], *row[3:]] for row in cells] == [
        ["1", "join", "sent", "0", "1", "0.00", hashes[0]],
        ["2", "pretrain", "1", "sent", "1", "1", "0.10", hashes[1]],
        ["3", "train", "1", "sent", "1", "1", "0.10", hashes[2]],
        ["4", "train", "2", "memory", "0.00", hashes[3]],
        ["5", "train", "3", "refused", "0.10", hashes[4]],
    ]
    assert "5 refused: number 'age[mean]': its name looks like a path or a file" in shown.output
    assert "Left this site: 4 messages, 0.20 MB. Refused: 1." in shown.output
    assert "The log is sound: 5 entries." in shown.output
    assert verify(kit.audit_log).head in shown.output


def test_the_shown_hash_is_that_of_the_message(kit):
    entries = [json.loads(line)["entry"] for line in ask(kit.path, "--json").output.splitlines()[:-1]]
    meta = {**META, "answers": "join//0"}
    join = Message(scalars={"train_cases": 3.0}, meta=meta).to_bytes()
    assert entries[0]["sha256"] == hashlib.sha256(join).hexdigest()


def test_the_last_ones_only(kit):
    shown = ask(kit.path, "--last", "2").output
    assert "the last 2 of 5" in shown
    assert "pretrain" not in shown
    assert "4 messages" in shown, "the sum is over everything"
    assert "pretrain" in ask(kit.path, "--last", "0").output


def test_json_has_names_and_values(kit):
    *entries, result = [json.loads(line) for line in ask(kit.path, "--json", "--last", "3").output.splitlines()]
    assert [line["entry"]["n"] for line in entries] == [3, 4, 5]
    assert entries[0]["entry"]["numbers"] == {"loss": 0.5}
    assert entries[0]["entry"]["listed"] == [["head.bias", [25_000], "float32"]]
    assert result["result"]["ok"] is True
    assert result["result"]["entries"] == 5
    only = ask(kit.path, "--json", "--verify-only").output.splitlines()
    assert [json.loads(line) for line in only] == [result]


@pytest.mark.parametrize("how", [(), ("--verify-only",), ("--json",)])
def test_a_changed_log_is_shown_and_fails(kit, how):
    kit.audit_log.write_text(kit.audit_log.read_text().replace('"loss":0.9', '"loss":0.1'))
    shown = ask(kit.path, *how)
    assert shown.exit_code == 1
    if "--json" in how:
        result = json.loads(shown.output.splitlines()[-1])["result"]
        assert (result["ok"], result["line"]) == (False, 2)
    else:
        assert "The log does not verify." in shown.output
        assert "line 2" in shown.output.replace("\n", "")
        assert "1 entry before that can be trusted" in shown.output


def test_an_end_that_was_cut_off_fails(kit):
    kit.audit_log.write_text("".join(kit.audit_log.read_text().splitlines(keepends=True)[:-1]))
    shown = ask(kit.path)
    assert shown.exit_code == 1
    assert "counts 5 entries, the log holds 4" in shown.output


def test_a_torn_end_is_explained_and_does_not_fail(kit):
    with kit.audit_log.open("a") as file:
        file.write('{"n":6,')
    shown = ask(kit.path)
    assert shown.exit_code == 0
    assert "unfinished line of 7 bytes" in shown.output
    AuditLog(kit.audit_log).append({"kind": "failed", "code": "disk", "bytes": 1, "sha256": "0" * 64})
    assert "unfinished" in ask(kit.path).output
    assert ask(kit.path).exit_code == 0


def test_a_copy_of_the_log_can_be_checked_elsewhere(kit, tmp_path):
    copy = tmp_path / "copies" / kit.audit_log.name
    copy.parent.mkdir()
    for file in (kit.audit_log, head_path(kit.audit_log)):
        (copy.parent / file.name).write_bytes(file.read_bytes())
    before = sorted(copy.parent.iterdir())
    assert ask(copy).exit_code == 0
    assert sorted(copy.parent.iterdir()) == before


def test_nothing_has_left_yet(tmp_path):
    kit = SiteKit(tmp_path)
    kit.local.mkdir()
    kit.settings.write_text("name: north\n")
    shown = ask(kit.path)
    assert shown.exit_code == 0
    assert shown.output.strip() == "Nothing has left this site yet."


def test_the_wrong_folder_is_said_to_be_wrong(tmp_path):
    with refused("not-a-kit"):
        ask(tmp_path)
    kit = ServerKit(tmp_path)
    kit.local.mkdir()
    kit.settings.write_text("federation: f\n")
    with refused("is-server-kit"):
        ask(tmp_path)


def test_requests_beyond_the_agreement_are_shown_and_counted_apart(kit):
    """Two models scored in one run, one of them twice; a third was refused before anything was computed."""
    guard = Egress(EgressPolicy(numbers=("dice/*",)), {}, AuditLog(kit.audit_log))
    for number, dice in ((1, 0.1), (1, 0.1), (2, 0.2)):
        meta = {**META, "answers": f"evaluate/train/{number}"}
        guard.release(Message({}, {"dice/liver": dice}, meta).to_bytes(), "evaluate", number, "train")
    error = TooManyQuestionsError("Site north is asked to score yet another model.", why="it has scored 3")
    error.answered, error.agreed = 3, 1
    task = Task("evaluate", "tiny", RoundInfo("train", 2, 2))
    note_refusal(AuditLog(kit.audit_log), b"request", task, error)
    shown = ask(kit.path)
    assert "Refused: 1. Requests beyond the agreement, declined: 1." in " ".join(shown.output.split())
    assert "Models scored on validation cases: 2, in 1 run." in " ".join(shown.output.split())
    (row,) = [line.split() for line in shown.output.splitlines() if re.match(r" +9 +20\d\d-", line)]
    assert row[3:] == ["evaluate", "2", "declined", hashlib.sha256(b"request").hexdigest()[:8]]
    last = json.loads(ask(kit.path, "--json", "--last", "1").output.splitlines()[0])["entry"]
    assert (last["answered"], last["agreed"]) == (3, 1)
