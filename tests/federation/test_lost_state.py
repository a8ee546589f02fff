"""A site that has lost its state says so, and goes on when it is back or when the loss is accepted."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from federations import THREE, Meddling, make_coordinator, make_workers, run, same
from refusing import refused

from panorgan.errors import RunError
from panorgan.federation import checkpoint
from panorgan.federation.events import read_events
from panorgan.federation.failures import code_of
from panorgan.federation.message import Message
from panorgan.federation.transports.local import LocalTransport
from panorgan.methods.base import Method, MethodConfig, SiteRule
from panorgan.preparation.batch import Batch

ACCEPT = "accept-lost-state"


def training(keep_state: bool = True, **changes):
    optimizer = {"learning_rate": 0.01, "keep_state": keep_state}
    return {"rounds": 3, "validate_every": 0, "local_steps": 1, "optimizer": optimizer, **changes}


def north(folder: Path) -> Path:
    return folder / "sites" / "north"


def refusal(call) -> RunError:
    with refused("lost-state", RunError) as caught:
        call()
    assert code_of(caught.value) == "lost-state"
    return caught.value


@pytest.mark.parametrize("keep_state", [True, False], ids=["a kept optimiser", "no state at all"])
def test_a_folder_that_was_deleted_is_missed_and_the_loss_can_be_accepted(tiny, tmp_path, keep_state):
    experiment = tiny(training=training(keep_state))
    run(experiment, tmp_path, rounds=2)
    shutil.rmtree(north(tmp_path))
    error = refusal(lambda: run(experiment, tmp_path))
    assert error.where == str(north(tmp_path))
    assert ACCEPT in error.fix

    refusal(lambda: run(experiment, tmp_path))  # to ask again changes nothing
    north(tmp_path).mkdir(exist_ok=True)
    (north(tmp_path) / ACCEPT).touch()
    assert run(experiment, tmp_path).finished
    assert not (north(tmp_path) / ACCEPT).exists(), "it was accepted once, not for ever"


class Diverging(Method):
    """Site north's loss is NaN in round 2."""

    name = "diverging"

    class Site(SiteRule):
        """Diverges once."""

        def loss(self, batch: Batch) -> torch.Tensor:
            broken = self.facts.name == "north" and self.round_info.round == 2
            return super().loss(batch) * (float("nan") if broken else 1.0)


def test_what_was_accepted_holds_until_a_round_is_saved(tiny, tmp_path):
    """North accepts its loss, and diverges in the very next round: it need not accept it again."""
    experiment, method = tiny(training=training()), Diverging(MethodConfig())
    run(experiment, tmp_path, rounds=1, method=method)
    shutil.rmtree(north(tmp_path))
    north(tmp_path).mkdir()
    (north(tmp_path) / ACCEPT).touch()
    run(experiment, tmp_path, rounds=1, method=method)
    assert (north(tmp_path) / ACCEPT).exists()
    assert run(experiment, tmp_path, method=method).finished
    assert not (north(tmp_path) / ACCEPT).exists()


def test_a_loss_while_the_site_runs_is_missed_too(tiny, tmp_path):
    """The worker still has everything in memory, but could not survive a restart."""
    experiment = tiny(training=training())
    coordinator = make_coordinator(experiment, tmp_path, LocalTransport(make_workers(experiment, tmp_path)))
    coordinator.run(rounds=1)
    shutil.rmtree(north(tmp_path))
    refusal(coordinator.run)


def test_an_older_backup_is_not_taken_for_the_newest_and_the_newest_gives_the_same_bits(tiny, tmp_path):
    experiment = tiny(training=training())
    whole = run(experiment, tmp_path / "whole")
    folder = tmp_path / "disturbed"
    for number in (1, 2):
        run(experiment, folder, rounds=1)
        shutil.copytree(north(folder), tmp_path / f"backup-{number}")
    shutil.rmtree(north(folder))
    shutil.copytree(tmp_path / "backup-1", north(folder))
    assert "round 1 of train" in refusal(lambda: run(experiment, folder)).why

    shutil.rmtree(north(folder))
    shutil.copytree(tmp_path / "backup-2", north(folder))
    assert same(run(experiment, folder).state.weights, whole.state.weights)


