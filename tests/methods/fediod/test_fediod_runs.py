"""FedIOD in whole runs: reductions, what travels when, kills, sites that come and go; and that it learns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from federations import Meddling, make_coordinator, make_workers, run, same
from fediod_pieces import FEDIOD, SLICES, SMALL, TOKENS_HERE
from killing import Killed, deadly
from overhearing import overheard
from safetensors.torch import load_file

from panorgan.federation import collector
from panorgan.federation.events import read_events
from panorgan.federation.message import Message
from panorgan.methods.fediod import DEPTH, ENTROPY, GATE, INTERSECTION, LARGEST_SHARE, TOKENS, UNION, FedIOD
from panorgan.methods.fediod.attention_maps import ScanMaps
from panorgan.methods.fediod.bottleneck_attention import head_of_key
from panorgan.methods.fediod.scan_inspection import ScanInspector
from panorgan.networks.organ_parts import MultiDecoder
from panorgan.workflows.execute import train

MAPS = {INTERSECTION, UNION}
OFF = {"name": "fediod", "transformer": False, "regularisation": False, "dynamic_aggregation": False}
SAMPLING = SLICES["training"]["sampling"]


def sliced(tiny, method: dict[str, Any] = FEDIOD, rounds: int = 4, **training: Any):
    kept = {"keep_state": True}
    training = {"rounds": rounds, "validate_every": 0, "sampling": SAMPLING, "optimizer": kept, **training}
    return tiny(method=method, network=SLICES["network"], training=training)


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    """An uninterrupted run of four rounds."""
    folder = tmp_path_factory.mktemp("whole")
    return run(sliced(tiny), folder), folder


@pytest.fixture(scope="module")
def unregularised(tiny, tmp_path_factory):
    """The same without regularisation."""
    folder = tmp_path_factory.mktemp("unregularised")
    return run(sliced(tiny, {**FEDIOD, "regularisation": False}), folder), folder


# -- reductions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dimensions", "optimizer"), [(2, "adamw"), (2, "sgd"), (3, "adamw")])
def test_with_everything_off_it_is_multidecoder_bit_for_bit(tiny, tmp_path, dimensions, optimizer):
    """The delivered model byte for byte, and every loss on the way."""
    shape = dict(SLICES) if dimensions == 2 else {}
    shape["training"] = {**shape.get("training", {}), "optimizer": {"name": optimizer}}
    for name, method in (
        ("plain", {"name": "multidecoder"}),
        ("off", OFF),
        ("t", {**OFF, **SMALL, "transformer": True}),
    ):
        train(tiny(method=method, **shape), tmp_path / name)
    models = {name: (tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("plain", "off", "t")}
    assert models["off"] == models["plain"]
    assert models["t"] != models["plain"]
    assert losses(tmp_path / "off") == losses(tmp_path / "plain")
    transformer = load_file(tmp_path / "t" / "model" / "model.safetensors")
    assert any(head_of_key(key) is not None for key in transformer)


def losses(folder) -> list[float]:
    rounds = [event.facts for event in read_events(folder / "events.jsonl") if event.kind == "round"]
    return [numbers["loss"] for facts in rounds for numbers in facts["sites"].values()]


def test_without_weight_regularisation_is_off(tiny, tmp_path, whole, unregularised):
    plain = unregularised[0].state.weights
    assert same(run(sliced(tiny, {**FEDIOD, "regularisation_weight": 0}), tmp_path).state.weights, plain)
    assert not same(whole[0].state.weights, plain)


def test_regularisation_begins_when_its_time_has_come(tiny, tmp_path, unregularised):
    """Until then, run by run, all is as without it. From its first round on, the losses are logged."""
    late = run(sliced(tiny, {**FEDIOD, "regularisation_start": 0.75}), tmp_path)
    assert late.finished
    with_it, without = losses(tmp_path), losses(unregularised[1])
    assert with_it[:4] == without[:4], "two sites, two rounds"
    assert all(a > b for a, b in zip(with_it[4:6], without[4:6], strict=True)), "the first steps differ by the losses"
    reported = [facts["sites"]["north"] for facts in events(tmp_path)]
    assert ["loss/union" in numbers for numbers in reported] == [False, False, True, True]


def test_dynamic_aggregation_changes_heads_alone(tiny, tmp_path):
    """After one round: local training is the same, only the mean of heads differs."""
    weights = {}
    for switch in (True, False):
        method = {**FEDIOD, "regularisation": False, "dynamic_aggregation": switch}
        weights[switch] = run(sliced(tiny, method, rounds=1), tmp_path / str(switch)).state.weights
    differ = {key for key in weights[True] if not torch.equal(weights[True][key], weights[False][key])}
    assert differ
    assert all(head_of_key(key) is not None for key in differ)


def test_a_rate_of_its_own_changes_the_transformer_alone_in_the_first_step(tiny, tmp_path):
    """One step of SGD without momentum: the transformer moves by a quarter, all else as before."""
    method = {**FEDIOD, "dropout": 0, "regularisation": False, "dynamic_aggregation": False}
    plain = {"name": "sgd", "momentum": 0.0, "weight_decay": 0.0, "clip_norm": None, "schedule": "constant"}
    training = {"local_steps": 1, "optimizer": {**plain, "learning_rate": 1.0}}
    weights = {
        name: run(sliced(tiny, {**method, "transformer_rate": rate}, 1, **training), tmp_path / name).state.weights
        for name, rate in (("not", 1e-30), ("quarter", 0.25), ("whole", 1.0))
    }
    for key, start in weights["not"].items():
        quarter, whole = weights["quarter"][key] - start, weights["whole"][key] - start
        torch.testing.assert_close(quarter, whole / 4, atol=1e-6, rtol=1e-3)
        assert bool(whole.any()) == key.startswith("transformer"), key


def test_the_log_tells_how_attention_behaves(tiny, tmp_path):
    """Of every site, in every round; and the server's largest λ, where heads are judged."""
    run(sliced(tiny, {**FEDIOD, "aggregation_start": 0.5}, rounds=3), tmp_path)
    rounds = events(tmp_path)
    for facts in rounds:
        for numbers in facts["sites"].values():
            assert 1 < numbers[GATE] <= 2
            assert 0 < numbers[ENTROPY] <= 1
    assert "server" not in rounds[0], "no λ yet"
    for facts in rounds[1:]:
        heads = [[site[f"attribution/{i}.{j}"] for site in facts["sites"].values()] for i in range(2) for j in range(3)]
        assert facts["server"][LARGEST_SHARE] == pytest.approx(max(max(own) / sum(own) for own in heads))


