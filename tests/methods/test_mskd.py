"""MS-KD*: both distillations by hand, where they count, without them FedAvg*."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from federations import run, same
from torch import nn

from panorgan.anatomy import Vocabulary
from panorgan.losses.unified_label import merge
from panorgan.methods.base import Payload, SiteTools
from panorgan.methods.mskd import MSKD, foreground, organ_cross_entropy, response_distance
from panorgan.methods.protocol import Federation, RoundInfo, SiteInfo
from panorgan.networks import SegmentationNetwork, UNet, UNetSettings
from panorgan.preparation.batch import Batch

ORGANS = Vocabulary(["liver", "spleen"])
TRAINING = {"rounds": 2, "validate_every": 0, "local_steps": 2}


def batch() -> Batch:
    """Three voxels of two cases: the first labels the liver, the second nothing; teachers know both organs."""
    said = torch.tensor([[[0.9, 0.2, 0.1], [0.1, 0.8, 0.3]], [[0.7, 0.2, 0.1], [0.1, 0.2, 0.6]]])
    return Batch(
        image=torch.zeros(2, 1, 3),
        masks=torch.tensor([[[True, False, False]], [[False, False, False]]]),
        annotated=torch.tensor([[True], [False]]),
        structures=("liver",),
        cases=("a", "b"),
        soft_targets=said,
        soft_target_organs=("liver", "spleen"),
        soft_targets_valid=torch.tensor([[False, True], [True, True]]),
    )


def shown() -> dict[str, torch.Tensor]:
    return foreground(merge(batch(), ORGANS), batch(), ORGANS)


def test_foreground_is_what_a_teacher_labels():
    """Not the liver of the first case, which the site outlines itself."""
    found = {organ: mask.tolist() for organ, mask in shown().items()}
    assert found == {
        "liver": [[False, False, False], [True, False, False]],
        "spleen": [[False, True, False], [False, False, True]],
    }


def test_the_cross_entropy_of_organs_by_hand():
    """p is that of one organ against everything else; the mean is over the foreground of a case."""
    logits = torch.tensor([[[0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [2.0, 2.0, 2.0]]] * 2)
    total = 1 + math.e + math.e**2
    liver, spleen = math.e / total, math.e**2 / total

    def entropy(q: float, p: float) -> float:
        return -q * math.log(p) - (1 - q) * math.log(1 - p)

    expected = [entropy(0.8, spleen), (entropy(0.7, liver) + entropy(0.6, spleen)) / 2]
    assert organ_cross_entropy(logits, batch(), shown(), ORGANS).tolist() == pytest.approx(expected, rel=1e-5)


def test_the_distance_of_responses_by_hand():
    """Mean squares (1, 4 | 2, 8) and (3, 0): at the first two of three voxels in the foreground 1 − 3/(3·√17)."""
    student = torch.tensor([[[1.0, 2.0, 9.0], [1.0, 2.0, 0.0]]]).unsqueeze(3)
    teacher = torch.tensor([[[-1.0, 0.0, 1.0], [math.sqrt(5), 0.0, 1.0]]]).unsqueeze(3)
    where = torch.tensor([[True, True, False]]).unsqueeze(2)
    assert response_distance(student, teacher, where).item() == pytest.approx(1 - 1 / math.sqrt(17))
    assert response_distance(2 * student, student, where).item() == pytest.approx(0, abs=1e-6)
    assert response_distance(student, teacher, torch.zeros_like(where)).item() == 0


def test_a_coarse_place_counts_if_it_holds_some_foreground():
    """4 × 4 voxels with one of the foreground: of 2 × 2 places one counts, where only directions could differ."""
    where = torch.zeros(1, 4, 4, dtype=torch.bool)
    where[0, 3, 0] = True
    student, teacher = torch.rand(1, 5, 2, 2) + 0.1, torch.rand(1, 5, 2, 2) + 0.1
    assert response_distance(student, teacher, where).item() == pytest.approx(0, abs=1e-6)
    where[0, 0, 0] = True
    a, b = (x.square().mean(1)[0, :, 0] for x in (student, teacher))
    expected = 1 - (a @ b / (a.norm() * b.norm())).item()
    assert response_distance(student, teacher, where).item() == pytest.approx(expected, abs=1e-6)


def test_features_are_those_of_every_level_and_the_logits_the_network_s_own():
    torch.manual_seed(0)
    network = UNet(ORGANS, UNetSettings(dimensions=2, features=(2, 4, 8)))
    image = torch.randn(1, 1, 16, 16)
    logits, features = network.logits_and_features(image)
    assert torch.equal(logits, network(image))
    assert [tuple(f.shape[1:]) for f in features] == [(2, 16, 16), (4, 8, 8), (8, 4, 4), (4, 8, 8), (2, 16, 16)]


class Responds(SegmentationNetwork):
    """Logits and features of two levels, whatever the image."""

    def __init__(self, logits: torch.Tensor, *levels: torch.Tensor) -> None:
        super().__init__(ORGANS, "softmax")
        self.logits, self.levels = nn.Parameter(logits.clone()), levels

    def logits_and_features(self, image: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        return self.logits, self.levels


def levels(seed: int) -> list[torch.Tensor]:
    """Three voxels, then two places, as slices of one row."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(2, width, 1, places, generator=generator) for width, places in ((2, 3), (4, 2))]


