"""FedASAM: the step and the mean over rounds by hand, reductions to FedAvg, and what survives a kill or a late join."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from federations import make_coordinator, make_workers, run, same
from overhearing import overheard, spooled
from torch import nn

from panorgan.anatomy import Vocabulary
from panorgan.errors import ConfigError
from panorgan.federation.message import Message
from panorgan.federation.transports.local import LocalTransport
from panorgan.methods.base import Payload, SiteTools
from panorgan.methods.fedasam import FedASAM, FedASAMConfig
from panorgan.methods.fedprox import FedProx, FedProxConfig
from panorgan.methods.protocol import Federation, RoundInfo, SiteInfo
from panorgan.methods.registry import find_method
from panorgan.methods.shared.sharpness import asam_step, preserve_statistics
from panorgan.methods.shared.swa import RoundAverage
from panorgan.networks.organ_parts import group_of_key
from panorgan.workflows.execute import train

FACTS = {"a": SiteInfo("a", 1, {"liver": 1}), "b": SiteInfo("b", 3, {"liver": 3})}
FEDERATION = Federation(Vocabulary(["liver"]), FACTS)


# -- the step --------------------------------------------------------------------------------------------------------


class Quadratic(nn.Module):
    """½(¼u² + 2v²): the gradient is (¼u, 2v)."""

    def __init__(self, u: float = 3.0, v: float = -1.0) -> None:
        super().__init__()
        self.u, self.v = nn.Parameter(torch.tensor([u])), nn.Parameter(torch.tensor([v]))
        self.places: list[tuple[float, float]] = []

    def forward(self) -> torch.Tensor:
        self.places.append((self.u.item(), self.v.item()))
        return 0.5 * (0.25 * self.u.square() + 2 * self.v.square()).sum()

    @property
    def weights(self) -> list[float]:
        return [self.u.item(), self.v.item()]


class QuadraticSite(FedASAM.Site):
    def loss(self, batch):
        return self.model()


def site_of(kind, config, model: nn.Module, rate: float = 0.1, **tools: Any):
    optimizer = torch.optim.SGD(model.parameters(), rate)
    return kind(config, FACTS["a"], FEDERATION, SiteTools(model, optimizer, **tools))


def test_one_step_by_hand():
    """w = (3, −1), η = 1: T = (4, 2); g = (0.75, −2), T·g = (3, −4), norm 5; ε = 0.5·T·(T·g)/5 = (1.2, −0.8).

    At w + ε = (4.2, −1.8) the gradient is (1.05, −3.6); a step of 0.1 from w leads to (2.895, −0.64).
    """
    model = Quadratic()
    reported = site_of(QuadraticSite, FedASAMConfig(rho=0.5, eta=1.0), model).step(None)
    assert model.places == [(3.0, -1.0), pytest.approx((4.2, -1.8))]
    assert model.weights == pytest.approx([2.895, -0.64])
    assert reported["loss"].item() == 0.5 * (0.25 * 9 + 2), "the loss where the model is"


def test_the_gradient_of_the_second_pass_is_clipped():
    """(1.05, −3.6) has the norm 3.75; at a norm of 0.375 it is a tenth."""
    model = Quadratic()
    site_of(QuadraticSite, FedASAMConfig(rho=0.5, eta=1.0), model, clip_norm=0.375).step(None)
    assert model.weights == pytest.approx([3 - 0.0105, -1 + 0.036], abs=1e-6)


def test_without_a_radius_there_is_one_pass():
    model = Quadratic()
    site_of(QuadraticSite, FedASAMConfig(rho=0), model).step(None)
    assert model.places == [(3.0, -1.0)]
    assert model.weights == pytest.approx([3 - 0.075, -1 + 0.2])


def test_the_step_takes_any_loss():
    """With FedProx's term, μ = 1, and only v, 2·½v² from v = 2, w₀ = 1: g = 4 + 1 = 5; T = 2, ε = 0.5·4·5/10 = 1.

    At 3 the gradient is 6 + 2 = 8; a step of 0.1 leads to 1.2.
    """

    class Held(FedProx.Site):
        def supervision(self, batch):
            return self.model().reshape(1)

        def step(self, batch):
            return {"loss": asam_step(self, batch, rho=0.5, eta=0.0)}

    model = Quadratic(0.0, 2.0)
    site = site_of(Held, FedProxConfig(mu=1), model)
    site.received = Payload({"u": torch.tensor([0.0]), "v": torch.tensor([1.0])})
    reported = site.step(None)
    assert reported["loss"].item() == 4 + 0.5
    assert model.weights == pytest.approx([0.0, 1.2])


class Normalised(nn.Module):
    """w·x through BatchNorm, and ½w² so that w has a gradient (BatchNorm does not care for its size)."""

    def __init__(self, momentum: float | None) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([2.0]))
        self.norm = nn.BatchNorm1d(1, momentum=momentum)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.w * x).square().mean() + 0.5 * self.w.square().sum()


@pytest.mark.parametrize(("momentum", "mean", "variance"), [(0.1, 0.4, 0.9 + 0.8), (None, 4.0, 8.0)])
def test_running_statistics_are_those_of_the_first_pass_alone(momentum, mean, variance):
    """w = 2 makes 1 and 3 into 2 and 6: mean 4, variance 8. At w + ε = 2 + ρT both would be larger."""

    class NormalisedSite(FedASAM.Site):
        def loss(self, batch):
            return self.model(batch)

    model = Normalised(momentum)
    site = site_of(NormalisedSite, FedASAMConfig(rho=0.5), model)
    site.step(torch.tensor([[1.0], [3.0]]))
    assert model.norm.running_mean.item() == pytest.approx(mean)
    assert model.norm.running_var.item() == pytest.approx(variance)
    assert model.norm.num_batches_tracked.item() == 1
    assert model.w.item() < 2


def test_statistics_come_back_after_an_error_too():
    norm = nn.BatchNorm1d(1)
    before = {key: value.clone() for key, value in norm.state_dict().items()}

    def break_off() -> None:
        with preserve_statistics(norm):
            norm(torch.tensor([[1.0], [3.0]]))
            assert not same(norm.state_dict(), before)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        break_off()
    assert same(norm.state_dict(), before)


# -- the mean over rounds --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "cycle", "rounds", "expected"),
    [
        (0.75, 2, 20, [16, 18, 20]),
        (0.75, 10, 100, [80, 90, 100]),
        (0.75, 2, 4, [4]),  # round 3 of 4 is not yet after 0.75
        (0.75, 2, 3, [3]),
        (0.75, 2, 1, [1]),
        (0.0, 1, 3, [1, 2, 3]),
        (0.29, 35, 100, [30, 65, 100]),  # 0.29·100 is a little less than 29 in floating point
        (None, 1, 3, []),
    ],
)
def test_which_rounds_count(start, cycle, rounds, expected):
    average = RoundAverage(start, cycle)
    assert [r for r in range(1, rounds + 1) if average.counts(RoundInfo("train", r, rounds))] == expected


def test_the_mean_over_rounds_by_hand():
    """Of rounds 1 to 8 count 4, 6 and 8, after 0.375. Values r²: 16, 36, 64; the mean goes 16, 26, 116/3."""
    average = RoundAverage(0.375, 2)
    seen = []
    for r in range(1, 9):
        weights = {"w": torch.tensor([float(r * r)]), "counter": torch.tensor(r)}
        average.add(weights, RoundInfo("train", r, 8))
        seen.append(average.over(weights)["w"].item())
        weights["w"] += 1000  # what was taken in is a copy
    assert seen == pytest.approx([1, 4, 9, 16, 16, 26, 26, 116 / 3])
    assert average.weights["counter"].item() == 8, "a counter is no weight"
    assert average.weights["counter"].dtype == torch.int64


def test_equal_models_have_exactly_themselves_as_mean():
    weights = {"w": torch.randn(1000, generator=torch.Generator().manual_seed(0))}
    average = RoundAverage(0.0, 1)
    for r in range(1, 8):
        average.add(weights, RoundInfo("train", r, 7))
    assert torch.equal(average.weights["w"], weights["w"])


def test_a_part_that_came_later_is_averaged_over_the_rounds_that_had_it():
    average = RoundAverage(0.0, 1)
    values = [(2.0, None), (4.0, 10.0), (9.0, 20.0)]
    for r, (old, new) in enumerate(values, 1):
        weights = {"old": torch.tensor(old)} | ({} if new is None else {"new": torch.tensor(new)})
        average.add(weights, RoundInfo("train", r, 3))
    assert {key: value.item() for key, value in average.weights.items()} == {"old": 5.0, "new": 15.0}
    assert average.models == {"old": 3, "new": 2}
    newest = average.over({"old": torch.tensor(0.0), "newest": torch.tensor(7.0)})
    assert {key: value.item() for key, value in newest.items()} == {"old": 5.0, "newest": 7.0}


def test_the_mean_comes_back_from_its_state_beside_that_of_others():
    first, second = RoundAverage(0.0, 1), RoundAverage(0.0, 1)
    models = [{"w": torch.tensor([float(v)]), "n": torch.tensor(v)} for v in (1, 5, 30)]
    for r, model in enumerate(models[:2], 1):
        first.add(model, RoundInfo("train", r, 3))
    state = first.state()
    first.add(models[2], RoundInfo("train", 3, 3))
    assert state.tensors["swa/w"].item() == 3.0, "what was saved does not change any more"
    second.load(Payload({**state.tensors, "w": torch.zeros(1)}, {**state.scalars, "heard/a": 1.0}))
    second.add(models[2], RoundInfo("train", 3, 3))
    assert same(second.weights, first.weights)
    assert second.models == first.models == {"w": 3, "n": 3}
    assert second.weights["w"].item() == 12.0
    second.load(Payload())
    assert second.weights == second.models == {}


@dataclass
class ServerInFolder:
    """A server rule that gets answers; a site that is not named keeps silent."""

    folder: Path
    rule: FedASAM.Server

    def play(self, round_: int, rounds: int, **answers: float) -> tuple[float, float]:
        """What is delivered and what is broadcast after the round."""
        self.rule.round_info = RoundInfo("train", round_, rounds)
        tensors = {site: {"w": torch.tensor([value])} for site, value in answers.items()}
        self.rule.aggregate(spooled(self.folder / str(round_), tensors))
        return self.rule.delivered()["w"].item(), self.rule.broadcast("a").tensors["w"].item()


def test_the_server_delivers_the_mean_and_sends_out_the_last(tmp_path):
    """Rounds 2, 3 and 4 count. Sites a and b weigh 1 : 3; b is silent in round 3, which counts all the same."""
    config = FedASAMConfig(swa_start=0.25, swa_cycle=1)
    server = ServerInFolder(tmp_path, FedASAM.Server(config, FEDERATION, {"w": torch.zeros(1)}))
    assert server.play(1, 4, a=7.0, b=7.0) == (7.0, 7.0)
    assert server.play(2, 4, a=0.0, b=4.0) == (3.0, 3.0)
    assert server.play(3, 4, a=8.0) == (5.5, 8.0)
    assert server.play(4, 4, a=1.0, b=1.0) == (4.0, 1.0)
    assert set(server.rule.expects("a")) == set(server.rule.broadcast("a").tensors) == {"w"}
    assert set(server.rule.state().tensors) == {"swa/w"}


def test_without_a_start_nothing_is_averaged_or_kept(tmp_path):
    server = ServerInFolder(tmp_path, FedASAM.Server(FedASAMConfig(swa_start=None), FEDERATION, {"w": torch.zeros(1)}))
    assert [server.play(r, 2, a=float(r)) for r in (1, 2)] == [(1.0, 1.0), (2.0, 2.0)]
    assert server.rule.state() == Payload()


@pytest.mark.parametrize(
    ("rounds", "settings", "starts"),
    [
        (60, {}, {"SWA": 46}),  # after 45; of every two rounds, counted back from the last, one
        (60, {"swa_cycle": 10}, {"SWA": 50}),
        (10, {"swa_start": 0.95}, {"SWA": 10}),
        (60, {"swa_start": None}, {}),
    ],
)
def test_when_the_average_begins(rounds, settings, starts):
    assert FedASAM(FedASAMConfig(**settings)).module_starts(rounds) == starts
    on_pseudo_labels = find_method("fedasam_pl")
    assert on_pseudo_labels(on_pseudo_labels.Config(**settings)).module_starts(rounds) == starts


@pytest.mark.parametrize("wrong", [{"rho": -0.1}, {"eta": -1}, {"swa_start": 1}, {"swa_cycle": 0}])
def test_impossible_numbers_are_refused(tiny, wrong):
    with pytest.raises(ConfigError):
        tiny(method={"name": "fedasam", **wrong}).build_method()


# -- on the tiny federation ------------------------------------------------------------------------------------------

TRAINING = {"rounds": 4, "validate_every": 0, "local_steps": 2}
EARLY = {"name": "fedasam", "swa_start": 0.25, "swa_cycle": 1}
"""Rounds 2, 3 and 4 of 4 are averaged."""


@pytest.mark.parametrize("network", [{"norm": "instance"}, {"norm": "batch"}, {"organs": "heads", "dropout": 0.2}])
def test_without_radius_and_average_it_is_fedavg_bit_for_bit(tiny, tmp_path, network):
    def delivered(folder: str, **method: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        coordinator = run(tiny(method=method, network=network, training=TRAINING), tmp_path / folder)
        return coordinator.state.weights, coordinator.delivered_weights()[1]

    fedavg, fedavg_delivered = delivered("fedavg", name="fedavg")
    weights, plain = delivered("plain", name="fedasam", rho=0, swa_start=None)
    assert same(weights, fedavg)
    assert same(plain, fedavg_delivered)
    weights, averaged = delivered("averaged", **EARLY, rho=0)
    assert same(weights, fedavg), "averaging does not touch what is trained"
    assert not same(averaged, fedavg_delivered)
    weights, sharp = delivered("sharp", name="fedasam", swa_start=None)
    assert same(sharp, weights)
    assert not same(weights, fedavg)


def test_after_one_step_running_statistics_are_those_of_fedavg(tiny, tmp_path):
    """Both saw one batch with the same weights; the pass at w + ε must not show."""
    training = {**TRAINING, "rounds": 1, "local_steps": 1}

    def sent(name: str) -> dict[str, torch.Tensor]:
        experiment = tiny(method={"name": name}, network={"norm": "batch"}, training=training)
        coordinator, sites = overheard(experiment, tmp_path / name)
        coordinator.run()
        parameters = dict(sites["north"].worker._rule.model.named_parameters())
        tensors = sites["north"].sent[0].tensors
        return {("parameter" if key in parameters else "buffer", key): value for key, value in tensors.items()}

    fedavg, fedasam = sent("fedavg"), sent("fedasam")
    differ = {kind for kind, key in fedavg if not torch.equal(fedavg[kind, key], fedasam[kind, key])}
    assert {kind for kind, _ in fedavg} == {"parameter", "buffer"}
    assert differ == {"parameter"}


def test_only_weights_travel_and_the_mean_is_what_is_scored(tiny, tmp_path):
    experiment = tiny(method=EARLY, training={**TRAINING, "validate_every": 1})
    workers = make_workers(experiment, tmp_path)
    heard: dict[str, list[Message]] = {"join": [], "train": [], "evaluate": []}

    class Listening:
        def __init__(self, worker) -> None:
            self.worker = worker

        def handle(self, request: bytes) -> bytes:
            message, answer = Message.from_bytes(request), self.worker.handle(request)
            heard[message.meta["task"]] += [message, Message.from_bytes(answer)]
            return answer

    sites = LocalTransport({name: Listening(worker) for name, worker in workers.items()})
    coordinator = make_coordinator(experiment, tmp_path, sites)
    coordinator.run()
    keys = set(coordinator.state.weights)
    assert {frozenset(message.tensors) for message in heard["train"]} == {frozenset(keys)}
    last = [message for message in heard["evaluate"] if message.tensors][-1]
    assert same(dict(last.tensors), dict(coordinator.rule.delivered()))
    assert not same(dict(last.tensors), coordinator.state.weights)


@pytest.mark.parametrize("norm", ["instance", "batch"])
def test_a_killed_run_goes_on_to_the_same_bits(tiny, tmp_path, norm):
    experiment = tiny(method=EARLY, training=TRAINING, network={"norm": norm})
    whole = run(experiment, tmp_path / "whole")
    for _ in range(3):
        run(experiment, tmp_path / "broken", rounds=1)
    again = run(experiment, tmp_path / "broken")
    assert same(again.state.weights, whole.state.weights)
    assert same(again.delivered_weights()[1], whole.delivered_weights()[1])
    assert set(whole.rule.average.models.values()) == {3}
    assert whole.delivered_weights()[1].keys() == whole.state.weights.keys()


def test_a_head_that_joins_late_is_averaged_over_its_own_rounds(tiny, tmp_path):
    experiment = tiny(method=EARLY, training=TRAINING, network={"organs": "heads"})
    coordinator, _ = overheard(experiment, tmp_path, joins_at={"south": 4})
    coordinator.run()
    models = {group_of_key(key): count for key, count in coordinator.rule.average.models.items()}
    assert models == {None: 3, "liver": 3, "spleen": 1, "kidney_left": 1, "kidney_right": 1}
    delivered = coordinator.delivered_weights()[1]
    assert delivered.keys() == coordinator.state.weights.keys()
    for key, value in delivered.items():
        assert torch.equal(value, coordinator.state.weights[key]) == (models[group_of_key(key)] == 1), key


@pytest.mark.slow
def test_it_learns(tiny, tmp_path):
    """The loss falls, and the delivered mean scores better than the model after the first round.

    In twice the rounds that FedAvg has for it: after 8 the loss is at 0.78 to 0.81 of the first, depending on the seed.
    """
    from panorgan.federation.events import read_events

    training = {"rounds": 16, "local_steps": 4, "validate_every": 1, "optimizer": {"learning_rate": 0.02}}
    train(tiny(method={"name": "fedasam"}, training=training), tmp_path / "run")
    rounds = [event.facts for event in read_events(tmp_path / "run" / "events.jsonl") if event.kind == "round"]
    losses = [sum(n["loss"] for n in r["sites"].values()) / len(r["sites"]) for r in rounds]
    scores = [[v for s in r["validation"].values() for v in s.values()] for r in rounds]
    dice = [sum(values) / len(values) for values in scores]
    assert losses[-1] < 0.8 * losses[0]
    assert dice[-1] > dice[0]
