"""UFPS rule by rule: the loss, the main teacher, and the step of eq. 14 by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from ufps_pieces import FACTS, OFF, ORGANS, FixedNetwork, enter, make_batch, site_of

from panorgan.anatomy import Vocabulary
from panorgan.losses.label_values import disagreed_value, undecided_value
from panorgan.methods.protocol import Federation
from panorgan.methods.ufps import UFPS
from panorgan.methods.ufps import method as ufps_module
from panorgan.methods.ufps.masks import pack
from panorgan.networks import SegmentationNetwork
from panorgan.preparation.batch import Batch

# -- the loss --------------------------------------------------------------------------------------------------------

# All probabilities are 1/3. BCE: of 12 places 4 are true. Dice: liver and spleen have 1 voxel of 4, the background 2.
BCE = (4 * math.log(3) + 8 * math.log(1.5)) / 12
DICE = (2 * (1 - (2 / 3 + 1) / (4 / 3 + 1 + 1)) + 1 - (4 / 3 + 1) / (4 / 3 + 2 + 1)) / 3
PLAIN = 0.5 * DICE + 0.5 * BCE
# The same over both samples, which are alike.
DICE_OF_BATCH = (2 * (1 - (4 / 3 + 1) / (8 / 3 + 2 + 1)) + 1 - (8 / 3 + 1) / (8 / 3 + 4 + 1)) / 3


def loss_in(round_: int, rounds: int, **config: object) -> float:
    """Dice per sample, as in the recipe, unless it is said."""
    site = site_of(FixedNetwork(torch.zeros(2, 3, 2, 2)), **{**OFF, "dice_over": "sample", **config})
    enter(site, round_, rounds)
    return site.step(make_batch())["loss"].item()


def test_the_plain_loss_by_hand():
    assert loss_in(1, 5) == pytest.approx(PLAIN)
    assert loss_in(1, 5, dice_weight=0.2, ce_weight=0.7) == pytest.approx(0.2 * DICE + 0.7 * BCE)
    assert loss_in(1, 5, dice_over="batch") == pytest.approx(0.5 * DICE_OF_BATCH + 0.5 * BCE)


def test_the_weighted_loss_by_hand():
    """Two cases in the bank: norm(U) = ∓½. The less sure one is above the 0.7 quantile, and shifted by r/R. WS of ten
    rounds ends with the third: that is its R."""
    for round_ in (2, 3):
        way = round_ / 3
        weights = 2 - math.exp(-0.5), 2 - math.exp(0.5 - way)
        assert loss_in(round_, 10, weight_schedule="tail_shift") == pytest.approx(sum(weights) / 2 * PLAIN)
        weights = (2 - ((1 - math.e) * way + math.e) ** norm for norm in (-0.5, 0.5))
        assert loss_in(round_, 10, weight_schedule="base_decrement") == pytest.approx(sum(weights) / 2 * PLAIN)


def weights_in(schedule: str, round_: int, rounds: int) -> list[float]:
    site = site_of(FixedNetwork(torch.zeros(2, 3, 2, 2)), **{**OFF, "weight_schedule": schedule})
    enter(site, round_, rounds)
    site.step(make_batch())
    return site.weights.tolist()


def test_weights_at_the_end_of_their_own_phase():
    """Round 199 of 500 is WS's last. The tail has moved by 1; base decrement treats all alike; the Gaussian is back
    where it was, at the surest case: G(−½) = 1/(√(2π)·0.28), G(½) = e^{−1/(2·0.28²)} of that."""
    assert weights_in("tail_shift", 199, 500) == pytest.approx([2 - math.exp(-0.5), 2 - math.exp(-0.5)])
    assert weights_in("base_decrement", 199, 500) == pytest.approx([1.0, 1.0])
    peak = 1 / (math.sqrt(2 * math.pi) * 0.28)
    by_hand = [
        0.3 * peak * math.exp(-((norm + 0.5) ** 2) / (2 * 0.28**2)) + 0.7 * (2 - math.exp(norm)) for norm in (-0.5, 0.5)
    ]
    assert weights_in("round_trip_gaussian", 199, 500) == pytest.approx(by_hand)
    assert weights_in("round_trip_gaussian", 99, 500) != pytest.approx(by_hand), "half-way it is elsewhere"


@pytest.mark.parametrize(("round_", "factor"), [(2, math.exp(-12)), (4, math.exp(-4)), (5, 1.0)])
def test_the_reverse_cross_entropy_by_hand(round_, factor):
    """Two thirds of the prediction lie on what the label excludes: RCE = 4·2/3."""
    found = loss_in(round_, 5, reverse_ce=True)
    assert found == pytest.approx(PLAIN + 0.01 * factor * 8 / 3, rel=1e-6)
    assert loss_in(round_, 5, reverse_ce=True, reverse_ce_weight=0) == pytest.approx(PLAIN)


def test_uncertainty_by_hand_and_one_value_per_case():
    """U = ⅓·(E + 0)/(1 + 1), E = H(p)/3 where the teacher says spleen: H(p)/18. Elsewhere it is certain."""

    def entropy(p: float) -> float:
        return -(p * math.log(p) + (1 - p) * math.log(1 - p))

    site = site_of(FixedNetwork(torch.zeros(2, 3, 2, 2)), cases=("x", "y", "z"))
    enter(site, 1, 5)
    for sure in ((0.7, 0.8), (0.9, 0.6)):
        site.step(make_batch(sure))
    kept = site.state().scalars
    assert kept == pytest.approx({"uncertainty/x": entropy(0.9) / 18, "uncertainty/y": entropy(0.6) / 18}, rel=1e-3)
    assert len(site.bank) == 2


def with_own_teacher(batch: Batch, labels_liver: bool) -> Batch:
    """The same teachers of both organs, for a site that labels the liver and for one that labels nothing of it."""
    liver = torch.tensor([[[[0.8, 0.0], [0.0, 0.0]]]] * 2)
    known = torch.ones(2, 2, dtype=torch.bool)
    annotated = torch.full((2, 1), labels_liver)
    return replace(
        batch,
        soft_targets=torch.cat([liver, batch.soft_targets], 1),
        soft_target_organs=ORGANS,
        soft_targets_valid=known,
        annotated=annotated,
    )


def test_uncertainty_hears_the_sites_own_teacher_and_the_label_does_not():
    """U = ⅓·(½·H(0.8)/3 + ½·H(p)/3): one voxel of liver, one of spleen. It is the same whatever the site labels."""

    def entropy(p: float) -> float:
        return -(p * math.log(p) + (1 - p) * math.log(1 - p))

    by_hand = [(entropy(0.8) + entropy(p)) / 18 for p in (0.9, 0.6)]
    for labels_liver in (True, False):
        site = site_of(FixedNetwork(torch.zeros(2, 3, 2, 2)))
        enter(site, 1, 10)
        batch = with_own_teacher(make_batch(), labels_liver)
        assert site.uncertainty(batch).tolist() == pytest.approx(by_hand, rel=1e-3)
    moved = replace(batch, annotated=torch.ones(2, 1, dtype=torch.bool), soft_targets=batch.soft_targets.flip(2))
    site.prepare(moved)
    assert site.label.values.flatten(1).tolist() == [[1, 0, 0, 2]] * 2, "liver where its label is"


def test_labels_hear_the_teachers_that_fedavg_on_pseudo_labels_hears():
    """A case that labels kidneys asks no teacher about their sides, though eq. 6 does: the side stays undecided."""
    sides = Vocabulary(["kidney_left", "kidney_right"])
    site = site_of(FixedNetwork(torch.zeros(2, 3, 2, 2)))
    enter(site, 1, 10)
    site.federation = Federation(sides, FACTS)
    batch = with_own_teacher(make_batch(), labels_liver=True)
    site.prepare(replace(batch, structures=("kidney",), soft_target_organs=tuple(sides)))
    assert site.label.values.flatten(1)[:, 0].tolist() == [undecided_value(0, sides)] * 2
    assert len(site.bank) == 2


@pytest.mark.parametrize(
    ("config", "asked"),
    [
        ({}, ORGANS),
        ({"weight_schedule": "none"}, ORGANS),
        ({"uncertainty_aware": "none"}, ORGANS),
        (OFF, ("spleen",)),
    ],
)
def test_own_teachers_are_asked_where_uncertainty_is(config, asked):
    site = site_of(FixedNetwork(torch.zeros(2, 3, 2, 2)), **config)
    for name in "ab":
        site.teachers.keep(name, site.model.state_dict())
    enter(site, 1, 10)
    assert site.organs_asked(site.tools.cases[0]) == asked
    site.teachers.owners = {"a": ("liver",)}
    site.lacks_labels = False
    assert site.organs_asked(site.tools.cases[0]) == (), "everything is labelled"


def test_a_sample_without_teachers_has_no_uncertainty():
    """Everything is annotated: nothing to weight, nothing to tell."""
    batch = make_batch()
    masks = torch.cat([batch.masks, batch.masks.flip(2)], dim=1)
    whole = Batch(batch.image, masks, torch.ones(2, 2, dtype=torch.bool), ORGANS, batch.cases)
    site = site_of(FixedNetwork(torch.zeros(2, 3, 2, 2)), sharpness="none")
    enter(site, 3, 5)
    site.step(whole)
    assert site.label.values.flatten(1).tolist() == [[1, 0, 2, 0]] * 2
    assert site.weights is None
    assert len(site.bank) == 0
    assert set(site.update().scalars) == {"cases"}


def test_the_main_teacher_is_the_model_that_came():
    """It calls the two voxels of nothing spleen; teachers agree on one voxel of the three that it calls an organ
    outside the ground truth: less than 0.8, so that it decides alone. A step of the local model does not move it."""
    logits = torch.zeros(2, 3, 2, 2)
    logits.flatten(2)[:, 2, 1:] = 5.0
    site = site_of(FixedNetwork(logits), **{**OFF, "main_teacher": True})
    for round_, expected in ((2, [1, 2, 0, 0]), (3, [1, 2, 2, 2])):
        enter(site, round_, 5)
        site.step(make_batch())
        site.prepare(make_batch())
        assert site.label.values.flatten(1).tolist() == [expected] * 2
    assert not torch.equal(site.model.logits, site.global_model.logits)
    both = {**OFF, "main_teacher": True, "main_teacher_share": 0.3}
    left_out = disagreed_value(("liver",), Vocabulary(ORGANS))
    for disagreement, value in (("left_out", left_out), ("background", 0)):
        site = site_of(FixedNetwork(logits), **both, disagreement=disagreement)
        enter(site, 3, 5)
        site.step(make_batch())
        assert site.label.values.flatten(1).tolist() == [[1, 2, value, value]] * 2, "1/3 of agreement: what both say"


def test_the_main_teacher_speaks_of_organs_that_it_knows():
    """It sees no spleen; the teacher sees one voxel, and is believed if the main teacher is not ready to teach it."""
    site = site_of(FixedNetwork(torch.zeros(2, 3, 2, 2)), **{**OFF, "main_teacher": True})
    left_out = disagreed_value(("liver",), Vocabulary(ORGANS))
    for ready, expected in ((ORGANS, [1, left_out, 0, 0]), (("liver",), [1, 2, 0, 0])):
        enter(site, 3, 5, ready=ready)
        site.prepare(make_batch())
        assert site.label.values.flatten(1).tolist() == [expected] * 2
        site.after_round()
    enter(site, 3, 5, ready=())
    assert site.global_model is None, "not used"


# -- eq. 14 ----------------------------------------------------------------------------------------------------------


class Quadratic(SegmentationNetwork):
    """½(a·u² + 2v²) per sample, a the mean of the image: the gradient is (a·u, 2v)."""

    def __init__(self) -> None:
        super().__init__(Vocabulary(ORGANS), "softmax")
        self.u, self.v = nn.Parameter(torch.tensor([3.0])), nn.Parameter(torch.tensor([-1.0]))
        self.seen: list[tuple[float, float, float]] = []

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        self.seen.append((image.mean().item(), self.u.item(), self.v.item()))
        return 0.5 * (image.flatten(1).mean(1) * self.u**2 + 2 * self.v**2)


class QuadraticSite(UFPS.Site):
    """What the network says is the loss; counts the labels that are made."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.labels: list[object] = []

    def prepare(self, batch: Batch) -> None:
        assert batch.image.mean() == 0.5, "the label is that of the image as it is"
        super().prepare(batch)
        self.labels.append(self.label)

    def sample_losses(self, logits: torch.Tensor) -> torch.Tensor:
        return logits