def test_without_gate_and_maps_attention_is_not_watched(tiny, tmp_path):
    """It is faster without its maps, so the log tells nothing of them."""
    run(sliced(tiny, {**FEDIOD, "gate": "none", "regularisation": False}, rounds=1), tmp_path)
    assert not {GATE, ENTROPY} & events(tmp_path)[0]["sites"]["north"].keys()


# -- what runs and what travels --------------------------------------------------------------------------------------


def test_only_owners_decoders_run_in_training(tiny, tmp_path, monkeypatch):
    """North labels the liver, south the rest; each has its own decoders only, and all of its own run in every step."""
    ran: dict[str, list[set[str]]] = {"north": [], "south": []}
    original_outputs, original_step = MultiDecoder.outputs, FedIOD.Site.step
    asked: list[str] = []

    def outputs(network, chosen, shared):
        asked.extend(group for group, _ in chosen)
        return original_outputs(network, chosen, shared)

    def step(rule, batch):
        asked.clear()
        result = original_step(rule, batch)
        ran[rule.facts.name].append(set(asked))
        assert len(asked) == len(set(asked)), "once each"
        return result

    monkeypatch.setattr(MultiDecoder, "outputs", outputs)
    monkeypatch.setattr(FedIOD.Site, "step", step)
    run(sliced(tiny, rounds=3), tmp_path)
    assert ran == {"north": [{"liver"}] * 6, "south": [{"kidney_left", "kidney_right", "spleen"}] * 6}


