"""FedIOD's network: re-weighted skip connections, counts, names, and multi-decoder when switched off."""

from __future__ import annotations

import pytest
import torch
from refusing import refused
from torch import nn

from panorgan.anatomy import Vocabulary
from panorgan.methods.fediod.attention_gate import reweight, token_weights
from panorgan.methods.fediod.bottleneck_attention import head_of_key
from panorgan.methods.fediod.inter_organ import NUMBERS_ONLY, InterOrganNetwork, InterOrganSettings
from panorgan.networks import UNetSettings, organ_network
from panorgan.networks.organ_parts import group_of_key, weights_for

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
ORGANS = ("liver", "kidney", "pancreas")
SMALL = {"layers": 2, "heads": 3, "head_width": 5, "mlp_width": 12}
THICK = ((1, 1, 1), (2, 2, 1), (2, 2, 2))


def unet(**options: object) -> UNetSettings:
    return UNetSettings(**{"features": (4, 6, 16), "organs": "decoders", "dimensions": 2, **options})


def build(organs=ORGANS, seed: int = 0, shape: dict[str, object] | None = None, **options: object) -> InterOrganNetwork:
    torch.manual_seed(seed)
    return InterOrganNetwork(Vocabulary(organs), unet(**shape or {}), None, InterOrganSettings(**{**SMALL, **options}))


def image(*space: int, batch: int = 2, seed: int = 1) -> torch.Tensor:
    return torch.randn(batch, 1, *space, generator=torch.Generator().manual_seed(seed))


def size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


# -- skip connections --------------------------------------------------------------------------------------------------


def test_skip_connections_are_reweighted_and_the_deepest_level_is_not():
    network = build().eval()
    x = image(16, 16)
    plain = build(gate="none").eval().shared(x)
    with network.record_attention() as seen:
        levels = network.shared(x)
    assert seen.weights is not None
    torch.testing.assert_close(seen.weights, token_weights(seen.mean, "softmax").view(2, 4, 4))
    torch.testing.assert_close(levels[2], plain[2])
    for level in (0, 1):
        torch.testing.assert_close(levels[level], reweight(plain[level], seen.weights))
        assert not torch.allclose(levels[level], (1 + 1 / 16) * plain[level], rtol=1e-3)


# -- switched off ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [{}, {"dimensions": 3, "norm": "batch", "residual": True}, {"dropout": 0.2}])
def test_without_the_transformer_it_is_the_multi_decoder_network(shape):
    """The same keys in the same order, the same bits: first weights, logits and a training step's gradients."""
    torch.manual_seed(0)
    plain = organ_network(Vocabulary(ORGANS), unet(**shape))
    ours = build(transformer=False, shape=shape)
    assert list(ours.state_dict()) == list(plain.state_dict())
    results = []
    for network in (plain, ours):
        torch.manual_seed(5)
        logits, _ = network.channels_for(image(*[8] * network.settings.dimensions), ["kidney"])
        logits.square().mean().backward()
        gradients = [parameter.grad for parameter in network.parameters() if parameter.grad is not None]
        results.append([*network.state_dict().values(), logits, *gradients])
    assert len(results[0]) == len(results[1])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_with_the_transformer_all_else_begins_with_the_same_weights():
    torch.manual_seed(0)
    plain = organ_network(Vocabulary(ORGANS), unet()).state_dict()
    ours = build().state_dict()
    assert all(torch.equal(ours[key], value) for key, value in plain.items())
    assert {key.partition(".")[0] for key in ours.keys() - plain.keys()} == {"transformer"}


def test_what_needs_attention_says_that_there_is_none():
    network = build(transformer=False)
    for ask in (
        lambda: network.attention(image(8, 8)),
        lambda: network.record_attention().__enter__(),
        lambda: network.override_attention([]).__enter__(),
    ):
        with refused("no-attention"):
            ask()


# -- counts and names ------------------------------------------------------------------------------------------------