HERE = (3.0, -1.0)
STEPS = {
    # kind, M_G; where the ascent gradient is taken (mean of the image), where the descent gradient is, where it ends.
    # w = (3, −1), η = 1: T = (4, 2). On the augmented image, a = ¼: g = (¾, −2), T·g = (3, −4), ε = (1.2, −0.8).
    # The descent gradient is (½u, 2v) at w + ε; a tenth of it is subtracted from w.
    "usam": ({"sharpness": "usam"}, None, 0.25, (4.2, -1.8), (2.79, -0.64)),
    # M_L: one of the two weights, v for its larger gradient
    "topk": ({"sharpness": "topk", "local_share": 0.5}, None, 0.25, (3.0, -1.8), (2.85, -0.64)),
    "topk, all of them": ({"sharpness": "topk", "local_share": 1}, None, 0.25, (4.2, -1.8), (2.79, -0.64)),
    "topk knows no M_G": (
        {"sharpness": "topk", "local_share": 0.5, "global_share": 0.5},
        (True, False),
        0.25,
        (3.0, -1.8),
        (2.85, -0.64),
    ),
    "susam, no M_G yet": ({"local_share": 0.5, "global_share": 0.5}, None, 0.25, (3.0, -1.8), (2.85, -0.64)),
    "susam, u disputed": ({"local_share": 0.5, "global_share": 0.5}, (True, False), 0.25, (4.2, -1.8), (2.79, -0.64)),
    "susam, v disputed": ({"local_share": 0.5, "global_share": 0.5}, (False, True), 0.25, (3.0, -1.8), (2.85, -0.64)),
    "susam, T_G too small": ({"local_share": 0.5, "global_share": 0}, (True, False), 0.25, (3.0, -1.8), (2.85, -0.64)),
    # On the image itself, a = ½: g = (1.5, −2), T·g = (6, −4), ‖T·g‖ = √52, ε = (12, −4)/√52.
    "asam": (
        {"sharpness": "asam"},
        None,
        0.5,
        (3 + 12 / 52**0.5, -1 - 4 / 52**0.5),
        (3 - 0.05 * (3 + 12 / 52**0.5), -1 + 0.2 * (1 + 4 / 52**0.5)),
    ),
}


