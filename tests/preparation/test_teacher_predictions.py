"""Extra volumes beside stored cases: stored once, never stale, cut and moved exactly like the label."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from refusing import refused

from panorgan.preparation.augment import AugmentSettings, Draws, augment
from panorgan.preparation.batch import PackedBatch
from panorgan.preparation.prefetch import prefetched
from panorgan.preparation.sampling import PatchSampler, SamplingSettings
from panorgan.preparation.store import Store
from panorgan.preparation.teacher_predictions import TeacherPredictions, as_probabilities, quantised

SHAPE = (14, 12, 10)
STRUCTURES = ("liver", "spleen")
HALF_A_LEVEL = 1 / 510
# Interpolation adds up weights in float32.
ROUNDING = 1e-6
ORGANS = ("aorta", "liver", "pancreas", "spleen")


@pytest.fixture
def cases(store_case):
    """Two scans of noise: `a` annotates the liver, `b` liver and spleen."""
    random = np.random.default_rng(0)
    masks = {name: random.random(SHAPE) > 0.7 for name in STRUCTURES}
    return [
        store_case("a", random.uniform(-500, 500, SHAPE), {"liver": masks["liver"]}),
        store_case("b", random.uniform(-500, 500, SHAPE), masks),
    ]


def not_annotated(case):
    return tuple(name for name in ORGANS if name not in case.structures)


class Teacher:
    """Probabilities that follow the image, another slope for every name: (image + 1)/2 · (place + 1)/4."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []
        self.released = 0

    def __call__(self, image: torch.Tensor, names: tuple[str, ...]) -> torch.Tensor:
        self.asked.append(names)
        return torch.stack([(image + 1) / 2 * (ORGANS.index(name) + 1) / 4 for name in names])

    def release(self) -> None:
        self.released += 1


def teacher_predictions(cases, teacher=None, key="k", names_of=not_annotated, **more) -> TeacherPredictions:
    teacher = teacher or Teacher()
    return TeacherPredictions(cases, key, names_of, teacher, release=getattr(teacher, "release", lambda: None), **more)


def files(cases) -> list[str]:
    return sorted(path.name for case in cases for path in case.folder.iterdir() if path.name.startswith("companion-"))


def settings(size=(8, 8, 8), batch=3) -> SamplingSettings:
    return SamplingSettings(patch_size=size, batch_size=batch)


# -- 8 bit ---------------------------------------------------------------------------------------------------------


def test_levels_by_hand():
    levels = quantised(torch.tensor([0.0, 1.0, 0.2, 0.6, 0.001, 0.002, 1.0000001, -1e-9]))
    assert levels.dtype == torch.uint8
    assert levels.tolist() == [0, 255, 51, 153, 0, 1, 255, 0]  # 0.001 · 255 = 0.255, 0.002 · 255 = 0.51
    assert as_probabilities(levels)[2:4].tolist() == pytest.approx([0.2, 0.6])


def test_no_level_is_further_than_half_a_step_from_its_probability():
    probabilities = torch.linspace(0, 1, 10_001)
    error = (as_probabilities(quantised(probabilities)) - probabilities).abs().max()
    assert HALF_A_LEVEL * 0.99 < float(error) <= HALF_A_LEVEL + 1e-7


# -- on disk -------------------------------------------------------------------------------------------------------


def test_every_case_is_predicted_once_and_only_what_it_lacks(cases):
    teacher, reported = Teacher(), []
    whole = teacher_predictions(cases, teacher)
    whole.ensure(lambda done, total: reported.append((done, total)))
    assert teacher.asked == [("aorta", "pancreas", "spleen"), ("aorta", "pancreas")]
    assert reported == [(1, 2), (2, 2)]
    assert teacher.released == 1
    assert whole.names == ("aorta", "pancreas", "spleen")
    volume, names = whole.volume(cases[0])
    assert (volume.shape, volume.dtype, names) == ((3, *SHAPE), np.uint8, whole.names)
    expected = (cases[0].image.astype(np.float32) + 1) / 2 * 3 / 4  # the pancreas is third of ORGANS
    np.testing.assert_allclose(volume[1] / 255, expected, atol=HALF_A_LEVEL + ROUNDING)


