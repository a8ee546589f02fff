"""The site worker: private parts, state that comes and goes, training that diverges, what it holds on to."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from federations import make_coordinator, make_workers, run, same
from refusing import refused

from panorgan.errors import RunError
from panorgan.federation import local_state
from panorgan.federation.events import Event
from panorgan.federation.settings import Patience
from panorgan.federation.transports.local import LocalTransport
from panorgan.methods.base import Federation, Method, MethodConfig, Payload, ServerRule, SiteRule
from panorgan.preparation.batch import Batch

QUICK = {"rounds": 3, "validate_every": 0, "local_steps": 1}


class PrivateHead(Method):
    """The head never travels to the site: it starts from the site's own first weights."""

    name = "private_head"

    class Site(SiteRule):
        """Takes over everything but the head, and keeps the head for itself."""

        def before_round(self) -> None:
            shared = {k: v for k, v in self.received.tensors.items() if not k.startswith("head.")}
            self.model.load_state_dict(shared, strict=False)

        def state(self) -> Payload:
            return Payload({k: v for k, v in self.model.state_dict().items() if k.startswith("head.")})

        def load_state(self, state: Payload) -> None:
            self.model.load_state_dict(dict(state.tensors), strict=False)


def test_private_parts_start_from_the_seed_alone(tiny, tmp_path):
    experiment, method = tiny(training=QUICK), PrivateHead(MethodConfig())
    outcomes = []
    for chance in (1, 2):
        torch.manual_seed(chance)
        before = torch.random.get_rng_state()
        outcomes.append(run(experiment, tmp_path / f"{chance}", method=method).state.weights)
        assert torch.equal(torch.random.get_rng_state(), before), "the caller's random numbers were touched"
    assert same(*outcomes)


def test_private_parts_survive_restarts(tiny, tmp_path):
    experiment, method = tiny(training=QUICK), PrivateHead(MethodConfig())
    whole = run(experiment, tmp_path / "whole", method=method)
    for _ in range(3):
        pieces = run(experiment, tmp_path / "pieces", rounds=1, method=method)
    assert same(whole.state.weights, pieces.state.weights)


class Diverging(Method):
    """Site north's loss is NaN in round 2."""

    name = "diverging"

    class Site(SiteRule):
        """Diverges once."""

        def loss(self, batch: Batch) -> torch.Tensor:
            broken = self.facts.name == "north" and self.round_info.round == 2
            return super().loss(batch) * (float("nan") if broken else 1.0)


@pytest.mark.parametrize("keep_state", [False, True])
def test_a_site_that_diverges_is_refused_and_recovers(tiny, tmp_path, keep_state):
    """Its answer is refused by name, the round goes on, and the next round starts from its last good state."""
    optimizer = {"learning_rate": 0.01, "keep_state": keep_state}
    experiment, method = tiny(training={**QUICK, "optimizer": optimizer}), Diverging(MethodConfig())
    heard: list[Event] = []
    workers = make_workers(experiment, tmp_path, method)
    coordinator = make_coordinator(experiment, tmp_path, LocalTransport(workers), heard, method)
    coordinator.run()
    refused = [(event.facts["number"], event.facts["site"]) for event in heard if event.kind == "refused"]
    assert refused == [(2, "north")]
    trained = [sorted(event.facts["sites"]) for event in heard if event.kind == "round"]
    assert trained == [["north", "south"], ["south"], ["north", "south"]]
    assert all(torch.isfinite(value).all() for value in coordinator.state.weights.values())


class DivergingInPrivate(Method):
    """Sends numbers alone, and trains on from a state of its own; something of north is not finite in round 2."""

    name = "diverging_in_private"
    what: ClassVar[str]

    class Site(SiteRule):
        """Its state counts the rounds."""

        rounds = 0.0

        def before_round(self) -> None:
            self.broken = self.facts.name == "north" and self.round_info.round == 2
            self.rounds += 1

        def step(self, batch: Batch) -> dict[str, torch.Tensor]:
            nan = torch.tensor(float("nan"))
            reported = {"loss": torch.tensor(0.5), "other": torch.tensor(1.0)}
            return {**reported, DivergingInPrivate.what: nan} if self.broken else reported

        def update(self) -> Payload:
            return Payload(scalars={"rounds": self.rounds})

        def state(self) -> Payload:
            broken = self.broken and DivergingInPrivate.what == "state"
            return Payload({"rounds": torch.tensor([float("nan") if broken else self.rounds])})

        def load_state(self, state: Payload) -> None:
            self.rounds = state.tensors["rounds"].item()

    class Server(ServerRule):
        def expects(self, site: str) -> dict[str, torch.Tensor]:
            return {}