def test_what_travels_in_which_round(tiny, tmp_path):
    coordinator, sites = overheard(sliced(tiny, rounds=5), tmp_path)
    coordinator.run()
    depth = int(coordinator.rule.agreed[DEPTH])
    for site in sites.values():
        weights = coordinator.rule.weights_of(site.worker.name).keys()
        assert [set(m.tensors) - weights for m in site.sent] == [set(), MAPS, MAPS, MAPS, set()]
        assert [set(m.tensors) - weights for m in site.received] == [set(), set(), MAPS, MAPS, MAPS]
        assert [DEPTH in m.scalars for m in site.received] == [False, True, True, True, True]
        assert [{DEPTH, TOKENS} <= m.scalars.keys() for m in site.sent] == [True, False, False, False, False]
        assert all(f"attribution/{i}.{j}" in m.scalars for m in site.sent for i in range(2) for j in range(3))
        for message in (*site.sent[1:4], *site.received[2:]):
            for key in MAPS:
                assert message.tensors[key].shape == (TOKENS_HERE, depth * TOKENS_HERE)
                assert message.tensors[key].dtype == torch.float16
    medians = {name: site.sent[0].scalars[DEPTH] for name, site in sites.items()}
    assert min(medians.values()) <= depth <= max(medians.values())
    bound = sites["north"].sent[2].tensors
    assert (bound[INTERSECTION] <= bound[UNION]).all()


def test_bytes_of_a_round(tiny, tmp_path):
    """Two maps of 16 bit: 2 · 2 · D̄ · n² bytes more than a round without, and a little for their names."""
    coordinator, sites = overheard(sliced(tiny, rounds=3), tmp_path)
    coordinator.run()
    first, second, last = (len(message.to_bytes()) for message in sites["north"].sent)
    maps = 2 * 2 * int(coordinator.rule.agreed[DEPTH]) * TOKENS_HERE**2
    assert 0 <= second - first - maps < 400
    assert 0 <= abs(last - first) < 400


def test_in_three_dimensions_a_scan_has_one_map(tiny, tmp_path):
    experiment = tiny(method=FEDIOD, training={"rounds": 4, "validate_every": 0})
    coordinator, sites = overheard(experiment, tmp_path)
    coordinator.run()
    assert coordinator.rule.agreed == {DEPTH: 1.0, TOKENS: 64.0}
    assert sites["north"].sent[1].tensors[UNION].shape == (64, 64)
    assert all("loss/union" in message.scalars for message in sites["south"].sent[2:])


def test_maps_of_another_size_are_refused(tiny, tmp_path):
    """South's maps are one slice deeper than agreed: its answers of those rounds do not count."""
    experiment = sliced(tiny, rounds=3)

    def deeper(site: str, kind: str, answer: bytes) -> list[tuple[str, bytes]]:
        message = Message.from_bytes(answer)
        if site == "south" and UNION in message.tensors:
            tensors = {k: torch.cat([v, v[:, :TOKENS_HERE]], 1) if k in MAPS else v for k, v in message.tensors.items()}
            answer = Message(tensors, message.scalars, message.meta).to_bytes()
        return [(site, answer)]

    heard: list[Any] = []
    transport = Meddling(make_workers(experiment, tmp_path), deeper)
    make_coordinator(experiment, tmp_path, transport, heard).run()
    rounds = [event.facts for event in heard if event.kind == "round"]
    assert [set(facts["sites"]) for facts in rounds] == [{"north", "south"}, {"north"}, {"north", "south"}]


# -- coming, going, kills --------------------------------------------------------------------------------------------


