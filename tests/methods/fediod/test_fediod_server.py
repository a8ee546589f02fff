"""FedIOD at the server: weights of heads, the agreed depth, fused maps, and how maps travel."""

from __future__ import annotations

import pytest
import torch
from fediod_pieces import TOKENS_HERE, aggregate, attention, server_of
from refusing import refused

from panorgan.errors import RunError
from panorgan.federation.egress import TensorRule, image_test
from panorgan.methods.base import RoundInfo
from panorgan.methods.fediod import DEPTH, INTERSECTION, LARGEST_SHARE, TOKENS, UNION, FedIOD, FedIODConfig
from panorgan.methods.fediod.attention_maps import fuse, packed, unpacked


def test_attributions_become_the_weights_of_heads():
    """By hand: head 0.0 counts 3 : 1 for b, head 0.1 helps no site and goes by cases, all else goes by cases."""
    server = server_of(server_step=1)
    names = {
        "attribution/0.0": "transformer.layers.0.heads.0.query.weight",
        "attribution/0.1": "transformer.layers.0.heads.1.query.weight",
        "mlp": "transformer.layers.0.mlp.0.weight",
        "encoder": "encoder.0.conv1.conv.weight",
    }
    ones = {
        site: {key: torch.full_like(server.weights[key], float(value)) for key in names.values()}
        for site, value in (("a", 0), ("b", 1))
    }
    reported = {
        "a": {"attribution/0.0": 0.01, "attribution/0.1": -1.0},
        "b": {"attribution/0.0": 0.03, "attribution/0.1": 0.0},
    }
    aggregate(server, {site: (ones[site], reported[site]) for site in ones})
    means = {name: float(server.weights[key].mean()) for name, key in names.items()}
    assert means == pytest.approx({"attribution/0.0": 0.75, "attribution/0.1": 0.25, "mlp": 0.25, "encoder": 0.25})


def test_what_a_site_said_about_heads_holds_until_it_says_more():
    server = server_of(refresh_every=2)
    key = "transformer.layers.0.heads.0.query.weight"
    aggregate(server, {"a": ({}, {"attribution/0.0": 1.0}), "b": ({}, {"attribution/0.0": 4.0})})
    assert (server.weight("a", key), server.weight("b", key)) == pytest.approx((0.2, 0.8))
    aggregate(server, {"a": ({}, {}), "b": ({}, {})})
    assert (server.weight("a", key), server.weight("b", key)) == pytest.approx((0.2, 0.8))
    aggregate(server, {"b": ({}, {"attribution/0.0": 4.0})})
    assert server.weight("b", key) == 1


def test_decoders_are_averaged_over_their_owners():
    server = server_of()
    liver, spleen = "decoders.liver.output.conv.conv.bias", "decoders.spleen.output.conv.conv.bias"
    assert liver in server.broadcast("a").tensors
    assert spleen not in server.broadcast("a").tensors
    aggregate(server, {"a": ({liver: torch.full((2,), 5.0)}, {}), "b": ({spleen: torch.full((2,), 7.0)}, {})})
    assert server.weights[liver].tolist() == [5.0, 5.0]
    assert server.weights[spleen].tolist() == [7.0, 7.0]


@pytest.mark.parametrize(
    ("depths", "limit", "agreed"),
    [((9.0, 30.0), 64, 9), ((30.0, 9.0), 64, 30), ((90.0, 30.0), 64, 64), ((9.5, 9.5), 64, 9), ((1.0, 1.0), 64, 1)],
)
def test_the_depth_is_that_of_most_scans(depths, limit, agreed):
    """Site a has three times as many."""
    server = server_of(map_depth=limit)
    reported = dict(zip("ab", depths, strict=True))
    aggregate(server, {site: ({}, {DEPTH: depth, TOKENS: 16.0}) for site, depth in reported.items()})
    assert server.broadcast("a").scalars == {DEPTH: float(agreed)}
    aggregate(server, {"b": ({}, {DEPTH: 3.0, TOKENS: 4.0})})
    assert server.agreed == {DEPTH: float(agreed), TOKENS: 16.0}, "once for all"


def test_only_maps_of_the_agreed_size_are_let_in():
    server = server_of()
    server.agreed = {DEPTH: 5.0, TOKENS: 16.0}
    for key in (INTERSECTION, UNION):
        example = server.expects("a")[key]
        assert (tuple(example.shape), example.dtype, example.device.type) == ((16, 80), torch.float16, "meta")
        assert example.shape == packed(attention(5)).shape
    server.round_info = RoundInfo("train", 10, 10)
    assert server.expects("a").keys() == server.weights_of("a").keys()


