"""Methods with more than one stage: what is carried over, what is validated, what is delivered."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
from federations import make_coordinator, make_workers, run, same
from refusing import refused

from panorgan.errors import RunError
from panorgan.federation.events import Event, read_events
from panorgan.federation.message import Message
from panorgan.federation.transports.local import LocalTransport
from panorgan.methods.base import Method, MethodConfig, SiteRule, Stage

KEEP = {"rounds": 3, "validate_every": 0, "optimizer": {"learning_rate": 0.01, "keep_state": True}}


class Staged(Method):
    """Two rounds of pretraining, then the training rounds."""

    name = "staged"
    pretrain = Stage("pretrain", 2)

    def stages(self, rounds: int) -> tuple[Stage, ...]:
        return (self.pretrain, Stage("train", rounds))


class Scored(LocalTransport):
    """Replaces every validation score by a chosen one, per stage and round."""

    def __init__(self, workers, scores: dict[str, float]) -> None:
        super().__init__(workers)
        self.scores = scores

    def exchange(self, sites, make_request, on_reply, deadline=None):
        def scored(site: str, answer: bytes) -> None:
            message = Message.from_bytes(answer)
            kind, _, round_info = str(message.meta["answers"]).partition("/")
            numbers = {"dice/liver": self.scores[round_info]} if kind == "evaluate" else message.scalars
            on_reply(site, Message(message.tensors, numbers, message.meta).to_bytes())

        super().exchange(sites, make_request, scored)


SCORES = {"pretrain/1": 0.9, "pretrain/2": 0.8, "train/1": 0.1, "train/2": 0.3, "train/3": 0.2}


def scored_run(tiny, folder, method: Method, **training):
    experiment = tiny(training={"rounds": 3, "validate_every": 1, "local_steps": 1, **training})
    heard: list[Event] = []
    transport = Scored(make_workers(experiment, folder, method), SCORES)
    coordinator = make_coordinator(experiment, folder, transport, heard, method)
    coordinator.run()
    return coordinator, [event.facts for event in heard if event.kind == "round"]


def test_the_best_round_is_one_of_the_last_stage(tiny, tmp_path):
    coordinator, rounds = scored_run(tiny, tmp_path, Staged(MethodConfig()))
    assert rounds[1]["best"] == {"round": 1.0, "dice": 0.9}, "within its stage a pretraining round may lead"
    assert coordinator.state.best == {"round": 4.0, "dice": 0.3}
    assert coordinator.delivered_weights()[0] == 4


def test_a_stage_may_go_without_validation(tiny, tmp_path):
    class Quiet(Staged):
        pretrain = Stage("pretrain", 2, validate=False)

    coordinator, rounds = scored_run(tiny, tmp_path, Quiet(MethodConfig()))
    assert [facts["validation"] is None for facts in rounds] == [True, True, False, False, False]
    assert coordinator.delivered_weights()[0] == 4


def test_a_last_stage_without_validation_delivers_its_last_round(tiny, tmp_path):
    class QuietEnd(Staged):
        def stages(self, rounds: int) -> tuple[Stage, ...]:
            return (self.pretrain, Stage("train", rounds, validate=False))

    coordinator, _ = scored_run(tiny, tmp_path, QuietEnd(MethodConfig()))
    number, weights = coordinator.delivered_weights()
    assert number == 5
    assert same(weights, coordinator.state.weights)


def test_validation_is_counted_within_the_stage(tiny, tmp_path):
    """A pretraining round shifts nothing: every second round *of the stage*, and its last."""

    class Short(Staged):
        pretrain = Stage("pretrain", 1)

    _, rounds = scored_run(tiny, tmp_path, Short(MethodConfig()), validate_every=2)
    validated = [f"{facts['stage']}/{facts['round']}" for facts in rounds if facts["validation"] is not None]
    assert validated == ["pretrain/1", "train/2", "train/3"]


class Growing(Staged):
    """Its modules begin one after the other; the second round of training (the fourth of the run) is the best."""

    starts: ClassVar[dict[str, int]]

    def module_starts(self, rounds: int) -> dict[str, int]:
        return {module: first for module, first in self.starts.items() if first <= rounds}


def early_notices(folder: Path) -> list[dict[str, Any]]:
    reported = [event.facts for event in read_events(folder / "events.jsonl") if event.kind == "notice"]
    return [facts for facts in reported if facts["code"] == "delivered-early"]


def growing(**starts: int) -> Method:
    return type("Growing", (Growing,), {"starts": starts})(MethodConfig())


def test_a_round_from_before_a_module_began_is_said_to_be_one(tiny, tmp_path):
    coordinator, _ = scored_run(tiny, tmp_path, growing(late=3, there=2))
    assert coordinator.delivered_weights()[0] == 4
    (reported,) = early_notices(tmp_path)
    assert reported["number"] == 5
    assert "round 4 of 5" in reported["text"]
    assert "late (round 5)" in reported["text"], "rounds of the whole run"
    assert "there" not in reported["text"]
    assert "training.select: last" in reported["text"]
    assert "validate_every" not in reported["text"], "more often than after every round is not possible"


def test_a_run_that_validates_seldom_is_told_so(tiny, tmp_path):
    """Rounds 2 and 3 of training are validated, with 0.3 and 0.2."""
    scored_run(tiny, tmp_path, growing(late=3), validate_every=2)
    (reported,) = early_notices(tmp_path)
    assert "training.validate_every is 2" in reported["text"]


@pytest.mark.parametrize(
    ("starts", "training"),
    [({"there": 2}, {}), ({}, {}), ({"late": 3}, {"select": "last"}), ({"late": 3}, {"validate_every": 0})],
    ids=["all began", "no modules", "the last is delivered", "nothing was validated"],
)
def test_nothing_is_said_where_every_module_had_its_part(tiny, tmp_path, starts, training):
    scored_run(tiny, tmp_path, growing(**starts), **training)
    assert early_notices(tmp_path) == []


def test_it_is_said_after_the_last_round_and_once_however_often_the_run_is_resumed(tiny, tmp_path):
    experiment = tiny(training={"rounds": 3, "validate_every": 1, "local_steps": 1})
    method = growing(late=3)
    for number in range(1, 8):
        transport = Scored(make_workers(experiment, tmp_path, method), SCORES)
        make_coordinator(experiment, tmp_path, transport, method=method).run(rounds=1)
        assert len(early_notices(tmp_path)) == (number >= 5)


class Watching(Staged):
    """Writes down how much optimiser state each round starts with."""

    seen: dict[tuple[str, str, int], int]

    class Site(SiteRule):
        """Looks before the first step."""

        def before_round(self) -> None:
            super().before_round()
            round_info = self.round_info
            Watching.seen[self.facts.name, round_info.stage, round_info.round] = len(self.tools.optimizer.state)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_kept_optimiser_starts_anew_with_every_stage(tiny, tmp_path, restarted):
    experiment, method = tiny(training=KEEP), Watching(MethodConfig())
    Watching.seen = {}
    for _ in range(5 if restarted else 1):
        run(experiment, tmp_path, rounds=1 if restarted else None, method=method)
    assert {(stage, round_): count > 0 for (_, stage, round_), count in Watching.seen.items()} == {
        ("pretrain", 1): False,
        ("pretrain", 2): True,
        ("train", 1): False,
        ("train", 2): True,
        ("train", 3): True,
    }


def test_pieces_equal_the_whole_across_stages(tiny, tmp_path):
    experiment, method = tiny(training=KEEP), Staged(MethodConfig())
    whole = run(experiment, tmp_path / "whole", method=method)
    for _ in range(5):
        pieces = run(experiment, tmp_path / "pieces", rounds=1, method=method)
    assert same(whole.state.weights, pieces.state.weights)


def test_a_site_refuses_to_go_back_to_an_earlier_stage(tiny, tmp_path):
    """The newest checkpoint was lost right after the stage changed: training on from a later state is no way."""
    experiment, method = tiny(training=KEEP), Staged(MethodConfig())
    run(experiment, tmp_path, rounds=3, method=method)
    (tmp_path / "checkpoints" / "round-00003.safetensors").unlink()
    (tmp_path / "checkpoints" / "round-00002.safetensors").unlink()
    # a coordinator that has lost everything asks for the first round again
    coordinator = make_coordinator(
        experiment, tmp_path, LocalTransport(make_workers(experiment, tmp_path, method)), method=method
    )
    assert coordinator.state.rounds_done == 0
    with refused("round-already-finished", RunError):
        coordinator.run(rounds=1)
