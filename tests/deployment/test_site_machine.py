"""A site's machine against a coordinator: lost state, changed data, too many questions, and the delivered model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from federations import make_coordinator
from hospitals import make_hospitals
from refusing import refused

pytest.importorskip("nvflare", reason="the network extra is not installed")

from panorgan.deployment.approval import record
from panorgan.deployment.folders import SiteKit
from panorgan.deployment.site_machine import SiteMachine
from panorgan.federation.audit import read_log
from panorgan.federation.coordinator import Coordinator, SitesMissingError
from panorgan.federation.events import read_events
from panorgan.federation.message import Message
from panorgan.federation.settings import Patience
from panorgan.federation.tasks import Task
from panorgan.federation.tensor_store import RunTensorStores
from panorgan.federation.transports.local import LocalTransport
from panorgan.methods.protocol import RoundInfo
from panorgan.preparation.plan import Plan
from panorgan.workflows.model_bundle import deliver
from panorgan.workflows.run import Run

BIAS = "head.conv.conv.bias"


class Hospitals:
    """Sites' machines, a coordinator of one run after the other, and everything on disk."""

    def __init__(self, experiment: Any, folder: Path) -> None:
        self.experiment, self.folder = experiment, folder
        self.kits = make_hospitals(folder / "sites", experiment)
        self.machines: dict[str, SiteMachine] = {}
        self.start()

    @property
    def north(self) -> SiteKit:
        return self.kits["north"]

    def start(self) -> None:
        """Start all machines, again if they run: as the engine does for every segment."""
        self.stop()
        self.machines = {name: SiteMachine(kit, name) for name, kit in self.kits.items()}

    def stop(self) -> None:
        for machine in self.machines.values():
            machine._lock.close()

    def coordinator(self, run: str = "run") -> Coordinator:
        """Waits for everybody, as between hospitals."""
        made = make_coordinator(
            self.experiment,
            self.folder / run,
            LocalTransport(self.machines),
            plan=self.experiment.plan,
            patience=Patience(on_missing="wait"),
        )
        made.setup = replace(made.setup, run=run)
        return made

    def codes(self, run: str = "run") -> list[tuple[str, str]]:
        """Which site has reported which failure."""
        events = read_events(self.folder / run / "events.jsonl")
        return [(event.facts["site"], event.facts["code"]) for event in events if event.kind == "failed"]

    def card(self, coordinator: Coordinator) -> dict[str, Any]:
        assert coordinator.state.plan is not None
        run = Run(self.folder / coordinator.setup.run)
        return deliver(run, self.experiment.agreement(), Plan(**coordinator.state.plan), coordinator)


def made(tiny, folder: Path, **training: Any) -> Hospitals:
    quick = {"rounds": 2, "validate_every": 0, "local_steps": 1, "optimizer": {"keep_state": True}, **training}
    return Hospitals(tiny(plan={"spacing_mm": "pooled"}, training=quick), folder)


@pytest.fixture
def hospitals(tiny, tmp_path) -> Iterator[Callable[..., Hospitals]]:
    all_: list[Hospitals] = []

    def make(**training: Any) -> Hospitals:
        all_.append(made(tiny, tmp_path, **training))
        return all_[-1]

    yield make
    for one in all_:
        one.stop()


def test_a_hospital_that_lost_its_state_says_so_and_may_accept_the_loss(hospitals):
    all_ = hospitals()
    all_.coordinator().run(rounds=1)
    all_.stop()
    shutil.rmtree(all_.north.path / "state")
    all_.start()
    with refused("no-answer", SitesMissingError):
        all_.coordinator().run()
    assert all_.codes() == [("north", "lost-state")]
    assert "accept-lost-state" in all_.north.log.read_text()

    (all_.north.path / "state" / "accept-lost-state").touch()
    coordinator = all_.coordinator()
    coordinator.run()
    assert coordinator.finished


