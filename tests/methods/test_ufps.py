"""UFPS rule by rule: what is active when, the loss and the step of eq. 14 by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from panorgan.anatomy import Vocabulary
from panorgan.cases.sampling import Batch
from panorgan.cases.store import StoredCase
from panorgan.methods import ufps as ufps_module
from panorgan.methods.base import Content, SiteTools
from panorgan.methods.exchange import Federation, Moment, SiteFacts
from panorgan.methods.sharpness import pack
from panorgan.methods.sparse_masks import GLOBAL, LOCAL
from panorgan.methods.ufps import MEAN, UFPS, VARIANCE, UFPSConfig
from panorgan.networks import SegmentationNetwork

OFF = {
    "weight_schedule": "none",
    "reverse_ce": False,
    "main_teacher": False,
    "uncertainty_aware": "none",
    "sharpness": "none",
}
ORGANS = ("liver", "spleen")
FACTS = {"a": SiteFacts("a", 1, {"liver": 1}), "b": SiteFacts("b", 3, {"spleen": 3})}
FEDERATION = Federation(Vocabulary(ORGANS), FACTS)


# -- sites that are told what to say ---------------------------------------------------------------------------------


class Told(SegmentationNetwork):
    """Logits [B, 3, 2, 2], whatever the image."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__(Vocabulary(ORGANS), "exclusive")
        self.logits = nn.Parameter(logits.clone())

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.logits


def site_of(
    model: nn.Module, kind: type[UFPS.Site] = UFPS.Site, cases: Sequence[str] = ("x", "y"), **config: object
) -> UFPS.Site:
    stored = [StoredCase(case, case, "a", ("liver",), Path("nowhere")) for case in cases]
    tools = SiteTools(model, torch.optim.SGD(model.parameters(), 0.1), cases=stored)
    return kind(UFPSConfig(**config), FACTS["a"], FEDERATION, tools)


def enter(site: UFPS.Site, round_: int, rounds: int, contested: torch.Tensor | None = None) -> None:
    """Begin a training round with the weights that the model has."""
    arrays = {key: value.clone() for key, value in site.model.state_dict().items()}
    site.moment = Moment("train", round_, rounds)
    site.received = Content(arrays if contested is None else {**arrays, GLOBAL: contested})
    site.before_round()


def make_batch(sure: Sequence[float] = (0.9, 0.6)) -> Batch:
    """Two samples of four voxels: one liver by ground truth, one spleen by a teacher (so sure), two of nothing."""
    masks = torch.tensor([[[[True, False], [False, False]]]] * 2)
    extra = torch.tensor([[[[0.0, p], [0.0, 0.0]]] for p in sure])
    return Batch(
        torch.full((2, 1, 2, 2), 0.5),
        masks,
        torch.ones(2, 1, dtype=torch.bool),
        ("liver",),
        ("x", "y"),
        extra,
        ("spleen",),
        torch.ones(2, 1, dtype=torch.bool),
    )


# -- what is active when ---------------------------------------------------------------------------------------------