def test_a_restart_finds_what_is_stored(cases):
    teacher_predictions(cases).ensure()
    before, teacher = files(cases), Teacher()
    again = teacher_predictions(cases, teacher)
    again.ensure()
    again.volume(cases[1])
    assert teacher.asked == []
    assert files(cases) == before
    assert len(before) == 2


def test_another_key_or_other_channels_get_another_file(cases):
    teacher_predictions(cases).ensure()
    changed, fewer = Teacher(), Teacher()
    teacher_predictions(cases, changed, key="of another teacher").ensure()
    teacher_predictions(cases, fewer, names_of=lambda case: ("aorta",)).ensure()
    assert len(changed.asked) == len(fewer.asked) == 2
    assert len(files(cases)) == 6


def test_a_damaged_file_is_predicted_again(cases):
    whole = teacher_predictions(cases)
    whole.ensure()
    path = whole.path(cases[0])
    path.write_bytes(path.read_bytes()[:100])
    teacher = Teacher()
    teacher_predictions(cases, teacher).ensure()
    assert teacher.asked == [("aorta", "pancreas", "spleen")]
    assert np.load(path).shape == (3, *SHAPE)


def test_a_flipped_bit_is_predicted_again(cases):
    teacher = Teacher()
    first = teacher_predictions(cases, teacher)
    first.ensure()
    path, asked = first.path(cases[0]), len(teacher.asked)
    whole = path.read_bytes()
    path.write_bytes(whole[:-20] + bytes([whole[-20] ^ 1]) + whole[-19:])
    teacher_predictions(cases, teacher).ensure()
    assert len(teacher.asked) == asked + 1
    assert path.read_bytes() == whole


def test_whoever_breaks_off_leaves_nothing_and_lets_go(cases):
    class Breaking(Teacher):
        def __call__(self, image, names):
            if len(self.asked) == 1:
                raise KeyboardInterrupt
            return super().__call__(image, names)

    teacher = Breaking()
    with pytest.raises(KeyboardInterrupt):
        teacher_predictions(cases, teacher).ensure()
    assert teacher.released == 1
    assert len(files(cases)) == 1
    assert not [path for case in cases for path in case.folder.glob(".incomplete*")]


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_not_finite_is_never_stored(cases, wrong):
    with refused("prediction-unusable") as caught:
        teacher_predictions(cases, lambda image, names: torch.full((len(names), *SHAPE), wrong)).ensure()
    assert caught.value.where == "north/a"
    assert files(cases) == []


def test_without_a_cache_nothing_is_stored_and_only_what_is_asked_for_is_predicted(cases):
    teacher = Teacher()
    fresh = teacher_predictions(cases, teacher, cached=False)
    fresh.ensure()
    assert teacher.asked == []
    fresh.cut(cases[0], ("aorta", "spleen"), (slice(0, 4),) * 3)
    assert teacher.asked == [("aorta", "spleen")]
    assert files(cases) == []


def test_unused_volumes_are_swept_and_used_ones_stay(cases):
    """Two weeks after they were used last; ordinary files of the case stay for ever."""
    used, unused = teacher_predictions(cases, key="used"), teacher_predictions(cases, key="unused")
    for some in (used, unused):
        some.ensure()
    long_ago = time.time() - 15 * 24 * 3600
    for path in [path for case in cases for path in case.folder.iterdir()]:
        os.utime(path, (long_ago, long_ago))
    teacher_predictions(cases, key="used").ensure()  # found, and thereby used
    Store(cases[0].folder.parent).sweep()
    assert files(cases) == sorted(used.path(case).name for case in cases)
    assert all((case.folder / "image.npy").is_file() for case in cases)


# -- in batches ----------------------------------------------------------------------------------------------------


def test_extra_is_cut_where_the_image_is(cases):
    sampler = PatchSampler(cases, STRUCTURES, settings(), teacher_predictions(cases, cached=False))
    for packed in sampler.batches(4, seed=1):
        batch = packed.unpack()
        assert batch.soft_target_organs == ("aorta", "pancreas", "spleen")
        assert batch.soft_targets.dtype == torch.float32
        for place, name in enumerate(batch.soft_target_organs):
            expected = (batch.image[:, 0] + 1) / 2 * (ORGANS.index(name) + 1) / 4
            known = batch.soft_targets_valid[:, place]
            torch.testing.assert_close(batch.soft_targets[known, place], expected[known], rtol=0, atol=ROUNDING)
            assert not batch.soft_targets[~known, place].any()


