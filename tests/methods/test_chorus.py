"""chorus: FedAvg without its switches, boxes that move image and label together, who needs a teacher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from answers import Answers
from torch import nn

from panorgan.anatomy import Vocabulary
from panorgan.losses.soft_label import SoftLabel
from panorgan.methods.base import Payload, SiteTools
from panorgan.methods.chorus import KNOWN, Lesson, random_box, with_box_of_next, with_mixed
from panorgan.methods.protocol import Federation, RoundInfo, SiteInfo
from panorgan.methods.registry import find_method
from panorgan.networks import SegmentationNetwork
from panorgan.preparation.batch import Batch

ORGANS = Vocabulary(["liver", "kidney_left", "kidney_right"])
SHAPE = (8, 8)


class Neighbourhood(SegmentationNetwork):
    """Logits of a voxel from the 3 × 3 around it."""

    def __init__(self) -> None:
        super().__init__(ORGANS, "softmax")
        self.output = nn.Conv2d(1, 4, 3, padding=1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.output(image)


def site_of(name: str, annotated: Mapping[str, int], known: Sequence[str] = (), **config: object):
    here = SiteInfo("here", 2, annotated)
    there = SiteInfo("there", 1, dict.fromkeys(ORGANS.organs, 1))
    torch.manual_seed(5)
    model, method = Neighbourhood(), find_method(name)
    tools = SiteTools(model, torch.optim.SGD(model.parameters(), 0.1))
    site = method.Site(method.Config(**config), here, Federation(ORGANS, {"here": here, "there": there}), tools)
    site.round_info = RoundInfo("train", 1, 1)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    site.received = Payload(weights, {f"{KNOWN}{organ}": 1.0 for organ in known})
    site.before_round()
    return site


def batch_of(*structures: str) -> Batch:
    draws = torch.Generator().manual_seed(2)
    image = torch.randn(2, 1, *SHAPE, generator=draws)
    first = torch.rand(2, 1, *SHAPE, generator=draws) > 0.6
    masks = torch.cat([first, ~first & (torch.rand(2, 1, *SHAPE, generator=draws) > 0.5)], dim=1)[:, : len(structures)]
    annotated = torch.ones(2, len(structures), dtype=torch.bool)
    return Batch(image, masks, annotated, structures, ("a", "b"))


def test_without_its_switches_it_is_fedavg():
    batch, losses, gradients = batch_of("liver"), [], []
    for name, config in (("fedavg", {}), ("chorus", {"cutmix": 0, "teacher_dice": False})):
        site = site_of(name, {"liver": 2}, **config)
        site.prepare(batch)
        loss = site.loss(batch)
        loss.backward()
        losses.append(loss.item())
        gradients.append(site.model.output.weight.grad.flatten().tolist())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert gradients[0] == pytest.approx(gradients[1], rel=1e-4, abs=1e-6)


def test_labelled_organs_keep_their_dice_whatever_the_model_knows():
    """A union, a batch that is labelled by half: the annotation counts as in FedAvg from the first round on."""
    half = batch_of("liver", "kidney")
    half.annotated[1, 1] = False
    for batch, annotated in ((batch_of("kidney"), {"kidney": 2}), (half, {"liver": 2, "kidney": 1})):
        losses = []
        for name, config in (("fedavg", {}), ("chorus", {"cutmix": 0})):
            site = site_of(name, annotated, ce_weight=0, **config)
            site.prepare(batch)
            losses.append(site.loss(batch).item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        assert losses[0] > 0.1


def test_what_one_of_two_mixed_patches_annotates_is_not_annotated():
    batch = batch_of("liver", "kidney")
    batch.annotated[1, 1] = False
    label = SoftLabel(torch.ones(2, 4, *SHAPE) / 4, torch.ones(2, *SHAPE, dtype=torch.bool))
    lesson = with_mixed(Lesson(batch, label), (slice(0, 4), slice(0, 4)))
    assert lesson.annotation.annotated.tolist() == [[True, True], [True, False], [True, False]]
    assert lesson.annotation.cases == ("a", "b", "a")


@pytest.mark.parametrize("switch", [{"cutmix": 1}, {"known": ("kidney_right",)}])
def test_each_switch_changes_the_loss(switch):
    batch, losses = batch_of("liver"), []
    for config in ({"cutmix": 0}, {"cutmix": 0} | switch):
        site = site_of("chorus", {"liver": 2}, **config)
        site.prepare(batch)
        losses.append(site.loss(batch).item())
    assert losses[0] != pytest.approx(losses[1], rel=1e-4)


def test_a_mixed_patch_takes_image_and_label_from_the_same_box():
    """The label of a mixed voxel is that of the patch it came from; the patches themselves stay as they are."""
    batch = batch_of("liver")
    plain, mixed = (site_of("chorus", {"liver": 2}, cutmix=share) for share in (0, 1))
    plain.prepare(batch)
    mixed.prepare(batch)
    whole, lesson = plain.lesson, mixed.lesson
    moved = (lesson.annotation.image[2] != batch.image[0])[0]
    assert 0.2 * 64 <= moved.sum() <= 0.7 * 64
    pairs = (
        (lesson.annotation.image, batch.image),
        (lesson.annotation.masks, batch.masks),
        (lesson.label.shares, whole.label.shares),
    )
    for seen, patches in pairs:
        assert torch.equal(seen[:2], patches)
        assert torch.equal(seen[2], torch.where(moved, patches[1], patches[0]))


@pytest.mark.parametrize(("patches", "seen"), [(1, 1), (2, 3), (3, 4), (4, 6)])
def test_every_two_patches_get_a_mixed_one(patches, seen):
    masks = torch.zeros(patches, 1, *SHAPE, dtype=torch.bool)
    annotated = torch.ones(patches, 1, dtype=torch.bool)
    batch = Batch(torch.randn(patches, 1, *SHAPE), masks, annotated, ("liver",), ("a",) * patches)
    site = site_of("chorus", {"liver": 2})
    site.prepare(batch)
    assert len(site.lesson.annotation.image) == len(site.lesson.label.counted) == seen
    assert site.loss(batch).isfinite()


def test_the_same_round_draws_the_same_boxes():
    lessons = []
    for _ in range(2):
        site = site_of("chorus", {"liver": 2}, cutmix=1)
        site.prepare(batch_of("liver"))
        lessons.append(site.lesson.annotation.image)
    assert torch.equal(*lessons)


@pytest.mark.parametrize(
    ("annotated", "taught"),
    [
        ({"liver": 2}, True),
        ({"liver": 2, "kidney": 2}, True),  # the union leaves open which kidney
        ({"liver": 2, "kidney_left": 2, "kidney_right": 1}, True),
        ({"liver": 2, "kidney_left": 2, "kidney_right": 2}, False),
    ],
)
def test_a_teacher_is_kept_where_the_annotation_leaves_something_open(annotated, taught):
    assert (site_of("chorus", annotated).received_model is not None) == taught


def test_a_union_is_shared_out_by_the_received_model():
    site = site_of("chorus", {"kidney": 2}, cutmix=0)
    batch = batch_of("kidney")
    site.prepare(batch)
    received = site.received_model(batch.image).softmax(dim=1)
    inside = batch.masks[:, 0]
    left, right = (received[:, channel][inside] for channel in (2, 3))
    torch.testing.assert_close(site.lesson.label.shares[:, 2][inside], left / (left + right))
    assert site.lesson.label.shares[:, :2].transpose(0, 1)[:, inside].sum() == 0


def test_nothing_of_a_batch_outlives_a_round():
    site = site_of("chorus", {"liver": 2})
    site.prepare(batch_of("liver"))
    site.after_round()
    assert not hasattr(site, "lesson")
    assert not site.state().tensors


@pytest.mark.parametrize("shape", [(8, 8), (64, 64, 24), (5, 1, 3)])
def test_a_box_is_half_to_four_fifths_long_and_inside(shape):
    draws = torch.Generator().manual_seed(0)
    for _ in range(50):
        for side, length in zip(random_box(torch.Size(shape), draws), shape, strict=True):
            assert 0 <= side.start < side.stop <= length
            assert round(0.5 * length) <= max(side.stop - side.start, 1) <= max(1, round(0.8 * length))


def test_a_batch_of_one_stays_as_it_is():
    sample = torch.arange(16.0).reshape(1, 1, 4, 4)
    assert torch.equal(with_box_of_next(sample, (slice(0, 2), slice(1, 3))), sample)


def server(**config: object):
    method = find_method("chorus")
    sites = {"a": SiteInfo("a", 1, {"liver": 1}), "b": SiteInfo("b", 1, {"kidney": 1})}
    return method.Server(method.Config(**config), Federation(ORGANS, sites), {"w": torch.zeros(1)})


def known(rule) -> set[str]:
    return {name.removeprefix(KNOWN) for name in rule.broadcast("a").scalars if name.startswith(KNOWN)}


def test_what_is_known_follows_validation_and_survives():
    rule = server()
    assert known(rule) == set()
    rule.validated({"a": {"liver": 0.49}, "b": {"kidney": 0.6}})
    assert known(rule) == {"kidney_left", "kidney_right"}
    rule.validated({"a": {"liver": 0.8}, "b": {"kidney": 0.3}})
    assert known(rule) == {"liver"}, "what it has forgotten it does not know"
    again = server()
    again.load_state(rule.state())
    assert known(again) == {"liver"}


def test_what_one_site_learns_round_after_round_adds_up():
    """v ← v/2 + mean: a site that moves by 2 each round, beside one that holds, moves the model by 1, 1.5, 1.75."""
    rule, moves = server(), []
    for _ in range(3):
        before = rule.weights["w"].item()
        answers = {"a": {"w": torch.tensor([before + 2.0])}, "b": {"w": torch.tensor([before])}}
        rule.aggregate(Answers(answers))
        moves.append(rule.weights["w"].item() - before)
    assert moves == pytest.approx([1.0, 1.5, 1.75])


def test_the_switch_and_a_limit_of_nought():
    rule = server(teacher_dice=False)
    rule.validated({"a": {"liver": 0.9}})
    assert known(rule) == set()
    assert known(server(known_from=0)) == set(ORGANS.organs)
