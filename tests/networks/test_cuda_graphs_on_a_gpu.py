"""Training passes as CUDA graphs are the passes themselves, bit for bit. Skipped where there is no GPU."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from panorgan.anatomy import Vocabulary
from panorgan.methods.fediod.inter_organ import NUMBERS_ONLY, AttentionLoss, InterOrganNetwork, InterOrganSettings
from panorgan.networks import UNet, UNetSettings, organ_network
from panorgan.networks.cuda_graphs import GraphedPass, SharedMemory, graph_cache_for

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
ORGANS = ("liver", "spleen", "pancreas")
SMALL = {2: (1, 32, 32), 3: (1, 16, 16, 16)}
WATCHED = ("attention", "numbers")
"""FedIOD's network, with an attention loss and without one."""


def make(kind, dimensions):
    torch.manual_seed(0)
    vocabulary = Vocabulary(ORGANS)
    settings = UNetSettings(dimensions=dimensions, features=(8, 16, 32), organs="decoders" if kind in WATCHED else kind)
    if kind == "channels":
        return UNet(vocabulary, settings)
    if kind in WATCHED:
        small = InterOrganSettings(layers=2, heads=2, head_width=16, mlp_width=32, dropout=0.2)
        return InterOrganNetwork(vocabulary, settings, None, small)
    return organ_network(vocabulary, settings)


@needs_gpu
@pytest.mark.parametrize("dimensions", [2, 3])
@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["channels", "heads", "task_blocks", "decoders", "encoders", *WATCHED])
def test_replayed_steps_are_the_same_bit_for_bit(kind, half, dimensions, monkeypatch):
    """Six steps on changing images, with dropout where the network has any; nothing warns or falls back."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    results = []
    for replayed in (False, True):
        network = make(kind, dimensions).cuda().train()
        network.graphs = graph_cache_for(network, torch.device("cuda")) if replayed else None
        optimizer = torch.optim.AdamW(network.parameters(), 0.01, fused=True)  # it insists on how gradients lie
        torch.manual_seed(1)
        seen = []
        for _ in range(6):
            image = torch.randn(2, *SMALL[dimensions], device="cuda")
            optimizer.zero_grad(set_to_none=True)
            attention_loss = AttentionLoss(
                "away", lambda mean, far: (mean - far).square().sum(), (torch.ones(2, 1, 1, device="cuda"),)
            )
            attention_losses = {"attention": attention_loss, "numbers": NUMBERS_ONLY}
            watch = network.record_attention(attention_losses[kind]) if kind in WATCHED else nullcontext()
            with torch.autocast("cuda", torch.bfloat16, enabled=half), watch as record:
                logits, _ = network.channels_for(image, ORGANS[:2])
                loss = logits.float().square().mean()
                if record is not None:
                    loss = loss + record.loss.sum()
                    seen.append(record.numbers)
            loss.backward()
            optimizer.step()
            seen.append(loss.detach())
        if replayed:
            assert len(network.graphs._recorded) == 1
            assert not network.graphs._given_up
        results.append([*seen, *(value.clone() for value in network.state_dict().values())])
    for expected, found in zip(*results, strict=True):
        assert torch.equal(found, expected)


@needs_gpu
def test_two_networks_take_turns_in_one_memory():
    """As simulated sites do: neither spoils the other's passes."""
    networks = [make("channels", 3).cuda().train() for _ in range(2)]
    image = torch.randn(2, *SMALL[3], device="cuda")
    expected = []
    for network in networks:
        network(image).square().mean().backward()
        expected.append([parameter.grad.clone() for parameter in network.parameters()])
        network.graphs = graph_cache_for(network, torch.device("cuda"))
    for _ in range(4):
        for network, gradients in zip(networks, expected, strict=True):
            network.zero_grad(set_to_none=True)
            network(image).square().mean().backward()
            for parameter, gradient in zip(network.parameters(), gradients, strict=True):
                torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-3 * float(gradient.abs().max()))
    assert all(len(network.graphs._recorded) == 1 for network in networks)


@needs_gpu
def test_graphs_of_a_device_share_their_memory():
    """A second network of the same kind takes little more: its results and gradients, but not what lies between."""
    held = []
    image = torch.randn(4, 1, 64, 64, 64, device="cuda")
    networks = [make("channels", 3).cuda().train() for _ in range(3)]
    for network in networks:
        network.graphs = graph_cache_for(network, torch.device("cuda"))
        for _ in range(3):
            network.zero_grad(set_to_none=True)
            network(image).square().mean().backward()
        torch.cuda.empty_cache()
        held.append(torch.cuda.memory_reserved())
    first, second = held[1] - held[0], held[2] - held[1]
    outputs = 4 * 4 * 64**3 * 4  # images, channels, voxels, bytes
    assert max(first, second) < 6 * outputs  # a whole pass takes more than thirty times as much


@needs_gpu
def test_recording_leaves_no_trace_in_the_random_numbers():
    network = make("attention", 2).cuda().train()
    image = torch.randn(2, *SMALL[2], device="cuda")
    torch.manual_seed(3)
    expected = torch.rand(4, device="cuda")
    torch.manual_seed(3)
    GraphedPass(
        network, lambda given: (network.outputs([("liver", 0)], network.shared(given)),), [image], SharedMemory()
    )
    assert torch.equal(torch.rand(4, device="cuda"), expected)
