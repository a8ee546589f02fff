"""Integrated gradients of attention heads, against closed forms and on FedIOD's network; what heads then count."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusing import refused

from panorgan.anatomy import Vocabulary
from panorgan.errors import RunError
from panorgan.methods.fediod.head_attribution import (
    STEPS,
    Attributor,
    foreground_probability,
    head_attribution,
    head_importance,
    head_weights,
    largest_entries,
)
from panorgan.methods.fediod.inter_organ import InterOrganNetwork, InterOrganSettings
from panorgan.networks.settings import UNetSettings


def random_maps(layers: int = 2, samples: int = 2, heads: int = 3, tokens: int = 4) -> list[torch.Tensor]:
    scores = torch.randn(layers, samples, heads, tokens, tokens, generator=torch.Generator().manual_seed(0))
    return list(scores.softmax(dim=-1))


# -- closed forms ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 15])
def test_linear_model(steps):
    """F = Σ_i ⟨W_i, A_i⟩ + constant: the attribution A_i × W_i, entry by entry, for any steps; a head's largest one."""
    maps = random_maps()
    weights = [torch.randn(m.shape, generator=torch.Generator().manual_seed(i)) for i, m in enumerate(maps)]
    found = head_attribution(
        lambda given: 7 + sum((w * a).sum() for w, a in zip(weights, given, strict=True)), maps, steps
    )
    for attribution, w, a in zip(found, weights, maps, strict=True):
        torch.testing.assert_close(attribution, w * a)
    expected = [[float((w * a)[:, head].max()) for head in range(3)] for w, a in zip(weights, maps, strict=True)]
    torch.testing.assert_close(largest_entries(found), torch.tensor(expected))


def test_a_linear_model_in_numbers():
    """One layer, two heads, maps of one entry: 0.5·A_1 − 0.25·A_2 at A = (0.8, 0.4)."""
    maps = [torch.tensor([0.8, 0.4]).view(1, 2, 1, 1)]
    found = head_attribution(lambda given: 0.5 * given[0][0, 0, 0, 0] - 0.25 * given[0][0, 1, 0, 0], maps)
    assert largest_entries(found).tolist() == [pytest.approx([0.4, -0.1])]


def test_entries_of_either_sign_do_not_cancel():
    """Two heads whose entries add up to the same, 0: the one that matters a hundred times more counts so much more."""
    maps = [torch.full((1, 2, 1, 2), 0.5)]
    slopes = torch.tensor([[2.0, -2.0], [0.02, -0.02]]).view(1, 2, 1, 2)
    found = head_attribution(lambda given: (slopes * given[0]).sum(), maps)
    assert found[0].sum((0, 2, 3)).tolist() == pytest.approx([0, 0], abs=1e-7)
    assert largest_entries(found).tolist() == [pytest.approx([1, 0.01])]


def test_all_heads_are_faded_in_together_by_a_sum_that_ends_at_one():
    """F = (A_1 + 2 A_2)² at A = (1, 1): ∂F/∂A_1 = 6ε, its mean over 1/15 … 15/15 is 6·16/30 = 3.2.

    With one head after the other the mixed term would be missing; a sum from 0 to 14/15 would give 2.8. So across
    layers: F = A_1·A_2 has ∂F/∂A_1 = ε, whose mean over ⅓, ⅔ and 1 is ⅔.
    """
    found = head_attribution(
        lambda given: (given[0][0, 0] + 2 * given[0][0, 1]).square().sum(), [torch.ones(1, 2, 1, 1)]
    )
    assert found[0].flatten().tolist() == pytest.approx([3.2, 6.4])
    two_layers = [torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1)]
    found = head_attribution(lambda given: (given[0] * given[1]).sum(), two_layers, steps=3)
    assert [layer.item() for layer in found] == pytest.approx([2 / 3, 2 / 3])


def test_half_a_map_has_half_the_attribution():
    """∂F/∂A is taken at εA and by A itself: F = ½A² at A = 0.5 has A × mean(ε)·A = ¼·16/30."""
    found = head_attribution(lambda given: given[0].square().sum() / 2, [torch.full((1, 1, 1, 1), 0.5)])
    assert found[0].item() == pytest.approx(0.25 * 16 / 30)