def slices() -> Batch:
    """The batch as slices of one row."""
    flat = batch()
    return replace(
        flat, image=flat.image.unsqueeze(2), masks=flat.masks.unsqueeze(2), soft_targets=flat.soft_targets.unsqueeze(2)
    )


def site(annotated: dict[str, str], cases: int = 2, **config: float):
    """Site `here` with some cases, of which one is labelled, beside others with one."""
    model = Responds(torch.randn(2, 3, 1, 3, generator=torch.Generator().manual_seed(0)), *levels(1))
    facts = {name: SiteInfo(name, 1, dict.fromkeys(organs.split(), 1)) for name, organs in annotated.items()}
    facts["here"] = replace(facts["here"], train_cases=cases)
    vocabulary = Vocabulary([*ORGANS, "kidney_left", "kidney_right"]) if "kidneys" in annotated else ORGANS
    tools = SiteTools(model, torch.optim.SGD(model.parameters(), 0.1))
    rule = MSKD.Site(MSKD.Config(**config), facts["here"], Federation(vocabulary, facts), tools)
    rule.round_info, rule.received = RoundInfo("train", 1, 1), Payload({"logits": model.logits.detach().clone()})
    for name in facts:
        rule.teachers.keep(name, {})
    rule.teachers.load = lambda name: Responds(model.logits, *levels(len(name)))
    rule.before_round()
    return rule


def test_the_loss_by_hand():
    """Each teacher counts where its organ is shown; the mean is over levels, then over teachers."""
    rule = site({"here": "liver", "livers": "liver", "spleens!": "spleen"}, logit_weight=0.5, feature_weight=0.25)
    assert set(rule.networks) == {"livers", "spleens!"}
    rule.prepare(slices())
    where = foreground(rule.label, slices(), ORGANS)
    distances = [
        sum(response_distance(s, t, where[organ]) for s, t in zip(levels(1), levels(len(name)), strict=True)) / 2
        for name, organ in (("livers", "liver"), ("spleens!", "spleen"))
    ]
    features = (distances[0] + distances[1]) / 2
    assert features.max() > 1e-3
    logits = organ_cross_entropy(rule.model.logits, slices(), where, ORGANS)
    expected = (rule.sample_losses(rule.model.logits) + 0.5 * logits + 0.25 * features).mean()
    assert rule.loss(slices()).item() == pytest.approx(expected.item(), rel=1e-6)


def test_a_teacher_that_serves_no_organ_is_not_asked_for_features():
    """Of a union, where another site labels both parts by name; of an organ that every case here labels."""
    others = {"livers": "liver", "kidneys": "kidney", "sides": "kidney_left kidney_right"}
    assert set(site({"here": "liver", **others}, cases=2).networks) == {"livers", "sides"}
    assert set(site({"here": "liver", **others}, cases=1).networks) == {"sides"}


@pytest.mark.parametrize(
    ("weights", "equal"), [((0, 0), True), ((1, 0), False), ((0, 1), False)], ids=["none", "logits", "features"]
)
def test_without_distillation_it_is_fedavg_on_pseudo_labels(tiny, tmp_path, weights, equal):
    method = {"name": "mskd", **dict(zip(("logit_weight", "feature_weight"), weights, strict=True))}
    found = run(tiny(method=method, training=TRAINING), tmp_path / "mskd").state.weights
    plain = run(tiny(method={"name": "fedavg_pl"}, training=TRAINING), tmp_path / "plain").state.weights
    assert same(dict(found), dict(plain)) == equal
