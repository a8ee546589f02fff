"""UFPS in whole runs: kills in every phase, sites that come and go, slices, lower precision; and that it learns."""

from __future__ import annotations

import multiprocessing
import signal
from typing import Any

import pytest
from dying_run import train_and_die
from federations import Meddling, make_coordinator, make_workers, run, same
from killing import Killed, deadly
from overhearing import overheard

from panorgan.config import parse_experiment
from panorgan.federation import collector
from panorgan.federation.events import read_events
from panorgan.federation.local_state import LocalState
from panorgan.federation.message import Message
from panorgan.methods.ufps import MEAN, UFPS, VARIANCE
from panorgan.methods.ufps import method as ufps_module
from panorgan.methods.ufps.sparse_masks import GLOBAL, LOCAL, SiteMasks
from panorgan.workflows.execute import train

# Rounds in all: 1, 2 pretrain; 3 exchange; 4 to 8 train, of which 6 to 8 with everything; masks are made in 6 and 8.
LONG: dict[str, Any] = {"name": "ufps", "pretrain": 0.4, "mask_every": 2, "main_teacher_dice": 0}
TRAINING: dict[str, Any] = {"rounds": 5, "validate_every": 0, "local_steps": 2, "optimizer": {"keep_state": True}}
NETWORK = {"dropout": 0.2}


def told_by_sites(folder) -> list[dict[str, Any]]:
    rounds = [event.facts for event in read_events(folder / "events.jsonl") if event.kind == "round"]
    return [{key: facts[key] for key in ("stage", "round", "sites")} for facts in rounds]


# -- kills -----------------------------------------------------------------------------------------------------------


KILLS = {
    # what is interrupted, at which call, whether it does its work before; rounds that are done by then.
    # Two sites take two steps in each round of pretrain and train.
    "a teacher half trained": (UFPS.Site, "step", 6, True, 1),
    "between pretrain and exchange": (UFPS.Server, "aggregate", 3, False, 2),
    "in the phase of weights": (UFPS.Site, "step", 10, True, 3),
    "masks made, the round not done": (SiteMasks, "refresh", 1, True, 5),
    "one site has answered with a mask": (collector, "check_answer", 11, True, 5),
    "one site has saved its masks, and not answered": (LocalState, "save", 11, True, 5),
    "masks collected, not kept": (UFPS.Server, "aggregate", 6, True, 5),
    "between two rounds with sharpness": (UFPS.Server, "broadcast", 13, False, 6),
    "at the perturbed point": (ufps_module, "ascend", 5, True, 6),
    "in the second refresh": (SiteMasks, "refresh", 6, False, 7),
}


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    """An uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    coordinator = run(tiny(method=LONG, training=TRAINING, network=NETWORK), folder)
    return coordinator, folder


def assert_like(folder, coordinator, whole) -> None:
    """Weights, sites' numbers, masks at the server; banks, masks, momentum and optimiser at the sites."""
    expected, where = whole
    assert coordinator.finished
    assert same(coordinator.state.weights, expected.state.weights)
    assert told_by_sites(folder) == told_by_sites(where)
    assert same(dict(coordinator.rule.state().tensors), dict(expected.rule.state().tensors))
    for site in ("north", "south"):
        mine, theirs = (LocalState(place / "sites" / site).load() for place in (folder, where))
        assert set(theirs.rule.tensors) == {"mask/current", "momentum"}
        assert len(theirs.rule.scalars) >= 2, "a bank"
        assert same(dict(mine.rule.tensors), dict(theirs.rule.tensors))
        assert mine.rule.scalars == theirs.rule.scalars
        assert same(mine.optimizer, theirs.optimizer)


@pytest.mark.parametrize(("holder", "name", "call", "works", "done"), KILLS.values(), ids=KILLS.keys())
def test_a_killed_run_goes_on_to_the_same_bits(tiny, tmp_path, whole, monkeypatch, holder, name, call, works, done):
    experiment = tiny(method=LONG, training=TRAINING, network=NETWORK)
    with monkeypatch.context() as patch:
        patch.setattr(holder, name, deadly(getattr(holder, name), call, works))
        with pytest.raises(Killed):
            run(experiment, tmp_path)
    assert len(told_by_sites(tmp_path)) == done
    assert_like(tmp_path, run(experiment, tmp_path), whole)


def test_one_round_per_process_gives_the_same_bits(tiny, tmp_path, whole):
    experiment = tiny(method=LONG, training=TRAINING, network=NETWORK)
    for _ in range(8):
        pieces = run(experiment, tmp_path, rounds=1)
    assert_like(tmp_path, pieces, whole)