def test_maps_are_fused_and_the_last_ones_kept():
    server = server_of()
    maps = {site: attention(5, seed=seed) for seed, site in enumerate("ab")}
    sent = {site: {INTERSECTION: packed(value / 2), UNION: packed(value)} for site, value in maps.items()}
    aggregate(server, {site: (sent[site], {}) for site in "ab"})
    by_hand = fuse(lambda site: maps[site], ["a", "b"])
    torch.testing.assert_close(unpacked(server.fused[UNION]), by_hand, rtol=2e-3, atol=1e-6)
    server.round_info = RoundInfo("train", 3, 10)
    assert {INTERSECTION, UNION} <= server.broadcast("a").tensors.keys()
    before = dict(server.fused)
    aggregate(server, {"a": ({}, {}), "b": ({}, {})})
    assert all(torch.equal(before[key], server.fused[key]) for key in before)
    aggregate(server, {"b": (sent["b"], {})})
    assert torch.equal(server.fused[UNION], sent["b"][UNION]), "those who came"
    assert not {INTERSECTION, UNION} & server.weights.keys()


def test_maps_are_shares_of_attention_whatever_a_site_sends():
    """A map of 60,000 would be in the fused one for everybody, in every round that follows."""
    server = server_of()
    server.agreed = {DEPTH: 5.0, TOKENS: 16.0}
    sound, wild = attention(5), torch.full((5, 16, 16), 60_000.0)
    aggregate(server, {"a": ({UNION: packed(sound)}, {}), "b": ({UNION: packed(wild)}, {})})
    assert float(server.fused[UNION].max()) <= 1.0
    assert float(server.fused[UNION].min()) >= 0.0


def test_maps_go_out_only_where_they_are_used():
    server = server_of(regularisation_start=0.5)
    server.fused = {INTERSECTION: packed(attention(5)), UNION: packed(attention(5))}
    for number, there in ((4, False), (5, True)):
        server.round_info = RoundInfo("train", number, 10)
        assert (UNION in server.broadcast("a").tensors) == there


def test_the_server_remembers():
    server = server_of()
    maps = {INTERSECTION: packed(attention(5)), UNION: packed(attention(5))}
    reported = {DEPTH: 5.0, TOKENS: 16.0, "attribution/0.0": 2.0, "attribution/1.2": 1.0}
    aggregate(server, dict.fromkeys("ab", (maps, reported)))
    other = server_of()
    other.load_state(server.state())
    assert other.agreed == server.agreed
    assert other.importance == server.importance == {s: {"attribution/0.0": 2.0, "attribution/1.2": 1.0} for s in "ab"}
    assert all(torch.equal(other.fused[key], server.fused[key]) for key in maps)
    fresh = server_of()
    fresh.load_state(server_of().state())
    assert (fresh.agreed, fresh.importance, fresh.fused) == ({}, {}, {})


# -- how maps travel -------------------------------------------------------------------------------------------------


def test_maps_come_back_as_they_went():
    maps = attention(6)
    there = packed(maps)
    assert there.is_contiguous()
    assert there[3, 2 * TOKENS_HERE + 5] == maps[2, 3, 5].half()
    torch.testing.assert_close(unpacked(there), maps, rtol=1e-3, atol=1e-7)


def test_at_the_papers_size_no_guard_takes_maps_for_images():
    """256 tokens, slices of 256 × 256: an array [D̄, 256, 256] would be refused, and so would its flat values."""
    is_image = image_test({(256, 256, 1), (256, 256, 10), (320, 320, 9)})
    maps = torch.zeros(10, 256, 256)
    assert is_image(maps)
    assert is_image(maps.flatten())
    assert not is_image(packed(maps))
    largest = packed(torch.zeros(FedIODConfig().map_depth, 256, 256))
    assert largest.numel() <= TensorRule().max_elements
    assert largest.dim() <= TensorRule().max_dimensions


def test_the_largest_share_of_a_site_in_a_head():
    server = server_of()
    assert server.numbers() == {}
    reported = {
        "a": {"attribution/0.0": 0.2, "attribution/0.1": 1.0},
        "b": {"attribution/0.0": 0.8, "attribution/0.1": 1.5},
    }
    aggregate(server, {site: ({}, numbers) for site, numbers in reported.items()})
    assert server.numbers() == {LARGEST_SHARE: pytest.approx(0.8)}


def test_weights_of_an_older_network_are_refused():
    """Theirs has no last normalisation: no site could load them."""
    server = server_of()
    old = {key: value for key, value in server.weights.items() if not key.startswith("transformer.norm")}
    with refused("run-of-older-version", RunError):
        FedIOD.Server(server.config, server.federation, old)
    without = {key: value for key, value in old.items() if not key.startswith("transformer")}
    assert FedIOD.Server(server.config, server.federation, without)