def test_a_case_that_annotates_an_organ_itself_has_no_such_volume(cases):
    seen = set()
    for packed in PatchSampler(cases, STRUCTURES, settings(), teacher_predictions(cases)).batches(4, seed=0):
        for case, known in zip(packed.cases, packed.soft_targets_valid.tolist(), strict=True):
            assert known == [True, True, case == "a"]  # aorta, pancreas, spleen
            seen.add(case)
    assert seen == {"a", "b"}


def test_outside_of_a_small_case_there_is_nothing(store_case):
    case = store_case("a", np.full((4, 6, 8), 500.0), {})
    certain = teacher_predictions(
        [case], lambda image, names: torch.ones(1, *image.shape), names_of=lambda case: ("aorta",)
    )
    packed = next(PatchSampler([case], (), settings(), certain).batches(1, seed=0))
    expected = torch.zeros(8, 8, 8)
    expected[2:6, 1:7] = 1
    assert torch.equal(packed.unpack().soft_targets[0, 0], expected)
    assert torch.equal(packed.image[0, 0], expected * 2 - 1)


GEOMETRY = AugmentSettings(rotation_degrees=20, scale=0.2, geometry_probability=0.7, mirror_axes=(0, 1, 2))


def batches(cases, soft_targets, size, steps=4) -> list[PackedBatch]:
    draws = Draws(5)
    sampler = PatchSampler(cases, STRUCTURES, settings(size), soft_targets)
    return [augment(packed, GEOMETRY, draws) for packed in sampler.batches(steps, seed=3)]


@pytest.mark.parametrize("size", [(8, 8, 8), (8, 1, 8), (16, 16, 16)], ids=["patches", "slices", "padded"])
def test_stored_and_fresh_volumes_agree_within_half_a_level_after_augmentation(cases, size):
    """The same draws move both; and image and label are the very same as without soft targets."""
    stored = batches(cases, teacher_predictions(cases), size)
    fresh = batches(cases, teacher_predictions(cases, cached=False), size)
    without = batches(cases, None, size)
    largest = 0.0
    for one, other, bare in zip(stored, fresh, without, strict=True):
        assert torch.equal(one.image, bare.image)
        assert torch.equal(one.bits, bare.bits)
        assert torch.equal(other.image, bare.image)
        assert torch.equal(other.bits, bare.bits)
        assert bare.soft_targets is None
        assert one.unpack().soft_targets.shape == (3, 3, *(n for n in size if n > 1))
        largest = max(largest, float((one.unpack().soft_targets - other.unpack().soft_targets).abs().max()))
    assert 0 < largest <= HALF_A_LEVEL + ROUNDING


@pytest.mark.parametrize(
    "geometry",
    [
        {"rotation_degrees": 25, "scale": 0.2, "geometry_probability": 1, "mirror_axes": ()},
        {"rotation_degrees": 0, "scale": 0, "mirror_axes": (0, 1)},
    ],
    ids=["turned", "mirrored"],
)
@pytest.mark.parametrize("shape", [(10, 8, 6), (12, 9)])
def test_extra_moves_with_the_image(geometry, shape):
    off = {"brightness": 0, "contrast": 0, "gamma": 0, "noise": 0, "blur_probability": 0}
    image = torch.rand(4, 1, *shape, generator=torch.Generator().manual_seed(1)) * 2 - 1
    soft_targets = torch.cat([(image + 1) / 2, (1 - image) / 4], dim=1)
    bits = torch.zeros(4, *shape, dtype=torch.uint8)
    batch = PackedBatch(
        image, bits, torch.ones(4, 1, dtype=torch.bool), ("liver",), tuple("abcd"), soft_targets=soft_targets
    )
    moved = augment(batch, AugmentSettings(**geometry, **off), Draws(2))
    assert not torch.equal(moved.image, image)
    expected = torch.cat([(moved.image + 1) / 2, (1 - moved.image) / 4], dim=1)
    torch.testing.assert_close(moved.soft_targets, expected, rtol=0, atol=ROUNDING)
    assert torch.equal(batch.soft_targets, soft_targets), "the input is left alone"


