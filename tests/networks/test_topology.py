"""Patches and strides from the scans' shape: nnU-Net's rules."""

from __future__ import annotations

import math

import pytest

from panorgan.networks import UNetSettings
from panorgan.networks.topology import strides_for, suits_slices, topology


def test_an_isotropic_scan_is_halved_everywhere():
    found = topology((60, 60, 60), (3, 3, 3), 64**3)
    assert found.patch_size == (64, 64, 64)  # 60 to the next multiple of 16
    assert found.strides == ((1, 1, 1), *((2, 2, 2),) * 3)
    assert found.halves_all


def test_thick_slices_wait_until_the_others_are_as_coarse():
    # 1.5 mm in the plane, 10 mm across: 1.5 → 3 → 6, then 12 against 10 is even.
    strides = strides_for((224, 224, 16), (1.5, 1.5, 10))
    assert strides == ((1, 1, 1), (2, 2, 1), (2, 2, 1), (2, 2, 2), (2, 2, 2), (2, 2, 1))


def test_four_voxels_remain_along_every_axis():
    for size in (8, 15, 16, 100):
        strides = strides_for((size,) * 3, (1, 1, 1))
        left = size / math.prod(level[0] for level in strides)
        assert left >= 4


@pytest.mark.parametrize("voxels", [128**3, 64**3, 32**3])
@pytest.mark.parametrize(
    ("shape", "spacing"),
    [((300, 250, 130), (1.5, 1.5, 3)), ((512, 512, 100), (0.8, 0.8, 5)), ((35, 50, 35), (1, 1, 1))],
)
def test_patches_fit_their_network_and_the_limit(voxels, shape, spacing):
    found = topology(shape, spacing, voxels)
    network = UNetSettings(features=(4,) * len(found.strides), strides=found.strides)
    for size, divisor, whole in zip(found.patch_size, network.divisor, shape, strict=True):
        assert size % divisor == 0
        assert 2 * divisor <= size <= whole + divisor
    assert math.prod(found.patch_size) < 2.2 * voxels  # rounding to multiples may add some


def test_a_patch_reaches_equally_far():
    found = topology((512, 512, 100), (0.8, 0.8, 5), 64**3)
    mm = [size * spacing for size, spacing in zip(found.patch_size, (0.8, 0.8, 5), strict=True)]
    assert max(mm) / min(mm) < 1.6


def test_a_given_depth_is_kept():
    assert len(topology((64, 64, 64), (1, 1, 1), 64**3, levels=3).strides) == 3
    assert len(topology((20, 20, 20), (1, 1, 1), 64**3, levels=5).strides) == 5


def test_few_thick_slices_are_for_a_2d_network():
    assert suits_slices((200, 200, 7), (1.4, 1.4, 8))
    assert not suits_slices((200, 200, 10), (1.4, 1.4, 8))
    assert not suits_slices((200, 200, 7), (4, 4, 8))
    found = topology((200, 180, 7), (1.4, 1.4, 8), 256**2, sliced=2)
    assert (found.dimensions, found.patch_size[2]) == (2, 1)
    assert all(len(level) == 2 for level in found.strides)
