"""When the global model may teach an organ: from validation numbers by hand, on the wire, and over a kill."""

from __future__ import annotations

import pytest
import torch
from federations import run, same
from overhearing import overheard

from panorgan.anatomy import Vocabulary
from panorgan.federation.events import read_events
from panorgan.methods.protocol import Federation, RoundInfo, SiteInfo
from panorgan.methods.shared.readiness import READY, Readiness
from panorgan.methods.ufps import UFPS, UFPSConfig

FACTS = {
    "a": SiteInfo("a", 1, {"liver": 1}),
    "b": SiteInfo("b", 3, {"liver": 3, "pancreas": 3}),
}
FEDERATION = Federation(Vocabulary(["liver", "pancreas"]), FACTS)


def judged(*validations: dict[str, dict[str, float]], **settings: float) -> list[tuple[str, ...]]:
    """The organs that are ready after each validation."""
    readiness, found = Readiness(**settings), []
    for scores in validations:
        readiness.validated(scores, FEDERATION)
        found.append(readiness.ready(FEDERATION))
    return found


def pancreas(*dice: float) -> list[dict[str, dict[str, float]]]:
    return [{"b": {"pancreas": value}} for value in dice]


def test_known_and_settled():
    """0.3 is too little to know; 0.6 is known and still rising; 0.61 brings a hundredth, so that it has converged."""
    assert judged(*pancreas(0.3, 0.6, 0.61)) == [(), (), ("pancreas",)]


def test_what_it_has_forgotten_it_does_not_teach():
    """Once settled it need not settle again; but known it must be."""
    assert judged(*pancreas(0.6, 0.6, 0.2, 0.7)) == [(), ("pancreas",), (), ("pancreas",)]


def test_an_organ_at_zero_has_not_settled():
    assert judged(*pancreas(0.0, 0.0, 0.0, 0.55)) == [(), (), (), ()]


def test_limits_are_settings():
    assert judged(*pancreas(0.3, 0.31), least=0.25) == [(), ("pancreas",)]
    assert judged(*pancreas(0.6), gain=1.0) == [("pancreas",)], "one validation is enough"
    assert judged({}, least=0.0) == [("liver", "pancreas")], "nothing is asked"


def test_every_site_that_annotates_an_organ_counts_and_no_other():
    """Liver: (0.4 + 0.8)/2. A has no pancreas to judge. Who is silent counts with what it said last."""
    first = {"a": {"liver": 0.4, "pancreas": 0.9}, "b": {"liver": 0.8, "pancreas": 0.1}}
    readiness = Readiness()
    readiness.validated(first, FEDERATION)
    assert readiness.dice(FEDERATION) == pytest.approx({"liver": 0.6, "pancreas": 0.1})
    readiness.validated({"b": {"liver": 0.4}, "stranger": {"liver": 1.0}}, FEDERATION)
    assert readiness.dice(FEDERATION) == pytest.approx({"liver": 0.4, "pancreas": 0.1})
    assert readiness.ready(FEDERATION) == ()


def test_parts_of_a_union_have_its_dice_where_nobody_names_them():
    facts = {"a": SiteInfo("a", 1, {"kidney": 1}), "b": SiteInfo("b", 1, {"kidney_left": 1})}
    sides = Federation(Vocabulary(["kidney_left", "kidney_right"]), facts)
    readiness = Readiness()
    readiness.validated({"a": {"kidney": 0.7}, "b": {"kidney_left": 0.5}}, sides)
    assert readiness.dice(sides) == {"kidney_left": 0.5, "kidney_right": 0.7}


def test_a_restart_forgets_nothing():
    readiness = Readiness()
    for scores in pancreas(0.6, 0.6):
        readiness.validated(scores, FEDERATION)
    again = Readiness()
    again.load({**readiness.numbers(), "teacher/a": 1.0})
    assert again.ready(FEDERATION) == ("pancreas",)
    assert again.numbers() == readiness.numbers()


# -- at the server ---------------------------------------------------------------------------------------------------


def server(round_: int, **config: object) -> UFPS.Server:
    rule = UFPS.Server(UFPSConfig(**config), FEDERATION, {"head.weight": torch.zeros(3)})
    rule.round_info = RoundInfo("train", round_, 10)
    return rule


def test_ready_organs_go_out_with_the_model_and_not_before_the_start():
    rule = server(5)
    for scores in pancreas(0.6, 0.6):
        rule.validated(scores)
    assert not [name for name in rule.broadcast("a").scalars if name.startswith(READY)]
    rule.round_info = RoundInfo("train", 6, 10)
    assert {name: value for name, value in rule.broadcast("a").scalars.items() if name.startswith(READY)} == {
        f"{READY}pancreas": 1.0
    }
    again = server(6)
    again.load_state(rule.state())
    assert again.broadcast("b").scalars == rule.broadcast("b").scalars


def test_people_are_told_which_organs_are_left_to_the_teachers():
    rule = server(6)
    rule.validated({"b": {"pancreas": 0.1}})
    about = {notice.code: notice.text for notice in rule.notices() if notice.code.startswith("main-teacher")}
    assert {code: ("liver" in text, "pancreas" in text) for code, text in about.items()} == {
        "main-teacher-unscored": (True, False),
        "main-teacher-waits": (False, True),
    }
    for silent in (server(5), server(6, main_teacher_dice=0), server(6, main_teacher=False)):
        assert {notice.code for notice in silent.notices()} == {"no-teacher"}


# -- in a run --------------------------------------------------------------------------------------------------------

METHOD = {"name": "ufps", "pretrain": 0.2, "main_teacher_start": 0.6, "main_teacher_dice": 1e-9, "main_teacher_gain": 1}
TRAINING = {"rounds": 5, "validate_every": 1, "local_steps": 2}


PARTS = {"liver": ["liver"], "spleen": ["spleen"], "kidney": ["kidney_left", "kidney_right"]}


def ready_in(messages) -> list[set[str]]:
    """Of the training rounds: which organs each request says may be taught."""
    numbers = [{n.removeprefix(READY) for n in m.scalars if n.startswith(READY)} for m in messages]
    return numbers[2:]


def known_after(folder) -> list[set[str]]:
    """Of the training rounds: the organs that some site gave a Dice above nothing."""
    rounds = [e.facts for e in read_events(folder / "events.jsonl") if e.kind == "round"]
    return [
        {o for own in facts["validation"].values() for name, dice in own.items() if dice > 0 for o in PARTS[name]}
        for facts in rounds
        if facts["stage"] == "train"
    ]


def test_what_sites_validate_decides_what_the_next_round_is_taught(tiny, tmp_path):
    coordinator, sites = overheard(tiny(method=METHOD, training=TRAINING), tmp_path)
    coordinator.run()
    found, known = ready_in(sites["north"].received), known_after(tmp_path)
    assert len(found) == len(known) == 5
    assert found[:2] == [set(), set()], "not before 0.6 of the rounds"
    assert found[2:] == known[1:4]
    assert any(known[1:4]), "a test of something"
    assert ready_in(sites["south"].received) == found


def test_a_kill_after_validation_loses_no_knowledge(tiny, tmp_path):
    """One round per process: what was validated in one is known in the next, and all goes on to the same bits."""
    experiment = tiny(method=METHOD, training=TRAINING)
    whole = run(experiment, tmp_path / "whole")
    for _ in range(7):
        pieces = run(experiment, tmp_path / "pieces", rounds=1)
    assert pieces.finished
    assert pieces.rule.readiness.numbers() == whole.rule.readiness.numbers()
    assert pieces.rule.readiness.ready(pieces.federation)
    assert same(pieces.state.weights, whole.state.weights)
