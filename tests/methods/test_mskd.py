"""MS-KD*: both distillations by hand, where they count, without them FedAvg*."""

from __future__ import annotations

import math

import pytest
import torch
from federations import run, same

from panorgan.anatomy import Vocabulary
from panorgan.losses.unified_label import merge
from panorgan.methods.mskd import foreground, organ_cross_entropy, response_distance
from panorgan.networks import UNet, UNetSettings
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


@pytest.mark.parametrize(
    ("weights", "equal"), [((0, 0), True), ((1, 0), False), ((0, 1), False)], ids=["none", "logits", "features"]
)
def test_without_distillation_it_is_fedavg_on_pseudo_labels(tiny, tmp_path, weights, equal):
    method = {"name": "mskd", **dict(zip(("logit_weight", "feature_weight"), weights, strict=True))}
    found = run(tiny(method=method, training=TRAINING), tmp_path / "mskd").state.weights
    plain = run(tiny(method={"name": "fedavg_pl"}, training=TRAINING), tmp_path / "plain").state.weights
    assert same(dict(found), dict(plain)) == equal
