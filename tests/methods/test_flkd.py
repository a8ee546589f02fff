"""FLKD: both distillation losses by hand, who teaches whom, and what travels in which stage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest
import torch
from overhearing import overheard, spooled
from torch import nn

from panorgan.anatomy import Vocabulary
from panorgan.federation.events import read_events
from panorgan.methods.base import Payload, SiteTools
from panorgan.methods.flkd import FLKD, FLKDConfig
from panorgan.methods.protocol import Federation, RoundInfo, SiteInfo
from panorgan.methods.shared.teacher_stages import organs_by_teacher
from panorgan.networks import SegmentationNetwork
from panorgan.networks.organ_parts import group_of_key
from panorgan.preparation.batch import Batch
from panorgan.preparation.store import StoredCase

TRAINING = {"rounds": 2, "validate_every": 0, "local_steps": 2}
OWN = {"north": {"liver"}, "south": {"spleen", "kidney_left", "kidney_right"}}


# -- a site whose network has fixed outputs ------------------------------------------------------------------------


class FixedNetwork(SegmentationNetwork):
    """Logits [B, C, V], whatever the image."""

    def __init__(self, organs: Sequence[str], logits: torch.Tensor) -> None:
        super().__init__(Vocabulary(organs), "sigmoid")
        self.logits = nn.Parameter(logits.clone())

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.logits

    def channels_for(self, image, organs):
        places = [place for place, organ in enumerate(self.vocabulary) if organ in organs]
        return self.logits[:, places], Vocabulary(self.vocabulary.organs[place] for place in places)


def make_site(
    organs: Sequence[str], annotated: dict[str, int], local: torch.Tensor, frozen: torch.Tensor, **config: object
) -> FLKD.Site:
    """In a training round: the global model that it received says `frozen`, its own one by now says `local`.

    It has two training cases; another site annotates every organ.
    """
    here, there = SiteInfo("here", 2, annotated), SiteInfo("there", 1, dict.fromkeys(organs, 1))
    federation = Federation(Vocabulary(organs), {"here": here, "there": there})
    model = FixedNetwork(organs, torch.zeros_like(local))
    tools = SiteTools(model, torch.optim.SGD(model.parameters(), 0.1))
    site = FLKD.Site(FLKDConfig(**{"dice_over": "sample", **config}), here, federation, tools)
    site.round_info, site.received = RoundInfo("train", 1, 1), Payload({"logits": frozen})
    site.before_round()
    with torch.no_grad():
        model.logits.copy_(local)
    return site


def make_batch(structures: tuple[str, ...], annotated: list[list[bool]], voxels: int, **more: object) -> Batch:
    masks = torch.rand(len(annotated), len(structures), voxels, generator=torch.Generator().manual_seed(3)) > 0.5
    image = torch.zeros(len(annotated), 1, voxels)
    return Batch(image, masks, torch.tensor(annotated), structures, ("a", "b")[: len(annotated)], **more)


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def kd_by_hand(logits: list, targets: list, counted: list[list[bool]]) -> list[float]:
    """Eqs. 7, 9 and 10 with the (1 − p) term, sample by sample: 1/(N_V·N_l) Σ_l Σ_j over the channels that count."""
    losses = []
    for x, t, counts in zip(logits, targets, counted, strict=True):
        total = 0.0
        for c, v in product([c for c in range(len(counts)) if counts[c]], range(len(x[0]))):
            p = sigmoid(x[c][v])
            total -= t[c][v] * math.log(p) + (1 - t[c][v]) * math.log(1 - p)
        losses.append(total / (len(x[0]) * max(sum(counts), 1)))
    return losses


def kd_slope_by_hand(logits: list, targets: list, counted: list[list[bool]]) -> torch.Tensor:
    """(σ(x) − t)/(N_V·N_l) where a channel counts, 0 elsewhere."""
    slope = torch.zeros(len(logits), len(logits[0]), len(logits[0][0]))
    for b, counts in enumerate(counted):
        for c, v in product([c for c in range(len(counts)) if counts[c]], range(slope.shape[2])):
            slope[b, c, v] = (sigmoid(logits[b][c][v]) - targets[b][c][v]) / (slope.shape[2] * sum(counts))
    return slope


def as_targets(logits: torch.Tensor) -> list:
    return [[[sigmoid(x) for x in channel] for channel in sample] for sample in logits.tolist()]


# -- eqs. 7, 9, 10 ---------------------------------------------------------------------------------------------------

KIDNEYS = ("kidney_left", "kidney_right", "spleen")
DISTILLED = {
    # organs; cases that annotate each structure; per sample what is annotated; per sample which organs are distilled
    "the others' organs": (("liver", "spleen", "pancreas"), {"liver": 2}, [[1], [1]], [[0, 1, 1], [0, 1, 1]]),
    "a mixed batch": (
        ("liver", "spleen", "pancreas"),
        {"liver": 2, "spleen": 1},
        [[1, 1], [1, 0]],
        [[0, 0, 1], [0, 1, 1]],
    ),
    "one sample has everything": (("liver", "spleen"), {"liver": 1, "spleen": 2}, [[1, 1], [0, 1]], [[0, 0], [1, 0]]),
    "a liver mask shows no tumour": (("liver", "liver_tumour"), {"liver": 2}, [[1], [1]], [[0, 1], [0, 1]]),
    "a tumour mask shows no liver": (("liver", "liver_tumour"), {"liver_tumour": 2}, [[1], [1]], [[1, 0], [1, 0]]),
    "a union says where its parts are": (KIDNEYS, {"kidney": 2}, [[1], [1]], [[0, 0, 1], [0, 0, 1]]),
    "the union in one sample only": (
        KIDNEYS,
        {"kidney": 1, "spleen": 1},
        [[1, 0], [0, 1]],
        [[0, 0, 1], [1, 1, 0]],
    ),
}


@pytest.mark.parametrize(("organs", "counts", "annotated", "distilled"), DISTILLED.values(), ids=DISTILLED.keys())
def test_global_distillation_by_hand(organs, counts, annotated, distilled):
    """Values [B] and gradients with respect to the logits; labelled channels get none, the global model none at all."""
    local, frozen = numbers(2, len(organs), 3, seed=1), numbers(2, len(organs), 3, seed=2)
    site = make_site(organs, counts, local, frozen)
    batch = make_batch(tuple(sorted(counts)), [[bool(a) for a in row] for row in annotated], 3)
    counted = [[bool(d) for d in row] for row in distilled]
    logits, vocabulary = site.model.channels_for(batch.image, organs)
    loss = site.global_distillation(logits, vocabulary, batch)
    targets = as_targets(frozen)
    assert loss.tolist() == pytest.approx(kd_by_hand(local.tolist(), targets, counted), rel=1e-5)
    loss.sum().backward()
    torch.testing.assert_close(site.model.logits.grad, kd_slope_by_hand(local.tolist(), targets, counted))
    assert [bool(row.any()) for row in site.model.logits.grad.flatten(0, 1)] == [c for row in counted for c in row]
    assert site.received_model.logits.grad is None
    assert torch.equal(site.received_model.logits, frozen)


LABELS_LIVER = ({"liver": 2}, ("liver",), [[True], [True]])


@pytest.mark.parametrize(
    "drawn", [("pancreas",), ("aorta", "pancreas"), ("aorta", "pancreas", "spleen")], ids=["n=1", "n=2", "all"]
)
@pytest.mark.parametrize("known", ["everywhere", "first sample lacks the first"])
def test_local_distillation_by_hand(drawn, known):
    """Eq. 10 for one organ, the same for two of them, eq. 9 for all; teachers are named in another order than heads."""
    organs = ("liver", "spleen", "pancreas", "aorta")
    counts, structures, annotated = LABELS_LIVER
    local, soft_targets = numbers(2, 4, 3, seed=1), numbers(2, len(drawn), 3, seed=4).sigmoid()
    counted = [[True] * len(drawn), [True] * len(drawn)]
    counted[0][0] = known == "everywhere"
    batch = make_batch(
        structures,
        annotated,
        3,
        soft_targets=soft_targets,
        soft_target_organs=drawn,
        soft_targets_valid=torch.tensor(counted, dtype=torch.bool),
    )
    site = make_site(organs, counts, local, local, global_weight=0)
    logits, vocabulary = site.model.channels_for(batch.image, organs)
    loss = site.local_distillation(logits, vocabulary, batch)
    places = [organs.index(organ) for organ in drawn]
    chosen = local[:, places].tolist()
    assert loss.tolist() == pytest.approx(kd_by_hand(chosen, soft_targets.tolist(), counted), rel=1e-5)
    loss.sum().backward()
    expected = torch.zeros(2, 4, 3)
    expected[:, places] = kd_slope_by_hand(chosen, soft_targets.tolist(), counted)
    torch.testing.assert_close(site.model.logits.grad, expected)
    assert site.received_model is None, "it is not needed"


def test_numbers_that_can_be_checked_with_a_pencil():
    """σ(log 3) = 3/4. Two voxels; spleen 0 and log 3, the global model says 3/4 and 1/2."""
    three = math.log(3)
    local, frozen = torch.tensor([[[9.0, 9.0], [0.0, three]]]), torch.tensor([[[9.0, 9.0], [three, 0.0]]])
    site = make_site(("liver", "spleen"), {"liver": 2}, local, frozen)
    batch = make_batch(("liver",), [[True]], 2)
    loss = site.global_distillation(*site.model.channels_for(batch.image, ("liver", "spleen")), batch)
    assert loss.item() == pytest.approx((math.log(2) + (math.log(4 / 3) + math.log(4)) / 2) / 2)
    loss.sum().backward()
    torch.testing.assert_close(site.model.logits.grad, torch.tensor([[[0.0, 0.0], [-0.125, 0.125]]]))


# -- eq. 8 -----------------------------------------------------------------------------------------------------------


def supervision_by_hand(p: list[float], truth: list[float]) -> float:
    """Eqs. 3 to 5 for one structure: cross-entropy with the (1 − p) term, and soft Dice with 1 above and below."""
    entropy = -sum(y * math.log(q) + (1 - y) * math.log(1 - q) for q, y in zip(p, truth, strict=True)) / len(p)
    overlap = sum(q * y for q, y in zip(p, truth, strict=True))
    return entropy + 1 - (2 * overlap + 1) / (sum(p) + sum(truth) + 1)


def slope_of(loss, logits: torch.Tensor, step: float = 1e-5) -> torch.Tensor:
    """Central differences of a plain function of a nested list, in double precision."""
    start = logits.double()
    slope = torch.zeros_like(start)
    for place in product(*(range(n) for n in start.shape)):
        up, down = start.clone(), start.clone()
        up[place] += step
        down[place] -= step
        slope[place] = (loss(up.tolist()) - loss(down.tolist())) / (2 * step)
    return slope.float()


SUPERVISED = {
    # organs; what is annotated; its probability from a voxel's probabilities; organs that are distilled
    "an organ": (("liver", "spleen", "pancreas"), "liver", lambda p: p[0], (1, 2)),
    "an organ with a tumour": (("liver", "liver_tumour"), "liver", lambda p: p[0], (1,)),
    # The tumour lies inside the union too, but the mask does not show where: supervision must leave its output alone.
    "a union with a tumour": (
        ("kidney_left", "kidney_right", "kidney_tumour"),
        "kidney",
        lambda p: 1 - (1 - p[0]) * (1 - p[1]),
        (2,),
    ),
}


@pytest.mark.parametrize(("organs", "structure", "combined", "distilled"), SUPERVISED.values(), ids=SUPERVISED.keys())
def test_the_whole_loss_by_hand(organs, structure, combined, distilled):
    """Eq. 8 with weights 0.5 and 2: the mean over the batch of CE + Dice + 0.5·KD_global + 2·KD_local."""
    local, frozen = numbers(2, len(organs), 3, seed=1), numbers(2, len(organs), 3, seed=2)
    drawn = distilled[-1]
    soft_targets, known = numbers(2, 1, 3, seed=4).sigmoid(), torch.ones(2, 1, dtype=torch.bool)
    site = make_site(organs, {structure: 2}, local, frozen, global_weight=0.5, local_weight=2.0)
    batch = make_batch(
        (structure,),
        [[True], [True]],
        3,
        soft_targets=soft_targets,
        soft_target_organs=(organs[drawn],),
        soft_targets_valid=known,
    )
    counted = [[c in distilled for c in range(len(organs))]] * 2

    def parts(logits: list) -> tuple[float, float, float]:
        supervised = 0.0
        for sample, mask in zip(logits, batch.masks[:, 0].tolist(), strict=True):
            voxels = [[sigmoid(channel[v]) for channel in sample] for v in range(3)]
            supervised += supervision_by_hand([combined(p) for p in voxels], [float(m) for m in mask])
        global_kd = kd_by_hand(logits, as_targets(frozen), counted)
        local_kd = kd_by_hand([[sample[drawn]] for sample in logits], soft_targets.tolist(), [[True]] * 2)
        return supervised / 2, sum(global_kd) / 2, sum(local_kd) / 2

    def whole(logits: list) -> float:
        supervised, global_kd, local_kd = parts(logits)
        return supervised + 0.5 * global_kd + 2.0 * local_kd

    reported = site.step(batch)
    _, global_kd, local_kd = parts(local.tolist())
    assert {name: value.item() for name, value in reported.items()} == pytest.approx(
        {"loss": whole(local.tolist()), "loss/global_kd": global_kd, "loss/local_kd": local_kd}, rel=1e-5
    )
    torch.testing.assert_close(site.model.logits.grad, slope_of(whole, local), rtol=1e-3, atol=1e-5)
    assert torch.equal(site.received_model.logits, frozen), "the step moved the local model only"
    assert not torch.equal(site.model.logits, local)


def test_what_is_not_there_is_not_logged():
    """No teachers: no local part. A site that annotates everything in every case: no global part either."""
    counts, structures, annotated = LABELS_LIVER
    local = numbers(2, 2, 3, seed=1)
    site = make_site(("liver", "spleen"), counts, local, local)
    assert set(site.step(make_batch(structures, annotated, 3))) == {"loss", "loss/global_kd"}
    site = make_site(("liver",), counts, local[:, :1], local[:, :1])
    assert set(site.step(make_batch(structures, annotated, 3))) == {"loss"}
    site = make_site(("liver", "spleen"), counts, local, local)
    site.after_round()
    site.round_info = RoundInfo("pretrain", 1, 1)
    site.before_round()
    assert set(site.step(make_batch(structures, annotated, 3))) == {"loss"}


# -- who teaches -----------------------------------------------------------------------------------------------------

SIDES = Vocabulary(["liver", "liver_tumour", "kidney_left", "kidney_right"])
WHO = {
    # annotated by site; who has a teacher; whom one listens to about what
    "organs by name": ({"a": ["liver"], "b": ["liver", "liver_tumour"]}, "ab", {"a": "L", "b": "LT"}),
    "a union, alone": ({"a": ["kidney"], "b": ["liver"]}, "ab", {"a": "lr", "b": "L"}),
    "a union beside its parts": ({"a": ["kidney"], "b": ["kidney_left", "kidney_right"]}, "ab", {"a": "", "b": "lr"}),
    "a union beside one part": ({"a": ["kidney"], "b": ["kidney_left"]}, "ab", {"a": "r", "b": "l"}),
    "a site with both": ({"a": ["kidney", "kidney_left"], "b": ["kidney"]}, "ab", {"a": "lr", "b": "r"}),
    "who knows them by name has no teacher": ({"a": ["kidney"], "b": ["kidney_left"]}, "a", {"a": "lr"}),
}


@pytest.mark.parametrize(("annotated", "present", "expected"), WHO.values(), ids=WHO.keys())
def test_a_union_is_heard_only_where_no_teacher_knows_the_parts_by_name(annotated, present, expected):
    sites = {name: SiteInfo(name, 1, dict.fromkeys(own, 1)) for name, own in annotated.items()}
    letters = dict(zip("LTlr", SIDES, strict=True))
    found = organs_by_teacher(Federation(SIDES, sites), present)
    assert found == {site: tuple(letters[letter] for letter in own) for site, own in expected.items()}


def test_a_case_is_distilled_from_the_teachers_of_what_it_does_not_label():
    """The own teacher too, for a case of one's own without that label; a liver mask leaves the tumour to others."""
    local = numbers(2, 4, 3, seed=1)
    site = make_site(("liver", "liver_tumour", "spleen", "aorta"), {"liver": 1, "spleen": 1}, local, local)
    for name in ("here", "there"):
        site.teachers.keep(name, {})
    site.teachers.owners = {"here": ("liver", "spleen"), "there": ("liver", "liver_tumour")}
    asked = {
        own: site.organs_without_label(StoredCase("x", "x", "here", own, Path("nowhere")))
        for own in ((), ("liver",), ("liver", "liver_tumour", "spleen"), ("spleen",))
    }
    assert [" ".join(organs) for organs in asked.values()] == [
        "liver liver_tumour spleen",
        "liver_tumour spleen",
        "",
        "liver liver_tumour",
    ]