@pytest.mark.slow
def test_a_run_killed_from_within_delivers_the_same_model_and_metrics(tiny_content, cache, tmp_path):
    """`kill -9` in the last phase, in a process of its own: model and metrics.csv byte for byte."""
    content = tiny_content(method=LONG, training={**TRAINING, "validate_every": 2}, network=NETWORK)
    train(parse_experiment(content), tmp_path / "whole", cache=cache)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["dying_run"])
    point = ("panorgan.methods.ufps.sparse_masks.SiteMasks.refresh", 2, True)
    child = context.Process(target=train_and_die, args=(content, tmp_path / "broken", cache, point))
    child.start()
    child.join(timeout=120)
    assert child.exitcode == -signal.SIGKILL, "the kill point was never reached"
    train(parse_experiment(content), tmp_path / "broken", resume=True, cache=cache)
    for path in ("model/model.safetensors", "metrics.csv"):
        assert (tmp_path / "broken" / path).read_bytes() == (tmp_path / "whole" / path).read_bytes(), path


# -- coming and going ------------------------------------------------------------------------------------------------


def test_who_misses_the_refresh_makes_its_mask_when_it_is_back(tiny, tmp_path):
    """North is away in round 6, when masks are made. In round 7 it makes one, with what the others' masks say; until
    then the server knows one mask, and nothing is disputed."""
    experiment = tiny(method=LONG, training=TRAINING)
    sent: list[tuple[str, int]] = []
    number, known = 0, []

    def listen(site: str, kind: str, answer: bytes) -> list[tuple[str, bytes]]:
        if LOCAL in Message.from_bytes(answer).tensors:
            sent.append((site, number))
        return [(site, answer)]

    transport = Meddling(make_workers(experiment, tmp_path), listen)
    coordinator = make_coordinator(experiment, tmp_path, transport)
    for number in range(1, 9):
        transport.absent = {"north"} if number == 6 else set()
        coordinator.run(rounds=1)
        disputed = coordinator.rule.broadcast("north").tensors.get(GLOBAL)
        known.append(None if disputed is None else bool(disputed.any()))
    assert sorted(sent) == [("north", 7), ("north", 8), ("south", 6), ("south", 8)]
    assert known == [None] * 5 + [False, True, True]


def test_a_site_that_joins_late_takes_part_in_everything(tiny, tmp_path):
    """South comes in round 7: it gets the teachers, makes a mask of its own at once, and has a bank to report."""
    experiment = tiny(method=LONG, training=TRAINING)
    coordinator, sites = overheard(experiment, tmp_path, joins_at={"south": 7})
    coordinator.run()
    first, second = sites["south"].sent
    weights = set(coordinator.state.weights)
    assert [set(message.tensors) for message in (first, second)] == [{*weights, LOCAL}] * 2
    assert {MEAN, VARIANCE} <= first.scalars.keys()
    assert {key.split("/")[1] for key in sites["south"].received[0].tensors if key.startswith("teacher/")} == {"north"}
    assert set(coordinator.rule.masks.state()) == {f"{LOCAL}/north", f"{LOCAL}/south"}


# -- whole runs ------------------------------------------------------------------------------------------------------


def test_on_slices(tiny, tmp_path):
    sampling = {"patch_size": [16, 16, 1], "batch_size": 4}
    training = {**TRAINING, "rounds": 3, "sampling": sampling}
    experiment = tiny(method=LONG, training=training, network={"dimensions": 2})
    result = train(experiment, tmp_path / "run")
    assert {row["organ"] for row in result.scores} == set(experiment.vocabulary)


def test_lower_precision(tiny, tmp_path):
    """Two runs of the same patches: losses agree but for rounding, and are not the same."""
    losses = []
    for precision in ("float32", "bfloat16"):
        training = {**TRAINING, "rounds": 3, "precision": precision}
        run(tiny(method=LONG, training=training), tmp_path / precision)
        rounds = told_by_sites(tmp_path / precision)
        losses.append([n["loss"] for facts in rounds for n in facts["sites"].values() if "loss" in n])
    exact, rough = losses
    assert rough == pytest.approx(exact, rel=0.1)
    assert rough != exact


@pytest.mark.slow
def test_it_learns(tiny, tmp_path):
    training = {"rounds": 12, "local_steps": 6, "validate_every": 4, "optimizer": {"learning_rate": 0.02}}
    run(tiny(method={"name": "ufps"}, training=training), tmp_path)
    rounds = [event.facts for event in read_events(tmp_path / "events.jsonl") if event.kind == "round"]
    rounds = [facts for facts in rounds if facts["stage"] == "train"]
    losses = [sum(numbers["loss"] for numbers in facts["sites"].values()) for facts in rounds]
    assert losses[-1] < 0.7 * losses[0]
    assert rounds[-1]["validation"]["north"]["liver"] > 0.4
