"""FedIOD's rules, piece by piece: what enters the loss, what is found after training, what the server makes of it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fediod_pieces import FEDIOD, SMALL, TOKENS_HERE, aggregate, attention, rule_at, server_of
from refusing import refused

from panorgan.anatomy import Vocabulary
from panorgan.errors import ConfigError
from panorgan.methods.about.uploads import empty_network
from panorgan.methods.base import Payload, RoundInfo
from panorgan.methods.fediod import DEPTH, ENTROPY, GATE, INTERSECTION, TOKENS, UNION, FedIOD, FedIODConfig
from panorgan.methods.fediod import head_attribution as head_attribution_module
from panorgan.methods.fediod import method as fediod
from panorgan.methods.fediod.attention_containment import missing_intersection, outside_union
from panorgan.methods.fediod.attention_maps import ScanMaps, packed, slice_targets, unpacked
from panorgan.methods.protocol import Federation, SiteInfo
from panorgan.networks import UNetSettings
from panorgan.preparation.batch import Batch
from panorgan.preparation.sampling import PatchSampler, SamplingSettings


def batch_of(rule: FedIOD.Site, seed: int = 0) -> Batch:
    cases = rule.tools.cases
    sampler = PatchSampler(cases, cases[0].structures, SamplingSettings(patch_size=(16, 16, 1), batch_size=4))
    return next(sampler.batches(1, seed)).unpack()


def received(rule: FedIOD.Site, depth: int = 6) -> Payload:
    maps = {INTERSECTION: packed(attention(depth) / 2), UNION: packed(attention(depth, seed=1))}
    return Payload({**rule.model.state_dict(), **maps}, {DEPTH: float(depth)})


# -- settings --------------------------------------------------------------------------------------------------------


def test_without_the_transformer_there_is_no_attention_to_hold_or_judge():
    for switch in ("regularisation", "dynamic_aggregation"):
        other = {"regularisation", "dynamic_aggregation"} - {switch}
        with refused("no-attention", ConfigError):
            FedIODConfig(transformer=False, **{switch: True}, **dict.fromkeys(other, False))
    FedIODConfig(transformer=False, regularisation=False, dynamic_aggregation=False)


@pytest.mark.parametrize(
    ("settings", "rounds", "sent", "used"),
    [
        ({}, 500, range(14, 500), range(15, 501)),  # 0.03 · 500
        ({}, 4, [2, 3], [3, 4]),  # the first round has no depth, the second no maps
        ({"regularisation_start": 0.5}, 8, range(3, 8), range(4, 9)),
        ({"regularisation_start": 0.5, "refresh_every": 3}, 8, [3, 6], range(4, 9)),
        ({"regularisation": False}, 8, [], []),
        ({"regularisation_weight": 0}, 8, [], []),
        ({}, 2, [], []),
    ],
)
def test_in_which_rounds_maps_travel_and_are_used(settings, rounds, sent, used):
    config = FedIODConfig(**settings)
    schedule = [RoundInfo("train", number, rounds) for number in range(1, rounds + 1)]
    assert [m.round for m in schedule if config.maps_travel(m)] == list(sent)
    assert [m.round for m in schedule if config.regularises(m) and m.round > min(sent, default=rounds)] == list(used)


@pytest.mark.parametrize(
    ("rounds", "settings", "starts"),
    [
        (500, {}, {"Reg": 15, "DA": 15}),  # 3 % of the rounds
        (60, {"regularisation_start": 0.5, "aggregation_start": 0.25}, {"Reg": 30, "DA": 15}),
        (4, {}, {"Reg": 3, "DA": 1}),  # fused maps come about in two rounds
        (2, {"dynamic_aggregation": False}, {}),
    ],
)
def test_when_each_module_begins(rounds, settings, starts):
    assert FedIOD(FedIODConfig(**settings)).module_starts(rounds) == starts


def test_in_which_rounds_heads_are_judged():
    def judged(**settings: object) -> list[int]:
        config = FedIODConfig(**settings)
        return [number for number in range(1, 7) if config.sends_attributions(RoundInfo("train", number, 6))]

    assert judged() == [1, 2, 3, 4, 5, 6]
    assert judged(refresh_every=2) == [1, 3, 5]
    assert judged(aggregation_start=0.5) == [3, 4, 5, 6]
    assert judged(aggregation_start=0.5, refresh_every=2) == [3, 5]
    assert judged(aggregation_start=1) == [6]
    assert judged(dynamic_aggregation=False) == []
    long = [number for number in range(1, 501) if FedIODConfig().sends_attributions(RoundInfo("train", number, 500))]
    assert long == list(range(15, 501))  # 0.03 · 500


@pytest.mark.parametrize(("settings", "adamw", "sgd"), [({}, 1 / 16, 1.0), ({"transformer_rate": 0.125}, 0.125, 0.125)])
def test_the_transformer_has_a_learning_rate_of_its_own(settings, adamw, sgd):
    """Under AdamW by default; all of its parameters and no others."""
    method = FedIOD(FedIODConfig(**SMALL, **settings))
    assert [set(method.rate_factors(name).values()) for name in ("adamw", "sgd")] == [{adamw}, {sgd}]
    federation = Federation(Vocabulary(["liver"]), {"a": SiteInfo("a", 1, {"liver": 1})})
    network = method.build_network(UNetSettings(features=(4, 8)), federation)
    (prefix,) = method.rate_factors("adamw")
    slower = {name for name, _ in network.named_parameters() if name.startswith(prefix)}
    assert slower == {f"transformer.{name}" for name, _ in network.transformer.named_parameters()}


def test_every_number_of_the_network_reaches_it():
    changed = {**SMALL, "dropout": 0.3, "gate": "sigmoid", "decoders": "single_layer"}
    facts = {"a": SiteInfo("a", 1, {"liver": 1}), "b": SiteInfo("b", 1, {"spleen": 1})}
    federation = Federation(Vocabulary(["liver", "spleen", "aorta"]), facts)
    method = FedIOD(FedIODConfig(**changed))
    network = empty_network(method, UNetSettings(features=(4, 8)), federation)
    assert network.inter_organ.model_dump() == {"transformer": True, **changed}
    assert network.groups == ("liver", "spleen"), "what some site annotates"
    (own,) = method.build_network(UNetSettings(features=(4, 8)), federation, site="b").groups
    assert own == "spleen"


def test_the_papers_module_table():
    figures = {row.label: row.paper for row in FedIOD.ablation}
    assert figures == {"Enc+Dec": "87.16", "+T": "87.50", "+Reg": "88.11", "+DA": "88.10"}
    built = [FedIODConfig(**row.settings) for row in FedIOD.ablation]
    switches = [(c.transformer, c.regularisation, c.dynamic_aggregation) for c in built]
    assert switches == [(False, False, False), (True, False, False), (True, True, False), (True, True, True)]


def judged(rule, maps, batch):
    """What the rule says about attention maps of a batch."""
    attention_loss = rule.containment(batch)
    return attention_loss.compute(maps, *attention_loss.given)


# -- a training step -------------------------------------------------------------------------------------------------


def test_the_losses_enter_with_their_weight(tiny, tmp_path):
    rule = rule_at(tiny, tmp_path, "north", {**FEDIOD, "dropout": 0, "regularisation_weight": 0.25})
    rule.received = received(rule)
    rule.before_round()
    batch = batch_of(rule)
    loss = rule.loss(batch)
    with rule.model.record_attention() as seen:
        plain = rule.supervision(batch).mean()
    maps = {key: unpacked(rule.received.tensors[key]) for key in (INTERSECTION, UNION)}
    targets = {key: slice_targets(value, batch.slices, batch.depths) for key, value in maps.items()}
    alpha = 1000 * TOKENS_HERE / 256
    missing = missing_intersection(seen.mean, targets[INTERSECTION], alpha).mean()
    outside = outside_union(seen.mean, targets[UNION], alpha).mean()
    assert missing > 0.1
    assert outside > 0.1
    torch.testing.assert_close(loss, plain + 0.25 * (missing + outside))
    expected = {"loss/intersection": missing, "loss/union": outside, GATE: seen.weights.max() + 1}
    for name, value in expected.items():
        torch.testing.assert_close(rule.logged[name], value.detach())
    assert set(rule.step(batch)) == {"loss", "loss/intersection", "loss/union", GATE, ENTROPY}


def test_a_steepness_of_ones_own(tiny, tmp_path):
    rule = rule_at(tiny, tmp_path, "north", {**FEDIOD, "alpha": 3.0})
    rule.received = received(rule)
    rule.before_round()
    maps, batch = attention(4, seed=5), batch_of(rule)
    target = slice_targets(rule.fused[UNION], batch.slices, batch.depths)
    torch.testing.assert_close(judged(rule, maps, batch)[1], outside_union(maps, target, 3.0).mean())


def test_the_losses_move_the_encoder_and_no_decoder(tiny, tmp_path):
    rule = rule_at(tiny, tmp_path, "north")
    rule.received = received(rule)
    rule.before_round()
    batch = batch_of(rule)
    with rule.model.record_attention() as seen:
        rule.model.channels_for(batch.image, rule.own_organs)
    sum(part.sum() for part in judged(rule, seen.mean, batch)).backward()
    moved = {key for key, parameter in rule.model.named_parameters() if parameter.grad is not None}
    assert "encoder.0.conv1.conv.weight" in moved
    assert "transformer.layers.0.heads.projections" in moved
    assert not any(key.startswith("decoders") for key in moved)


@pytest.mark.parametrize(
    ("settings", "round_info"),
    [
        ({"regularisation_start": 0.5}, RoundInfo("train", 4, 10)),
        ({"regularisation": False}, RoundInfo("train", 5, 10)),
        ({"regularisation_weight": 0.0}, RoundInfo("train", 5, 10)),
    ],
)
def test_before_its_start_and_without_it_the_loss_is_supervision_alone(tiny, tmp_path, settings, round_info):
    rule = rule_at(tiny, tmp_path, "north", {**FEDIOD, "dropout": 0, **settings})
    rule.received, rule.round_info = received(rule), round_info
    rule.before_round()
    batch = batch_of(rule)
    assert torch.equal(rule.loss(batch), rule.supervision(batch).mean())
    assert set(rule.step(batch)) == {"loss", GATE, ENTROPY}


def test_without_maps_there_is_nothing_to_hold_on_to(tiny, tmp_path):
    rule = rule_at(tiny, tmp_path, "north")
    rule.received = Payload(rule.model.state_dict())
    rule.before_round()
    assert rule.fused == {}
    assert set(rule.step(batch_of(rule))) == {"loss", GATE, ENTROPY}


def test_patches_with_a_volume_have_one_map(tiny, tmp_path):
    """Of 4 × 4 × 4 tokens; every patch is held to the same one, and a site's own is that of its scans' middles."""
    volumes = {"network": {"dimensions": 3}, "training": {"sampling": {"patch_size": [16, 16, 16]}}}
    rule = rule_at(tiny, tmp_path, "north", {**FEDIOD, "map_scans": 1.0}, **volumes)
    fused = attention(1, tokens=64)
    rule.fused = {INTERSECTION: fused, UNION: fused}
    image = torch.randn(2, 1, 16, 16, 16, generator=torch.Generator().manual_seed(0))
    batch = Batch(image, image > 9, torch.ones(2, 1, dtype=torch.bool), ("liver",), ("a", "b"))
    maps = attention(2, seed=3, tokens=64)
    torch.testing.assert_close(
        judged(rule, maps, batch)[0], missing_intersection(maps, fused.expand(2, -1, -1), 250.0).mean()
    )
    rule.received = Payload(scalars={DEPTH: 1.0})
    rule.after_round()
    assert rule.answer.tensors[UNION].shape == (64, 64)
    assert (rule.inspector.median_depth(), rule.inspector.tokens()) == (1.0, 64)


# -- after training --------------------------------------------------------------------------------------------------


def test_the_dice_loss_of_a_scan_by_hand(tiny, tmp_path):
    """South annotates the spleen and, as one, both kidneys: a voxel is kidney unless it is neither."""
    rule = rule_at(tiny, tmp_path, "south")
    rule.model.eval()
    case = rule.tools.cases[0]
    losses = []
    logits = [rule.model(piece.image).detach() for piece in rule.inspector.pieces(rule.inspector.scan(case))]
    organs = {organ: torch.cat(logits)[:, i].sigmoid() for i, organ in enumerate(rule.model.vocabulary)}
    organs["kidney"] = 1 - (1 - organs["kidney_left"]) * (1 - organs["kidney_right"])
    masks = rule.inspector.scan(case).unpack().masks
    assert case.structures == ("kidney", "spleen")
    for place, structure in enumerate(case.structures):
        truth, p = masks[:, place], organs[structure]
        losses.append(1 - (2 * (p * truth).sum() + 1) / (p.sum() + truth.sum() + 1))
    assert float(rule.inspector.dice_loss(case)) == pytest.approx(float(sum(losses)) / 2, rel=1e-4)


def test_maps_are_those_of_the_best_scans(tiny, tmp_path, monkeypatch):
    """Two of three scans, τ = 0.5: their least and most attention, resampled to the depth that was agreed on."""
    rule = rule_at(tiny, tmp_path, "north", {**FEDIOD, "map_scans": 0.5, "dynamic_aggregation": False})
    cases = list(rule.tools.cases)
    assert len(cases) == 3, "one and a half: two"
    bad = {cases[0].id: 0.9, cases[1].id: 0.2, cases[2].id: 0.1}
    monkeypatch.setattr(rule.inspector, "dice_loss", lambda case: torch.tensor(bad[case.id]))
    rule.received = Payload(scalars={DEPTH: 7.0})
    rule.after_round()
    assert rule.model.training
    by_hand = ScanMaps(7)
    rule.model.eval()
    for case in cases[1:]:
        by_hand.add(rule.model.attention(rule.inspector.scan(case).image))
    sent = rule.update()
    assert sent.tensors[INTERSECTION].shape == (TOKENS_HERE, 7 * TOKENS_HERE)
    assert sent.tensors[UNION].dtype == torch.float16
    torch.testing.assert_close(unpacked(sent.tensors[INTERSECTION]), by_hand.intersection, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(unpacked(sent.tensors[UNION]), by_hand.union, rtol=1e-3, atol=1e-6)
    assert not any(name.startswith("attribution") for name in sent.scalars)


def test_nothing_is_drawn_after_training(tiny, tmp_path):
    rule = rule_at(tiny, tmp_path, "north")
    rule.received = Payload(scalars={DEPTH: 4.0})
    before = torch.get_rng_state()
    rule.after_round()
    first = rule.update()
    assert torch.equal(torch.get_rng_state(), before)
    rule.after_round()
    again = rule.update()
    assert first.scalars == again.scalars
    assert all(torch.equal(first.tensors[key], again.tensors[key]) for key in first.tensors)
    assert {key for key in first.tensors if key.startswith("attention")} == {INTERSECTION, UNION}
    assert {name for name in first.scalars if name.startswith("attribution/")} == {
        f"attribution/{layer}.{head}" for layer in range(2) for head in range(3)
    }


def test_the_first_round_tells_sizes_and_no_maps(tiny, tmp_path):
    rule = rule_at(tiny, tmp_path, "north")
    rule.received, rule.round_info = Payload(), RoundInfo("train", 1, 10)
    rule.after_round()
    depths = sorted(case.image.shape[2] for case in rule.tools.cases)
    sent = rule.update()
    assert sent.scalars[DEPTH] == np.median(depths)
    assert sent.scalars[TOKENS] == TOKENS_HERE
    assert sent.tensors.keys() == rule.model.state_dict().keys()


def test_the_encoder_runs_once_however_many_steps(tiny, tmp_path):
    rule = rule_at(tiny, tmp_path, "north", {**FEDIOD, "attribution_steps": 5})
    rule.model.eval()
    encoder, decoder = [], []
    rule.model.encoder[0].register_forward_hook(lambda *_: encoder.append(1))
    rule.model.decoders["liver"]["output"].register_forward_hook(lambda *_: decoder.append(1))
    scan = rule.inspector.scan(rule.tools.cases[0])
    assert len(scan) > 16, "more than one piece"
    found = rule.inspector.attribution_of(rule.tools.cases[0])
    shown = (scan.bits != 0).flatten(1).any(1).nonzero()
    pieces = -(-(int(shown[-1]) - int(shown[0]) + 1) // 16)
    assert (len(encoder), len(decoder)) == (pieces, 5 * pieces)
    assert found.shape == (2, 3)
    assert found.min() > 0, "on the real network it is not zero"
    assert all(parameter.grad is None for parameter in rule.model.parameters())


@pytest.mark.parametrize("at_once", [1, 2, 3, 50])
def test_steps_taken_together_find_the_same(tiny, tmp_path, monkeypatch, at_once):
    """As a GPU takes them: seven steps in passes of two, of three, or in one."""
    rule = rule_at(tiny, tmp_path, "north", {**FEDIOD, "attribution_steps": 7})
    rule.model.eval()
    expected = rule.inspector.attribution_of(rule.tools.cases[0])
    encoder, passes = [], []
    rule.model.encoder[0].register_forward_hook(lambda *_: encoder.append(1))
    rule.model.decoders["liver"]["output"].register_forward_hook(lambda *_: passes.append(1))
    monkeypatch.setattr(rule.inspector.attributor, "steps_at_once", lambda maps, pixels: at_once)
    found = rule.inspector.attribution_of(rule.tools.cases[0])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6 * float(expected.abs().max()))
    assert len(passes) == len(encoder) * -(-7 // at_once) > 0


def test_attributions_of_fine_steps_add_up_to_what_attention_changes(tiny, tmp_path):
    """Completeness of integrated gradients: Σ over heads and entries ≈ F(A) − F(0). A head counts by its largest."""
    rule = rule_at(tiny, tmp_path, "south", {**FEDIOD, "attribution_steps": 200})
    rule.model.eval()
    kept: list[Any] = []
    original = head_attribution_module.head_attribution

    def kept_too(foreground, maps, *others):
        kept.append((foreground, maps, original(foreground, maps, *others)))
        return kept[-1][2]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head_attribution_module, "head_attribution", kept_too)
        found = rule.inspector.attribution_of(rule.tools.cases[0])
    with torch.no_grad():
        change = sum(f(maps) - f([torch.zeros_like(layer) for layer in maps]) for f, maps, _ in kept)
    total = sum(float(layer.sum()) for _, _, attribution in kept for layer in attribution)
    assert total == pytest.approx(float(change), rel=0.05)
    largest = [[max(float(a[i][:, j].max()) for _, _, a in kept) for j in range(3)] for i in range(2)]
    torch.testing.assert_close(found, torch.tensor(largest))


def test_attribution_changes_with_the_organ(tiny, tmp_path):
    """The same scan and weights, the mask read as another organ: other decoders, other heads that matter."""
    organs = ["liver", "spleen"]
    site = {"name": "north", "annotated": organs, "cases": 5, "spacing_mm": [12, 12, 12]}
    rule = rule_at(tiny, tmp_path, "north", vocabulary=organs, phantom={"sites": [site]})
    rule.model.eval()
    case = rule.tools.cases[0]
    found = {}
    image = {name: getattr(case, name) for name in ("image", "shape", "channels", "part", "spacing")}
    for bit, organ in enumerate(case.structures):
        labels = ((np.asarray(case.labels) >> bit) & 1).astype(np.uint8)
        only = SimpleNamespace(id="x", labels=labels, structures=(organ,), **image)
        found[organ] = rule.inspector.attribution_of(only)
    shares = [found[organ] / found[organ].abs().sum() for organ in organs]
    assert (shares[0] - shares[1]).abs().max() > 0.02


def test_a_head_that_adds_nothing_counts_for_nothing(tiny, tmp_path):
    """Its output is zero, and no gate uses its map: the site tells 0, and other sites decide about that head."""
    rule = rule_at(tiny, tmp_path, "north", {**FEDIOD, "gate": "none", "regularisation": False})
    with torch.no_grad():
        rule.model.transformer.layers[1].heads[2].output.zero_()
    rule.received = Payload()
    rule.after_round()
    reported = rule.update().scalars
    assert reported["attribution/1.2"] == 0
    assert all(value != 0 for name, value in reported.items() if name.startswith("attribution/") and name[-3:] != "1.2")
    others = {**reported, "attribution/1.2": 3e-4}
    server = server_of(rule.federation)
    aggregate(server, {"north": ({}, reported), "south": ({}, others)})
    assert server.weight("north", "transformer.layers.1.heads.2.query.weight") == 0
    assert server.weight("south", "transformer.layers.1.heads.2.query.weight") == 1


def test_scans_that_show_no_organ_say_nothing(tiny, tmp_path):
    rule = rule_at(tiny, tmp_path, "north")
    case = rule.tools.cases[0]
    names = ("id", "image", "shape", "channels", "part", "structures", "spacing")
    empty = SimpleNamespace(**{name: getattr(case, name) for name in names})
    empty.labels = np.zeros_like(case.labels)
    assert rule.inspector.attribution_of(empty) is None
    rule.inspector.tools = replace(rule.tools, cases=[empty])
    rule.received = Payload(scalars={DEPTH: 4.0})
    rule.after_round()
    sent = rule.update()
    assert UNION in sent.tensors
    assert not any(name.startswith("attribution") for name in sent.scalars)


def test_too_many_tokens_are_refused_before_they_fill_the_memory(tiny, tmp_path, monkeypatch):
    """The tiny network halves slices of 16 × 16 twice: 16 tokens."""
    monkeypatch.setattr(fediod, "_MOST_TOKENS", 15)
    with refused("too-many-tokens", ConfigError) as caught:
        rule_at(tiny, tmp_path, "north")
    assert "16 places" in caught.value.what
    assert "network.features" in caught.value.fix
    off = {"transformer": False, "regularisation": False, "dynamic_aggregation": False}
    assert rule_at(tiny, tmp_path, "north", {**FEDIOD, **off})  # nothing is related there
