"""Organs that a federation is losing are named, once, and not for an accident."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from federations import run, same

from panorgan.cli.view import PlainView
from panorgan.federation.events import EventLog, read_events
from panorgan.federation.notices import NoticeBoard
from panorgan.federation.remedies import Remedies
from panorgan.federation.scores import ValidationScores
from panorgan.federation.watchdog import Watchdog
from panorgan.methods.base import Method, ServerRule
from panorgan.methods.protocol import Notice
from panorgan.report.page import describe_happening
from panorgan.workflows.execute import train

BIAS = "head.conv.conv.bias"

FINE = {"north": {"liver": 0.8}, "south": {"spleen": 0.7}}
LOST = {"north": {"liver": 0.8}, "south": {"spleen": 0.01}}
NORMAL = {"north": {"liver": 1.1}, "south": {"spleen": 0.9}}
FLOODED = {"north": {"liver": 1.1}, "south": {"spleen": 8.0}}


def named(reported: list[Notice]) -> list[str]:
    return [notice.text.split()[0] for notice in reported]


@pytest.mark.parametrize(("dice", "volume", "code"), [(LOST, NORMAL, "organ-lost"), (FINE, FLOODED, "organ-floods")])
def test_an_organ_in_trouble_twice_in_a_row_is_named_once(dice: dict, volume: dict, code: str) -> None:
    dog = Watchdog()
    reported = [dog.look(progress, dice, volume) for progress in (0.3, 0.4, 0.5, 0.6)]
    assert [named(some) for some in reported] == [[], ["spleen"], [], []]
    assert [notice.code for some in reported for notice in some] == [code]


def test_the_sites_that_annotate_it_are_named() -> None:
    dog = Watchdog()
    dog.look(0.5, LOST, NORMAL)
    (notice,) = dog.look(0.6, LOST, NORMAL)
    assert "south" in notice.text
    assert "north" not in notice.text


def test_one_bad_validation_is_an_accident() -> None:
    dog = Watchdog()
    for dice in (LOST, FINE, LOST, FINE):
        assert dog.look(0.5, dice, NORMAL) == []


def test_early_rounds_are_not_judged() -> None:
    dog = Watchdog()
    assert [dog.look(progress, LOST, FLOODED) for progress in (0.05, 0.1, 0.2)] == [[], [], []]


def test_it_is_not_lost_where_one_owner_finds_it() -> None:
    dog = Watchdog()
    both = {"south": {"spleen": 0.0}, "north": {"spleen": 0.6}}
    assert [dog.look(0.5, both, {}) for _ in range(3)] == [[], [], []]


def test_an_organ_does_not_flood_where_one_owner_finds_it_as_large_as_it_is() -> None:
    dog = Watchdog()
    both = {"south": {"spleen": 9.0}, "north": {"spleen": 1.2}}
    assert [dog.look(0.5, FINE, both) for _ in range(3)] == [[], [], []]


def test_a_model_that_knows_nothing_yet_has_lost_nothing() -> None:
    dog = Watchdog()
    assert [dog.look(0.5, {"north": {"liver": 0.0}, "south": {"spleen": 0.0}}, {}) for _ in range(3)] == [[], [], []]


def test_an_organ_that_came_back_and_went_again_is_named_again() -> None:
    dog = Watchdog()
    reported = [named(dog.look(0.5, dice, {})) for dice in (LOST, LOST, FINE, LOST, LOST)]
    assert reported == [[], ["spleen"], [], [], ["spleen"]]


# -- what to do ------------------------------------------------------------------------------------------------------

MARGINAL, BATCH = "method.unlabelled: received", "method.dice_over: batch"
OWNERS, RARE = "method.organ_parts: owners", "network.organ_prior: 0.05"


@pytest.mark.parametrize(
    ("method", "network", "lost", "floods"),
    [
        ({"name": "fedavg"}, {}, (), ()),
        ({"name": "fedavg", "unlabelled": "marginal"}, {}, (MARGINAL,), (MARGINAL,)),
        ({"name": "fedavg", "unlabelled": "marginal"}, {"organs": "heads"}, (MARGINAL,), (MARGINAL,)),
        ({"name": "fedavg", "unlabelled": "marginal"}, {"activation": "sigmoid"}, (MARGINAL,), (MARGINAL,)),
        ({"name": "flkd"}, {}, (), ()),  # it distils by settings of its own
        ({"name": "fedavg", "dice_over": "sample", "organ_parts": "everyone"}, {}, (BATCH,), (OWNERS,)),
        ({"name": "fedavg"}, {"organ_prior": None}, (), (RARE,)),
        ({"name": "fedavg"}, {"organ_prior": 0.5}, (), (RARE,)),
        ({"name": "fedavg"}, {"organ_prior": 0.01}, (), ()),
        ({"name": "ufps"}, {}, (), ()),  # pseudo labels leave nothing open, and teach everybody everything
    ],
)
def test_advice_names_settings_that_a_run_lacks_and_its_method_allows(tiny, method, network, lost, floods) -> None:
    experiment = tiny(method=method, network={"organ_prior": 0.05, **network})
    assert Remedies.of(experiment.build_method(), experiment.network) == Remedies(lost, floods)
    dog = Watchdog(Remedies(lost, floods))
    dog.look(0.5, LOST, FLOODED)
    first, second = dog.look(0.5, LOST, FLOODED)
    assert all(setting in first.text for setting in lost)
    assert all(setting in second.text for setting in floods)
    assert ("Set " in first.text, "Set " in second.text) == (bool(lost), bool(floods))


# -- in a run --------------------------------------------------------------------------------------------------------

LONG = {"rounds": 4, "local_steps": 1, "validate_every": 1}
FOUND = {"liver": 0.6, "spleen": 0.5}


def scripted(monkeypatch: pytest.MonkeyPatch, dice: dict[str, float], volume: dict[str, float]) -> None:
    """Every site scores every model like this."""
    scores = ValidationScores(dice, volume)
    monkeypatch.setattr("panorgan.federation.site.validation_scores", lambda *about: scores)


def notices(folder: Path) -> list[tuple[int, str, str]]:
    reported = [event.facts for event in read_events(folder / "events.jsonl") if event.kind == "notice"]
    return [(facts["number"], facts["code"], facts["text"].split()[0]) for facts in reported]


def test_a_run_names_the_organ_it_loses_once(tiny, tmp_path, monkeypatch):
    scripted(monkeypatch, {"liver": 0.6, "spleen": 0.0}, {})
    train(tiny(training=LONG), tmp_path / "run")
    assert notices(tmp_path / "run") == [(2, "organ-lost", "spleen")]


@pytest.mark.parametrize(
    ("dice", "volume", "code"),
    [({**FOUND, "spleen": 0.0}, {}, "organ-lost"), (FOUND, {"liver": 1.1, "spleen": 3.5}, "organ-floods")],
)
def test_a_resumed_run_remembers_what_earlier_validations_said(tiny, tmp_path, monkeypatch, dice, volume, code):
    experiment = tiny(training=LONG)
    scripted(monkeypatch, dice, volume)
    for _ in range(3):  # new workers and a new coordinator for every round
        run(experiment, tmp_path, rounds=1)
    assert notices(tmp_path) == [(2, code, "spleen")]


def test_a_round_that_happened_twice_counts_once(tmp_path):
    """After a kill; two lines about round 1 are one validation."""
    log = EventLog(tmp_path / "events.jsonl")
    facts = {"number": 1, "round": 1, "rounds": 4, "validation": FINE, "volume": FLOODED}
    for _ in range(2):
        log.record("round", **facts)
    board = NoticeBoard(log)
    board.recall(read_events(log.path))
    assert notices(tmp_path) == []
    board.check_organs({**facts, "number": 2, "round": 2})
    assert notices(tmp_path) == [(2, "organ-floods", "spleen")]


def test_a_log_of_before_volumes_and_codes_is_taken_up(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    log.record("round", number=1, round=1, rounds=4, validation=LOST)
    log.record("notice", number=1, text="No teacher knows liver.")
    board = NoticeBoard(log)
    board.recall(read_events(log.path))
    board.note(2, Notice("no-teacher", "No teacher knows liver."))
    board.check_organs({"number": 2, "round": 2, "rounds": 4, "validation": LOST})
    reported = [event.facts.get("code") for event in read_events(log.path) if event.kind == "notice"]
    assert reported == [None, "organ-lost"]


class Flooding(Method):
    """Delivers a model that takes nearly everything for spleen."""

    class Server(ServerRule):
        def delivered(self) -> Mapping[str, torch.Tensor]:
            bias = self.weights[BIAS].clone()
            bias[1 + list(self.federation.vocabulary).index("spleen")] += 50
            return {**self.weights, BIAS: bias}


def test_a_run_whose_model_floods_says_so_from_end_to_end(tiny, tmp_path, capsys):
    """South annotates the spleen: a real network, real volumes. North's liver cannot be found, and is not large."""
    experiment = tiny(training=LONG)
    run(experiment, tmp_path, method=Flooding(experiment.build_method().config))
    rounds = [event.facts for event in read_events(tmp_path / "events.jsonl") if event.kind == "round"]
    assert all(facts["volume"]["south"]["spleen"] > 10 for facts in rounds)
    assert all(facts["volume"]["north"] == {"liver": 0.0} for facts in rounds)
    floods = [event for event in read_events(tmp_path / "events.jsonl") if event.facts.get("code") == "organ-floods"]
    (notice,) = floods
    assert (notice.facts["number"], notice.facts["text"].split()[0]) == (2, "spleen")
    assert "Set network.organ_prior: 0.05." in notice.facts["text"], "all else is as it should be"
    PlainView("tiny")(notice)
    assert notice.facts["text"] in capsys.readouterr().out
    assert notice.facts["text"] in describe_happening(notice)[1]


def test_a_run_that_finds_organs_as_large_as_they_are_is_not_told_of(tiny, tmp_path, monkeypatch):
    scripted(monkeypatch, FOUND, {"liver": 0.8, "spleen": 2.9})
    run(tiny(training=LONG), tmp_path)
    assert notices(tmp_path) == []


def test_volumes_change_neither_weights_nor_the_best_round(tiny, tmp_path, monkeypatch):
    experiment = tiny(training={**LONG, "rounds": 2})
    scripted(monkeypatch, FOUND, {})
    without = run(experiment, tmp_path / "without")
    scripted(monkeypatch, FOUND, {"liver": 40.0, "spleen": 0.0})
    having = run(experiment, tmp_path / "with")
    assert same(without.state.weights, having.state.weights)
    assert without.state.best == having.state.best