@pytest.mark.parametrize(("config", "disputed", "ascent", "there", "end"), STEPS.values(), ids=STEPS.keys())
def test_one_step_by_hand(monkeypatch, config, disputed, ascent, there, end):
    augmented = []

    def half_as_bright(image, settings, generator):
        augmented.append(settings)
        return image / 2

    monkeypatch.setattr(ufps_module, "cmidg", half_as_bright)
    model = Quadratic()
    site = site_of(model, QuadraticSite, **{**OFF, "sharpness": "susam", "rho": 0.5, "eta": 1.0, **config})
    enter(site, 3, 5, None if disputed is None else pack(torch.tensor(disputed)))
    reported = site.step(make_batch())
    assert model.seen == [pytest.approx((ascent, *HERE)), pytest.approx((0.5, *there))]
    assert [model.u.item(), model.v.item()] == pytest.approx(end)
    assert reported["loss"].item() == pytest.approx(0.5 * (0.5 * there[0] ** 2 + 2 * there[1] ** 2))
    assert len(site.labels) == 1, "one label for both gradients"
    assert augmented == ([] if config.get("sharpness") == "asam" else [site.config.augmentation])


@pytest.mark.parametrize(
    ("config", "seen", "end"),
    [
        # (1), (2): one gradient, on the darker image (a = ¼): (¾, −2)
        ({"sharpness": "augmented"}, [(0.25, *HERE)], (3 - 0.075, -1 + 0.2)),
        # (7): usam's point, and the darker image there: (¼·4.2, −3.6)
        ({"sharpness": "both"}, [(0.25, *HERE), (0.25, 4.2, -1.8)], (3 - 0.105, -1 + 0.36)),
        # (6): 0.8 of the gradient at w, (1.5, −2), and 0.2 of that at usam's point, (2.1, −3.6)
        (
            {"sharpness": "usam", "perturbed_share": 0.2},
            [(0.25, *HERE), (0.5, 4.2, -1.8), (0.5, *HERE)],
            (3 - 0.1 * (0.8 * 1.5 + 0.2 * 2.1), -1 + 0.1 * (0.8 * 2 + 0.2 * 3.6)),
        ),
    ],
    ids=["augmented", "both", "fused"],
)
def test_a_step_of_figure_8_by_hand(monkeypatch, config, seen, end):
    """The same numbers as above: w = (3, −1), ρ = 0.5, η = 1."""
    monkeypatch.setattr(ufps_module, "cmidg", lambda image, settings, generator: image / 2)
    model = Quadratic()
    site = site_of(model, QuadraticSite, **{**OFF, "rho": 0.5, "eta": 1.0, **config})
    enter(site, 3, 5)
    site.step(make_batch())
    assert model.seen == [pytest.approx(one) for one in seen]
    assert [model.u.item(), model.v.item()] == pytest.approx(end)


