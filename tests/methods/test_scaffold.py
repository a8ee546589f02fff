"""SCAFFOLD: control variates by hand, what keeps them sound when answers are lost or sites join, and reductions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from federations import Tampering, make_coordinator, make_workers, run, same
from overhearing import overheard, spooled
from torch import nn

from panorgan.anatomy import Vocabulary
from panorgan.federation.message import Message
from panorgan.methods.base import Payload, SiteTools
from panorgan.methods.protocol import Federation, RoundInfo, SiteInfo
from panorgan.methods.scaffold import Scaffold, ScaffoldConfig
from panorgan.networks.organ_parts import group_of_key

RATE, STEPS = 0.1, 2
TRAINING = {"rounds": 3, "validate_every": 0, "local_steps": 2}
PLAIN_STEPS = {"name": "sgd", "momentum": 0.0, "weight_decay": 0.0, "schedule": "constant", "clip_norm": None}


# -- two sites that pull at one number -------------------------------------------------------------------------------


class Number(nn.Module):
    """One weight, and one that no site's loss touches."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))
        self.untouched = nn.Parameter(torch.zeros(1))


class PullingSite(Scaffold.Site):
    """½(w − b)²: the gradient is w − b."""

    def loss(self, batch):
        return 0.5 * (self.model.w - batch).square().sum()


class Toy:
    """A federation of `PullingSite`s; `targets` are their b. The mean is plain, as in the paper."""

    def __init__(self, folder: Path, targets: dict[str, float], cases: Sequence[int] = (), **config: str) -> None:
        self.folder, self.targets, self.config = (
            folder,
            targets,
            ScaffoldConfig(unlabelled="marginal", server_step=1, **config),
        )
        counts = dict(zip(targets, cases or [1] * len(targets), strict=True))
        self.facts = {name: SiteInfo(name, counts[name], {"liver": 1}) for name in targets}
        self.server = self._server({"w": torch.tensor([1.0]), "untouched": torch.tensor([0.0])}, list(targets))
        self.sites: dict[str, PullingSite] = {}
        self.round = 0

    def _server(self, weights, sites) -> Scaffold.Server:
        federation = Federation(Vocabulary(["liver"]), {name: self.facts[name] for name in sites})
        return Scaffold.Server(self.config, federation, weights)

    def restart_server(self, sites: list[str]) -> None:
        """As a coordinator does when a site joins: a new rule with the old state."""
        state, weights = self.server.state(), self.server.weights
        self.server = self._server(weights, sites)
        self.server.load_state(state)

    def site(self, name: str) -> PullingSite:
        if name not in self.sites:
            model = Number()
            tools = SiteTools(model, torch.optim.SGD(model.parameters(), RATE))
            self.sites[name] = PullingSite(self.config, self.facts[name], self.server.federation, tools)
        return self.sites[name]

    def play(self, lost: Sequence[str] = ()) -> dict[str, dict[str, torch.Tensor]]:
        """One round; answers of `lost` sites never arrive."""
        self.round += 1
        round_info = self.server.round_info = RoundInfo("train", self.round, 9)
        answers = {}
        for name in self.server.federation.sites:
            site = self.site(name)
            site.round_info, site.received = round_info, self.server.broadcast(name)
            site.before_round()
            for _ in range(STEPS):
                site.step(torch.tensor(self.targets[name]))
            site.after_round()
            answers[name] = {key: value.detach().clone() for key, value in site.update().tensors.items()}
        arrived = {name: tensors for name, tensors in answers.items() if name not in lost}
        self.server.aggregate(spooled(self.folder / str(self.round), arrived))
        return answers

    def known_controls(self, name: str = "w") -> dict[str, float]:
        """c_i as they will be at the start of the next round."""
        acknowledged = self.server.acknowledged
        return {
            key: (site.next_control if acknowledged.get(key) == site.answered else site.control)[name].item()
            for key, site in self.sites.items()
        }


