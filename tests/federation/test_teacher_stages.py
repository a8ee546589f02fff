"""Teachers in a whole run: trained, exchanged, asked once, cut with the label; and what a kill does to that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from federations import Tampering, make_coordinator, make_workers, run, same
from killing import Killed

from panorgan.federation import egress as egress_module
from panorgan.federation.checkpoint import Checkpoints
from panorgan.federation.egress import Egress, default_policy, image_shapes, weights_of_site
from panorgan.federation.events import Event
from panorgan.federation.tensor_store import DiskTensorStore
from panorgan.federation.transports.local import LocalTransport
from panorgan.methods.base import Method, MethodConfig, Payload, ServerRule, SiteRule, Stage
from panorgan.methods.protocol import Federation
from panorgan.methods.shared.teachers import ServerTeachers, SiteTeachers, as_teacher

TRAINING = {"rounds": 2, "validate_every": 0, "local_steps": 2}


class Taught(Method):
    """One round of its own, an exchange, then the usual loss plus a pull towards the teachers."""

    name = "taught"
    tensors: ClassVar[Mapping[str, str]] = {"teacher/*": "the model of this site alone"}
    cached = True
    seen: ClassVar[list[tuple[str, tuple[str, ...], list[list[bool]]]]] = []
    pulls: ClassVar[list[float]] = []

    def stages(self, rounds):
        quiet = {"validate": False}
        return (
            Stage("pretrain", 1, **quiet, local_steps=1),
            Stage("exchange", 1, **quiet, local_steps=0),
            Stage("train", rounds),
        )

    class Site(SiteRule):
        def __init__(self, *arguments) -> None:
            super().__init__(*arguments)
            owners = {site: self.federation.organs_of(site) for site in self.federation.sites}
            self.teachers = SiteTeachers(self.tools, self.tools.network_of, owners)

        def before_round(self) -> None:
            self.received = self.teachers.receive(self.received)
            super().before_round()

        def teacher_predictions(self):
            lacking = [organ for organ in self.teachers.known() if organ not in self.own_organs]
            return self.teachers.predictions(lambda case: tuple(lacking), Taught.cached) if lacking else None

        def loss(self, batch):
            loss = super().loss(batch)
            if batch.soft_targets is not None:
                Taught.seen.append((self.facts.name, batch.soft_target_organs, batch.soft_targets_valid.tolist()))
                logits = self.model(batch.image)[:, 1:]
                channels = [self.model.vocabulary.index(name) for name in batch.soft_target_organs]
                pull = (logits[:, channels].sigmoid() - batch.soft_targets).square().mean()
                Taught.pulls.append(float(pull.detach()))
                loss = loss + pull
            return loss

        def after_round(self) -> None:
            if self.round_info.stage == "pretrain":
                self.teachers.keep(self.facts.name, self.model.state_dict())

        def update(self):
            if self.round_info.stage == "pretrain":
                return Payload(as_teacher(self.model.state_dict()))
            return super().update() if self.round_info.stage == "train" else Payload(scalars={"cases": 1.0})

    class Server(ServerRule):
        def __init__(self, *arguments) -> None:
            super().__init__(*arguments)
            self.teachers = ServerTeachers(self.tensor_store)

        def broadcast(self, site):
            return Payload({**self.weights, **self.teachers.for_site(site)}, self.teachers.request_flags(site))

        def expects(self, site):
            return {"pretrain": self.teachers.expects(self.weights), "train": self.weights}.get(
                self.round_info.stage, {}
            )

        def aggregate(self, updates) -> None:
            self.teachers.mark_delivered(updates.sites)
            self.teachers.collect(updates)
            super().aggregate(updates)

        def state(self):
            return Payload(scalars=self.teachers.numbers())

        def load_state(self, state) -> None:
            self.teachers.load(state.scalars)


@pytest.fixture
def method() -> Taught:
    Taught.seen, Taught.pulls, Taught.cached = [], [], True
    return Taught(MethodConfig())


@pytest.fixture
def experiment(tiny, tmp_path, monkeypatch):
    """With a cache of its own, so that nothing is predicted before the test begins."""
    monkeypatch.setenv("PANORGAN_CACHE", str(tmp_path / "cache"))
    return tiny(training=TRAINING)


def test_teachers_reach_the_loss_of_the_others(experiment, tmp_path, method, asked):
    coordinator = run(experiment, tmp_path, method=method)
    cases = {site: facts.train_cases for site, facts in coordinator.federation.sites.items()}
    assert len(asked) == sum(cases.values()), "every training scan once, by the one teacher of the other site"
    seen = {(site, names) for site, names, _ in Taught.seen}
    assert seen == {("north", ("kidney_left", "kidney_right", "spleen")), ("south", ("liver",))}
    assert all(all(row) for _, _, known in Taught.seen for row in known)
    assert len(Taught.seen) == 2 * 2 * 2  # sites × rounds × steps
    assert coordinator.tensor_store.names() == ("teacher/north", "teacher/south")
    assert coordinator.rule.teachers.up_to_date == ("north", "south")


def test_a_stage_without_steps_is_a_round_like_any_other(experiment, tmp_path, method):
    heard: list[Event] = []
    transport = LocalTransport(make_workers(experiment, tmp_path, method))
    make_coordinator(experiment, tmp_path, transport, heard, method).run()
    rounds = [event.facts for event in heard if event.kind == "round"]
    assert [facts["stage"] for facts in rounds] == ["pretrain", "exchange", "train", "train"]
    assert rounds[1]["sites"] == {"north": {"cases": 1.0}, "south": {"cases": 1.0}}
    assert all("loss" in rounds[0]["sites"][site] for site in ("north", "south"))


def test_teachers_are_sent_once(experiment, tmp_path, method):
    heard: list[Event] = []
    transport = LocalTransport(make_workers(experiment, tmp_path, method))
    make_coordinator(experiment, tmp_path, transport, heard, method).run()
    pretrain, exchange, *train = [event.facts["bytes_sent"] for event in heard if event.kind == "round"]
    assert exchange > 1.8 * pretrain
    assert all(sent < 1.1 * pretrain for sent in train)


def test_pieces_equal_the_whole_with_the_stored_volumes_and_without(experiment, tmp_path, method, asked):
    whole = run(experiment, tmp_path / "whole", method=method)
    predicted = len(asked)
    for _ in range(4):
        pieces = run(experiment, tmp_path / "pieces", rounds=1, method=method)
    assert same(whole.state.weights, pieces.state.weights)
    assert len(asked) == predicted, "the same teachers again: what is stored beside the cases is found"


def test_stored_and_fresh_predictions_give_the_same_loss_within_quantisation(experiment, tmp_path, method):
    """With augmentation. |(s − q)² − (s − p)²| = |p − q| · |2 s − p − q| ≤ 2/510, since all lie in [0, 1]."""
    assert experiment.training.augment.rotation_degrees > 0
    run(experiment, tmp_path / "stored", rounds=3, method=method)
    stored, Taught.pulls, Taught.cached = Taught.pulls, [], False
    run(experiment, tmp_path / "fresh", rounds=3, method=method)
    fresh = Taught.pulls
    assert len(stored) == len(fresh) == 4  # two sites, two steps; the second step starts from other weights already
    for place in (0, 2):
        assert 0 < abs(stored[place] - fresh[place]) <= 2 / 510


def test_a_kill_between_the_vault_and_the_checkpoint_does_no_harm(experiment, tmp_path, method, monkeypatch):
    whole = run(experiment, tmp_path / "whole", method=method)

    def dies(self, state):
        if state.rounds_done == 1:
            raise Killed
        saves(self, state)

    saves = Checkpoints.save
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", dies)
        with pytest.raises(Killed):
            run(experiment, tmp_path / "killed", method=method)
    left = DiskTensorStore(tmp_path / "killed" / "vault")
    assert left.names() == ("teacher/north", "teacher/south")
    before = {name: left.get(name) for name in left.names()}
    killed = run(experiment, tmp_path / "killed", method=method)
    assert same(whole.state.weights, killed.state.weights)
    assert all(same(before[name], killed.tensor_store.get(name)) for name in before), "the same bytes again"


def test_who_missed_the_exchange_gets_the_teachers_later(experiment, tmp_path, method):
    workers = make_workers(experiment, tmp_path, method)
    transport = Tampering(workers)
    coordinator = make_coordinator(experiment, tmp_path, transport, method=method)
    coordinator.run(rounds=1)
    transport.drop = ["north"]
    coordinator.run(rounds=1)
    assert coordinator.rule.teachers.up_to_date == ("south",)
    transport.drop = []
    coordinator.run()
    assert coordinator.rule.teachers.up_to_date == ("north", "south")
    assert {site for site, _, _ in Taught.seen} == {"north", "south"}


def test_a_new_run_does_not_see_the_teachers_of_another(experiment, tmp_path, method):
    """Even in the same folder of the site, and in the same process."""
    workers = make_workers(experiment, tmp_path, method)
    seen = {}
    for name in ("first", "second"):
        coordinator = make_coordinator(experiment, tmp_path / name, LocalTransport(workers), method=method)
        coordinator.setup = replace(coordinator.setup, run=name)
        coordinator.run(rounds=1)
        seen[name] = workers["north"]._rule.teachers.known()
        coordinator.run(rounds=1)
        assert workers["north"]._rule.teachers.known() == ("kidney_left", "kidney_right", "liver", "spleen")
    assert seen == {"first": ("liver",), "second": ("liver",)}, "its own alone"
    folders = sorted(path.name.rsplit("-", 1)[0] for path in (tmp_path / "sites" / "north" / "vault").iterdir())
    assert folders == ["second"], "the older run's are gone, like its state"


def test_nothing_of_a_teacher_stays_on_the_device(experiment, tmp_path, method):
    workers = make_workers(experiment, tmp_path, method)
    make_coordinator(experiment, tmp_path, LocalTransport(workers), method=method).run(rounds=3)
    rule = workers["north"]._rule
    assert not rule.received.tensors
    alive = [value for value in vars(rule).values() if isinstance(value, torch.nn.Module)]
    assert alive == [rule.model]


def test_a_declared_teacher_passes_the_default_policy(experiment, tmp_path, method, monkeypatch):
    """Every tensor of it, among them those with more dimensions than an extra tensor may have."""
    monkeypatch.setattr(egress_module, "find_method", lambda name: Taught)
    worker = make_workers(experiment, tmp_path, method)["north"]
    setup, data = worker.setup, worker.data
    federation = Federation(setup.vocabulary, {"north": worker.facts()})
    weights = weights_of_site(method, setup.network, federation, "north")
    policy = default_policy("taught")
    shapes = image_shapes((*data.train, *data.validation), setup.training.sampling.patch_size)
    egress = Egress(policy, weights, None, shapes)
    assert max(value.dim() for value in weights.values()) == 5
    for key, value in weights.items():
        assert not list(egress._extra(f"teacher/{key}", value, key))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("cached", [True, False])
def test_teachers_on_a_gpu(experiment, tmp_path, method, asked, cached):
    """Pinned, copied and moved there; networks that only predict are let go of."""
    Taught.cached = cached
    workers = make_workers(experiment, tmp_path, method)
    for worker in workers.values():
        worker.setup = replace(worker.setup, device=torch.device("cuda"))
    make_coordinator(experiment, tmp_path, LocalTransport(workers), method=method).run()
    assert len(Taught.seen) == 8
    cases = sum(worker.facts().train_cases for worker in workers.values())
    assert len(asked) == (cases if cached else 8 * experiment.training.sampling.batch_size)
