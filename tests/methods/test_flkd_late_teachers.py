"""FLKD's teachers that go astray: lost on the way, refused, diverged at the site, or never trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from federations import Meddling, make_coordinator, make_workers, run, same
from overhearing import overheard

from panorgan.federation import collector
from panorgan.federation.collector import _requests
from panorgan.federation.events import read_events
from panorgan.federation.local_state import LocalState
from panorgan.federation.message import Message
from panorgan.methods.flkd import FLKD

# Rounds in all: 1, 2 pretrain; 3 exchange; 4 to 6 train.
LONG = {"name": "flkd", "pretrain": 0.67}
TRAINING = {"rounds": 3, "validate_every": 0, "local_steps": 2}
KEPT = {**TRAINING, "optimizer": {"keep_state": True}}
BOTH = ("teacher/north", "teacher/south")
ALL_PARTS = {"loss", "cases", "loss/global_kd", "loss/local_kd"}


def happened(folder, kind: str) -> list[dict[str, Any]]:
    return [event.facts for event in read_events(folder / "events.jsonl") if event.kind == kind]


@dataclass
class Trial:
    """A run in which something happens to answers of north, by round of the whole run; the sites forget between rounds
    whatever is not on their disk, if `restarts`."""

    experiment: Any
    folder: Any
    lost: set[int] = field(default_factory=set)
    spoiled: set[int] = field(default_factory=set)
    away: set[int] = field(default_factory=set)
    restarts: bool = False
    sent: dict[tuple[str, int], Message] = field(default_factory=dict)

    def run(self):
        coordinator = self._coordinator()
        for number in range(1, len(coordinator.schedule) + 1):
            if self.restarts and number > 1:
                coordinator = self._coordinator()
            self.number = number
            self.transport.absent = {"north"} if number in self.away else set()
            coordinator.run(rounds=1)
        return coordinator

    def _coordinator(self):
        transport = self.transport = Meddling(make_workers(self.experiment, self.folder), self._meddle)
        return make_coordinator(self.experiment, self.folder, transport)

    def _meddle(self, site: str, kind: str, answer: bytes):
        if kind != "train":
            return [(site, answer)]
        message = Message.from_bytes(answer)
        self.sent[site, self.number] = message
        if site == "north" and self.number in self.lost:
            return []
        if site == "north" and self.number in self.spoiled:
            tensors = {key: value * float("nan") for key, value in message.tensors.items()}
            return [(site, Message(tensors, message.scalars, message.meta).to_bytes())]
        return [(site, answer)]

    def teachers_sent_by(self, site: str) -> list[int]:
        """Rounds in which a site sent a teacher."""
        return [
            number
            for (sender, number), message in sorted(self.sent.items())
            if sender == site and any(key.startswith("teacher/") for key in message.tensors)
        ]


@pytest.fixture(scope="module")
def undisturbed(tiny, tmp_path_factory):
    return run(tiny(method=LONG, training=KEPT), tmp_path_factory.mktemp("undisturbed"))


MISHAPS = {
    # what happens; when north's teacher arrives; from which round on both sites learn from it
    "lost at the end of pretrain": ({"lost": {2}}, 3, 4),
    "refused at the end of pretrain": ({"spoiled": {2}}, 3, 4),
    "lost in the exchange too": ({"lost": {2, 3}}, 4, 5),
    "refused and then lost": ({"spoiled": {2}, "lost": {3}}, 4, 5),
    "lost, and away in the exchange": ({"lost": {2}, "away": {3}}, 4, 5),
}


@pytest.mark.parametrize("restarts", [False, True], ids=["in memory", "from disk"])
@pytest.mark.parametrize(("mishap", "arrives", "heard"), MISHAPS.values(), ids=MISHAPS.keys())
def test_a_finished_teacher_is_asked_for_until_it_arrives(
    tiny, tmp_path, undisturbed, mishap, arrives, heard, restarts
):
    """The very teacher that it would have been, and the other site learns from it in the round after."""
    trial = Trial(tiny(method=LONG, training=KEPT), tmp_path, restarts=restarts, **mishap)
    coordinator = trial.run()
    assert coordinator.tensor_store.names() == BOTH
    assert same(coordinator.tensor_store.get("teacher/north"), undisturbed.tensor_store.get("teacher/north"))
    # North sends it in every round in which it is asked, and never again once it has arrived.
    assert trial.teachers_sent_by("north") == [n for n in range(2, arrives + 1) if n not in trial.away]
    assert trial.teachers_sent_by("south") == [2]
    for number in range(4, 7):
        reported = set(trial.sent["south", number].scalars)
        assert reported == (ALL_PARTS if number >= heard else ALL_PARTS - {"loss/local_kd"})
    assert coordinator.rule.teachers.up_to_date == ("north", "south")
    assert coordinator.rule.teachers.due_sites == ()
    assert len(happened(tmp_path, "refused")) == len(trial.spoiled)


def test_a_site_that_broke_off_in_pretrain_sends_what_it_has(tiny, tmp_path, undisturbed):
    """It missed the last round: its teacher is that of the round before."""
    trial = Trial(tiny(method=LONG, training=KEPT), tmp_path, away={2})
    coordinator = trial.run()
    assert trial.teachers_sent_by("north") == [3]
    assert coordinator.tensor_store.names() == BOTH
    teacher = coordinator.tensor_store.get("teacher/north")
    assert not same(teacher, undisturbed.tensor_store.get("teacher/north"))
    run(tiny(method=LONG, training=KEPT), tmp_path / "first round", rounds=1)
    assert same(teacher, dict(LocalState(tmp_path / "first round" / "sites" / "north").load().rule.tensors))


# -- diverged --------------------------------------------------------------------------------------------------------


def poison(monkeypatch, rounds: set[int]) -> None:
    """North's loss is NaN in these rounds of pretrain."""
    loss = FLKD.Site.loss

    def poisoned(self, batch):
        round_info = self.round_info
        broken = self.facts.name == "north" and round_info.stage == "pretrain" and round_info.round in rounds
        return loss(self, batch) * (float("nan") if broken else 1.0)

    monkeypatch.setattr(FLKD.Site, "loss", poisoned)