@pytest.mark.parametrize("allowed", [(), ("volume/liver",), ("volume/*",)], ids=["none", "one", "all"])
def test_a_policy_decides_about_volumes_and_the_hospital_takes_part_in_any_case(hospitals, allowed):
    """North annotates the liver; a policy that names no volumes is one of before they were sent."""
    all_ = hospitals(rounds=1, validate_every=1)
    policy = yaml.safe_load(all_.north.egress_policy.read_text())
    policy["numbers"] = [*(name for name in policy["numbers"] if name != "volume/*"), *allowed]
    all_.north.egress_policy.write_text(yaml.safe_dump(policy))
    record(all_.north)
    coordinator = all_.coordinator()
    coordinator.run()
    assert coordinator.finished
    assert set(coordinator.state.scores) == {"north", "south"}
    (facts,) = [e.facts for e in read_events(all_.folder / "run" / "events.jsonl") if e.kind == "round"]
    assert set(facts["validation"]["north"]) == {"liver"}
    assert set(facts["volume"].get("north", {})) == ({"liver"} if allowed else set())
    assert "liver" not in facts["volume"]["south"]
    _, entries = read_log(all_.north.audit_log)
    sent = [entry["numbers"] for entry in entries if entry.get("task") == "evaluate"]
    assert [{"volume/liver"} & set(numbers) for numbers in sent] == [{"volume/liver"} if allowed else set()]
    assert ("kept here" in all_.north.log.read_text()) != bool(allowed)


def a_label(kit: SiteKit) -> Path:
    return sorted((kit.path / "data").rglob("*label*/*.nii.gz"))[0]


def add_a_patient(kit: SiteKit) -> Callable[[], None]:
    """One of the other hospital's patients turns up here, under a name of its own."""
    added = []
    for path in sorted((kit.path / "data").rglob("*.nii.gz")):
        first = sorted(path.parent.glob("*.nii.gz"))[0]
        if path == first:
            added.append(Path(shutil.copy(path, path.with_name("zz-" + path.name))))
    content = kit.path / "data" / "dataset.json"
    before = content.read_text() if content.is_file() else None

    def undo() -> None:
        for path in added:
            path.unlink()
        if before is not None:
            content.write_text(before)

    return undo


def change_a_label(kit: SiteKit) -> Callable[[], None]:
    path, backup = a_label(kit), kit.path / "backup"
    shutil.copy2(path, backup)
    path.write_bytes(sorted(path.parent.glob("*.nii.gz"))[1].read_bytes())
    return lambda: shutil.copy2(backup, path) and None


def lose_a_scan(kit: SiteKit) -> Callable[[], None]:
    path = sorted((kit.path / "data").rglob("*image*/*.nii.gz"))[0]
    path.rename(kit.path / "away")
    return lambda: (kit.path / "away").rename(path) and None


@pytest.mark.parametrize(
    ("change", "restart", "code"),
    [
        (change_a_label, False, "data-changed"),
        (change_a_label, True, "data-changed"),
        (lose_a_scan, False, "data"),
        (add_a_patient, True, "data-changed"),  # data that was not read yet changes nothing within a segment
    ],
)
def test_data_that_changes_during_a_run_is_noticed_and_can_be_put_back(hospitals, change, restart, code):
    all_ = hospitals()
    all_.coordinator().run(rounds=1)
    undo = change(all_.north)
    if restart:
        all_.start()
    with refused("no-answer", SitesMissingError):
        all_.coordinator().run()
    assert all_.codes() == [("north", code)]

    undo()
    all_.start()
    coordinator = all_.coordinator()
    coordinator.run()
    assert coordinator.finished, "nothing is lost"


def ask(machine: SiteMachine, task: Task, weights: dict[str, torch.Tensor]) -> Message:
    return Message.from_bytes(machine.handle(Message(weights, meta=task.to_meta()).to_bytes()))


def test_questions_beyond_the_agreement_are_refused_and_counted_in_the_log(hospitals):
    all_ = hospitals(validate_every=1)
    coordinator = all_.coordinator()
    coordinator.run(rounds=1)
    task, weights = coordinator._task("evaluate", RoundInfo("train", 1, 2)), coordinator.state.weights
    codes = []
    for number in range(1, 6):
        answer = ask(all_.machines["north"], task, {**weights, BIAS: weights[BIAS] + number})
        codes.append(answer.meta.get("failed"))
    assert codes == [None, None, *["too-many-questions"] * 3], "one was the coordinator's own"
    report, entries = read_log(all_.north.audit_log)
    assert report.ok
    declined = [entry for entry in entries if entry["kind"] == "refused"]
    assert [(entry["direction"], entry["task"], entry["round"]) for entry in declined] == [("in", "evaluate", 1)] * 3
    assert [entry["code"] for entry in declined] == ["too-many-questions"] * 3
    assert [(entry["answered"], entry["agreed"]) for entry in declined] == [(3, 2)] * 3
    assert len([entry for entry in entries if entry["kind"] == "failed"]) == 3


