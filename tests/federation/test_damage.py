"""A flipped bit in what coordinator and sites keep: they go back and say so, or stop and say what to do."""

from __future__ import annotations

import os

import pytest
import torch
from federations import make_coordinator, make_workers, run, same
from refusing import refused

from panorgan.errors import RunError
from panorgan.federation.checkpoint import Checkpoints, CoordinatorState
from panorgan.federation.events import DAMAGED, Event, EventLog, mend_tail, read_events
from panorgan.federation.local_models import load_weights
from panorgan.federation.local_state import LocalState, SavedRound
from panorgan.federation.message import Message
from panorgan.federation.tensor_store import DiskTensorStore
from panorgan.federation.transports.local import LocalTransport
from panorgan.methods.protocol import Payload

KEEP = {"rounds": 4, "validate_every": 0, "local_steps": 1, "optimizer": {"learning_rate": 0.01, "keep_state": True}}


def flip_last_bit(path):
    """The last byte of the last tensor: what is read is a number like any other."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def state(rounds: int, best: dict | None = None) -> CoordinatorState:
    return CoordinatorState({"w": torch.full((3,), float(rounds))}, rounds_done=rounds, best=best)


# -- the coordinator ------------------------------------------------------------------------------------------------


def test_a_flipped_bit_in_the_newest_checkpoint_goes_back_one_round(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state(1))
    checkpoints.save(state(2))
    assert checkpoints.load_latest().rounds_done == 2
    assert checkpoints.unreadable == ()
    flip_last_bit(tmp_path / "round-00002.safetensors")
    assert checkpoints.load_latest().rounds_done == 1
    assert checkpoints.peek() == (1, ())
    assert len(checkpoints.unreadable) == 1
    assert "round-00002" in checkpoints.unreadable[0]


def test_a_flipped_bit_in_the_best_round_is_an_error(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state(1, {"round": 1.0, "dice": 0.5}))
    checkpoints.save(state(2, {"round": 1.0, "dice": 0.5}))
    flip_last_bit(tmp_path / "best-00001.safetensors")
    with refused("best-checkpoint-unreadable", RunError) as caught:
        checkpoints.load_best(checkpoints.load_latest())
    assert caught.value.fix


def test_a_checkpoint_without_a_checksum_is_read(tmp_path):
    """Of an older version."""
    meta = dict.fromkeys(("sites", "best", "scores", "scorers", "plan", "told")) | {"rounds_done": 3}
    (tmp_path / "round-00003.safetensors").write_bytes(Message({"weights/w": torch.ones(2)}, meta=meta).to_bytes())
    assert Checkpoints(tmp_path).load_latest().rounds_done == 3


@pytest.mark.parametrize("moved_on", [False, True], ids=["between two rounds", "sites have answered the next round"])
def test_a_run_goes_on_from_the_checkpoint_before_to_the_same_bits_and_says_so(tiny, tmp_path, moved_on, monkeypatch):
    """Sites keep state, and one may be a round further than the checkpoint that is left by two."""
    experiment = tiny(training=KEEP)
    undisturbed = run(experiment, tmp_path / "undisturbed")
    folder = tmp_path / "damaged"
    stopped = run(experiment, folder, rounds=2)
    if moved_on:
        monkeypatch.setattr(stopped.rule, "aggregate", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            stopped.run()
    flip_last_bit(folder / "checkpoints" / "round-00002.safetensors")
    heard: list[Event] = []
    resumed = make_coordinator(experiment, folder, LocalTransport(make_workers(experiment, folder)), heard)
    assert resumed.state.rounds_done == 1
    (notice,) = [event.facts for event in heard if event.kind == "notice"]
    assert notice["code"] == "checkpoint-damaged"
    assert "round-00002" in notice["text"]
    resumed.run()
    assert same(resumed.state.weights, undisturbed.state.weights)


def _interrupted(*_):
    raise KeyboardInterrupt


def test_a_damaged_answer_in_the_spool_is_refused_and_asked_for_again(tiny, tmp_path, monkeypatch):
    experiment = tiny(training={**KEEP, "rounds": 1})
    undisturbed = run(experiment, tmp_path / "undisturbed")
    folder = tmp_path / "damaged"
    stopped = make_coordinator(experiment, folder, LocalTransport(make_workers(experiment, folder)))
    monkeypatch.setattr(stopped.rule, "aggregate", _interrupted)
    with pytest.raises(KeyboardInterrupt):
        stopped.run()
    flip_last_bit(folder / "spool" / "00001" / "south.safetensors")
    heard: list[Event] = []
    resumed = make_coordinator(experiment, folder, LocalTransport(make_workers(experiment, folder)), heard)
    resumed.run()
    assert [event.facts["site"] for event in heard if event.kind == "refused"] == ["south"]
    assert [event.facts["sites"] for event in heard if event.kind == "asked"] == [["south"]]
    assert same(resumed.state.weights, undisturbed.state.weights)


def test_damaged_tensors_in_a_vault_are_an_error(tmp_path):
    tensor_store = DiskTensorStore(tmp_path)
    tensor_store.put("teacher/north", {"w": torch.ones(3)})
    (path,) = tmp_path.iterdir()
    flip_last_bit(path)
    for read in (lambda: tensor_store.get("teacher/north"), tensor_store.names):
        with refused("vault-unreadable", RunError) as caught:
            read()
        assert caught.value.fix


# -- a site ---------------------------------------------------------------------------------------------------------


def answer_of(round_: int) -> bytes:
    return Message(
        {"w": torch.full((2,), float(round_))}, meta={"run": "r", "answers": f"train/train/{round_}"}
    ).to_bytes()


def saved(round_: int) -> SavedRound:
    return SavedRound("train", round_, Payload({"bank": torch.full((2,), float(round_))}), {})


def test_a_flipped_bit_in_a_sites_state_is_an_error(tmp_path):
    local = LocalState(tmp_path)
    local.save("r", saved(1), answer_of(1))
    assert local.finished("r") == ("train", 1)
    flip_last_bit(tmp_path / "state.safetensors")
    for fresh in (local, LocalState(tmp_path)):
        with refused("state-unreadable", RunError) as caught:
            fresh.finished("r")
        assert caught.value.fix
        with refused("state-unreadable", RunError):
            fresh.load()


def test_a_damaged_answer_is_not_given(tmp_path):
    local = LocalState(tmp_path)
    local.save("r", saved(1), answer_of(1))
    assert local.answer_to("r", "train/train/1") == answer_of(1), "to the last bit as it was sent"
    flip_last_bit(tmp_path / "answer.safetensors")
    assert local.answer_to("r", "train/train/1") is None


@pytest.mark.parametrize("killed_before", ["answer.safetensors", "state.safetensors"])
def test_the_answer_before_the_last_stays_whatever_is_interrupted(tmp_path, monkeypatch, killed_before):
    local = LocalState(tmp_path)
    for round_ in (1, 2):
        local.save("r", saved(round_), answer_of(round_))
    original = os.replace

    def killed(source, target):
        if os.path.basename(target) == killed_before:
            raise KeyboardInterrupt
        original(source, target)

    for _ in range(2):  # and again while the same round is tried once more
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", killed)
            with pytest.raises(KeyboardInterrupt):
                local.save("r", saved(3), answer_of(3))
        assert local.finished("r") == ("train", 2)
        assert local.answer_to("r", "train/train/2") == answer_of(2)
    local.save("r", saved(3), answer_of(3))
    assert [local.answer_to("r", f"train/train/{n}") for n in (2, 3)] == [answer_of(2), answer_of(3)]


def test_a_damaged_model_of_a_single_site_is_an_error(tmp_path):
    from panorgan.federation.local_models import _write

    path = tmp_path / "north.safetensors"
    _write(path, {"w": torch.ones(3)})
    assert torch.equal(load_weights(path)["w"], torch.ones(3))
    flip_last_bit(path)
    with refused("local-model-unreadable", RunError) as caught:
        load_weights(path)
    assert str(path) in caught.value.where


# -- the log --------------------------------------------------------------------------------------------------------


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "events.jsonl"
    for number in (1, 2, 3):
        EventLog(path).record("round", number=number, loss=0.5)
    return path


@pytest.mark.parametrize(
    "change", [(b"0.5", b"0.7"), (b'{"crc32"', b'["crc32"'), (b"}\n", b")\n"), (b"round", b"r\xffund")]
)
def test_a_damaged_line_is_told_with_its_number(log, change):
    lines = log.read_bytes().splitlines(keepends=True)
    lines[1] = lines[1].replace(*change)
    log.write_bytes(b"".join(lines))
    events = list(read_events(log))
    assert [event.kind for event in events] == ["round", DAMAGED, "round"]
    assert events[1].facts == {"line": 2}


def test_a_lost_line_break_is_told(log):
    log.write_bytes(log.read_bytes().replace(b"\n", b" ", 1))
    assert [event.kind for event in read_events(log)] == [DAMAGED, "round"]


def test_a_line_that_a_kill_has_torn_is_taken_away_and_no_damage(log):
    whole = log.read_bytes()
    for cut in range(1, len(whole) // 3 - 1):
        log.write_bytes(whole + whole[:cut])
        assert [event.kind for event in read_events(log)] == ["round"] * 3, "while it is being written"
        mend_tail(log)
        assert log.read_bytes() == whole
    log.write_bytes(whole[:-1])
    mend_tail(log)
    assert log.read_bytes() == whole, "a line that lacks nothing but its break gets it"
