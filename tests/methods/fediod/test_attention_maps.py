"""Attention maps of scans: best scans, depth, intersection and union, the wire, fusion, and the way back; by hand."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from refusing import refused

from panorgan.errors import RunError
from panorgan.federation.message import Message
from panorgan.methods.fediod.attention_maps import (
    ScanMaps,
    SliceTargets,
    best_scans,
    fuse,
    pack,
    resample_depth,
    slice_targets,
)


def stack(*values: float) -> torch.Tensor:
    """Slices [D, 1, 1] of one number each."""
    return torch.tensor(values).view(-1, 1, 1)


def attention(depth: int, tokens: int = 4, seed: int = 0) -> torch.Tensor:
    """Random rows that add up to one, [D, n, n]."""
    return torch.randn(depth, tokens, tokens, generator=torch.Generator().manual_seed(seed)).softmax(dim=-1)


# -- which scans -------------------------------------------------------------------------------------------------------


def test_the_scans_with_the_lowest_loss_best_first():
    losses = {"a": 0.5, "b": 0.1, "c": 0.9, "d": 0.3, "e": 0.2}
    assert best_scans(losses, 0.4) == ("b", "e")
    assert best_scans(losses, 1.0) == ("b", "e", "d", "a", "c")


@pytest.mark.parametrize(
    ("scans", "share", "count"),
    [(1, 0.2, 1), (2, 0.2, 1), (7, 0.2, 1), (8, 0.2, 2), (12, 0.2, 2), (13, 0.2, 3), (5, 0.3, 2), (50, 0.29, 15)],
)
def test_their_number_is_rounded_to_the_nearest_and_at_least_one(scans, share, count):
    assert len(best_scans({f"{i:02}": float(i) for i in range(scans)}, share)) == count


def test_equal_losses_go_by_name_whatever_came_first():
    assert best_scans({"c": 0.1, "a": 0.1, "b": 0.1}, 0.6) == ("a", "b")
    assert best_scans({"b": 0.1, "a": 0.1, "c": 0.1}, 0.6) == ("a", "b")


def test_scans_without_a_loss_are_left_out_and_not_counted():
    losses = {"a": math.nan, "b": 0.3, "c": math.inf, "d": 0.2, "e": math.nan}
    assert best_scans(losses, 0.5) == ("d",)
    assert best_scans(losses, 1.0) == ("d", "b")
    assert best_scans({"a": math.nan}, 1.0) == ()
    assert best_scans({}, 0.2) == ()


# -- depth -------------------------------------------------------------------------------------------------------------


def test_depth_by_hand():
    """4 → 2: half way between two. 2 → 4: at −¼, ¼, ¾ and 1¼, the outer ones held at the ends."""
    assert resample_depth(stack(0.0, 0.2, 0.4, 1.0), 2).flatten().tolist() == pytest.approx([0.1, 0.7])
    assert resample_depth(stack(0.2, 0.6), 4).flatten().tolist() == pytest.approx([0.2, 0.3, 0.5, 0.6])
    assert resample_depth(stack(0.3), 3).flatten().tolist() == pytest.approx([0.3] * 3)
    assert resample_depth(stack(0.1, 0.2, 0.9), 1).flatten().tolist() == pytest.approx([0.2])


@pytest.mark.parametrize("before", [1, 2, 7, 10, 61])
@pytest.mark.parametrize("after", [1, 3, 10, 40])
def test_depth_agrees_with_the_librarys_interpolation(before, after):
    maps = attention(before)
    wanted = F.interpolate(maps.flatten(1).T.unsqueeze(0), size=after, mode="linear", align_corners=False)
    found = resample_depth(maps, after)
    torch.testing.assert_close(found, wanted[0].T.view(after, 4, 4), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.sum(-1), torch.ones(after, 4))


@pytest.mark.parametrize("depth", [1, 3, 10, 40, 117])
def test_the_same_depth_changes_no_bit(depth):
    maps = attention(depth)
    found = resample_depth(maps, depth)
    assert torch.equal(found, maps)
    assert found.data_ptr() != maps.data_ptr()


def test_maps_are_not_rounded_by_the_precision_around_them():
    maps = attention(7)
    plain = resample_depth(maps, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(resample_depth(maps, 5), plain)
        target = slice_targets(maps, torch.tensor([2]), torch.tensor([9]))
    assert torch.equal(target, slice_targets(maps, torch.tensor([2]), torch.tensor([9])))
    assert resample_depth(maps.half(), 5).dtype == torch.float32


# -- intersection and union --------------------------------------------------------------------------------------------


def test_intersection_and_union_by_hand():
    """Scans of 2, 4 and 1 slices, brought to 2: (0.2, 0.6), (0.1, 0.7) and (0.3, 0.3)."""
    maps = ScanMaps(depth=2)
    for scan in (stack(0.2, 0.6), stack(0.0, 0.2, 0.4, 1.0), stack(0.3)):
        maps.add(scan)
    assert maps.intersection.flatten().tolist() == pytest.approx([0.1, 0.3])
    assert maps.union.flatten().tolist() == pytest.approx([0.3, 0.7])
    assert maps.scans == 3


def test_element_by_element():
    maps = ScanMaps(depth=1)
    maps.add(torch.tensor([[[0.1, 0.9], [0.5, 0.5]]]))
    maps.add(torch.tensor([[[0.4, 0.6], [0.2, 0.8]]]))
    torch.testing.assert_close(maps.intersection, torch.tensor([[[0.1, 0.6], [0.2, 0.5]]]))
    torch.testing.assert_close(maps.union, torch.tensor([[[0.4, 0.9], [0.5, 0.8]]]))


def test_one_scan_is_both_and_stays_as_it_was():
    scan = attention(3)
    before = scan.clone()
    maps = ScanMaps(depth=3)
    maps.add(scan)
    assert torch.equal(maps.intersection, scan)
    assert torch.equal(maps.union, scan)
    maps.add(attention(5, seed=1))
    assert torch.equal(scan, before)


def test_no_scan_at_all_is_an_error():
    maps = ScanMaps(depth=3)
    with refused("no-attention-maps", RunError):
        _ = maps.intersection
    with refused("no-attention-maps", RunError):
        _ = maps.union


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 6), st.randoms(use_true_random=False))
def test_every_scan_lies_between_them_in_any_order(depths, depth, random):
    scans = [attention(d, seed=i) for i, d in enumerate(depths)]
    maps, again = ScanMaps(depth), ScanMaps(depth)
    for scan in scans:
        maps.add(scan)
    random.shuffle(scans)
    for scan in scans:
        again.add(scan)
        resampled = resample_depth(scan, depth)
        assert ((maps.intersection <= resampled) & (resampled <= maps.union)).all()
    assert torch.equal(maps.intersection, again.intersection)
    assert torch.equal(maps.union, again.union)


# -- the wire ----------------------------------------------------------------------------------------------------------


def test_what_travels_is_off_by_no_more_than_it_says():
    generator = torch.Generator().manual_seed(0)
    values = torch.cat([torch.rand(10_000, generator=generator) ** power for power in (1, 4, 16, 64)])
    values = torch.cat([values, torch.tensor([0.0, 1.0, 1 / 256, 2**-14, 2**-24, 2**-25])])
    packed = pack(values)
    assert packed.dtype == torch.float16
    bound = torch.maximum(values * 2**-11, torch.tensor(2.0**-25))
    assert ((packed.double() - values.double()).abs() <= bound.double()).all()
    ordered = values.sort().values
    assert (pack(ordered).float().diff() >= 0).all()


def test_a_message_carries_it_bit_for_bit_in_two_bytes_per_value():
    packed = pack(attention(40, tokens=64))
    raw = Message({"union": packed}, {}, {}).to_bytes()
    assert packed.numel() * 2 <= len(raw) <= packed.numel() * 2 + 1000
    assert torch.equal(Message.from_bytes(raw).tensors["union"], packed)


# -- fusion ------------------------------------------------------------------------------------------------------------


def fused(*maps: torch.Tensor) -> torch.Tensor:
    sites = {f"site{i}": m for i, m in enumerate(maps)}
    return fuse(sites.__getitem__, list(sites))


def test_fusion_by_hand():
    """0, 0 and 0.9: their mean is 0.3, distances 0.3, 0.3 and 0.6; element by element."""
    found = fused(stack(0.0, 0.4), stack(0.0, 0.4), stack(0.9, 0.4))
    outlier = math.exp(-0.6) / (2 * math.exp(-0.3) + math.exp(-0.6))
    assert outlier == pytest.approx(0.270291, abs=1e-6)
    assert found.flatten().tolist() == pytest.approx([0.9 * outlier, 0.4])
    assert found.dtype == torch.float32


@pytest.mark.parametrize(("common", "outlier"), [(0.2, 0.8), (0.8, 0.2)])
def test_an_outlier_counts_less_on_either_side(common, outlier):
    """A signed distance, as printed, would let the low outlier count more."""
    found = fused(stack(common), stack(common), stack(outlier)).item()
    share = (found - common) / (outlier - common)
    assert share == pytest.approx(math.exp(-0.4) / (2 * math.exp(-0.2) + math.exp(-0.4)), rel=1e-5)
    assert share < 1 / 3


def test_weights_add_up_to_one():
    """They do if and only if maps that are all higher by a number give a result that is."""
    maps = [0.5 * attention(3, seed=i) for i in range(4)]
    torch.testing.assert_close(fused(*[m + 0.25 for m in maps]), fused(*maps) + 0.25)


def test_equal_maps_and_one_site_change_nothing():
    maps = attention(3)
    assert torch.equal(fused(maps), maps)
    assert torch.equal(fused(maps, maps, maps), maps)


@given(st.lists(st.floats(0, 1, width=16), min_size=1, max_size=6))
def test_it_equals_a_softmax_over_sites_and_stays_between_them(values):
    maps = torch.tensor(values, dtype=torch.float64)
    expected = ((-(maps - maps.mean()).abs()).softmax(0) * maps).sum().item()
    found = fused(*[stack(v).half() for v in values]).item()
    assert found == pytest.approx(expected, abs=1e-7)
    assert min(values) - 1e-7 <= found <= max(values) + 1e-7


def test_sites_are_read_one_at_a_time_in_the_order_of_their_names():
    maps, asked = {"b": pack(stack(0.2)), "a": pack(stack(0.4)), "c": pack(stack(0.9))}, []

    def read(site: str) -> torch.Tensor:
        asked.append(site)
        return maps[site]

    before = {site: m.clone() for site, m in maps.items()}
    assert torch.equal(fuse(read, ["c", "a", "b"]), fuse(read, ["a", "b", "c"]))
    assert asked == ["a", "b", "c"] * 4
    assert all(torch.equal(maps[site], before[site]) for site in maps)
    with refused("no-attention-maps", RunError):
        fuse(read, [])


def test_a_scale_makes_distances_felt():
    """0, 0 and 0.9 are off by 0.3, 0.3 and 0.6. Even attention of two tokens is ½, and the scale half of that: by 1.2,
    1.2 and 2.4 times the scale."""
    sites = {name: torch.full((1, 2, 2), value) for name, value in (("a", 0.0), ("b", 0.0), ("c", 0.9))}
    found = fuse(sites.__getitem__, list(sites), scale=0.5)
    outlier = math.exp(-(2.4**2)) / (2 * math.exp(-(1.2**2)) + math.exp(-(2.4**2)))
    assert outlier < 0.01
    assert found.flatten().tolist() == pytest.approx([0.9 * outlier] * 4)
    plain = fuse(sites.__getitem__, list(sites))
    assert plain.flatten().tolist() == pytest.approx([0.9 * 0.270291] * 4, rel=1e-5)


def test_a_small_scale_takes_whoever_is_nearest_and_nothing_becomes_nan():
    """e^−(256 · 0.5 / 10⁻³)² is 0 for all: the nearest decide, and two who are as near share it."""
    sites = {"a": torch.tensor([[[0.0, 0.2]]]), "b": torch.tensor([[[1.0, 0.2]]]), "c": torch.tensor([[[0.6, 0.2]]])}
    found = fuse(sites.__getitem__, list(sites), scale=1e-3)
    assert found.flatten().tolist() == pytest.approx([0.6, 0.2])
    both = fuse({"a": stack(0.0), "b": stack(1.0)}.__getitem__, ["a", "b"], scale=1e-6)
    assert both.item() == pytest.approx(0.5)


@pytest.mark.parametrize("scale", [None, 0.1])
def test_double_precision_maps_are_not_written_into(scale):
    maps = {"a": stack(0.2).double(), "b": stack(0.6).double()}
    fuse(maps.__getitem__, ["a", "b"], scale)
    assert (maps["a"].item(), maps["b"].item()) == (pytest.approx(0.2), pytest.approx(0.6))


# -- the way back ------------------------------------------------------------------------------------------------------


def test_slice_targets_by_hand():
    """Maps of the scan's own depth: the mean of three, of two at the ends."""
    maps = stack(0.0, 0.3, 0.9, 0.6)
    found = slice_targets(maps, torch.tensor([0, 1, 2, 3]), torch.tensor([4, 4, 4, 4]))
    assert found.shape == (4, 1, 1)
    assert found.flatten().tolist() == pytest.approx([0.15, 0.4, 0.6, 0.75])


