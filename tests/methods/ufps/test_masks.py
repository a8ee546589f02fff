"""The masks of sparse SAM: exactly as many as asked for, drawn fairly, kept over time, and packed for the wire."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusing import refused

from panorgan.errors import ConfigError, MessageError, RunError
from panorgan.methods.ufps import masks
from panorgan.methods.ufps.masks import Momentum, extra, global_mask, largest, pack, unpack

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


# -- the largest -------------------------------------------------------------------------------------------------------


def expected(values: torch.Tensor, share: float) -> torch.Tensor:
    """By sorting everything: a stable sort keeps the first of equals in front."""
    mask = torch.zeros(len(values), dtype=torch.bool, device=values.device)
    mask[values.abs().sort(descending=True, stable=True).indices[: round(share * len(values))]] = True
    return mask


def test_largest_by_hand():
    values = torch.tensor([0.0, -3.0, 1.0, 2.0, -1.0, 0.0, 1.0, -0.5, 0.0, 0.0])
    places = {share: largest(values, share).nonzero().flatten().tolist() for share in (0.0, 0.2, 0.4, 0.8, 1.0)}
    assert places == {0.0: [], 0.2: [1, 3], 0.4: [1, 2, 3, 4], 0.8: [0, 1, 2, 3, 4, 5, 6, 7], 1.0: list(range(10))}


def test_the_count_is_the_nearest_whole_number():
    assert largest(torch.randn(100), 0.29).sum() == 29  # 0.29·100 is 28.999… in floating point
    assert largest(torch.randn(7), 0.4).sum() == 3  # 2.8


@given(
    values=st.lists(
        st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5]) | st.floats(width=32, allow_nan=False), min_size=1, max_size=60
    ),
    share=st.floats(0, 1),
)
def test_largest_is_what_sorting_gives(values: list[float], share: float):
    values = torch.tensor(values)
    assert torch.equal(largest(values, share), expected(values, share))


@settings(deadline=None)
@given(seed=st.integers(0, 10**6), share=st.floats(0, 1), distinct=st.sampled_from([1, 2, 3, 20, 10**6]))
def test_a_sample_may_be_small_and_pieces_short(seed: int, share: float, distinct: int):
    # With 64 of 3000 entries sampled, all ways through the selection are taken.
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, distinct, (3000,), generator=generator).float()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masks, "_SAMPLE", 64)
        patch.setattr(masks, "_PIECE", 136)
        assert torch.equal(largest(values, share), expected(values, share))


def layers(n: int) -> torch.Tensor:
    """Like gradients: layers differ by orders of magnitude."""
    return torch.randn(n) * torch.logspace(-6, 2, n // 10_000 + 1).repeat_interleave(10_000)[:n]


MANY = 1_300_003
LARGE = {
    "layers": lambda: layers(MANY),
    "mostly zero": lambda: layers(MANY) * (torch.rand(MANY) < 0.1),
    "zero up to the limit": lambda: layers(MANY) * (torch.rand(MANY) < 0.4),
    "clipped": lambda: layers(MANY).clamp(-1e-5, 1e-5),
    "all equal": lambda: torch.full((MANY,), -2.0),
    "all zero": lambda: torch.zeros(MANY),
    "rising": lambda: torch.arange(MANY).float(),
    "not like its sample": lambda: torch.arange(MANY).remainder(MANY // masks._SAMPLE | 1).eq(0).float() + 1,
    "half precision": lambda: layers(MANY).bfloat16(),
    "double precision": lambda: layers(MANY).double(),
    "infinite": lambda: layers(MANY).log(),  # NaN of negative numbers
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", LARGE)
def test_largest_of_many(kind: str, device: str):
    torch.manual_seed(1)
    values = LARGE[kind]().to(device)
    for share in (0.4, 1e-6):
        mask = largest(values, share)
        assert mask.sum() == round(share * MANY)
        assert torch.equal(mask, expected(values, share))


def test_not_a_number_is_the_largest():
    values = torch.tensor([1.0, float("nan"), -float("inf"), 2.0])
    assert largest(values, 0.5).tolist() == [False, True, True, False]


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_is_a_share(share: float):
    with refused("share-out-of-range", ConfigError):
        largest(torch.ones(3), share)


# -- the extra mask ----------------------------------------------------------------------------------------------------


def test_extra_by_hand():
    # Ten weights: G_N = {1, 2, 3}. A tenth of ten is one of them; half of ten is five, but there are only three.
    local = torch.tensor([1, 0, 0, 0, 0, 0, 0, 0, 0, 1], dtype=torch.bool)
    global_ = torch.tensor([1, 1, 1, 1, 0, 0, 0, 0, 0, 0], dtype=torch.bool)
    one = extra(local, global_, 0.1, torch.Generator().manual_seed(0)).nonzero().flatten().tolist()
    assert len(one) == 1
    assert one[0] in (1, 2, 3)
    assert extra(local, global_, 0.5, torch.Generator()).nonzero().flatten().tolist() == [1, 2, 3]
    assert not extra(local, local, 0.5, torch.Generator()).any()


@given(masks=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=80), share=st.floats(0, 1))
def test_extra_has_its_size_and_its_place(masks: list[tuple[bool, bool]], share: float):
    local, global_ = torch.tensor(masks).unbind(1)
    eligible = ~local & global_
    chosen = extra(local, global_, share, torch.Generator().manual_seed(1))
    assert chosen.sum() == min(round(share * len(masks)), int(eligible.sum()))
    assert not (chosen & ~eligible).any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("share", [0.0, 1e-6, 0.1, 0.299])
def test_extra_among_many(share: float, device: str):
    torch.manual_seed(1)
    local, global_ = (torch.rand(MANY) < 0.4).to(device), (torch.rand(MANY) < 0.5).to(device)
    chosen = extra(local, global_, share, torch.Generator().manual_seed(2))
    assert chosen.sum() == round(share * MANY)
    assert not (chosen & (local | ~global_)).any()
    assert torch.equal(chosen, extra(local, global_, share, torch.Generator().manual_seed(2)))


def test_everybody_has_the_same_chance():
    # 40 eligible weights, 13 places, 1000 draws: each should be in 325 times, give or take 14.8 (one σ).
    local = torch.zeros(100, dtype=torch.bool)
    global_ = torch.arange(100) % 5 < 2
    generator = torch.Generator().manual_seed(3)
    times = sum(extra(local, global_, 0.13, generator).int() for _ in range(1000))
    assert not times[~global_].any()
    assert (times[global_] - 325).abs().max() < 4 * 14.8
    assert 0.4 < times[global_].double().var() / 14.8**2 < 2.0  # neither taking turns nor favourites


def test_the_last_place_is_drawn_too():
    # One place for 4096: the 32 or so that share the best lot must not be served in order. The mean place of 300 draws
    # is 2047.5, give or take 68; always the first of 32 would give about 124.
    no_site, everybody = torch.zeros(4096, dtype=torch.bool), torch.ones(4096, dtype=torch.bool)
    generator = torch.Generator().manual_seed(4)
    places = [extra(no_site, everybody, 1 / 4096, generator).nonzero().item() for _ in range(300)]
    assert abs(sum(places) / 300 - 2047.5) < 4 * 68


# -- as a GPU does it --------------------------------------------------------------------------------------------------


@given(
    values=st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, float("nan")]), min_size=1, max_size=40),
    share=st.floats(0.1, 0.9),
)
def test_sorting_everything_gives_the_same_mask(values: list[float], share: float):
    count = round(share * len(values))
    assert torch.equal(masks._largest_by_sorting(torch.tensor(values), count), largest(torch.tensor(values), share))


@given(chosen=st.lists(st.booleans(), min_size=1, max_size=60), count=st.integers(0, 60))
def test_a_part_has_its_size_and_its_place(chosen: list[bool], count: int):
    chosen = torch.tensor(chosen)
    part = masks._part_by_sorting(chosen, count, torch.Generator().manual_seed(0))
    assert part.sum() == min(count, int(chosen.sum()))
    assert not (part & ~chosen).any()


def test_everybody_has_the_same_chance_in_a_part():
    # As above: 13 of 40, 1000 times.
    chosen = torch.arange(100) % 5 < 2
    generator = torch.Generator().manual_seed(3)
    times = sum(masks._part_by_sorting(chosen, 13, generator).int() for _ in range(1000))
    assert (times[chosen] - 325).abs().max() < 4 * 14.8


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_draws_by_itself():
    torch.manual_seed(1)
    local, global_ = (torch.rand(MANY) < 0.4).cuda(), (torch.rand(MANY) < 0.5).cuda()
    drawn = [extra(local, global_, 0.1, torch.Generator("cuda").manual_seed(seed)) for seed in (2, 2, 3)]
    assert all(part.sum() == round(0.1 * MANY) for part in drawn)
    assert not (drawn[0] & (local | ~global_)).any()
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


# -- momentum ----------------------------------------------------------------------------------------------------------


def test_three_steps_of_momentum():
    momentum = Momentum(0.9)
    for gradient in ([1.0, -2.0, 0.0], [-1.0, 0.0, 3.0], [0.0, 1.0, -1.0]):
        momentum.update(torch.tensor(gradient))
    # 0.081·|g₁| + 0.09·|g₂| + 0.1·|g₃|
    torch.testing.assert_close(momentum.values, torch.tensor([0.171, 0.262, 0.37]))
    assert momentum.mask(2 / 3).tolist() == [False, True, True]


def test_momentum_survives_a_restart():
    momentum, restarted = Momentum(0.9), Momentum(0.9)
    restarted.load(momentum.state())
    assert restarted.values is None
    momentum.update(torch.tensor([1.0, -2.0]))
    restarted.load({key: value.clone() for key, value in momentum.state().items()})
    for one in (momentum, restarted):
        one.update(torch.tensor([0.3, 0.7]))
    assert momentum.values.tolist() == restarted.values.tolist()


def test_loading_does_not_share_memory():
    saved = {"momentum": torch.tensor([1.0])}
    momentum = Momentum(0.5)
    momentum.load(saved)
    momentum.update(torch.tensor([0.0]))
    assert saved["momentum"].item() == 1.0


def test_half_precision_gradients_add_up_in_single():
    momentum = Momentum(0.9)
    momentum.update(torch.tensor([1.0], dtype=torch.bfloat16))
    assert momentum.values.dtype == torch.float32


def test_no_mask_before_the_first_gradient():
    with refused("no-gradient-yet", RunError):
        Momentum().mask(0.4)


# -- bits --------------------------------------------------------------------------------------------------------------


def as_number(bits: torch.Tensor) -> int:
    """Bytes as one number: bit i is bit i % 8 of byte i // 8."""
    return int.from_bytes(bits.cpu().numpy().tobytes(), "little")