def test_a_random_perturbation_goes_as_far_as_asam():
    """Figure 8 (4): ε = (12, −4)/√52 in ASAM, of length √(160/52); anywhere else at that distance here."""
    model = Quadratic()
    site = site_of(model, QuadraticSite, **{**OFF, "sharpness": "random", "rho": 0.5, "eta": 1.0})
    enter(site, 3, 5)
    for _ in range(2):
        model.u.data.fill_(3.0)
        model.v.data.fill_(-1.0)
        site.step(make_batch())
    points = [(u - 3, v + 1) for _, u, v in model.seen[1::2]]
    assert [u**2 + v**2 for u, v in points] == pytest.approx([160 / 52] * 2)
    assert points[0] != points[1]


def test_the_scale_of_biases_is_as_set(monkeypatch):
    asked = []
    original = ufps_module.ascend
    monkeypatch.setattr(
        ufps_module, "ascend", lambda *args, **options: asked.append(options) or original(*args, **options)
    )
    for scale_biases in (True, False):
        site = site_of(Quadratic(), QuadraticSite, **{**OFF, "sharpness": "usam", "scale_biases": scale_biases})
        enter(site, 3, 5)
        site.step(make_batch())
    assert [options["scale_biases"] for options in asked] == [True, False]


def test_before_sharpness_begins_a_step_is_plain():
    model = Quadratic()
    site = site_of(model, QuadraticSite, **{**OFF, "sharpness": "susam"})
    enter(site, 2, 5)
    site.step(make_batch())
    assert model.seen == [(0.5, *HERE)]
    assert [model.u.item(), model.v.item()] == pytest.approx([3 - 0.15, -1 + 0.2])


def test_masks_that_are_drawn_change_no_image_and_no_dropout(monkeypatch):
    """Each has a stream of its own: so kinds of sharpness see the same images, and a comparison is fair."""
    images: list[torch.Tensor] = []
    original = ufps_module.cmidg

    def kept(*arguments) -> torch.Tensor:
        images.append(original(*arguments))
        return images[-1]

    monkeypatch.setattr(ufps_module, "cmidg", kept)
    next_draw = []
    for kind in ("usam", "susam"):
        torch.manual_seed(5)
        site = site_of(FixedNetwork(torch.zeros(2, 3, 2, 2)), sharpness=kind, local_share=0.25, global_share=0.25)
        enter(site, 5, 5, pack(torch.ones(24, dtype=torch.bool)))
        for _ in range(3):
            site.step(make_batch())
        next_draw.append(torch.rand(1).item())
    assert int(site.masks.current.sum()) == 12, "six of the eighteen others were drawn"
    assert all(torch.equal(a, b) for a, b in zip(images[:3], images[3:], strict=True))
    assert not torch.equal(images[0], images[1])
    assert next_draw[0] == next_draw[1]