def test_a_round_that_was_not_agreed_is_refused_with_a_code_and_logged(hospitals):
    all_ = hospitals()
    coordinator = all_.coordinator()
    task, weights = coordinator._task("train", RoundInfo("train", 1, -1)), coordinator.state.weights
    assert ask(all_.machines["north"], task, weights).meta["failed"] == "not-agreed"
    (declined,) = [entry for entry in read_log(all_.north.audit_log)[1] if entry["kind"] == "refused"]
    assert (declined["direction"], declined["task"], declined["code"]) == ("in", "train", "no-such-round")


# -- the delivered model -------------------------------------------------------------------------------------------


def delivered(all_: Hospitals) -> tuple[Coordinator, dict[str, Any]]:
    """A run of which every hospital has the model."""
    coordinator = all_.coordinator()
    coordinator.run()
    card = all_.card(coordinator)
    assert coordinator.deliver(card, ["north", "south"]) == ["north", "south"]
    return coordinator, card


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory) -> Iterator[tuple[Hospitals, Coordinator, dict[str, Any]]]:
    """The same to look at, for tests that change nothing."""
    all_ = made(tiny, tmp_path_factory.mktemp("finished"), rounds=1)
    yield all_, *delivered(all_)
    all_.stop()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


Change = Callable[[dict[str, torch.Tensor], dict[str, Any]], Any]
OTHERS = ["liver", "spleen", "kidney_right", "kidney_left"]
BAD: dict[str, tuple[str, Change]] = {
    "not finite": ("not-finite", lambda weights, card: weights.update({BIAS: weights[BIAS] * float("nan")})),
    "another shape": ("wrong-tensor", lambda weights, card: weights.update({BIAS: torch.zeros(99)})),
    "one key less": ("wrong-network", lambda weights, card: weights.pop(BIAS)),
    "one key more": ("wrong-network", lambda weights, card: weights.update(more=torch.zeros(1))),
    "no weights": ("wrong-network", lambda weights, card: weights.clear()),
    "other organs": ("wrong-card", lambda weights, card: card.update(organs=OTHERS)),
    "another network": ("wrong-card", lambda weights, card: card["network"].update(features=[4, 8, 16])),
    "another method": ("wrong-card", lambda weights, card: card.update(method={"name": "solo"})),
    "another patch": ("wrong-card", lambda weights, card: card["inference"].update(patch_size=[512, 512, 512])),
    "another plan": ("plan-changed", lambda weights, card: card["plan"].update(spacing_mm=[1.0, 1.0, 1.0])),
    "another run": ("wrong-card", lambda weights, card: card.update(run="another")),
    "another format": ("reserved-card-field", lambda weights, card: card.update(format=99)),
    "control characters": ("bad-card", lambda weights, card: card.update(name="\x1b[2J")),
    "much": ("bad-card", lambda weights, card: card.update(name="n" * 10**6)),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_model_replaces_nothing(finished, what):
    all_, coordinator, card = finished
    kept = contents(all_.north.model)
    weights, card = dict(coordinator.delivered_weights()[1]), json.loads(json.dumps(card))
    code, change = BAD[what]
    change(weights, card)
    task = coordinator._task("deliver", coordinator.schedule[-1], card)
    assert ask(all_.machines["north"], task, weights).meta["failed"] == "not-agreed"
    declined = [entry for entry in read_log(all_.north.audit_log)[1] if entry["kind"] == "refused"]
    assert declined[-1]["code"] == code
    assert contents(all_.north.model) == kept
    assert not all_.north.previous_model.exists()


def test_the_model_before_is_kept_and_the_same_again_changes_nothing(hospitals):
    all_ = hospitals(rounds=1)
    coordinator, card = delivered(all_)
    first = contents(all_.north.model)
    assert coordinator.deliver(card, ["north"]) == ["north"]
    assert contents(all_.north.model) == first
    assert not all_.north.previous_model.exists()

    second = all_.coordinator("second")
    second.run()
    assert second.deliver(all_.card(second), ["north"]) == ["north"]
    assert json.loads(contents(all_.north.model)["model.json"])["run"] == "second"
    assert contents(all_.north.previous_model) == first
    leftovers = [path.name for path in all_.north.path.iterdir() if path.name.startswith(".model")]
    assert not leftovers


def test_teachers_are_gone_when_the_model_has_arrived(hospitals):
    all_ = hospitals(rounds=1)
    stores = RunTensorStores(all_.north.path / "state")
    for run in ("run", "a-run-that-was-given-up"):
        stores.of(run).put("teacher/south", {"w": torch.ones(2)})
    delivered(all_)
    assert (all_.north.model / "model.safetensors").is_file()
    assert not list((all_.north.path / "state" / "vault").rglob("*.safetensors"))