@given(st.lists(st.booleans(), max_size=70))
def test_pack_and_back(mask: list[bool]):
    mask = torch.tensor(mask, dtype=torch.bool)
    packed = pack(mask)
    assert as_number(packed) == sum(1 << place for place in mask.nonzero().flatten().tolist())
    assert torch.equal(unpack(packed, len(mask)), mask)


@pytest.mark.parametrize("device", DEVICES)
def test_pack_many_and_back(device: str):
    mask = (torch.rand(MANY) < 0.4).to(device)
    packed = pack(mask)
    assert packed.shape == (162_501,)
    assert packed.device == mask.device
    assert as_number(packed) == int("".join("01"[bit] for bit in reversed(mask.tolist())), 2)
    assert torch.equal(unpack(packed, MANY), mask)


def test_global_mask_by_hand():
    # Ten weights at three sites. Set where one or two of three have the bit: 1, 2, 4, 8.
    sites = [[0, 1, 2, 9], [0, 2, 4, 9], [0, 8, 9]]
    masks = [torch.isin(torch.arange(10), torch.tensor(site)) for site in sites]
    together = unpack(global_mask((pack(mask) for mask in masks), 10), 10)
    assert together.nonzero().flatten().tolist() == [1, 2, 4, 8]


@given(st.data(), st.integers(1, 40), st.integers(1, 5))
def test_global_mask_counts_sites(data: st.DataObject, n: int, sites: int):
    masks = torch.tensor(
        data.draw(st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=sites, max_size=sites))
    )
    votes = masks.sum(0)
    assert torch.equal(unpack(global_mask(map(pack, masks), n), n), (votes > 0) & (votes < sites))


def test_bits_beyond_the_last_weight_are_cleared():
    clean, dirty = pack(torch.zeros(10, dtype=torch.bool)), torch.tensor([0, 0xFF], dtype=torch.uint8)
    assert global_mask([clean, dirty], 10).tolist() == [0, 0b11]
    assert dirty.tolist() == [0, 0xFF]
    assert unpack(dirty, 10).tolist() == [False] * 8 + [True] * 2


def test_one_site_or_none_contests_nothing():
    assert not global_mask([pack(torch.ones(9, dtype=torch.bool))], 9).any()
    assert global_mask([], 9).tolist() == [0, 0]


@pytest.mark.parametrize(
    "bad", [torch.zeros(1, dtype=torch.uint8), torch.zeros(2), torch.zeros(2, 1, dtype=torch.uint8)]
)
def test_bytes_of_another_size_are_refused(bad: torch.Tensor):
    with refused("packed-mask-size", MessageError):
        unpack(bad, 9)
    with refused("packed-mask-size", MessageError):
        global_mask([torch.zeros(2, dtype=torch.uint8), bad], 9)