def test_two_rounds_by_hand(tmp_path):
    """η = 0.1, K = 2, targets 0 and 4, start 1.

    Round 1: a goes 1 → 0.9 → 0.81 by gradients 1 and 0.9; b goes 1 → 1.3 → 1.57 by −3 and −2.7.
    Round 2, from 1.19 with c = −0.95: a follows g − 0.95 − 0.95, 1.19 → 1.261 → 1.3249, raw gradients 1.19 and
    1.261; b follows g + 2.85 − 0.95, 1.19 → 1.281 → 1.3629, raw gradients −2.81 and −2.719.
    """
    toy = Toy(tmp_path, {"a": 0.0, "b": 4.0})
    first = toy.play()
    assert {name: tensors["w"].item() for name, tensors in first.items()} == pytest.approx({"a": 0.81, "b": 1.57})
    assert {n: a["control/w"].item() for n, a in first.items()} == pytest.approx({"a": 0.95, "b": -2.85})
    assert toy.server.weights["w"].item() == pytest.approx(1.19)
    assert toy.server.control["w"].item() == pytest.approx(-0.95)
    second = toy.play()
    assert {name: tensors["w"].item() for name, tensors in second.items()} == pytest.approx({"a": 1.3249, "b": 1.3629})
    assert toy.known_controls() == pytest.approx({"a": 1.2255, "b": -2.7645})
    assert toy.server.weights["w"].item() == pytest.approx(1.3439)
    assert toy.server.control["w"].item() == pytest.approx(-0.7695)


def test_it_is_option_two_of_the_paper(tmp_path):
    """c_i⁺ = c_i − c + (x − y_i)/(K·η), for plain steps, over five rounds."""
    toy = Toy(tmp_path, {"a": 0.0, "b": 4.0, "c": -1.0})
    known = dict.fromkeys("abc", 0.0)
    for _ in range(5):
        x, c = toy.server.weights["w"].item(), toy.server.control.get("w", torch.zeros(1)).item()
        answers = toy.play()
        for name in known:
            known[name] = known[name] - c + (x - answers[name]["w"].item()) / (STEPS * RATE)
        assert toy.known_controls() == pytest.approx(known, abs=1e-5)
        assert toy.server.control["w"].item() == pytest.approx(sum(known.values()) / 3, abs=1e-5)


def test_sites_that_disagree_step_together(tmp_path):
    """At the optimum of the mean, 2, no site moves away any more; plain local steps would pull to 1.62 and 2.38."""
    toy = Toy(tmp_path, {"a": 0.0, "b": 4.0})
    for _ in range(60):
        answers = toy.play()
    assert toy.server.weights["w"].item() == pytest.approx(2.0, abs=1e-3)
    assert [tensors["w"].item() for tensors in answers.values()] == pytest.approx([2.0, 2.0], abs=1e-3)


def test_weights_by_cases_weigh_the_control_variates_too(tmp_path):
    """c is the gradient of what is minimised: 1·½(w − 0)² + 3·½(w − 4)², whose optimum is 3."""
    toy = Toy(tmp_path, {"a": 0.0, "b": 4.0}, cases=(1, 3), weighting="cases")
    toy.play()
    assert toy.server.control["w"].item() == pytest.approx((1 * 0.95 + 3 * -2.85) / 4)
    for _ in range(60):
        toy.play()
    assert toy.server.weights["w"].item() == pytest.approx(3.0, abs=1e-3)


def mean_of(controls: dict[str, float]) -> float:
    return sum(controls.values()) / len(controls)


def test_a_lost_answer_leaves_c_the_mean_of_all_c_i(tmp_path):
    """Site b's second change never arrives: it must not count as confirmed."""
    toy = Toy(tmp_path, {"a": 0.0, "b": 4.0})
    toy.play()
    before = toy.known_controls()["b"]
    toy.play(lost=["b"])
    assert toy.known_controls()["b"] == before
    for _ in range(3):
        assert toy.server.control["w"].item() == pytest.approx(mean_of(toy.known_controls()), abs=1e-6)
        toy.play()


def test_who_joins_later_adds_nothing_at_first(tmp_path):
    toy = Toy(tmp_path, {"a": 0.0, "b": 4.0})
    toy.restart_server(["a"])
    toy.play()
    assert toy.server.control["w"].item() == pytest.approx(0.95)
    toy.restart_server(["a", "b"])
    assert toy.server.control["w"].item() == pytest.approx(0.95 / 2), "b's is 0"
    for _ in range(3):
        toy.play()
        assert toy.server.control["w"].item() == pytest.approx(mean_of(toy.known_controls()), abs=1e-6)


def test_a_site_without_gradient_follows_the_others(tmp_path):
    """g = 0 is a gradient: the step is −η(0 − 0 + c)."""
    toy = Toy(tmp_path, {"a": 0.0})
    toy.play()
    toy.server.sums["untouched"] = torch.tensor([2.0])
    toy.server._find_means()
    answers = toy.play()
    assert answers["a"]["untouched"].item() == pytest.approx(-STEPS * RATE * 2.0)
    assert answers["a"]["control/untouched"].item() == 0


