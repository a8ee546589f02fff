"""FedAlign: transmitting matrices and their norms by hand, the narrow copy, and what learns from the difference."""

from __future__ import annotations

import pytest
import torch
from torch.func import functional_call

from panorgan.anatomy import Vocabulary
from panorgan.methods.base import Payload, SiteTools
from panorgan.methods.fedalign import narrow_width, narrowed, spectral_norm, transmitting_matrix
from panorgan.methods.protocol import Federation, RoundInfo, SiteInfo
from panorgan.methods.registry import find_method
from panorgan.networks import UNet, UNetSettings
from panorgan.preparation.batch import Batch
from panorgan.workflows.execute import train

ORGANS = Vocabulary(["liver"])
HERE = SiteInfo("here", 2, {"liver": 2})
KINDS = {
    "slices": {"dimensions": 2, "features": (4, 8)},
    "volumes, batch": {"norm": "batch", "features": (4, 8)},
    "residual, group": {"norm": "group", "groups": 2, "residual": True, "dimensions": 2, "features": (4, 8)},
    "standardised": {"weight_standardisation": True, "dimensions": 2, "features": (4, 8)},
}


def network(**settings) -> UNet:
    torch.manual_seed(0)
    return UNet(ORGANS, UNetSettings(**settings))


def site(name: str = "fedalign", kind: str = "slices", **config: object):
    method, model = find_method(name), network(**KINDS[kind])
    tools = SiteTools(model, torch.optim.SGD(model.parameters(), 0.1))
    rule = method.Site(method.Config(**config), HERE, Federation(ORGANS, {"here": HERE}), tools)
    rule.received = Payload({key: value.clone() for key, value in model.state_dict().items()})
    rule.round_info = RoundInfo("train", 1, 3)
    rule.before_round()
    return rule


def batch(dimensions: int = 2) -> Batch:
    image = torch.randn(2, 1, *[8] * dimensions, generator=torch.Generator().manual_seed(1))
    return Batch(image, image > 0.3, torch.ones(2, 1, dtype=torch.bool), ("liver",), ("a", "b"))


def test_a_transmitting_matrix_by_hand():
    """Four voxels are averaged to two: channel 0 becomes (1.5, 3.5), channel 1 (0, 2); out is (1, 3) and (2, 0)."""
    entering = torch.tensor([[[[1.0, 2.0, 3.0, 4.0]], [[0.0, 0.0, 2.0, 2.0]]]])
    leaving = torch.tensor([[[[1.0, 3.0]], [[2.0, 0.0]]]])
    expected = [[(1.5 * 1 + 3.5 * 3) / 2, 1.5 * 2 / 2], [2 * 3 / 2, 0.0]]
    assert transmitting_matrix(entering, leaving).tolist() == [expected]


def test_the_largest_singular_value_by_hand_and_its_gradient():
    """Of diag(3, 1) and of a row (3, 4). The gradient of a singular value is u·vᵀ."""
    matrices = torch.tensor([[[3.0, 0.0], [0.0, 1.0]], [[3.0, 4.0], [0.0, 0.0]]], requires_grad=True)
    norms = spectral_norm(matrices, 30)
    assert norms.tolist() == pytest.approx([3.0, 5.0])
    norms.sum().backward()
    expected = torch.tensor([[[1.0, 0.0], [0.0, 0.0]], [[0.6, 0.8], [0.0, 0.0]]])
    torch.testing.assert_close(matrices.grad, expected, atol=1e-6, rtol=0)


def test_autocast_leaves_the_constants_alone():
    """bfloat16 has no number between 256 and 258."""
    ones = torch.ones(1, 1, 257, 1)
    with torch.autocast("cpu", torch.bfloat16):
        assert transmitting_matrix(ones, 257 * ones).item() == 257
        assert spectral_norm(torch.tensor([[[257.0]]]), 3).item() == 257


@pytest.mark.parametrize("kind", KINDS)
def test_the_narrow_copy_is_a_block_of_that_width_with_the_first_channels(kind):
    """Half the channels of 4 → 8 is a block 2 → 4."""
    settings = KINDS[kind]
    whole, narrow = network(**settings), network(**{**settings, "features": (2, 4)})
    weights = narrowed(whole.bottleneck, 0.5)
    narrow.bottleneck.load_state_dict(weights)
    entering = torch.randn(2, 2, *[4] * (2 if settings.get("dimensions") else 3))
    before = {key: value.clone() for key, value in whole.bottleneck.state_dict().items()}
    torch.testing.assert_close(functional_call(whole.bottleneck, weights, (entering,)), narrow.bottleneck(entering))
    assert all(torch.equal(value, before[key]) for key, value in whole.bottleneck.state_dict().items())


@pytest.mark.parametrize(("norm", "share", "width"), [("instance", 0.25, 3), ("group", 0.25, 4), ("group", 0.9, 12)])
def test_the_width_is_rounded_up_to_whole_groups(norm, share, width):
    block = network(norm=norm, groups=4, features=(4, 12)).bottleneck
    assert narrow_width(block, 12, share) == width


@pytest.mark.parametrize("kind", ["slices", "residual, group"])
def test_the_loss_is_the_sum_and_only_the_block_learns_from_the_difference(kind):
    plain = site("fedavg", kind).loss(batch())
    for relative, mu in ((False, 2.0), (True, 0.45)):
        rule = site(kind=kind, mu=mu, relative=relative, iterations=50)
        entering, leaving = rule.model.around_bottleneck(batch().image)
        entering = entering.detach()
        width = narrow_width(rule.model.bottleneck, entering.shape[1], 0.25)
        narrow = functional_call(rule.model.bottleneck, narrowed(rule.model.bottleneck, 0.25), (entering[:, :width],))
        norms = [
            torch.linalg.matrix_norm(transmitting_matrix(*pair), 2)
            for pair in ((entering[:, :width], narrow), (entering, leaving))
        ]
        difference = (norms[0] - norms[1]).square().mean().item()
        assert difference > 1e-3
        added = mu * (plain.item() if relative else difference)
        assert rule.loss(batch()).item() == pytest.approx(plain.item() + added, rel=1e-4)
        rule.difference(batch().image).backward()
        trained = {name for name, value in rule.model.named_parameters() if value.grad is not None}
        assert trained == {f"bottleneck.{name}" for name, _ in rule.model.bottleneck.named_parameters()}
        assert any(value.grad.abs().sum() > 0 for value in rule.model.bottleneck.parameters())


def test_without_mu_it_is_fedavg_bit_for_bit(tiny, tmp_path):
    def weights(**method):
        folder = tmp_path / "-".join(map(str, method.values()))
        train(tiny(method=method, training={"rounds": 2, "validate_every": 0}), folder)
        return (folder / "model" / "model.safetensors").read_bytes()

    fedavg = weights(name="fedavg")
    assert weights(name="fedalign", mu=0) == fedavg
    assert weights(name="fedalign") != fedavg


def test_teachers_of_pseudo_labels_are_trained_without():
    rule = site("fedalign_pl")
    rule.round_info = RoundInfo("pretrain", 1, 3)
    assert rule.loss(batch()).item() == rule.supervision(batch()).mean().item()