def test_intensity_leaves_extra_alone():
    settings = AugmentSettings(rotation_degrees=0, scale=0, blur_probability=1)
    image = torch.rand(2, 1, 6, 6, 6) * 2 - 1
    bits, annotated = torch.zeros(2, 6, 6, 6, dtype=torch.uint8), torch.ones(2, 1, dtype=torch.bool)
    batch = PackedBatch(image, bits, annotated, ("liver",), ("a", "b"), soft_targets=quantised((image + 1) / 2))
    changed = augment(batch, settings, Draws(0))
    assert not torch.equal(changed.image, image)
    assert torch.equal(changed.soft_targets, as_probabilities(batch.soft_targets))


def test_extra_travels_with_the_batch(cases):
    sampler = PatchSampler(cases, STRUCTURES, settings(), teacher_predictions(cases))
    plain = list(sampler.batches(3, seed=0))
    moved = plain[0].to(torch.device("meta"))
    assert {moved.soft_targets.device.type, moved.soft_targets_valid.device.type} == {"meta"}
    for one, other in zip(plain, prefetched(sampler.batches(3, seed=0)), strict=True):
        assert torch.equal(one.soft_targets, other.soft_targets)
        assert torch.equal(one.soft_targets_valid, other.soft_targets_valid)
    absent = plain[0].unpack().assuming_unknown_is_absent()
    assert torch.equal(absent.soft_targets, plain[0].unpack().soft_targets)


def test_a_site_that_annotates_everything_has_no_extra(cases):
    packed = next(
        PatchSampler(cases, STRUCTURES, settings(), teacher_predictions(cases, names_of=lambda case: ())).batches(1, 0)
    )
    assert (packed.soft_targets, packed.soft_target_organs, packed.soft_targets_valid) == (None, (), None)


# -- drawing channels ----------------------------------------------------------------------------------------------


def test_some_channels_are_drawn_for_each_batch_and_patches_stay_the_same(cases):
    whole = list(PatchSampler(cases, STRUCTURES, settings(), teacher_predictions(cases)).batches(30, seed=7))
    some = list(PatchSampler(cases, STRUCTURES, settings(), teacher_predictions(cases, per_step=1)).batches(30, seed=7))
    again = list(
        PatchSampler(cases, STRUCTURES, settings(), teacher_predictions(cases, per_step=1)).batches(30, seed=7)
    )
    assert {packed.soft_target_organs for packed in some} == {("aorta",), ("pancreas",), ("spleen",)}
    assert [packed.soft_target_organs for packed in some] == [packed.soft_target_organs for packed in again]
    for one, all_ in zip(some, whole, strict=True):
        assert torch.equal(one.image, all_.image)
        assert torch.equal(one.bits, all_.bits)
        place = all_.soft_target_organs.index(one.soft_target_organs[0])
        assert torch.equal(one.soft_targets[:, 0], all_.soft_targets[:, place])
        assert torch.equal(one.soft_targets_valid[:, 0], all_.soft_targets_valid[:, place])


def test_what_no_case_of_the_batch_has_is_drawn_last(cases):
    """Only `a` lacks the spleen: a batch of `b` alone must not waste its draw on it."""
    drawn = teacher_predictions(cases, per_step=2)
    random = np.random.default_rng(0)
    assert {drawn.draw([cases[1]], random) for _ in range(20)} == {("aorta", "pancreas")}
    assert len({drawn.draw(cases, random) for _ in range(40)}) == 3


def test_more_draws_than_channels_are_all_channels(cases):
    whole = teacher_predictions(cases, per_step=9)
    assert whole.draw(cases, np.random.default_rng(0)) == whole.names


def test_each_channel_is_drawn_equally_often(cases):
    drawn = teacher_predictions([replace(cases[0], structures=())], per_step=1)
    random = np.random.default_rng(1)
    counts = dict.fromkeys(ORGANS, 0)
    for _ in range(4000):
        counts[drawn.draw(drawn.cases, random)[0]] += 1
    # 1000 expected; 5 standard deviations of a binomial are 5 · √(4000 · 1/4 · 3/4) = 137.
    assert all(abs(count - 1000) < 137 for count in counts.values())