def test_a_site_comes_back_from_its_saved_state(tmp_path):
    toy, other = Toy(tmp_path / "1", {"a": 0.0, "b": 4.0}), Toy(tmp_path / "2", {"a": 0.0, "b": 4.0})
    for one in (toy, other):
        one.play()
        one.play(lost=["b"])
    for name, site in list(other.sites.items()):
        state = site.state()
        del other.sites[name]
        other.site(name).load_state(Payload({k: v.clone() for k, v in state.tensors.items()}, dict(state.scalars)))
    other.restart_server(["a", "b"])
    first, second = toy.play(), other.play()
    assert all(same(first[name], second[name]) for name in first)


# -- on the tiny federation ------------------------------------------------------------------------------------------

ONE_SITE = {
    "sites": [{"name": "north", "annotated": ["liver", "spleen", "kidney"], "cases": 4, "spacing_mm": [14, 14, 14]}]
}


@pytest.mark.parametrize("organs", ["channels", "heads"])
def test_with_one_site_it_is_fedavg(tiny, tmp_path, organs):
    """c = c_i, so nothing is corrected: the same bits for two rounds, then c has been rounded once more than c_i."""
    training = {**TRAINING, "optimizer": PLAIN_STEPS | {"learning_rate": 0.05}}
    common = {"phantom": ONE_SITE, "training": training, "network": {"organs": organs}}
    methods = [{"name": name, "dice_over": "sample"} for name in ("fedavg", "scaffold")]
    runs = [overheard(tiny(method=method, **common), tmp_path / method["name"])[0] for method in methods]
    for _ in range(2):
        for coordinator in runs:
            coordinator.run(rounds=1)
        assert same(runs[0].state.weights, runs[1].state.weights)
    for coordinator in runs:
        coordinator.run()
    for key, value in runs[0].state.weights.items():
        torch.testing.assert_close(runs[1].state.weights[key], value, rtol=1e-5, atol=1e-6)


def test_in_the_first_round_it_is_fedavg_with_any_optimiser(tiny, tmp_path):
    def weights(name: str, rounds: int) -> dict[str, torch.Tensor]:
        experiment = tiny(method={"name": name, "weighting": "uniform", "server_step": 1}, training=TRAINING)
        return dict(run(experiment, tmp_path / f"{name}-{rounds}", rounds).state.weights)

    assert same(weights("fedavg", 1), weights("scaffold", 1))
    assert not same(weights("fedavg", 2), weights("scaffold", 2))


@pytest.mark.parametrize("norm", ["instance", "batch"])
def test_the_payload_doubles(tiny, tmp_path, norm):
    """Twice the parameters; running statistics and their counters are no parameters, and travel once."""
    experiment = tiny(method={"name": "scaffold"}, training={**TRAINING, "rounds": 2}, network={"norm": norm})
    coordinator, sites = overheard(experiment, tmp_path)
    coordinator.run()
    for site in sites.values():
        model = site.worker._rule.model
        parameters, everything = dict(model.named_parameters()), set(model.state_dict())
        twice = everything | {f"control/{name}" for name in parameters}
        assert set(site.sent[0].tensors) == set(site.sent[1].tensors) == set(site.received[1].tensors) == twice
        assert set(site.received[0].tensors) == everything, "no site has a control variate yet"
        control = sum(v.numel() for k, v in site.sent[0].tensors.items() if k.startswith("control/"))
        assert control == sum(value.numel() for value in parameters.values())
        if norm == "instance":
            assert 2 * control == sum(value.numel() for value in site.sent[0].tensors.values())
    expected = coordinator.rule.expects("north")
    counters = [key for key in expected if key.endswith("num_batches_tracked")]
    assert all(not key.startswith("control/") for key in counters)
    assert bool(counters) == (norm == "batch")


@pytest.mark.parametrize("keep_state", [False, True])
def test_a_killed_run_goes_on_to_the_same_bits(tiny, tmp_path, keep_state):
    training = {**TRAINING, "optimizer": {"keep_state": keep_state}}
    experiment = tiny(method={"name": "scaffold"}, training=training, network={"norm": "batch"})
    whole = run(experiment, tmp_path / "whole")
    for done in (1, 1):
        run(experiment, tmp_path / "broken", rounds=done)
    again = run(experiment, tmp_path / "broken")
    assert same(again.state.weights, whole.state.weights)
    assert same(again.rule.control, whole.rule.control)
    assert again.rule.acknowledged == whole.rule.acknowledged == {"north": 3, "south": 3}