def active_in(site: UFPS.Site, round_: int, rounds: int, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The modules that leave a trace in a round of one step."""
    seen: set[str] = set()
    for name, module in (("adaptive_rce", "aRCE"), ("cmidg", "SAM")):
        original = getattr(ufps_module, name)

        def traced(*arguments, original=original, module=module):
            seen.add(module)
            return original(*arguments)

        monkeypatch.setattr(ufps_module, name, traced)
    enter(site, round_, rounds)
    seen |= {"GMT"} if site.global_model is not None else set()
    site.step(make_batch())
    seen |= {"WS"} if site.weights is not None else set()
    site.after_round()
    assert site.global_model is None, "between rounds it takes no room"
    seen |= {"UA"} if {MEAN, VARIANCE} <= site.update().numbers.keys() else set()
    monkeypatch.undo()
    return seen


LATE = {"aRCE", "GMT", "UA", "SAM"}
PHASES = {
    # rounds of the run; round → what is active then
    5: {1: {"WS"}, 2: {"aRCE"}, 3: LATE, 5: LATE},
    100: {1: set(), 2: {"WS"}, 39: {"WS"}, 40: {"aRCE"}, 59: {"aRCE"}, 60: LATE, 100: LATE},
    500: {9: set(), 10: {"WS"}, 199: {"WS"}, 200: {"aRCE"}, 299: {"aRCE"}, 300: LATE},
}


@pytest.mark.parametrize("rounds", PHASES)
def test_what_is_active_when(rounds, monkeypatch):
    """The paper's rounds of 500 are shares: from r ≥ share·R on."""
    site = site_of(Told(torch.zeros(2, 3, 2, 2)))
    found = {r: active_in(site, r, rounds, monkeypatch) for r in PHASES[rounds]}
    assert found == PHASES[rounds]


@pytest.mark.parametrize(
    ("start", "round_", "active"),
    [
        ({"schedule_start": 0.5, "schedule_end": 0.6}, 5, {"WS"}),
        ({"schedule_start": 0.5, "schedule_end": 0.6}, 6, {"aRCE", *LATE}),
        ({"reverse_ce_start": 0.9}, 8, {"GMT", "UA", "SAM"}),
        ({"main_teacher_start": 0.1}, 2, {"WS", "GMT"}),
        ({"uncertainty_start": 0.1}, 2, {"WS", "UA"}),
        ({"sharpness_start": 0.1}, 2, {"WS", "SAM"}),
        ({"sharpness": "none"}, 8, LATE - {"SAM"}),
        ({"rho": 0}, 8, LATE - {"SAM"}),
        ({"main_teacher": False}, 8, LATE - {"GMT"}),
        ({"uncertainty_aware": "none"}, 8, LATE - {"UA"}),
        ({"reverse_ce": False}, 8, LATE - {"aRCE"}),
        ({"weight_schedule": "none"}, 2, set()),
    ],
)
def test_every_module_has_its_own_switch_and_start(monkeypatch, start, round_, active):
    if round_ == 5:
        start = {**start, "reverse_ce_start": 0.6}
    site = site_of(Told(torch.zeros(2, 3, 2, 2)), **start)
    assert active_in(site, round_, 10, monkeypatch) == active


@pytest.mark.parametrize(("every", "expected"), [(5, [12, 17]), (3, [12, 15, 18]), (1, list(range(12, 21)))])
@pytest.mark.parametrize("sharpness", ["topk", "susam"])
def test_masks_are_made_in_the_first_round_of_sharpness_and_every_so_many_after_it(every, expected, sharpness):
    """20 rounds, sharpness from 0.6 on. Only sUSAM sends its masks."""
    site = site_of(Told(torch.zeros(2, 3, 2, 2)), sharpness=sharpness, mask_every=every)
    refreshed, sent = [], []
    for round_ in range(1, 21):
        enter(site, round_, 20)
        site.step(make_batch())
        refreshed += [round_] if site.refreshing else []
        sent += [round_] if LOCAL in site.update().arrays else []
    assert refreshed == expected
    assert sent == (expected if sharpness == "susam" else [])


def test_a_site_without_a_mask_makes_one_when_it_comes():
    """It missed round 12 of 20, and is back in 14: it need not wait for 17, and sends its mask at once."""
    site = site_of(Told(torch.zeros(2, 3, 2, 2)))
    sent = []
    for round_ in (11, 14, 15, 17, 18):
        enter(site, round_, 20)
        site.step(make_batch())
        sent += [round_] if LOCAL in site.update().arrays else []
    assert sent == [14, 17]


def test_dense_kinds_have_no_masks():
    for sharpness in ("asam", "usam"):
        site = site_of(Told(torch.zeros(2, 3, 2, 2)), sharpness=sharpness)
        enter(site, 20, 20)
        site.step(make_batch())
        assert site.masks.current is None
        assert not site.masks.state()


# -- the loss --------------------------------------------------------------------------------------------------------

# All probabilities are 1/3. BCE: of 12 places 4 are true. Dice: liver and spleen have 1 voxel of 4, the background 2.
BCE = (4 * math.log(3) + 8 * math.log(1.5)) / 12
DICE = (2 * (1 - (2 / 3 + 1) / (4 / 3 + 1 + 1)) + 1 - (4 / 3 + 1) / (4 / 3 + 2 + 1)) / 3
PLAIN = 0.5 * DICE + 0.5 * BCE


def loss_in(round_: int, rounds: int, **config: object) -> float:
    site = site_of(Told(torch.zeros(2, 3, 2, 2)), **{**OFF, **config})
    enter(site, round_, rounds)
    return site.step(make_batch())["loss"].item()


def test_the_plain_loss_by_hand():
    assert loss_in(1, 5) == pytest.approx(PLAIN)
    assert loss_in(1, 5, dice_weight=0.2, ce_weight=0.7) == pytest.approx(0.2 * DICE + 0.7 * BCE)


def test_the_weighted_loss_by_hand():
    """Two cases in the bank: norm(U) = ∓½. The less sure one is above the 0.7 quantile, and shifted by r/R = 0.2."""
    weights = 2 - math.exp(-0.5), 2 - math.exp(0.5 - 0.2)
    assert loss_in(1, 5, weight_schedule="tail_shift") == pytest.approx(sum(weights) / 2 * PLAIN)
    weights = (2 - ((1 - math.e) * 0.2 + math.e) ** norm for norm in (-0.5, 0.5))
    assert loss_in(1, 5, weight_schedule="base_decrement") == pytest.approx(sum(weights) / 2 * PLAIN)


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

    site = site_of(Told(torch.zeros(2, 3, 2, 2)), cases=("x", "y", "z"))
    enter(site, 1, 5)
    for sure in ((0.7, 0.8), (0.9, 0.6)):
        site.step(make_batch(sure))
    kept = site.state().numbers
    assert kept == pytest.approx({"uncertainty/x": entropy(0.9) / 18, "uncertainty/y": entropy(0.6) / 18}, rel=1e-3)
    assert len(site.bank) == 2


def test_a_sample_without_teachers_has_no_uncertainty():
    """Everything is annotated: nothing to weight, nothing to tell."""
    batch = make_batch()
    masks = torch.cat([batch.masks, batch.masks.flip(2)], dim=1)
    whole = Batch(batch.image, masks, torch.ones(2, 2, dtype=torch.bool), ORGANS, batch.cases)
    site = site_of(Told(torch.zeros(2, 3, 2, 2)), sharpness="none")
    enter(site, 3, 5)
    site.step(whole)
    assert site.label.values.flatten(1).tolist() == [[1, 0, 2, 0]] * 2
    assert site.weights is None
    assert len(site.bank) == 0
    assert set(site.update().numbers) == {"cases"}


def test_the_main_teacher_is_the_model_that_came():
    """It calls the two voxels of nothing spleen; teachers agree on one voxel of the three that it calls an organ
    outside the ground truth: less than 0.8, so that it decides alone. A step of the local model does not move it."""
    logits = torch.zeros(2, 3, 2, 2)
    logits.flatten(2)[:, 2, 1:] = 5.0
    site = site_of(Told(logits), **{**OFF, "main_teacher": True})
    for round_, expected in ((2, [1, 2, 0, 0]), (3, [1, 2, 2, 2])):
        enter(site, round_, 5)
        site.step(make_batch())
        site.prepare(make_batch())
        assert site.label.values.flatten(1).tolist() == [expected] * 2
    assert not torch.equal(site.model.logits, site.global_model.logits)
    site = site_of(Told(logits), **{**OFF, "main_teacher": True, "main_teacher_share": 0.3})
    enter(site, 3, 5)
    site.step(make_batch())
    assert site.label.values.flatten(1).tolist() == [[1, 2, 0, 0]] * 2, "with 1/3 of agreement, what both say"


# -- eq. 14 ----------------------------------------------------------------------------------------------------------


class Quadratic(SegmentationNetwork):
    """½(a·u² + 2v²) per sample, a the mean of the image: the gradient is (a·u, 2v)."""

    def __init__(self) -> None:
        super().__init__(Vocabulary(ORGANS), "exclusive")
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
    "susam, u contested": ({"local_share": 0.5, "global_share": 0.5}, (True, False), 0.25, (4.2, -1.8), (2.79, -0.64)),
    "susam, v contested": ({"local_share": 0.5, "global_share": 0.5}, (False, True), 0.25, (3.0, -1.8), (2.85, -0.64)),
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


@pytest.mark.parametrize(("config", "contested", "ascent", "there", "end"), STEPS.values(), ids=STEPS.keys())
def test_one_step_by_hand(monkeypatch, config, contested, ascent, there, end):
    augmented = []

    def half_as_bright(image, settings, generator):
        augmented.append(settings)
        return image / 2

    monkeypatch.setattr(ufps_module, "cmidg", half_as_bright)
    model = Quadratic()
    site = site_of(model, QuadraticSite, **{**OFF, "sharpness": "susam", "rho": 0.5, "eta": 1.0, **config})
    enter(site, 3, 5, None if contested is None else pack(torch.tensor(contested)))
    told = site.step(make_batch())
    assert model.seen == [pytest.approx((ascent, *HERE)), pytest.approx((0.5, *there))]
    assert [model.u.item(), model.v.item()] == pytest.approx(end)
    assert told["loss"].item() == pytest.approx(0.5 * (0.5 * there[0] ** 2 + 2 * there[1] ** 2))
    assert len(site.labels) == 1, "one label for both gradients"
    assert augmented == ([] if config.get("sharpness") == "asam" else [site.config.augmentation])


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
        site = site_of(Told(torch.zeros(2, 3, 2, 2)), sharpness=kind, local_share=0.25, global_share=0.25)
        enter(site, 5, 5, pack(torch.ones(24, dtype=torch.bool)))
        for _ in range(3):
            site.step(make_batch())
        next_draw.append(torch.rand(1).item())
    assert int(site.masks.current.sum()) == 12, "six of the eighteen others were drawn"
    assert all(torch.equal(a, b) for a, b in zip(images[:3], images[3:], strict=True))
    assert not torch.equal(images[0], images[1])
    assert next_draw[0] == next_draw[1]
