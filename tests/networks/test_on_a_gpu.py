"""What an NVIDIA GPU computes in its own way gives what the plain way gives. Skipped where there is none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from panorgan.anatomy import Vocabulary
from panorgan.networks import UNetSettings, head_stack, organ_network
from panorgan.networks.instance_norm import InstanceNorm, use_whole_gpu

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
ORGANS = ("liver", "spleen", "pancreas", "stomach", "aorta", "kidney_left", "kidney_right")


@pytest.mark.parametrize(("dimensions", "kind"), [(2, nn.InstanceNorm2d), (3, nn.InstanceNorm3d)])
def test_elsewhere_the_norm_is_the_plain_one(dimensions, kind):
    """Same keys, same bits; and every plain one of a network is replaced, with its weights."""
    plain = nn.Sequential(nn.Identity(), nn.Sequential(kind(3, affine=True)))
    nn.init.normal_(plain[1][0].weight)
    nn.init.normal_(plain[1][0].bias)
    image = torch.randn(2, 3, *[8] * dimensions)
    expected, state = plain(image), dict(plain.state_dict())
    use_whole_gpu(plain)
    assert isinstance(plain[1][0], InstanceNorm)
    assert torch.equal(plain(image), expected)
    assert plain.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[key]) for key, value in plain.state_dict().items())


def test_a_norm_that_keeps_statistics_is_left_alone():
    network = nn.Sequential(nn.InstanceNorm3d(3, affine=True, track_running_stats=True))
    keys = set(network.state_dict())
    use_whole_gpu(network)
    assert set(network.state_dict()) == keys


@needs_gpu
@pytest.mark.parametrize("shape", [(2, 8, 64, 128, 128), (1, 3, 40, 96, 96), (2, 4, 512, 512), (3, 5, 64, 64, 66)])
def test_pieces_normalise_like_the_whole(shape):
    """Output and all gradients, to float32's last digits; the last shape cannot be cut and takes the plain way."""
    torch.manual_seed(0)
    plain = {4: nn.InstanceNorm2d, 5: nn.InstanceNorm3d}[len(shape)](shape[1], affine=True).cuda()
    nn.init.uniform_(plain.weight, 0.5, 2)
    nn.init.normal_(plain.bias)
    pieces = InstanceNorm(shape[1], affine=True).cuda()
    pieces.load_state_dict(plain.state_dict())
    image = 3 * torch.randn(shape, device="cuda") + 5
    results = []
    for norm in (plain, pieces):
        seen = image.clone().requires_grad_()
        out = norm(seen)
        # In place, as the activations of the networks: it must not spoil what the way back needs.
        out.mul_(torch.linspace(-1, 2, image.numel(), device="cuda").view(shape)).sum().backward()
        results.append([out.detach(), seen.grad, norm.weight.grad, norm.bias.grad])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4 * float(expected.abs().max()))


@needs_gpu
@pytest.mark.parametrize("organs", [1, 3, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_at_once(organs, dtype, monkeypatch):
    """Outputs and gradients are those of the convolutions as they are written."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # convolutions would round to ten bits
    torch.manual_seed(0)
    network = organ_network(Vocabulary(ORGANS), UNetSettings(features=(8, 16), organs="heads")).cuda()
    heads = list(network.heads.values())[:organs]
    chosen = [(place, 0) for place in range(organs)]
    features = torch.randn(2, 8, 10, 12, 14, device="cuda")
    weights = [parameter for head in heads for parameter in head.parameters()]
    results = []
    for at_once in (False, True):
        seen = features.clone().requires_grad_()
        with torch.autocast("cuda", dtype, enabled=dtype is torch.bfloat16):
            if at_once:
                out = head_stack.run_heads(heads, seen, chosen)
            else:
                out = torch.cat([head(seen)[:, :1] for head in heads], dim=1)
        gradients = torch.autograd.grad(
            (out.float() * torch.arange(1, organs + 1, device="cuda").view(1, -1, 1, 1, 1)).mean(), [seen, *weights]
        )
        results.append([out, *gradients])
    tolerance = 1e-4 if dtype is torch.float32 else 4e-2
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(
            found.float(), expected.float(), rtol=tolerance, atol=tolerance * float(expected.abs().max())
        )