def test_slice_targets_of_scans_of_other_depths():
    """(0.2, 0.6) at four slices is 0.2, 0.3, 0.5, 0.6; a scan of one slice has no neighbours."""
    found = slice_targets(stack(0.2, 0.6), torch.tensor([0, 2, 0, 1]), torch.tensor([4, 4, 1, 2]))
    assert found.flatten().tolist() == pytest.approx([0.25, (0.3 + 0.5 + 0.6) / 3, 0.4, 0.4])


@pytest.mark.parametrize("depth", [1, 2, 5, 30])
def test_slice_targets_are_means_of_the_resampled_stack(depth):
    maps = attention(8)
    whole = resample_depth(maps, depth)
    found = slice_targets(maps, torch.arange(depth), torch.full((depth,), depth))
    expected = torch.stack([whole[max(d - 1, 0) : d + 2].mean(0) for d in range(depth)])
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found.sum(-1), torch.ones(depth, 4))


def test_targets_that_are_looked_up_are_those_worked_out():
    """Scans of three depths, two of them equal; several stacks at once, each by its own."""
    maps, others = attention(8), attention(8, seed=1)
    lookup = SliceTargets([maps, others], [5, 3, 12, 5])
    slices, depths = torch.tensor([0, 2, 11, 4, 0, 6]), torch.tensor([5, 3, 12, 5, 3, 12])
    for found, stacked in zip(lookup(slices, depths), (maps, others), strict=True):
        torch.testing.assert_close(found, slice_targets(stacked, slices, depths))


def test_packed_maps_give_targets_in_full_precision():
    maps = pack(attention(8))
    found = slice_targets(maps, torch.tensor([3]), torch.tensor([9]))
    assert torch.equal(found, slice_targets(maps.float(), torch.tensor([3]), torch.tensor([9])))