def test_parameters_at_the_papers_settings():
    """Per layer four matrices of 6 heads, the perceptron with biases, two normalisations; one at the end; and all else
    by level."""
    shape = {"features": (16, 32, 64, 128, 256)}
    network = InterOrganNetwork(Vocabulary(ORGANS), unet(**shape))
    layer = 4 * 6 * 256 * 256 + 2 * 256 * 1024 + 1024 + 256 + 2 * 2 * 256
    transformer = 4 * layer + 2 * 256
    assert size(network.transformer) == transformer == 8_398_336
    down = sum(9 * (a * b + b * b) + 4 * b for a, b in ((1, 16), (16, 32), (32, 64), (64, 128), (128, 256)))
    up = sum(4 * 2 * b * b + 9 * (2 * b * b + b * b) + 4 * b for b in (16, 32, 64, 128)) + 2 * 17
    assert size(network) == transformer + down + 3 * up == 11_865_590
    single = InterOrganNetwork(Vocabulary(ORGANS), unet(**shape), None, InterOrganSettings(decoders="single_layer"))
    assert size(single) == transformer + down + up + 2 * 2 * 17


def test_heads_have_names_of_their_own():
    network = build()
    keys = network.state_dict().keys()
    assert "transformer.layers.0.heads.2.query.weight" in keys
    assert "transformer.layers.1.heads.0.output.weight" in keys
    by_head: dict[tuple[int, int], set[str]] = {}
    for key in keys:
        place = head_of_key(key)
        if place is not None:
            by_head.setdefault(place, set()).add(key.split(".")[5])
    kinds = {"query", "key", "value", "output"}
    assert by_head == {(layer, head): kinds for layer in range(2) for head in range(3)}
    others = ("transformer.layers.0.mlp.0.weight", "decoders.liver.output.conv.conv.weight", "encoder.0.norm1.weight")
    assert [head_of_key(key) for key in others if key in keys] == [None] * 3


@pytest.mark.parametrize("decoders", ["whole", "single_layer"])
def test_decoders_belong_to_organs_and_the_rest_to_all(decoders):
    network = build(decoders=decoders)
    weights = network.state_dict()
    assert {group_of_key(key) for key in weights} == {None, *ORGANS}
    own = weights_for(weights, ["liver"])
    assert own.keys() == build(["liver"], decoders=decoders).state_dict().keys()
    parts = network.parts()
    structural = {"encoder", "bottleneck", "transformer", *(f"decoder:{organ}" for organ in ORGANS)}
    structural |= {"decoder"} if decoders == "single_layer" else set()
    assert parts.keys() == structural | {"norm"}
    assert sorted(key for part in structural for key in parts[part]) == sorted(weights)
    assert "transformer.layers.0.mlp_norm.weight" in parts["norm"]


# -- the whole network -----------------------------------------------------------------------------------------------


def runs(module: nn.Module) -> list[None]:
    """Grows by one whenever the module runs."""
    counted: list[None] = []
    module.register_forward_hook(lambda *_: counted.append(None))
    return counted


def test_only_decoders_that_are_asked_for_run():
    network = build()
    counts = {organ: runs(network.decoders[organ]["output"]) for organ in ORGANS}
    transformer = runs(network.transformer)
    logits, vocabulary = network.channels_for(image(16, 16), ["pancreas", "liver"])
    assert (vocabulary.organs, logits.shape) == (("liver", "pancreas"), (2, 2, 16, 16))
    assert {organ: len(count) for organ, count in counts.items()} == {"liver": 1, "kidney": 0, "pancreas": 1}
    network.attention(image(16, 16))
    assert (sum(map(len, counts.values())), len(transformer)) == (2, 2)


def test_a_single_layer_decoder_is_the_last_layer_of_one_for_all():
    network = build(decoders="single_layer").eval()
    shared = runs(network.decoder[0])
    logits = network(image(16, 16))
    assert len(shared) == 1
    features = network.shared(image(16, 16))[0]
    by_hand = torch.cat([network.decoders[organ]["output"](features)[:, :1] for organ in ORGANS], dim=1)
    torch.testing.assert_close(logits, by_hand)


@pytest.mark.parametrize("gate", ["softmax", "sigmoid", "none"])
@pytest.mark.parametrize("decoders", ["whole", "single_layer"])
def test_gradients_reach_every_head_and_only_own_decoders(gate, decoders):
    network = build(gate=gate, decoders=decoders)
    logits, _ = network.channels_for(image(16, 16), ["kidney"])
    logits.square().mean().backward()
    for key, parameter in network.named_parameters():
        if key.startswith("transformer"):
            assert parameter.grad is not None, key
            assert float(parameter.grad.abs().max()) > 0, key
        if group_of_key(key) in ("liver", "pancreas"):
            assert parameter.grad is None, key
    for layer in network.transformer.layers:
        every, width = len(layer.heads), layer.heads.head_width
        of_projections, of_outputs = layer.heads.projections.grad, layer.heads.outputs.grad
        assert bool((of_projections.unflatten(2, (every, width)).abs().amax((1, 3)) > 0).all())  # [kind, head]
        assert bool((of_outputs.unflatten(1, (every, width)).abs().amax((0, 2)) > 0).all())


