"""Masks of sUSAM at a site and at the server: how many weights, which ones, how many bytes, and what is kept."""

from __future__ import annotations

import pytest
import torch

from panorgan.anatomy import Vocabulary
from panorgan.methods.ufps.masks import pack, unpack
from panorgan.methods.ufps.sparse_masks import ServerMasks, SiteMasks, parameter_count
from panorgan.networks import UNet, UNetSettings

N = 1003


def gradient(seed: int, n: int = N) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def draws(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def top(values: torch.Tensor, share: float) -> torch.Tensor:
    """The largest magnitudes by a full sort."""
    mask = torch.zeros(len(values), dtype=torch.bool)
    mask[values.abs().argsort(descending=True)[: round(share * len(values))]] = True
    return mask


COUNTS = {
    # T_L, T_G, share of M_G; |M_E| = min(T_G·n, |M_G \ M_L|)
    "enough to choose from": (0.4, 0.1, 0.5, lambda free: 100),
    "fewer than allowed": (0.4, 0.1, 0.05, lambda free: free),
    "none allowed": (0.4, 0.0, 0.5, lambda free: 0),
    "none disputed": (0.4, 0.1, 0.0, lambda free: 0),
    "everything is local": (1.0, 0.1, 0.5, lambda free: 0),
    "nothing is local": (0.0, 0.1, 0.5, lambda free: 100),
}


@pytest.mark.parametrize(("local", "extra", "disputed", "count"), COUNTS.values(), ids=COUNTS.keys())
def test_so_many_weights_move_and_only_these(local, extra, disputed, count):
    g, theirs = gradient(1), top(gradient(2), disputed)
    masks = SiteMasks(local, extra, momentum=0.9)
    masks.refresh(g, pack(theirs), draws())
    m_l = top(g, local)
    free = theirs & ~m_l
    m_e = masks.current & ~m_l
    assert torch.equal(masks.current & m_l, m_l)
    assert int(m_e.sum()) == count(int(free.sum()))
    assert not (m_e & ~free).any(), "M_E comes from M_G without M_L"


def test_the_extra_mask_is_drawn_and_the_local_one_is_not():
    def made(seed: int, disputed: torch.Tensor | None) -> torch.Tensor:
        masks = SiteMasks(0.4, 0.1, momentum=0.9)
        masks.refresh(gradient(1), disputed, draws(seed))
        return masks.current

    theirs = pack(top(gradient(2), 0.5))
    assert torch.equal(made(1, theirs), made(1, theirs))
    assert not torch.equal(made(1, theirs), made(2, theirs))
    assert torch.equal(made(1, None), made(2, None))
    assert torch.equal(made(1, None), top(gradient(1), 0.4)), "before the server has a mask, M_L alone"


def test_what_is_sent_is_that_of_the_momentum_and_what_is_used_that_of_the_last_gradient():
    """Eq. 11 with α = ½ and four weights: |g| = (4, 0, 1, 0) and then (0, 3, 1, 0); G = (1, 1.5, 0.75, 0)."""
    masks = SiteMasks(0.5, 0.0, momentum=0.5)
    masks.refresh(torch.tensor([-4.0, 0.0, 1.0, 0.0]), None, draws())
    masks.refresh(torch.tensor([0.0, 3.0, -1.0, 0.0]), None, draws())
    assert unpack(masks.long_term_bits(), 4).tolist() == [True, True, False, False]
    assert masks.current.tolist() == [False, True, True, False]


@pytest.mark.parametrize("n", [1, 8, 9, N])
def test_a_mask_is_one_bit_per_weight(n):
    masks = SiteMasks(0.4, 0.1, momentum=0.9)
    masks.refresh(gradient(1, n), None, draws())
    sent = masks.long_term_bits()
    assert (sent.dtype, sent.shape) == (torch.uint8, ((n + 7) // 8,))
    assert int(unpack(sent, n).sum()) == round(0.4 * n)
    assert {key: value.nbytes for key, value in masks.state().items()} == {
        "mask/current": (n + 7) // 8,
        "momentum": 4 * n,
    }


def test_a_site_goes_on_from_its_state():
    first, second = (SiteMasks(0.4, 0.1, momentum=0.9) for _ in range(2))
    theirs = pack(top(gradient(2), 0.5))
    first.refresh(gradient(1), theirs, draws(1))
    state = {key: value.clone() for key, value in first.state().items()}
    second.load({**state, "something else": torch.zeros(1)})
    assert torch.equal(second.current, first.current)
    for masks in (first, second):
        masks.refresh(gradient(3), theirs, draws(2))
    assert torch.equal(second.current, first.current)
    assert torch.equal(second.long_term_bits(), first.long_term_bits())
    second.load({})
    assert second.current is None
    assert second.state() == {}


def test_the_server_keeps_the_last_mask_of_a_silent_site():
    server = ServerMasks()
    assert server.global_bits(8) is None
    server.collect({"a": torch.tensor([0b11110000], dtype=torch.uint8)})
    assert server.global_bits(8).tolist() == [0], "there is no disagreement with a single site"
    server.collect({"b": torch.tensor([0b00111100], dtype=torch.uint8)})
    assert server.global_bits(8).tolist() == [0b11001100]
    server.collect({"b": torch.tensor([0b11110001], dtype=torch.uint8)})
    assert server.global_bits(8).tolist() == [0b00000001]
    server.collect({})
    assert server.global_bits(8).tolist() == [0b00000001]
    other = ServerMasks()
    other.load({**server.state(), "swa/w": torch.zeros(3)})
    assert other.global_bits(8).tolist() == [0b00000001]


def test_what_a_site_sent_may_change_afterwards():
    sent = torch.tensor([0b1100], dtype=torch.uint8)
    server = ServerMasks()
    server.collect({"a": sent, "b": torch.tensor([0b1010], dtype=torch.uint8)})
    sent.zero_()
    assert server.global_bits(8).tolist() == [0b0110]


@pytest.mark.parametrize(
    "settings", [{"norm": "instance"}, {"norm": "batch", "residual": True}, {"norm": "group", "dimensions": 2}]
)
def test_the_server_counts_the_parameters_that_a_site_has(settings):
    """Buffers have no gradient. Otherwise a mask would be refused for its length, and the site with it."""
    network = UNet(Vocabulary(["liver", "spleen"]), UNetSettings(features=(8, 16, 16), **settings))
    assert parameter_count(network.state_dict()) == sum(p.numel() for p in network.parameters())
    assert [name for name, _ in network.named_parameters()] == [
        key for key in network.state_dict() if key in dict(network.named_parameters())
    ]
