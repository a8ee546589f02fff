"""UFPS on the wire: who counts how much, the mask that sites disagree on, what messages hold, and how many bytes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from overhearing import overheard

from panorgan.anatomy import Vocabulary
from panorgan.federation.aggregation import SpooledUpdates
from panorgan.federation.events import read_events
from panorgan.federation.message import Message, MessageFile
from panorgan.methods.protocol import Federation, Payload, RoundInfo, SiteInfo
from panorgan.methods.ufps import MEAN, UFPS, VARIANCE, UFPSConfig
from panorgan.methods.ufps.masks import pack, unpack
from panorgan.methods.ufps.sparse_masks import GLOBAL, LOCAL

FACTS = {"a": SiteInfo("a", 1, {"liver": 1}), "b": SiteInfo("b", 3, {"spleen": 3})}
FEDERATION = Federation(Vocabulary(["liver", "spleen"]), FACTS)


# -- the server ------------------------------------------------------------------------------------------------------

KEYS = ("encoder.0.weight", "bottleneck.weight", "decoder.0.weight", "head.weight")
CERTAIN = {
    # softmax(−μ/0.05) = (¾, ¼), softmax(−σ/0.001) = (⅘, ⅕), n/Σn = (¼, ¾): Â = (0.6, 0.4)
    "a": {MEAN: 0.1, VARIANCE: 0.002},
    "b": {MEAN: 0.1 + 0.05 * math.log(3), VARIANCE: 0.002 + 0.001 * math.log(4)},
}


def answers(folder: Path, numbers: dict[str, dict[str, float]], **masks: torch.Tensor) -> SpooledUpdates:
    """Site a says 1 everywhere, b says 2."""
    files = {}
    for place, site in enumerate(numbers, 1):
        tensors = {key: torch.full((3,), float(place)) for key in KEYS}
        tensors |= {LOCAL: masks[site]} if site in masks else {}
        (folder / site).write_bytes(Message(tensors, {"cases": 1.0, **numbers[site]}).to_bytes())
        files[site] = MessageFile(folder / site)
    return SpooledUpdates(files)


def server(round_: int, rounds: int = 5, **config: object) -> UFPS.Server:
    rule = UFPS.Server(UFPSConfig(**config), FEDERATION, {key: torch.zeros(3) for key in KEYS})
    rule.round_info = RoundInfo("train", round_, rounds)
    return rule


BY_CASES, BY_CERTAINTY = 0.25 * 1 + 0.75 * 2, 0.6 * 1 + 0.4 * 2
MEANS = {
    # part, round; what counts in encoder, bottleneck, decoder and head
    "decoder": ({}, 3, [BY_CASES, BY_CASES, BY_CERTAINTY, BY_CERTAINTY]),
    "encoder": ({"uncertainty_aware": "encoder"}, 3, [BY_CERTAINTY, BY_CERTAINTY, BY_CASES, BY_CASES]),
    "all": ({"uncertainty_aware": "all"}, 3, [BY_CERTAINTY] * 4),
    "none": ({"uncertainty_aware": "none"}, 3, [BY_CASES] * 4),
    "before it begins": ({}, 2, [BY_CASES] * 4),
    "uniform elsewhere": (
        {"weighting": "uniform"},
        3,
        [1.5, 1.5, *[2 - (0.75 + 0.8 + 0.5) / 3] * 2],
    ),
}


@pytest.mark.parametrize(("config", "round_", "expected"), MEANS.values(), ids=MEANS.keys())
def test_certainty_counts_in_the_chosen_part_alone(tmp_path, config, round_, expected):
    rule = server(round_, **config)
    rule.aggregate(answers(tmp_path, CERTAIN))
    assert [rule.weights[key][0].item() for key in KEYS] == pytest.approx(expected)


def test_a_site_that_tells_nothing_counts_by_its_cases(tmp_path):
    """A is certain of everything, b has no teachers to be unsure of: ¼ and ¾ in all three terms."""
    rule = server(3)
    rule.aggregate(answers(tmp_path, {"a": {MEAN: 0.0, VARIANCE: 0.0}, "b": {}}))
    assert [rule.weights[key][0].item() for key in KEYS] == pytest.approx([BY_CASES] * 4)


def bits(text: str) -> torch.Tensor:
    """Twelve weights as a packed mask."""
    return pack(torch.tensor([letter == "1" for letter in text]))


def as_text(packed: torch.Tensor) -> str:
    return "".join("1" if bit else "0" for bit in unpack(packed, 12).tolist())


def test_the_disputed_weights_go_out_with_the_next_request(tmp_path):
    """Eq. 12: neither in no mask nor in all. A silent site keeps its last mask; a restart forgets nothing."""
    rule = server(3)
    assert GLOBAL not in rule.broadcast("a").tensors
    assert rule.expects("a")[LOCAL].shape == (2,)
    rule.aggregate(answers(tmp_path, CERTAIN, a=bits("110000000001"), b=bits("101000000000")))
    for site in FACTS:
        assert as_text(rule.broadcast(site).tensors[GLOBAL]) == "011000000001"
    assert rule.broadcast("a").tensors.keys() == {*KEYS, GLOBAL}, "the means of the masks themselves are no weights"
    rule.round_info = RoundInfo("train", 4, 5)
    rule.aggregate(answers(tmp_path, {"a": CERTAIN["a"]}, a=bits("000000000011")))
    assert as_text(rule.broadcast("a").tensors[GLOBAL]) == "101000000011"
    again = server(5)
    again.load_state(rule.state())
    assert as_text(again.broadcast("b").tensors[GLOBAL]) == "101000000011"
    again.load_state(Payload())
    assert GLOBAL not in again.broadcast("b").tensors


@pytest.mark.parametrize(
    ("stage", "round_", "config"),
    [
        ("train", 2, {}),
        ("exchange", 1, {}),
        ("train", 3, {"sharpness": "topk"}),
        ("train", 3, {"rho": 0}),
    ],
)
def test_no_mask_is_expected_or_sent_where_there_is_no_susam(tmp_path, stage, round_, config):
    rule = server(3, **config)
    rule.masks.collect({"a": bits("110000000001"), "b": bits("101000000000")})
    rule.round_info = RoundInfo(stage, round_, 5)
    assert GLOBAL not in rule.broadcast("a").tensors
    assert LOCAL not in rule.expects("a")


def test_a_kept_mask_does_not_hold_on_to_the_answer_it_came_with(tmp_path):
    """Answers are memory-mapped files as large as the model; one that is removed stays on disk while a part is held."""
    rule = server(3)
    updates = answers(tmp_path, CERTAIN, a=bits("110000000001"))
    rule.aggregate(updates)
    del updates
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs a list of this process's memory maps")
    assert not [line for line in maps.read_text().splitlines() if line.endswith(str(tmp_path / "a"))]
    assert as_text(next(iter(rule.masks.state().values()))) == "110000000001"


# -- on the tiny federation ------------------------------------------------------------------------------------------

TRAINING = {"rounds": 5, "validate_every": 0, "local_steps": 2}


def test_what_travels_in_which_round(tiny, tmp_path):
    """Pretrain, exchange, five rounds; late modules from the third on, masks in the third and fifth."""
    experiment = tiny(method={"name": "ufps", "pretrain": 0.2, "mask_every": 2}, training=TRAINING)
    coordinator, sites = overheard(experiment, tmp_path)
    assert [m.stage for m in coordinator.schedule] == ["pretrain", "exchange"] + ["train"] * 5
    coordinator.run()
    weights = set(coordinator.state.weights)
    teacher = {f"teacher/{key}" for key in weights}
    plain, certain = {"loss", "cases"}, {"loss", "cases", MEAN, VARIANCE}
    for name, site in sites.items():
        (other,) = sites.keys() - {name}
        others = {f"teacher/{other}/{key}" for key in weights}
        masked = {*weights, LOCAL}
        assert [set(message.tensors) for message in site.sent] == [
            teacher, set(), weights, weights, masked, weights, masked
        ]  # fmt: skip
        asked = {*weights, GLOBAL}
        assert [set(message.tensors) for message in site.received] == [
            set(), others, weights, weights, weights, asked, asked
        ]  # fmt: skip
        volumes = {f"volume_ml/{structure}" for structure in site.worker.facts().annotated}
        assert [set(m.scalars) for m in site.sent] == [plain | volumes, {"cases"}, plain, plain, *[certain] * 3]
        rule = site.worker._rule
        assert site.sent[-1].scalars[MEAN] == float(rule.bank.statistics().mean)
        assert site.sent[-1].scalars[VARIANCE] == float(rule.bank.statistics().variance)
        assert 0 < len(rule.bank) <= rule.facts.train_cases
    parameters = sum(p.numel() for p in rule.model.parameters())
    masks = [unpack(site.sent[4].tensors[LOCAL], parameters) for site in sites.values()]
    assert [int(mask.sum()) for mask in masks] == [round(0.4 * parameters)] * 2
    disputed = unpack(sites["north"].received[5].tensors[GLOBAL], parameters)
    assert torch.equal(disputed, masks[0] ^ masks[1])
    assert disputed.any()


def test_the_mean_of_a_run_is_that_of_eq_7(tiny, tmp_path):
    """From the messages alone: in the last round the decoder by certainty, the encoder by cases."""
    experiment = tiny(method={"name": "ufps", "pretrain": 0.3}, training={**TRAINING, "rounds": 3})
    coordinator, sites = overheard(experiment, tmp_path)
    coordinator.run()
    last = {name: site.sent[-1] for name, site in sites.items()}
    cases = {name: message.scalars["cases"] for name, message in last.items()}
    by_cases = {name: count / sum(cases.values()) for name, count in cases.items()}
    terms = [by_cases]
    for key, temperature in ((MEAN, 0.05), (VARIANCE, 0.001)):
        powers = {name: math.exp(-message.scalars[key] / temperature) for name, message in last.items()}
        terms.append({name: power / sum(powers.values()) for name, power in powers.items()})
    certain = {name: sum(term[name] for term in terms) / 3 for name in last}
    assert certain != pytest.approx(by_cases, abs=1e-3)
    for key, value in coordinator.state.weights.items():
        shares = certain if key.startswith(("decoder.", "head.")) else by_cases
        expected = sum(shares[name] * message.tensors[key].double() for name, message in last.items())
        torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-7)


def test_a_round_with_masks_is_hardly_larger_than_one_of_fedavg(tiny, tmp_path):
    """One bit for each of 32 in both directions, 1/32 = 3.1 %, at 4 % at most; in rounds between refreshes half."""
    common = {"network": {"features": [16, 32, 64]}, "training": {**TRAINING, "local_steps": 1}}
    sizes = {}
    for name, method in (("fedavg", {"name": "fedavg"}), ("ufps", {"name": "ufps", "pretrain": 0.2, "mask_every": 2})):
        coordinator, _ = overheard(tiny(method=method, **common), tmp_path / name)
        coordinator.run()
        rounds = [e.facts for e in read_events(tmp_path / name / "events.jsonl") if e.kind == "round"]
        sizes[name] = [facts["bytes_training"] for facts in rounds if facts["stage"] == "train"]
    plain = min(sizes["fedavg"])
    ratios = [size / plain for size in sizes["ufps"]]
    assert max(ratios) == ratios[4], "the round in which masks go both ways"
    assert 1 + 1 / 32 < ratios[4] <= 1.04
    assert 1 + 1 / 64 < ratios[3] <= 1.02
    assert max(ratios[:2]) < 1.005