@pytest.mark.parametrize("keep_state", [False, True])
@pytest.mark.parametrize("rounds", [{1}, {2}], ids=["before anything travels", "when the teacher is due"])
def test_a_site_that_diverges_in_pretrain_is_refused_and_recovers(tiny, tmp_path, monkeypatch, rounds, keep_state):
    """Nothing is sent in the first round, so nothing that is sent shows it. The next starts from what was good."""
    poison(monkeypatch, rounds)
    training = {**TRAINING, "optimizer": {"keep_state": keep_state}}
    trial = Trial(tiny(method=LONG, training=training), tmp_path)
    coordinator = trial.run()
    (refused,) = happened(tmp_path, "refused")
    assert (refused["number"], refused["site"]) == (*rounds, "north")
    assert "not finite" in refused["reason"] + refused["why"]
    pretrain = happened(tmp_path, "round")[:2]
    assert [sorted(facts["sites"]) for facts in pretrain] == [
        ["south"] if number in rounds else ["north", "south"] for number in (1, 2)
    ]
    assert all("loss" in numbers for facts in pretrain for numbers in facts["sites"].values())
    assert coordinator.tensor_store.names() == BOTH
    assert all(value.isfinite().all() for value in coordinator.tensor_store.get("teacher/north").values())
    assert trial.teachers_sent_by("north") == ([2] if rounds == {1} else [2, 3])
    assert set(trial.sent["south", 4].scalars) == ALL_PARTS
    assert not happened(tmp_path, "notice")


# -- no teacher at all -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("restarts", [False, True], ids=["in memory", "from disk"])
def test_training_without_a_teacher_is_told_once(tiny, tmp_path, monkeypatch, restarts):
    """North diverges whenever it trains alone: it has nothing to send, says so once, and is not refused for that."""
    poison(monkeypatch, {1, 2})
    trial = Trial(tiny(method=LONG, training=TRAINING), tmp_path, restarts=restarts)
    coordinator = trial.run()
    assert trial.teachers_sent_by("north") == [2], "the one that was refused"
    assert [facts["number"] for facts in happened(tmp_path, "refused")] == [1, 2]
    assert coordinator.tensor_store.names() == ("teacher/south",)
    assert coordinator.rule.teachers.due_sites == ()
    (notice,) = happened(tmp_path, "notice")
    assert notice["number"] == 4
    assert notice["code"] == "no-teacher"
    assert "No teacher knows liver." in notice["text"]
    assert set(trial.sent["south", 4].scalars) == ALL_PARTS - {"loss/local_kd"}
    assert set(trial.sent["north", 4].scalars) == ALL_PARTS


def test_an_organ_that_comes_too_late_for_a_teacher_is_told(tiny, tmp_path):
    coordinator, _ = overheard(tiny(method=LONG, training=TRAINING), tmp_path, joins_at={"south": 5})
    coordinator.run()
    (notice,) = happened(tmp_path, "notice")
    assert notice["number"] == 5
    assert "No teacher knows spleen, kidney left, kidney right." in notice["text"]


@pytest.mark.parametrize("method", [LONG, {**LONG, "local_weight": 0}], ids=["all are there", "none is needed"])
def test_nothing_is_told_when_nothing_is_missing(tiny, tmp_path, method):
    run(tiny(method=method, training={**TRAINING, "rounds": 1}), tmp_path)
    assert not happened(tmp_path, "notice")


# -- one request for all ---------------------------------------------------------------------------------------------


def test_a_request_for_training_is_made_once_for_all_sites(tiny, tmp_path, monkeypatch):
    """The model is large, and sites are many: the roster of teachers must not make every request another one."""
    made: dict[str, list[bytes]] = {}

    def watched(question):
        make = _requests(question)

        def make_request(site: str) -> bytes:
            request = make(site)
            if question.task.kind == "train":
                made.setdefault(question.task.label, []).append(request)
            return request

        return make_request

    monkeypatch.setattr(collector, "_requests", watched)
    run(tiny(method=LONG, training=TRAINING), tmp_path)
    assert len(made) == 6
    for label, (first, second) in made.items():
        assert (first is second) == (label != "train/exchange/1"), label
    assert "teacher/north" in Message.from_bytes(made["train/train/3"][0]).scalars


def test_a_teacher_that_is_late_does_not_spoil_the_mean(tiny, tmp_path):
    """It comes along with the weights of a training round, and is none of them."""
    trial = Trial(tiny(method=LONG, training=TRAINING), tmp_path, lost={2, 3})
    coordinator = trial.run()
    north, south = (trial.sent[site, 6].tensors for site in ("north", "south"))
    assert any(key.startswith("teacher/") for key in trial.sent["north", 4].tensors)
    assert north.keys() == south.keys() == coordinator.state.weights.keys()
    for key, value in coordinator.state.weights.items():
        torch.testing.assert_close(value.double(), (north[key].double() + south[key].double()) / 2)