@pytest.mark.parametrize(
    ("what", "counted"),
    [("state", [1.0, 2.0]), ("loss", [1.0, 2.0]), ("other", [1.0, 2.0, 3.0])],
)
@pytest.mark.parametrize("waits", [False, True])
def test_what_diverges_without_being_sent_is_refused_too(tiny, tmp_path, what, counted, waits):
    """North counts only rounds that were good; a number besides the loss is left out, as ever. No site waits for it."""
    experiment, method = tiny(training=QUICK), DivergingInPrivate(MethodConfig())
    DivergingInPrivate.what = what
    heard: list[Event] = []
    transport = LocalTransport(make_workers(experiment, tmp_path, method))
    patience = Patience(on_missing="wait" if waits else "proceed")
    make_coordinator(experiment, tmp_path, transport, heard, method, patience=patience).run()
    refused = [(event.facts["number"], event.facts["site"]) for event in heard if event.kind == "refused"]
    assert refused == ([] if what == "other" else [(2, "north")])
    reported = [event.facts["sites"] for event in heard if event.kind == "round"]
    assert [numbers["north"]["rounds"] for numbers in reported if "north" in numbers] == counted
    assert [numbers["south"]["rounds"] for numbers in reported] == [1.0, 2.0, 3.0]
    assert not [event for event in heard if event.kind in ("missing", "failed")]


class Forgetting(Method):
    """Has private state in round 1 only."""

    name = "forgetting"

    class Site(SiteRule):
        """Counts what it was given back."""

        def state(self) -> Payload:
            return Payload(scalars={"kept": 1.0}) if self.round_info.round == 1 else Payload()

        def load_state(self, state: Payload) -> None:
            Forgetting.loaded.append((self.round_info.round, dict(state.scalars)))

    loaded: list[tuple[int, dict[str, float]]]


def test_a_state_that_was_emptied_does_not_come_back(tiny, tmp_path):
    experiment, method = tiny(training=QUICK), Forgetting(MethodConfig())
    Forgetting.loaded = []
    run(experiment, tmp_path, rounds=2, method=method)
    run(experiment, tmp_path, rounds=1, method=method)
    assert [numbers for _, numbers in Forgetting.loaded] == [{}, {}]  # two sites, restarted before round 3


def test_a_site_holds_on_to_nothing_it_does_not_need_between_rounds(tiny, tmp_path):
    experiment = tiny(training={**QUICK, "optimizer": {"keep_state": False}})
    workers = make_workers(experiment, tmp_path)
    make_coordinator(experiment, tmp_path, LocalTransport(workers)).run()
    for worker in workers.values():
        rule = worker._rule
        assert not rule.received.tensors
        assert not rule.tools.optimizer.state
        assert all(parameter.grad is None for parameter in rule.model.parameters())


def test_the_answer_reaches_the_disk_before_the_state_that_stands_for_it(tiny, tmp_path, monkeypatch):
    """After a power cut a state without its answer could not be repaired."""
    written: list[tuple[str, bool]] = []
    original = local_state.write_atomically

    def watched(path, content, durable=False):
        written.append((path.name, durable))
        original(path, content, durable)

    monkeypatch.setattr(local_state, "write_atomically", watched)
    run(tiny(training={**QUICK, "optimizer": {"keep_state": True}}), tmp_path, rounds=1)
    assert written == [("answer.safetensors", True), ("state.safetensors", True)] * 2


def test_a_damaged_state_is_named_with_its_folder(tiny, tmp_path):
    experiment = tiny(training={**QUICK, "optimizer": {"keep_state": True}})
    run(experiment, tmp_path, rounds=1)
    path = tmp_path / "sites" / "north" / "state.safetensors"
    path.write_bytes(path.read_bytes()[:50])
    with refused("state-unreadable", RunError) as caught:
        run(experiment, tmp_path, rounds=1)
    assert str(path) in caught.value.where
    assert caught.value.fix


def test_autocast_may_be_entered_within_itself(tiny, tmp_path):
    """A teacher's prediction inside the loss, say; afterwards nothing is left switched on."""
    worker = make_workers(tiny(training={"precision": "bfloat16"}), tmp_path)["north"]
    federation = Federation(worker.setup.vocabulary, {"north": worker.facts()})
    tools = worker._ready_rule(federation).tools
    with tools.autocast(), tools.autocast():
        assert torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_private_state_returns_to_the_device_it_came_from(tiny, tmp_path):
    """Nothing a rule kept on the GPU may come back on the CPU after a restart."""
    experiment = tiny(training=QUICK)
    devices: list[str] = []

    class OnDevice(PrivateHead):
        class Site(PrivateHead.Site):
            def load_state(self, state: Payload) -> None:
                devices.extend(value.device.type for value in state.tensors.values())
                super().load_state(state)

    method = OnDevice(MethodConfig())
    for _ in range(2):
        workers = make_workers(experiment, tmp_path, method)
        for worker in workers.values():
            worker.setup = replace(worker.setup, device=torch.device("cuda"))
        make_coordinator(experiment, tmp_path, LocalTransport(workers), method=method).run(rounds=1)
    assert set(devices) == {"cuda"}