def test_attention_is_kept_on_request_and_only_then():
    network = build().eval()
    x = image(16, 8)
    with network.record_attention() as seen:
        watched = network(x)
    assert (seen.grid, len(seen.maps), seen.maps[0].shape) == ((4, 2), 2, (2, 3, 8, 8))
    torch.testing.assert_close(seen.mean, torch.stack(seen.maps).mean(dim=(0, 2)))
    torch.testing.assert_close(seen.mean.sum(2), torch.ones(2, 8))
    assert torch.equal(seen.mean, network.attention(x))
    before = seen.mean
    assert torch.equal(network(x), watched)
    assert seen.mean is before


@pytest.mark.parametrize(("gate", "largest"), [("softmax", 1.0), ("sigmoid", 2.0), ("none", 0.0)])
def test_who_watches_is_told_the_largest_factor_and_the_entropy(gate, largest):
    """Of heads that look at all places alike, but for one layer that looks at the first alone; 16 places."""
    network = build(gate=gate).eval()
    even, first = torch.full((1, 3, 16, 16), 1 / 16), torch.zeros(1, 3, 16, 16)
    first[..., 0] = 1
    with network.record_attention(NUMBERS_ONLY) as seen, network.override_attention([first, first]):
        network(image(16, 16, batch=1))
        if gate != "none":
            assert float(seen.weights.max()) == pytest.approx(largest, rel=1e-4)
        torch.testing.assert_close(seen.numbers, torch.tensor([1 + largest, 0.0]), rtol=1e-4, atol=1e-6)
    with network.record_attention(NUMBERS_ONLY) as seen, network.override_attention([first, even]):
        network(image(16, 16, batch=1))
    assert float(seen.numbers[1]) == pytest.approx(0.5)
    assert not seen.numbers.requires_grad
    assert seen.loss.numel() == 0


def test_what_leaves_the_transformer_is_normalised():
    """However large what comes in is, or what the layers add."""
    network = build().eval()
    levels = network.encoded(image(16, 16))
    with torch.no_grad():
        for layer in network.transformer.layers:
            layer.mlp[3].weight.mul_(1000)
        out, _ = network.transformer(100 * levels[-1])
    assert float(out.square().mean().sqrt()) == pytest.approx(1, abs=0.01)
    torch.testing.assert_close(out.mean(1), torch.zeros(2, 4, 4), atol=1e-4, rtol=0)


@pytest.mark.parametrize("gate", ["softmax", "none"])
def test_watching_changes_nothing(gate):
    """Without gate and onlooker torch's own attention is used, which never has the map."""
    network = build(gate=gate).eval()
    plain = network(image(16, 16))
    with network.record_attention() as seen:
        torch.testing.assert_close(network(image(16, 16)), plain)
    assert (seen.weights is None) == (gate == "none")


def test_a_loss_on_the_attention_trains_encoder_and_heads():
    network = build()
    with network.record_attention() as seen:
        network.channels_for(image(16, 16), ["liver"])
    seen.mean.square().sum().backward()
    missing = {key for key, parameter in network.named_parameters() if parameter.grad is None}
    assert all(key.startswith(("decoders", "transformer.layers.1", "transformer.norm")) for key in missing)
    assert not any(".query." in key or ".key." in key for key in missing)
    assert float(network.encoder[0].conv1.conv.weight.grad.abs().max()) > 0


