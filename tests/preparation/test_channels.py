"""Several channels from the scan to the batch: each standardised, moved together, changed in brightness by itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from panorgan.data.case import Case
from panorgan.data.channels import Channel
from panorgan.data.volume import Volume
from panorgan.federation.egress import image_shapes
from panorgan.federation.lookalikes import image_test
from panorgan.methods.ufps.cmidg import CMIDGSettings, cmidg
from panorgan.preparation.augment import AugmentSettings, Draws, augment
from panorgan.preparation.plan import Plan
from panorgan.preparation.preprocess import Grid, prepare_image
from panorgan.preparation.sampling import PatchSampler, SamplingSettings, whole_scan
from panorgan.preparation.store import Store

PLAN = Plan(spacing_mm=(1.0, 1.0, 1.0), intensity="zscore")


@pytest.fixture
def stored(tmp_path, write_scan):
    """Two channels, the second three times the first and far brighter: standardised they are the same."""
    first = np.random.default_rng(0).normal(100, 10, (20, 18, 12)).astype(np.float32)
    channels = (
        Channel("t1", write_scan("t1.nii.gz", first)),
        Channel("t2", write_scan("t2.nii.gz", 3 * first + 900)),
        Channel("t3", write_scan("t3.nii.gz", np.flip(first, 0).copy())),
    )
    case = Case("one", "anna", "here", channels[0].path, (), channels=channels)
    return Store(tmp_path / "store").add(case, PLAN)


def test_each_channel_has_its_own_mean_and_spread(stored):
    assert stored.image.shape == (3, 20, 18, 12)
    assert (stored.shape, stored.channels) == ((20, 18, 12), 3)
    np.testing.assert_allclose(stored.image[1], stored.image[0], atol=2e-3)
    assert stored.labels.shape == (20, 18, 12)
    assert abs(float(np.float32(stored.image[1]).mean())) < 1e-3


def test_the_plan_crops_to_what_any_channel_shows():
    first, second = np.zeros((30, 10, 10)), np.zeros((30, 10, 10))
    first[10:12], second[20:22] = 1, 1
    volume = Volume(first, np.diag([10.0, 10, 10, 1]), (second,))
    grid = Grid.of(volume, PLAN.model_copy(update={"crop": "body"}))
    assert grid.box[0] == (9, 23)
    assert prepare_image(volume, PLAN, Grid.of(volume)).shape == (2, 300, 100, 100)


def test_channels_of_one_4d_file_in_another_order_are_another_case(tmp_path, write_scan):
    stack = np.random.default_rng(0).normal(size=(6, 6, 6, 2)).astype(np.float32)
    path = write_scan("both.nii.gz", stack)
    store = Store(tmp_path / "store")

    def case(*indices: int) -> Case:
        return Case("one", "anna", "here", path, (), channels=tuple(Channel("c", path, index=i) for i in indices))

    keys = {store.content_of(case(0, 1)), store.content_of(case(1, 0)), store.content_of(case(0))}
    assert len(keys) == 3
    np.testing.assert_array_equal(store.add(case(0, 1), PLAN).image[1], store.add(case(1, 0), PLAN).image[0])


@pytest.mark.parametrize(
    ("patch", "shape"), [((8, 8, 8), (3, 8, 8, 8)), ((8, 8, 1), (3, 8, 8)), ((1, 8, 8), (3, 8, 8))]
)
def test_patches_hold_every_channel_of_one_place(stored, patch, shape):
    sampler = PatchSampler([stored], (), SamplingSettings(patch_size=patch, batch_size=2))
    batch = next(sampler.batches(1, seed=0))
    assert batch.image.shape == (2, *shape)
    torch.testing.assert_close(batch.image[:, 1], batch.image[:, 0], atol=2e-3, rtol=0)
    assert not torch.allclose(batch.image[:, 2], batch.image[:, 0], atol=0.1)


def test_a_patch_larger_than_the_scan_is_filled_in_every_channel(stored):
    batch = next(PatchSampler([stored], (), SamplingSettings(patch_size=(24, 24, 16))).batches(1, seed=0))
    assert batch.image.shape[1:] == (3, 24, 24, 16)
    assert bool((batch.image[:, :, 0] == -1).all())


def test_a_whole_scan_keeps_its_channels(stored):
    assert whole_scan(stored, (24, 24, 1)).image.shape == (12, 3, 24, 24)
    assert whole_scan(stored, (16, 16, 16)).image.shape == (1, 3, 16, 16, 16)
    slices = whole_scan(stored, (24, 24, 1)).image
    np.testing.assert_array_equal(slices[4, 2, 2:22, 3:21], np.float32(stored.image[2, :, :, 4]))


@pytest.mark.parametrize("patch", [(8, 8, 8), (8, 8, 1)])
def test_geometry_is_shared_and_brightness_is_not(stored, patch):
    batch = next(PatchSampler([stored], (), SamplingSettings(patch_size=patch, batch_size=3)).batches(1, seed=0))
    off = dict.fromkeys(("brightness", "contrast", "gamma", "noise", "blur_probability"), 0.0)
    moved = augment(batch, AugmentSettings(geometry_probability=1, **off), Draws(0))
    torch.testing.assert_close(moved.image[:, 1], moved.image[:, 0], atol=3e-3, rtol=0)
    assert not torch.allclose(moved.image[:, 0], batch.image[:, 0], atol=0.05)

    still = {"rotation_degrees": 0, "scale": 0}
    shifted = augment(batch, AugmentSettings(**still, **(off | {"brightness": 0.5})), Draws(0)).image - batch.image
    per_channel = shifted.flatten(2)
    torch.testing.assert_close(per_channel.amin(2), per_channel.amax(2), atol=1e-5, rtol=0)  # one shift each
    assert len(set(per_channel[:, :, 0].flatten().tolist())) == 9
    changed = augment(batch, AugmentSettings(**still, **(off | {"blur_probability": 0.5})), Draws(3)).image
    touched = (changed != batch.image).flatten(2).any(2)
    assert touched.any()
    assert not touched.all()


@pytest.mark.parametrize("shape", [(2, 3, 12, 12), (2, 3, 8, 8, 8)])
def test_cmidg_changes_each_channel_as_an_image_of_its_own(shape):
    image = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    changed = cmidg(image, CMIDGSettings(ipa=False), torch.Generator().manual_seed(1))
    alone = cmidg(image.flatten(0, 1)[:, None], CMIDGSettings(ipa=False), torch.Generator().manual_seed(1))
    torch.testing.assert_close(changed, alone.view(shape))
    norms = torch.linalg.vector_norm(image.flatten(2), dim=2), torch.linalg.vector_norm(changed.flatten(2), dim=2)
    torch.testing.assert_close(*norms)


def test_what_looks_like_any_or_all_channels_may_not_leave(stored):
    looks = image_test(image_shapes([stored], (32, 32, 16)))
    for shape in ((20, 18, 12), (3, 20, 18, 12), (3 * 20 * 18 * 12,), (3, 32, 32, 16), (3 * 32 * 32 * 16,)):
        assert looks(torch.zeros(shape)), shape
    assert not looks(torch.zeros(4, 3, 3, 3, 3))