def test_what_the_maps_do_not_reach_is_an_error():
    maps = random_maps()
    with refused("maps-without-effect", RunError):
        head_attribution(lambda given: given[0].sum(), maps)
    with refused("maps-without-effect", RunError):
        head_attribution(lambda given: torch.tensor(0.5), maps)


# -- on the network ----------------------------------------------------------------------------------------------------


def small_network(seed: int = 0, **settings: object) -> InterOrganNetwork:
    """Two layers of three heads on 4×4 tokens, spleen and liver."""
    unet = UNetSettings(dimensions=2, features=(4, 8, 16), organ_prior=None)
    heads = InterOrganSettings(layers=2, heads=3, head_width=8, mlp_width=16, **settings)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = InterOrganNetwork(Vocabulary(["spleen", "liver"]), unet, inter_organ=heads)
    return network.eval()


def scan(seed: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Images [slices, 1, 16, 16] and the masks of an organ [slices, 1, 16, 16]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 1, 16, 16, generator=generator), torch.rand(4, 1, 16, 16, generator=generator) > 0.6


def maps_of(network: InterOrganNetwork, images: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with torch.no_grad(), network.record_attention() as seen:
        network.shared(images)
    return seen.maps


def attribution(
    network: InterOrganNetwork, organ: str, steps: int = STEPS, slices: slice = slice(None), seed: int = 3
) -> torch.Tensor:
    """[layers, slices, heads, n, n]."""
    images, masks = scan(seed)
    voxels = masks.sum((0, 2, 3))

    def foreground(maps):
        with network.override_attention(maps):
            logits, _ = network.channels_for(images[slices], [organ])
        return foreground_probability(logits.sigmoid(), masks[slices], voxels)

    return torch.stack(head_attribution(foreground, maps_of(network, images[slices]), steps))


def test_attribution_is_not_zero_and_adds_up_to_what_the_maps_do():
    """Completeness: with many steps, the attributions' sum is F with the maps less F without any."""
    network = small_network(seed=2)
    assert (largest_entries(attribution(network, "liver")) > 1e-5).all()
    images, masks = scan()
    ends = []
    for factor in (0.0, 1.0):
        maps = [factor * layer for layer in maps_of(network, images)]
        with torch.no_grad(), network.override_attention(maps):
            logits, _ = network.channels_for(images, ["liver"])
        ends.append(foreground_probability(logits.sigmoid(), masks, masks.sum((0, 2, 3))).item())
    assert abs(ends[1] - ends[0]) > 1e-3
    assert attribution(network, "liver", steps=100).sum().item() == pytest.approx(ends[1] - ends[0], rel=0.02)


def test_another_organ_gives_another_attribution():
    network = small_network()
    liver, spleen = (largest_entries(attribution(network, organ)) for organ in ("liver", "spleen"))
    assert (liver - spleen).abs().max() > 0.1 * liver.abs().max()


def test_a_softmax_summed_over_its_channels_would_tell_nothing():
    """Why F is the organ's own probability: the sum over all channels is constant, whatever the heads do."""
    network, (images, _) = small_network(), scan()

    def constant(maps):
        with network.override_attention(maps):
            return network(images).softmax(dim=1).mean()

    assert (
        torch.stack(head_attribution(constant, maps_of(network, images))).abs().max()
        < 1e-3 * attribution(network, "liver").abs().max()
    )


def test_batches_of_slices_are_those_of_the_scan():
    network = small_network()
    parts = [attribution(network, "liver", slices=batch) for batch in (slice(0, 3), slice(3, 4))]
    torch.testing.assert_close(torch.cat(parts, dim=1), attribution(network, "liver"))


def test_it_asks_for_gradients_itself_and_leaves_none_behind():
    network = small_network()
    plain = attribution(network, "liver")
    with torch.no_grad():
        found = attribution(network, "liver")
    assert torch.equal(found, plain)
    assert not found.requires_grad
    assert all(parameter.grad is None for parameter in network.parameters())


def test_lower_precision_around_it_does_not_lower_it():
    network, (images, masks) = small_network(), scan()
    maps = maps_of(network, images)

    def foreground(given):
        with network.override_attention(given):
            logits, _ = network.channels_for(images, ["liver"])
        return foreground_probability(logits.sigmoid(), masks, masks.sum((0, 2, 3)))

    plain = torch.stack(head_attribution(foreground, maps, steps=2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(torch.stack(head_attribution(foreground, maps, steps=2)), plain)


def test_a_head_zeroed_by_hand_gets_weight_zero():
    """It adds nothing to tokens; without a gate nothing else uses its map."""
    north, south = small_network(gate="none"), small_network(seed=1, gate="none")
    with torch.no_grad():
        for weight in north.transformer.layers[1].heads[2]:
            weight.zero_()
    sites = {}
    for site, network in (("north", north), ("south", south)):
        found = attribution(network, "liver")
        importance = head_importance([largest_entries(found)])
        sites[site] = {f"{place}.{head}": importance[place, head].item() for place in range(2) for head in range(3)}
    assert sites["north"]["1.2"] == 0.0
    assert all(value > 0 for head, value in sites["north"].items() if head != "1.2")
    weights = head_weights(sites, {"north": 90, "south": 10})
    assert weights.pop("1.2") == {"north": 0.0, "south": 1.0}
    assert len(weights) == 5
    assert all(0 < head["north"] < 1 for head in weights.values())


# -- F and HA ----------------------------------------------------------------------------------------------------------


def test_foreground_probability_by_hand():
    """First organ (0.2 + 0.6 + 0.7)/3 = 0.5, second 0.9; the third is nowhere and takes no part: (0.5 + 0.9)/2."""
    probabilities = torch.tensor([[[0.2, 0.6], [0.1, 0.9], [0.4, 0.4]], [[0.7, 0.3], [0.8, 0.8], [0.4, 0.4]]])
    masks = torch.tensor([[[1, 1], [0, 1], [0, 0]], [[1, 0], [0, 0], [0, 0]]], dtype=torch.bool)
    voxels = masks.sum((0, 2))
    assert foreground_probability(probabilities, masks, voxels).item() == pytest.approx(0.7)
    halves = [foreground_probability(probabilities[i : i + 1], masks[i : i + 1], voxels).item() for i in (0, 1)]
    assert halves == pytest.approx([((0.2 + 0.6) / 3 + 0.9) / 2, 0.7 / 3 / 2])
    assert foreground_probability(probabilities, torch.zeros_like(masks), torch.zeros(3)).item() == 0.0


def test_a_large_organ_does_not_outweigh_a_small_one():
    probabilities = torch.full((1, 2, 100), 0.5)
    masks = torch.zeros(1, 2, 100, dtype=torch.bool)
    masks[0, 0], masks[0, 1, :2] = True, True
    alone = [foreground_probability(probabilities[:, [o]], masks[:, [o]], masks.sum((0, 2))[[o]]) for o in (0, 1)]
    assert alone[0].item() == alone[1].item() == 0.5


def test_importance_is_the_largest_over_scans():
    found = head_importance([torch.tensor([0.1, -0.5, 0.0]), torch.tensor([0.3, -0.2, 0.0])])
    torch.testing.assert_close(found, torch.tensor([0.3, -0.2, 0.0]))


def test_rounding_errors_do_not_count():
    found = head_importance([torch.tensor([2.0, 1e-6, 1e-5, -1e-7]), torch.tensor([-4.0, 3e-6, 0.0, -1e-6])])
    torch.testing.assert_close(found, torch.tensor([2.0, 0.0, 1e-5, 0.0]))
    assert head_importance([torch.zeros(2)]).tolist() == [0.0, 0.0]


# -- λ -----------------------------------------------------------------------------------------------------------------


def test_weights_by_hand():
    importance = {"north": {"a": 0.3, "b": 0.5}, "south": {"a": 0.1, "b": -0.2}, "west": {"a": 0.0, "b": 1.5}}
    found = head_weights(importance, {"north": 5, "south": 80, "west": 15})
    assert found == {
        "a": {"north": pytest.approx(0.75), "south": pytest.approx(0.25), "west": 0.0},
        "b": {"north": pytest.approx(0.25), "south": 0.0, "west": pytest.approx(0.75)},
    }


@pytest.mark.parametrize("values", [(0.0, 0.0), (-1.0, 0.0), (-0.5, -0.5), (math.nan, -1.0)])
def test_a_head_that_helps_nowhere_is_averaged_by_cases(values):
    found = head_weights({"north": {"a": values[0]}, "south": {"a": values[1]}}, {"north": 30, "south": 10})
    assert found == {"a": {"north": 0.75, "south": 0.25}}


def test_a_site_that_tells_nothing_counts_by_its_cases():
    """It has half of the cases; the others share the other half 3 : 1. So for a head that it alone leaves out."""
    cases = {"north": 20, "south": 10, "west": 10}
    expected = {"a": {"north": 0.5, "south": pytest.approx(0.375), "west": pytest.approx(0.125)}}
    reported = {"south": {"a": 3.0}, "west": {"a": 1.0}}
    assert head_weights(reported, cases) == expected
    assert head_weights({"north": {"a": math.nan}, **reported}, cases) == expected
    assert head_weights({"north": {}, **reported}, cases) == expected


numbers = st.floats(-1e308, 1e308) | st.sampled_from([math.nan, math.inf, 0.0, 1e-300])


@given(
    st.dictionaries(st.text(max_size=3), st.tuples(st.integers(1, 500), numbers, numbers), min_size=1, max_size=6),
)
def test_weights_add_up_to_one_for_every_head(sites):
    importance = {site: {"a": first, "b": second} for site, (_, first, second) in sites.items()}
    found = head_weights(importance, {site: cases for site, (cases, _, _) in sites.items()})
    assert set(found) == {"a", "b"}
    for weights in found.values():
        assert set(weights) == set(sites)
        assert all(weight >= 0 for weight in weights.values())
        assert math.fsum(weights.values()) == pytest.approx(1)


# -- several steps at a time -------------------------------------------------------------------------------------------


class _OnGPU:
    """Stands for a map that lies on a GPU."""

    is_cuda = True

    def __init__(self, numbers: int) -> None:
        self.numbers = numbers

    def numel(self) -> int:
        return self.numbers


@pytest.mark.parametrize(
    ("slices", "tokens", "side", "steps"),
    [(16, 256, 256, 3), (9, 256, 256, 5), (48, 256, 256, 1), (100, 256, 256, 1), (16, 100, 160, 7), (1, 4096, 128, 1)],
)
def test_a_gpu_takes_as_many_steps_as_make_48_slices(slices, tokens, side, steps):
    """Of the paper's 256² pixels and 24 maps of 256 tokens; many tokens alone are too much, too."""
    maps = [_OnGPU(slices * 6 * tokens**2)] * 4
    attributor = Attributor()
    assert attributor.steps_at_once(maps, slices * side**2) == steps
    attributor.one_by_one = True
    assert attributor.steps_at_once(maps, slices * side**2) == 1


def test_elsewhere_steps_are_taken_one_by_one():
    assert Attributor().steps_at_once([torch.zeros(1, 1, 1, 1)], 1) == 1


def test_where_memory_does_not_suffice_for_several_steps_they_are_taken_one_by_one_from_then_on(monkeypatch):
    maps, asked = [torch.ones(1, 1, 2, 2)], []

    def foreground(given):
        asked.append(len(given[0]))
        if len(given[0]) > 1 and scarce:
            raise torch.OutOfMemoryError
        return given[0].square().sum()

    scarce, attributor = False, Attributor()
    monkeypatch.setattr(Attributor, "steps_at_once", lambda self, maps, pixels: 1 if self.one_by_one else 4)
    expected = attributor(foreground, maps, pixels=4, steps=4)
    assert (asked, attributor.one_by_one) == ([4], False)
    scarce = True
    for tried in ([4, 1, 1, 1, 1], [1, 1, 1, 1]):
        asked.clear()
        torch.testing.assert_close(attributor(foreground, maps, pixels=4, steps=4), expected)
        assert (asked, attributor.one_by_one) == (tried, True)


def test_memory_that_does_not_suffice_for_one_step_is_an_error():
    def foreground(given):
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        Attributor()(foreground, [torch.ones(1, 1, 2, 2)], pixels=4)