def test_logits_as_a_function_of_the_attention():
    network = build().eval()
    x = image(16, 16)
    with network.record_attention() as seen:
        logits = network(x)
    maps = [attention.detach().requires_grad_() for attention in seen.maps]
    with network.override_attention(maps):
        again = network(x)
        torch.testing.assert_close(network.attention(x), seen.mean)
    torch.testing.assert_close(again, logits)
    gradients = torch.autograd.grad(again.sigmoid().sum(), maps)
    assert all(float(gradient.abs().amax(dim=(0, 2, 3)).min()) > 0 for gradient in gradients)
    with network.override_attention([torch.zeros_like(attention) for attention in maps]):
        assert not torch.allclose(network(x), logits, atol=1e-3)
    assert torch.equal(network(x), logits)
    with refused("wrong-number-of-maps") as caught, network.override_attention(maps[:1]):
        pass
    assert "1 attention maps for a transformer of 2 layers" in caught.value.what


@pytest.mark.parametrize("decoders", ["whole", "single_layer"])
def test_in_two_halves_it_is_the_same(decoders):
    """And the second half may be asked again, with other attention, without the first."""
    network = build(decoders=decoders).eval()
    x, organs = image(16, 16), ("pancreas", "liver")
    logits, vocabulary = network.channels_for(x, organs)
    encoder = runs(network.encoder[0])
    encoded = network.encoded(x)
    places = [vocabulary.index(organ) for organ in organs]
    assert torch.equal(network.decoded(encoded, organs), logits[:, places])
    maps = network.maps_of(encoded)
    with network.record_attention() as seen, network.override_attention(maps):
        torch.testing.assert_close(network.decoded(encoded, organs), logits[:, places])
    assert all(torch.equal(*pair) for pair in zip(seen.maps, maps, strict=True))
    assert len(encoder) == 1


SHAPES = [
    ({}, (16, 24), (4, 6)),
    ({"dimensions": 3}, (8, 12, 4), (2, 3, 1)),
    ({"dimensions": 3, "strides": THICK}, (8, 8, 6), (2, 2, 3)),
]


@pytest.mark.parametrize(("shape", "space", "grid"), SHAPES)
def test_any_image_size_in_two_and_three_dimensions(shape, space, grid):
    network = build(shape=shape).eval()
    with network.record_attention() as seen:
        assert network(image(*space)).shape == (2, 3, *space)
    assert seen.grid == grid
    larger = tuple(2 * side for side in space)
    assert network(image(*larger)).shape == (2, 3, *larger)


@pytest.mark.parametrize(("shape", "space", "grid"), SHAPES)
def test_channels_last_gives_the_same(shape, space, grid):
    network = build(shape=shape).eval()
    expected = network(image(*space))
    kind = torch.channels_last if len(space) == 2 else torch.channels_last_3d
    found = network.to(memory_format=kind)(image(*space).to(memory_format=kind))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gate", ["softmax", "none"])
def test_half_precision_keeps_the_attention_in_full(gate):
    network = build(gate=gate)
    with torch.autocast("cpu", torch.bfloat16), network.record_attention() as seen:
        logits = network(image(16, 16))
    assert (logits.dtype, seen.mean.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(seen.mean.sum(2), torch.ones(2, 16))
    logits.float().square().mean().backward()
    assert all(parameter.grad.isfinite().all() for parameter in network.parameters())
    with torch.autocast("cpu", torch.bfloat16):
        assert network(image(16, 16)).dtype == torch.bfloat16


def test_dropout_follows_the_seed():
    network = build(dropout=0.5)
    outcomes = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outcomes.append(network(image(16, 16)))
    assert torch.equal(outcomes[0], outcomes[1])
    assert not torch.equal(outcomes[0], outcomes[2])


@needs_gpu
@pytest.mark.parametrize("gate", ["softmax", "none"])
@pytest.mark.parametrize(("shape", "space", "grid"), SHAPES)
def test_on_a_gpu_it_is_the_same(gate, shape, space, grid, monkeypatch):
    """Logits and gradients as on a CPU; maps in full precision under autocast."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # convolutions would round to ten bits
    network = build(gate=gate, shape=shape).eval()
    outcomes = []
    for device in ("cpu", "cuda"):
        network = network.to(device)
        logits = network(image(*space).to(device))
        gradients = torch.autograd.grad(logits.square().mean(), list(network.parameters()))
        outcomes.append([logits.cpu(), *(gradient.cpu() for gradient in gradients)])
    for expected, found in zip(*outcomes, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 * float(expected.detach().abs().max()))
    with torch.autocast("cuda", torch.bfloat16), network.record_attention() as seen:
        assert network(image(*space).cuda()).isfinite().all()
    assert seen.mean.dtype == torch.float32