# -- the mean, and what travels --------------------------------------------------------------------------------------


def test_the_mean_of_everything_is_unweighted(tmp_path):
    """Eq. 6: sites of 1 and 3 cases count the same, and every site has a say in every head."""
    shared, head = "encoder.0.conv.weight", "heads.spleen.0.weight"
    facts = {"a": SiteInfo("a", 1, {"liver": 1}), "b": SiteInfo("b", 3, {"spleen": 3})}
    start = {key: torch.tensor([9.0]) for key in (shared, head)}
    rule = FLKD.Server(FLKDConfig(), Federation(Vocabulary(["liver", "spleen"]), facts), start)
    rule.round_info = RoundInfo("train", 1, 1)
    sent = {"a": {shared: 1.0, head: 2.0}, "b": {shared: 2.0, head: 10.0}}
    rule.aggregate(spooled(tmp_path, {s: {k: torch.tensor([v]) for k, v in own.items()} for s, own in sent.items()}))
    assert {key: value.item() for key, value in rule.weights.items()} == {shared: 1.5, head: 6.0}


def test_what_travels_in_which_stage(tiny, tmp_path):
    coordinator, sites = overheard(tiny(method={"name": "flkd", "pretrain": 1.0}, training=TRAINING), tmp_path)
    assert [m.stage for m in coordinator.schedule] == ["pretrain", "pretrain", "exchange", "train", "train"]
    coordinator.run()
    everything = set(coordinator.state.weights)
    own = {site: {key for key in everything if group_of_key(key) in {None, *OWN[site]}} for site in OWN}
    for name, site in sites.items():
        (other,) = OWN.keys() - {name}
        teacher = {f"teacher/{key}" for key in own[name]}
        others = {f"teacher/{other}/{key}" for key in own[other]}
        assert [set(message.tensors) for message in site.sent] == [set(), teacher, set(), everything, everything]
        assert [set(message.tensors) for message in site.received] == [set(), set(), others, everything, everything]
        reported = [set(message.scalars) for message in site.sent]
        assert reported[:4] == [{"loss", "cases"}] * 2 + [{"cases"}] + [
            {"loss", "cases", "loss/global_kd", "loss/local_kd"}
        ]
        roster = [dict(message.scalars) for message in site.received]
        assert roster == [{}, {}] + [{"teacher/north": 1.0, "teacher/south": 1.0}] * 3
    for key in own["north"]:
        sent, handed_on = sites["north"].sent[1].tensors, sites["south"].received[2].tensors
        assert torch.equal(handed_on[f"teacher/north/{key}"], sent[f"teacher/{key}"])
    north, south = (sites[name].sent[-1] for name in ("north", "south"))
    assert north.scalars["cases"] != south.scalars["cases"]
    for key, value in coordinator.state.weights.items():
        torch.testing.assert_close(value.double(), (north.tensors[key].double() + south.tensors[key].double()) / 2)
    rounds = [event.facts for event in read_events(tmp_path / "events.jsonl") if event.kind == "round"]
    for place, told_of in enumerate(rounds):
        assert told_of["bytes_sent"] == sum(len(site.received[place].to_bytes()) for site in sites.values())
        assert told_of["bytes_received"] == sum(len(site.sent[place].to_bytes()) for site in sites.values())


def test_without_local_kd_there_is_one_stage():
    assert [stage.name for stage in FLKD(FLKDConfig(local_weight=0)).stages(4)] == ["train"]
    stages = FLKD(FLKDConfig(pretrain=0.1)).stages(4)
    assert [(stage.name, stage.rounds) for stage in stages] == [("pretrain", 1), ("exchange", 1), ("train", 4)]