@pytest.mark.parametrize("damage", [lambda text: text[:40], lambda text: text.replace("test-run", "best-run")])
def test_a_damaged_record_of_the_run_is_as_bad_as_none(tiny, tmp_path, damage):
    experiment = tiny(training=training())
    run(experiment, tmp_path, rounds=1)
    path = north(tmp_path) / "run.json"
    path.write_text(damage(path.read_text()))
    assert str(path) in refusal(lambda: run(experiment, tmp_path)).why


def test_a_state_that_another_run_has_replaced_is_missed(tiny, tmp_path):
    experiment = tiny(training=training())
    workers = make_workers(experiment, tmp_path)
    first = make_coordinator(experiment, tmp_path / "first", LocalTransport(workers))
    first.run(rounds=1)
    second = make_coordinator(experiment, tmp_path / "second", LocalTransport(workers))
    second.setup = replace(second.setup, run="another-run")
    second.run(rounds=1)
    refusal(first.run)


# -- no false alarms -------------------------------------------------------------------------------------------------


def test_a_site_may_be_ahead_of_what_the_coordinator_received(tiny, tmp_path):
    """North's second answer is lost on its way: the round goes on without it, and north with the next."""
    experiment = tiny(training=training())

    def meddle(site: str, kind: str, answer: bytes):
        lost = site == "north" and Message.from_bytes(answer).meta["answers"] == "train/train/2"
        return [] if lost else [(site, answer)]

    transport = Meddling(make_workers(experiment, tmp_path), meddle)
    make_coordinator(experiment, tmp_path, transport).run()
    reported = [
        event.facts["sites"].keys() for event in read_events(tmp_path / "events.jsonl") if event.kind == "round"
    ]
    assert [("north" in sites) for sites in reported] == [True, False, True]


def test_an_answer_that_was_refused_for_its_size_alone_leaves_a_state_that_can_be_lost(tiny, tmp_path):
    """An outlier's state is saved like any other's: what is not used is not therefore unknown."""
    experiment = tiny(phantom=THREE, training=training())

    def meddle(site: str, kind: str, answer: bytes):
        if (site, kind) != ("north", "train"):
            return [(site, answer)]
        message = Message.from_bytes(answer)
        huge = {key: value + 1e6 if value.is_floating_point() else value for key, value in message.tensors.items()}
        return [(site, Message(huge, message.scalars, message.meta).to_bytes())]

    def coordinator():
        return make_coordinator(experiment, tmp_path, Meddling(make_workers(experiment, tmp_path), meddle))

    coordinator().run(rounds=1)
    coordinator().run(rounds=1)  # refused twice, asked for a third time: nothing is lost
    refused = [event.facts["site"] for event in read_events(tmp_path / "events.jsonl") if event.kind == "refused"]
    assert refused == ["north", "north"]
    shutil.rmtree(north(tmp_path))
    refusal(coordinator().run)


def test_a_checkpoint_of_an_older_version_goes_on(tiny, tmp_path, monkeypatch):
    """It does not say who answered, and the sites' folders hold no record of the run."""
    experiment = tiny(training=training())
    whole = run(experiment, tmp_path / "whole")
    folder = tmp_path / "old"
    with monkeypatch.context() as older:
        older.setattr(checkpoint, "_PLAIN", tuple(name for name in checkpoint._PLAIN if name != "answered"))
        run(experiment, folder, rounds=1)
    for record in folder.rglob("run.json"):
        record.unlink()
    assert same(run(experiment, folder).state.weights, whole.state.weights)


def test_a_site_without_state_may_be_asked_for_an_older_round(tiny, tmp_path):
    """A coordinator that lost two checkpoints asks anew; where nothing is carried over, nothing is wrong with that."""
    experiment = tiny(training=training(keep_state=False))
    whole = run(experiment, tmp_path / "whole")
    folder = tmp_path / "back"
    for number in range(3):
        run(experiment, folder, rounds=1)
        if number == 0:
            shutil.copytree(folder / "checkpoints", tmp_path / "kept")
    shutil.rmtree(folder / "checkpoints")
    shutil.copytree(tmp_path / "kept", folder / "checkpoints")
    assert same(run(experiment, folder).state.weights, whole.state.weights)