def test_sites_that_come_and_go(tiny, tmp_path):
    """South is away when depths are reported and comes in round 3: it takes the depth over and sends maps at once. In
    round 4 only south is there: its maps alone are fused. In round 5 both are."""
    experiment = sliced(tiny, rounds=6)
    transport = Meddling(make_workers(experiment, tmp_path))
    coordinator = make_coordinator(experiment, tmp_path, transport)
    away = {1: {"south"}, 2: {"south"}, 3: set(), 4: {"north"}, 5: set(), 6: set()}
    fused = []
    for number, absent in away.items():
        transport.absent = absent
        coordinator.run(rounds=1)
        fused.append(dict(coordinator.rule.fused))
        assert len(events(tmp_path)) == number
    (depth,) = {coordinator.rule.agreed[DEPTH]}
    assert depth == events(tmp_path)[0]["sites"]["north"][DEPTH]
    assert fused[0] == {}
    assert not any(same(fused[number], fused[number + 1]) for number in (1, 2, 3)), "new ones every time"
    assert same(fused[4], fused[5]), "the last round sends none"
    assert set(coordinator.rule.importance) == {"north", "south"}


def events(folder) -> list[dict[str, Any]]:
    return [event.facts for event in read_events(folder / "events.jsonl") if event.kind == "round"]


KILLS = {
    # what is interrupted, at which call, whether it does its work before; rounds that are done by then.
    "depths reported, not kept": (FedIOD.Server, "aggregate", 1, True, 0),
    "between two scans": (ScanInspector, "dice_loss", 8, True, 1),
    "maps half made": (ScanMaps, "add", 1, True, 1),
    "one site has answered with maps": (collector, "check_answer", 3, True, 1),
    "maps fused, not kept": (FedIOD.Server, "aggregate", 2, True, 1),
    "in the first regularised round": (FedIOD.Site, "step", 10, True, 2),
    "between two rounds with maps": (FedIOD.Server, "broadcast", 7, False, 3),
}


def assert_like(folder, coordinator, whole) -> None:
    expected, where = whole
    assert coordinator.finished
    assert same(coordinator.state.weights, expected.state.weights)
    mine, theirs = coordinator.rule.state(), expected.rule.state()
    assert set(theirs.tensors) == MAPS
    assert same(dict(mine.tensors), dict(theirs.tensors))
    assert mine.scalars == theirs.scalars
    assert [facts["sites"] for facts in events(folder)] == [facts["sites"] for facts in events(where)]


@pytest.mark.parametrize(("holder", "name", "call", "works", "done"), KILLS.values(), ids=KILLS.keys())
def test_a_killed_run_goes_on_to_the_same_bits(tiny, tmp_path, whole, monkeypatch, holder, name, call, works, done):
    experiment = sliced(tiny)
    with monkeypatch.context() as patch:
        patch.setattr(holder, name, deadly(getattr(holder, name), call, works))
        with pytest.raises(Killed):
            run(experiment, tmp_path)
    assert len(events(tmp_path)) == done
    assert_like(tmp_path, run(experiment, tmp_path), whole)


def test_one_round_per_process_gives_the_same_bits(tiny, tmp_path, whole):
    experiment = sliced(tiny)
    for _ in range(4):
        pieces = run(experiment, tmp_path, rounds=1)
    assert_like(tmp_path, pieces, whole)


# -- whole runs ------------------------------------------------------------------------------------------------------


def test_lower_precision(tiny, tmp_path, whole):
    """Two runs of the same patches: losses agree but for rounding, and are not the same."""
    run(sliced(tiny, precision="bfloat16"), tmp_path)
    exact, rough = losses(whole[1]), losses(tmp_path)
    assert rough == pytest.approx(exact, rel=0.1)
    assert rough != exact


@pytest.mark.slow
def test_it_learns(tiny, tmp_path):
    training = {"local_steps": 8, "validate_every": 6, "optimizer": {"learning_rate": 0.01}}
    sampling = {"patch_size": [24, 24, 1], "batch_size": 8}
    run(sliced(tiny, rounds=12, **training, sampling=sampling), tmp_path)
    rounds = events(tmp_path)
    supervised = [
        sum(n["loss"] - 0.1 * (n.get("loss/union", 0) + n.get("loss/intersection", 0)) for n in facts["sites"].values())
        for facts in rounds
    ]
    assert supervised[-1] < 0.7 * supervised[0]
    assert rounds[-1]["validation"]["north"]["liver"] > 0.4
