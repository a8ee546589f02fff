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
    """Output and all gradients, to float32's last digits; the last shape is cut into other pieces than the first."""
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
        # In place, as the activations of the networks: it must not spoil what the way back needs. Squared, because the
        # gradient of a sum is one of numbers that cancel out, of which rounding leaves little.
        out.mul_(torch.linspace(-1, 2, image.numel(), device="cuda").view(shape)).square().sum().backward()
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
    kernel = pytest.importorskip("panorgan.networks.head_kernel")
    used, plain = [], kernel.run
    monkeypatch.setattr(kernel, "run", lambda *args: used.append(1) or plain(*args))
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
    assert used
    tolerance = 1e-4 if dtype is torch.float32 else 4e-2
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(
            found.float(), expected.float(), rtol=tolerance, atol=tolerance * float(expected.abs().max())
        )


@needs_gpu
@pytest.mark.parametrize("organs", [1, 2, 3, 7])
@pytest.mark.parametrize("shape", [(2, 8, 10, 12, 14), (1, 8, 64, 65, 66), (3, 8, 40, 50)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_without_gradient_are_one_kernel(organs, shape, dtype, monkeypatch):
    """With two outputs per head: a tumour's lies beside its organ's."""
    kernel = pytest.importorskip("panorgan.networks.head_kernel")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    settings = UNetSettings(dimensions=len(shape) - 2, features=(8, 16), organs="heads")
    heads = list(organ_network(Vocabulary(ORGANS), settings).cuda().heads.values())[:organs]
    features = torch.randn(shape, device="cuda")
    chosen = [(place, output) for place in range(organs) for output in (1, 0)]
    used = []
    plain = kernel.run
    monkeypatch.setattr(kernel, "run", lambda *args: used.append(1) or plain(*args))
    with torch.no_grad(), torch.autocast("cuda", dtype, enabled=dtype is torch.bfloat16):
        expected = torch.cat([heads[head](features)[:, output : output + 1] for head, output in chosen], dim=1)
        found = head_stack.run_heads(heads, features, chosen)
    assert used
    assert found.dtype == dtype
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


@needs_gpu
def test_without_a_compiler_heads_are_multiplied(monkeypatch):
    kernel = pytest.importorskip("panorgan.networks.head_kernel")

    def no_compiler(*args):
        raise RuntimeError("Failed to find C compiler.")

    monkeypatch.setattr(kernel, "run", no_compiler)
    kernel._works_on.cache_clear()
    heads = list(
        organ_network(Vocabulary(ORGANS), UNetSettings(features=(8, 16), organs="heads")).cuda().heads.values()
    )
    with torch.no_grad():
        assert head_stack.run_heads(heads, torch.randn(1, 8, 6, 6, 6, device="cuda"), [(0, 0)]).shape == (1, 1, 6, 6, 6)
    kernel._works_on.cache_clear()