def controls(coordinator, workers) -> dict[str, dict[str, torch.Tensor]]:
    """c_i of every site, as the server knows them after the last round."""
    acknowledged = coordinator.rule.acknowledged
    return {
        name: rule.next_control if acknowledged.get(name) == rule.answered else rule.control
        for name, rule in ((name, worker._rule) for name, worker in workers.items())
    }


@pytest.mark.parametrize("what", ["refused", "silent"])
def test_c_stays_the_mean_when_a_round_goes_on_without_a_site(tiny, tmp_path, what):
    experiment = tiny(method={"name": "scaffold"}, training=TRAINING)
    workers = make_workers(experiment, tmp_path)
    transport = Tampering(workers)
    coordinator = make_coordinator(experiment, tmp_path, transport)

    def spoil(site: str, answer: bytes) -> bytes:
        message = Message.from_bytes(answer)
        extra = {"unknown": torch.zeros(1)} if site == "north" else {}
        return Message({**message.tensors, **extra}, message.scalars, message.meta).to_bytes()

    for number in (1, 2, 3):
        transport.change = spoil if number == 2 and what == "refused" else None
        transport.drop = ["north"] if number == 2 and what == "silent" else []
        coordinator.run(rounds=1)
        known = controls(coordinator, workers)
        for name, value in coordinator.rule.control.items():
            mean = (known["north"][name] + known["south"][name]) / 2
            torch.testing.assert_close(value, mean, rtol=1e-4, atol=1e-6)
    assert coordinator.rule.acknowledged == {"north": 3, "south": 3}


def test_heads_of_owners_have_control_variates_of_owners(tiny, tmp_path):
    experiment = tiny(method={"name": "scaffold"}, network={"organs": "heads"}, training=TRAINING)
    coordinator, sites = overheard(experiment, tmp_path)
    coordinator.run()
    for name, own in {"north": {"liver"}, "south": {"spleen", "kidney_left", "kidney_right"}}.items():
        for message in sites[name].sent:
            assert {group_of_key(key.removeprefix("control/")) for key in message.tensors} == {None, *own}
        for message in sites[name].received[1:]:
            controls_of = {key for key in message.tensors if key.startswith("control/")}
            assert {group_of_key(key.removeprefix("control/")) for key in controls_of} == {None, *own}
    known = controls(coordinator, {name: site.worker for name, site in sites.items()})
    for name, value in coordinator.rule.control.items():
        owners = [own[name] for own in known.values() if name in own]
        assert len(owners) == (2 if group_of_key(name) is None else 1)
        torch.testing.assert_close(value, sum(owners) / len(owners), rtol=1e-4, atol=1e-6)


def test_with_everyone_a_site_moves_foreign_heads_along_with_their_owners(tiny, tmp_path):
    """North has no label for the spleen. From the second round on, SCAFFOLD tells it where the others go."""
    method = {"name": "scaffold", "organ_parts": "everyone", "unlabelled": "marginal"}
    coordinator, sites = overheard(tiny(method=method, network={"organs": "heads"}, training=TRAINING), tmp_path)
    coordinator.run()
    north = sites["north"]
    spleen = [key for key in coordinator.state.weights if group_of_key(key) == "spleen"]
    moved = [
        any(not torch.equal(north.sent[r].tensors[key], north.received[r].tensors[key]) for key in spleen)
        for r in range(3)
    ]
    assert moved == [False, True, True]
    assert all(north.sent[r].tensors[f"control/{key}"].abs().max() == 0 for key in spleen for r in range(3))


def test_a_newcomer_in_a_federation_with_heads(tiny, tmp_path):
    experiment = tiny(method={"name": "scaffold"}, network={"organs": "heads"}, training={**TRAINING, "rounds": 4})
    coordinator, sites = overheard(experiment, tmp_path, joins_at={"south": 3})
    coordinator.run()
    assert coordinator.rule.acknowledged == {"north": 4, "south": 4}
    known = controls(coordinator, {name: site.worker for name, site in sites.items()})
    for name, value in coordinator.rule.control.items():
        owners = [own[name] for own in known.values() if name in own]
        torch.testing.assert_close(value, sum(owners) / len(owners), rtol=1e-4, atol=1e-6)
