"""Training patches: what is in them, and that they depend on the seed alone."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from refusing import refused

from panorgan.preparation.augment import AugmentSettings, Draws, augment
from panorgan.preparation.batch import PackedBatch
from panorgan.preparation.sampling import PatchSampler, SamplingSettings, whole_scan

SHAPE = (20, 18, 16)


def box(*ranges: tuple[int, int], shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    mask = np.zeros(shape, dtype=bool)
    mask[tuple(slice(*r) for r in ranges)] = True
    return mask


LIVER = box((2, 5), (3, 6), (1, 4))
TUMOUR = box((3, 4), (4, 5), (2, 3))
SPLEEN = box((15, 18), (12, 15), (10, 13))


@pytest.fixture
def cases(store_case):
    """The image of `a` is 1 in its liver and of `b` in its spleen; elsewhere all are 0."""
    return [
        store_case("b", SPLEEN * 500.0, {"spleen": SPLEEN}),
        store_case("a", LIVER * 500.0, {"liver": LIVER, "liver_tumour": TUMOUR}),
    ]


def settings(size: int = 8, batch: int = 4, foreground: float = 0.66) -> SamplingSettings:
    return SamplingSettings(patch_size=(size, size, size), batch_size=batch, foreground=foreground)


CASE = ("id", "site", "structures", "image", "labels", "foreground", "shape", "channels", "part")
STRUCTURES = ("spleen", "liver_tumour", "liver")  # another order than the cases'


def same(first: PackedBatch, second: PackedBatch) -> bool:
    return (
        torch.equal(first.image, second.image)
        and torch.equal(first.bits, second.bits)
        and torch.equal(first.annotated, second.annotated)
        and first.cases == second.cases
    )


def test_batches_depend_on_the_seed_alone(cases) -> None:
    first = list(PatchSampler(cases, STRUCTURES, settings()).batches(5, seed=3))
    again = list(PatchSampler(cases[::-1], STRUCTURES, settings()).batches(5, seed=3))
    other = list(PatchSampler(cases, STRUCTURES, settings()).batches(5, seed=4))
    assert len(first) == 5
    assert all(same(a, b) for a, b in zip(first, again, strict=True))
    assert not any(same(a, b) for a, b in zip(first, other, strict=True))
    assert not same(first[0], first[1])


def test_shapes_and_types(cases) -> None:
    sampler = PatchSampler(cases, STRUCTURES, SamplingSettings(patch_size=(8, 6, 4), batch_size=3))
    packed = next(sampler.batches(1, seed=0))
    assert (packed.image.shape, packed.image.dtype) == ((3, 1, 8, 6, 4), torch.float32)
    assert (packed.bits.shape, packed.bits.dtype) == ((3, 8, 6, 4), torch.uint8)
    assert (packed.annotated.shape, packed.annotated.dtype) == ((3, 3), torch.bool)
    batch = packed.unpack()
    assert (batch.masks.shape, batch.masks.dtype) == ((3, 3, 8, 6, 4), torch.bool)
    assert (batch.structures, batch.cases) == (STRUCTURES, packed.cases)


def test_every_case_says_what_it_annotates_and_bits_land_in_the_right_places(cases) -> None:
    seen = set()
    for packed in PatchSampler(cases, STRUCTURES, settings(foreground=1)).batches(10, seed=0):
        batch = packed.unpack()
        for image, masks, annotated, case in zip(batch.image, batch.masks, batch.annotated, batch.cases, strict=True):
            seen.add(case)
            spleen, tumour, liver = masks
            if case == "a":
                assert annotated.tolist() == [False, True, True]
                assert torch.equal(image[0] == 1, liver)
                assert not spleen.any()
                assert (tumour <= liver).all()
                if liver.sum() == LIVER.sum():  # wholly inside the patch
                    assert tumour.sum() == 1
            else:
                assert annotated.tolist() == [True, False, False]
                assert torch.equal(image[0] == 1, spleen)
                assert not liver.any()
                assert not tumour.any()
    assert seen == {"a", "b"}


def test_a_structure_that_the_batch_does_not_have_is_dropped(cases) -> None:
    packed = next(PatchSampler(cases, ("liver",), settings(foreground=1, batch=8)).batches(1, seed=0))
    assert packed.annotated.tolist() == [[case == "a"] for case in packed.cases]
    assert set(packed.bits.unique().tolist()) == {0, 1}


def test_foreground_patches_hold_a_structure(cases) -> None:
    def share(foreground: float) -> float:
        sampler = PatchSampler(cases, STRUCTURES, settings(size=6, batch=10, foreground=foreground))
        batches = list(sampler.batches(30, seed=1))
        return float(torch.cat([batch.bits.flatten(1).any(1) for batch in batches]).float().mean())

    assert share(1.0) == 1.0
    # A random 6³ patch meets a 3³ box in a 20 × 18 × 16 scan rarely: (8·8·8) / (15·13·11) is an upper bound.
    assert share(0.0) < 0.35
    assert share(0.0) < share(0.5) < 1.0


def test_tissue_may_be_the_foreground(store_case) -> None:
    """The left half of a scan is denser than water; its only structure lies in the other half, and attracts none."""
    tissue = box((0, 10), (0, 18), (0, 16))
    case = store_case("half", tissue * 500.0, {"spleen": SPLEEN})

    def inside(foreground: float) -> tuple[bool, bool]:
        """Whether every patch holds tissue, and whether every patch holds anything else."""
        chosen = SamplingSettings(patch_size=(2, 2, 2), batch_size=8, foreground=foreground, foreground_is="tissue")
        images = torch.cat([b.image for b in PatchSampler([case], ("spleen",), chosen).batches(25, seed=0)])
        return bool((images > 0).flatten(1).any(1).all()), bool((images <= 0).flatten(1).any(1).all())

    assert inside(1.0) == (True, False)
    assert inside(0.0) == (False, True)
    assert inside(0.5) == (False, False)


@pytest.mark.parametrize("hu", [-500.0, 500.0])
def test_a_scan_without_tissue_or_of_tissue_alone_still_gives_patches(store_case, hu) -> None:
    case = store_case("flat", np.full(SHAPE, hu), {"spleen": SPLEEN})
    chosen = SamplingSettings(patch_size=(8, 8, 8), foreground=0.5, foreground_is="tissue")
    assert len(list(PatchSampler([case], ("spleen",), chosen).batches(3, seed=0))) == 3


def test_foreground_of_structures_outside_the_batch_does_not_attract_patches(store_case) -> None:
    case = store_case("a", np.zeros(SHAPE), {"liver": LIVER, "spleen": SPLEEN})
    for packed in PatchSampler([case], ("liver",), settings(foreground=1, size=6)).batches(10, seed=0):
        assert packed.bits.flatten(1).any(1).all()


def test_structures_share_the_foreground_evenly(store_case) -> None:
    """A large organ must not crowd out a small one."""
    large = box((0, 20), (0, 18), (0, 9))
    small = box((10, 11), (10, 11), (14, 15))
    case = store_case("a", np.zeros(SHAPE), {"liver": large, "spleen": small})
    sampler = PatchSampler([case], ("liver", "spleen"), settings(foreground=1, size=4, batch=10))
    hits = torch.cat([batch.unpack().masks[:, 1].flatten(1).any(1) for batch in sampler.batches(30, seed=0)])
    assert 0.4 < float(hits.float().mean()) < 0.65


def test_patches_reach_every_voxel_and_keep_their_place(store_case) -> None:
    hu = np.arange(6 * 5 * 4, dtype=np.float32).reshape(6, 5, 4)
    case = store_case("a", hu, {})
    seen = set()
    for packed in PatchSampler([case], (), SamplingSettings(patch_size=(3, 3, 3), batch_size=8)).batches(40, seed=0):
        assert packed.annotated.shape == (8, 0)
        assert packed.annotated.dtype == torch.bool
        assert packed.unpack().masks.shape == (8, 0, 3, 3, 3)
        for image in (packed.image[:, 0] * 500).round().long():
            seen |= set(image.flatten().tolist())
            steps = image - image[0, 0, 0]
            assert steps[1, 1, 1] == 20 + 4 + 1  # cut out without turning or skipping
    assert seen == set(range(120))


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_slices_lie_across_the_axis_of_size_one(store_case, axis) -> None:
    """Voxels count up by 20, 4 and 1 along R, A and S, so their differences tell which axes a slice has."""
    hu = np.arange(6 * 5 * 4, dtype=np.float32).reshape(6, 5, 4)
    case = store_case("a", hu, {"liver": hu == 47})
    patch, steps = [3, 3, 3], [20, 4, 1]
    patch[axis] = 1
    step = [s for other, s in enumerate(steps) if other != axis]
    seen = set()
    sampler = PatchSampler([case], ("liver",), SamplingSettings(patch_size=tuple(patch), batch_size=8, foreground=0.3))
    for packed in sampler.batches(40, seed=0):
        assert packed.image.shape == (8, 1, 3, 3)
        assert packed.unpack().masks.shape == (8, 1, 3, 3)
        assert packed.axes == tuple(other for other in range(3) if other != axis)
        values = (packed.image[:, 0] * 500).round().long()
        assert (values[:, 1, 0] - values[:, 0, 0] == step[0]).all()
        assert (values[:, 0, 1] - values[:, 0, 0] == step[1]).all()
        assert torch.equal(packed.bits == 1, values == 47)
        seen |= set(values.flatten().tolist())
    assert seen == set(range(120))


def test_foreground_slices_hold_the_structure(cases) -> None:
    sampler = PatchSampler(cases, STRUCTURES, SamplingSettings(patch_size=(8, 8, 1), batch_size=8, foreground=1))
    assert all(packed.bits.flatten(1).any(1).all() for packed in sampler.batches(20, seed=0))


def test_a_batch_knows_the_voxel_size_along_its_axes(cases) -> None:
    cases = [SimpleNamespace(**{name: getattr(case, name) for name in CASE}, spacing=(1.0, 2.0, 8.0)) for case in cases]
    volumes = next(PatchSampler(cases, STRUCTURES, settings(batch=2)).batches(1, seed=0))
    assert volumes.spacing.tolist() == [[1.0, 2.0, 8.0]] * 2
    slices = next(PatchSampler(cases, STRUCTURES, SamplingSettings(patch_size=(8, 1, 8))).batches(1, seed=0))
    assert slices.spacing.tolist() == [[1.0, 8.0]] * 2


def test_a_small_case_is_padded_with_air(store_case) -> None:
    shape = (3, 8, 20)
    case = store_case("small", np.zeros(shape), {"liver": np.ones(shape, dtype=bool)})
    packed = next(PatchSampler([case], ("liver",), settings(size=8, batch=2)).batches(1, seed=0))
    # Five missing planes: two before, three after.
    inside = torch.zeros(8, 8, 8, dtype=torch.bool)
    inside[2:5] = True
    for image, bits in zip(packed.image[:, 0], packed.bits, strict=True):
        assert torch.equal(image, torch.where(inside, 0.0, -1.0))
        assert torch.equal(bits, inside.long())


def test_an_empty_training_set_is_an_error() -> None:
    with refused("nobody-to-train-on") as caught:
        PatchSampler([], ("liver",), settings())
    assert caught.value.fix


def test_more_structures_than_bits_are_refused(cases) -> None:
    PatchSampler(cases, tuple(f"s{t}" for t in range(63)), settings())
    with refused("too-many-structures") as caught:
        PatchSampler(cases, tuple(f"s{t}" for t in range(64)), settings())
    assert "64" in caught.value.what


@pytest.mark.parametrize(
    "wrong", [{"patch_size": (8, 0, 8)}, {"patch_size": (8, 1, 1)}, {"batch_size": 0}, {"foreground": 1.1}]
)
def test_impossible_settings_are_refused(wrong) -> None:
    with pytest.raises(ValidationError):
        SamplingSettings(**wrong)


# -- where slices lie ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_slice_says_which_of_how_many_it_is(store_case, axis) -> None:
    """Voxels count up along the axis; what they show is what the batch says, also after augmentation."""
    counted = np.zeros(SHAPE) + np.arange(SHAPE[axis]).reshape([-1 if a == axis else 1 for a in range(3)])
    case = store_case("a", counted, {"liver": LIVER})
    levels = [float(np.moveaxis(np.asarray(case.image), axis, 0)[place].mean()) for place in range(SHAPE[axis])]
    size = tuple(1 if a == axis else 8 for a in range(3))
    packed = next(PatchSampler([case], ("liver",), SamplingSettings(patch_size=size, batch_size=16)).batches(1, seed=0))
    assert packed.depths.tolist() == [SHAPE[axis]] * 16
    assert len(set(packed.slices.tolist())) > 3
    np.testing.assert_allclose(packed.image.mean((1, 2, 3)), [levels[place] for place in packed.slices], atol=1e-3)
    moved = augment(packed, AugmentSettings(), Draws(0)).unpack()
    assert torch.equal(moved.slices, packed.slices)
    assert torch.equal(moved.depths, packed.depths)
    part = packed[3:5]
    assert (len(part), part.cases, part.slices.tolist()) == (2, ("a", "a"), packed.slices[3:5].tolist())
    assert torch.equal(part.unpack().masks, packed.unpack().masks[3:5])


def test_patches_with_a_volume_are_no_slices(cases) -> None:
    batch = next(PatchSampler(cases, STRUCTURES, settings()).batches(1, seed=0)).unpack()
    assert batch.slices is None
    assert batch.depths is None


def test_a_whole_scan_in_slices(cases) -> None:
    """Wider than the scan along R, where it is filled up; narrower along A, where it is cut; every slice along S."""
    case = cases[1]
    scan = whole_scan(case, (24, 8, 1))
    assert (scan.image.shape, scan.image.dtype, len(scan)) == ((16, 1, 24, 8), torch.float32, 16)
    assert scan.slices.tolist() == list(range(16))
    assert scan.depths.tolist() == [16] * 16
    assert (scan.axes, scan.spacing.shape, set(scan.cases)) == ((0, 1), (16, 2), {"a"})
    image = np.asarray(case.image, dtype=np.float32)
    np.testing.assert_array_equal(scan.image[:, 0, 2:22].numpy(), np.moveaxis(image[:, 5:13], 2, 0))
    assert (scan.image[:, 0, :2] == -1).all()
    assert (scan.image[:, 0, 22:] == -1).all()
    batch = scan.unpack()
    assert batch.annotated.all()
    for place, (name, mask) in enumerate(case.masks()):
        assert batch.structures[place] == name
        np.testing.assert_array_equal(batch.masks[:, place, 2:22].numpy(), np.moveaxis(mask[:, 5:13], 2, 0))
        assert not batch.masks[:, place, :2].any()


def test_a_whole_scan_across_another_axis(cases) -> None:
    scan = whole_scan(cases[1], (8, 1, 16))
    assert (scan.image.shape, scan.axes) == ((18, 1, 8, 16), (0, 2))
    np.testing.assert_array_equal(scan.image[4, 0].numpy(), np.asarray(cases[1].image, dtype=np.float32)[6:14, 4])


def test_a_whole_scan_of_volumes_is_its_middle(cases) -> None:
    scan = whole_scan(cases[1], (8, 8, 20))
    assert (scan.image.shape, scan.slices, scan.depths) == ((1, 1, 8, 8, 20), None, None)
    image = np.asarray(cases[1].image, dtype=np.float32)
    np.testing.assert_array_equal(scan.image[0, 0, :, :, 2:18].numpy(), image[6:14, 5:13])
