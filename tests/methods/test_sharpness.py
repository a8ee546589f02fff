"""The SAM family: ε by hand, reductions, and the way back bit for bit."""

from __future__ import annotations

import pytest
import torch
from refusing import refused
from torch import nn

from panorgan.errors import RunError
from panorgan.methods.shared.sharpness import ascend, flat_gradient
from panorgan.methods.ufps.masks import extra, largest

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


class Quadratic(nn.Module):
    """½(a·u² + b·v²), two parameters; the gradient is (a·u, b·v). A third parameter takes no part."""

    def __init__(self, a: float, b: float, u: float = 3.0, v: float = -1.0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.factors = (a, b)
        self.u = nn.Parameter(torch.tensor([u], dtype=dtype))
        self.idle = nn.Parameter(torch.tensor([[5.0], [-0.0]], dtype=dtype))
        self.v = nn.Parameter(torch.tensor([v], dtype=dtype))

    def loss(self) -> torch.Tensor:
        a, b = self.factors
        return 0.5 * (a * self.u.square() + b * self.v.square()).sum()

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.parameters()])

    def backward(self) -> Quadratic:
        self.zero_grad()
        self.loss().backward()
        return self


def bits(values: torch.Tensor) -> list[int]:
    kinds = {2: torch.int16, 4: torch.int32}
    return values.view(kinds[values.element_size()]).tolist()


# -- ε -----------------------------------------------------------------------------------------------------------------


def test_asam_by_hand():
    # w = (3, −1), η = 1: T = (4, 2). g = (0.75, −2): T·g = (3, −4), norm 5. ε = 0.5·T·(T·g)/5 = 0.5·(2.4, −1.6).
    model = Quadratic(0.25, 2.0).backward()
    ascend(model, rho=0.5, eta=1.0)
    torch.testing.assert_close(model.weights(), torch.tensor([3 + 1.2, 5.0, 0.0, -1 - 0.8]))


def test_asam_that_leaves_the_scale_of_biases_alone():
    # A weight 3 and a bias −1, gradients (0.75, 4), η = 1: T = (4, 1), as in ASAM's own code. T·g = (3, 4), norm 5.
    # ε = 0.5·T·(T·g)/5 = (1.2, 0.4). In its own scale, T = (4, 2), the bias would go further.
    model = torch.nn.Linear(1, 1)
    for parameter, value, gradient in zip(model.parameters(), (3.0, -1.0), (0.75, 4.0), strict=True):
        parameter.data.fill_(value)
        parameter.grad = torch.full_like(parameter, gradient)
    with ascend(model, rho=0.5, eta=1.0, scale_biases=False):
        assert [model.weight.item(), model.bias.item()] == pytest.approx([4.2, -0.6])
    with ascend(model, rho=0.5, eta=1.0):
        assert model.bias.item() == pytest.approx(-1 + 0.5 * 2 * 8 / (9 + 64) ** 0.5)


def test_sam_by_hand():
    # g = (3, −4), norm 5. ε = 0.5·g/5 = (0.3, −0.4). η plays no part.
    model = Quadratic(1.0, 4.0).backward()
    ascend(model, rho=0.5, eta=1.0, adaptive=False)
    torch.testing.assert_close(model.weights(), torch.tensor([3.3, 5.0, 0.0, -1.4]))


@pytest.mark.parametrize(("adaptive", "moved"), [(True, -1.8), (False, -1 - 0.5 * 2 / 4.5625**0.5)])
def test_a_mask_picks_from_the_whole_perturbation(adaptive: bool, moved: float):
    # The norm is that of the whole gradient: what may move goes as far as it would without a mask.
    model = Quadratic(0.25, 2.0).backward()
    before = model.weights()
    ascend(model, rho=0.5, eta=1.0, mask=torch.tensor([False, False, False, True]), adaptive=adaptive)
    after = model.weights()
    assert bits(after[:3]) == bits(before[:3])  # −0 stays −0
    assert after[3].item() == pytest.approx(moved)


def test_the_gradient_there_is_used_here():
    # At w + ε = (4.2, −1.8) the gradient is (0.25·4.2, 2·−1.8); plain descent by 0.1 starts at w = (3, −1).
    model = Quadratic(0.25, 2.0).backward()
    with ascend(model, rho=0.5, eta=1.0):
        model.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    torch.testing.assert_close(model.weights(), torch.tensor([3 - 0.105, 5.0, 0.0, -1 + 0.36]))


def test_everything_masked_in_is_dense():
    dense, sparse = Quadratic(0.3, 1.7).backward(), Quadratic(0.3, 1.7).backward()
    gradient = flat_gradient(sparse)
    local = largest(gradient, 1.0)
    nothing = extra(local, torch.ones(4, dtype=torch.bool), 0.0, torch.Generator().manual_seed(0))
    ascend(dense, 0.7, 0.001)
    ascend(sparse, 0.7, 0.001, mask=local | nothing)
    assert bits(dense.weights()) == bits(sparse.weights())
    assert bits(dense.weights()) != bits(Quadratic(0.3, 1.7).weights())


@pytest.mark.parametrize("adaptive", [True, False])
def test_radius_zero_moves_nothing(adaptive: bool):
    model = Quadratic(0.3, 1.7, u=-0.0).backward()
    before = model.weights()
    ascend(model, 0.0, 0.001, adaptive=adaptive)
    assert bits(model.weights()) == bits(before)


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("scale", [0.0, 1e-30])
def test_a_vanishing_gradient_moves_nothing(adaptive: bool, scale: float):
    # The squares of 1e-30 are zero in single precision; dividing by them must not blow ε up.
    model = Quadratic(scale, scale).backward()
    before = model.weights()
    ascend(model, 0.7, 0.001, adaptive=adaptive)
    torch.testing.assert_close(model.weights(), before, rtol=0, atol=0)


def test_no_gradient_at_all_moves_nothing():
    model = Quadratic(1.0, 1.0)
    before = model.weights()
    ascend(model, 0.7, 0.001)
    torch.testing.assert_close(model.weights(), before, rtol=0, atol=0)


def test_the_norm_of_many_small_numbers():
    # 4 million equal gradients: every weight moves by ρ/√n. One running float sum misses that by 2 in 1000.
    model = nn.Linear(2000, 2000, bias=False)
    nn.init.zeros_(model.weight)
    model.weight.grad = torch.full_like(model.weight, 0.1)
    ascend(model, 1.0, adaptive=False)
    torch.testing.assert_close(model.weight.detach(), torch.full((2000, 2000), 1 / 2000), rtol=1e-5, atol=0)


def test_missing_gradients_are_zero():
    model = Quadratic(1.0, 4.0).backward()
    assert model.idle.grad is None
    assert flat_gradient(model).tolist() == [3.0, 0.0, 0.0, -4.0]


def test_a_mask_of_another_model_is_refused():
    with refused("mask-does-not-fit", RunError):
        ascend(Quadratic(1.0, 1.0).backward(), 0.7, mask=torch.ones(3, dtype=torch.bool))


# -- the way back ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_undo_is_exact(device: str, dtype: torch.dtype, memory: torch.memory_format):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1)).to(device, dtype, memory_format=memory)
    with torch.no_grad():
        model[0].weight.mul_(1e-4)  # small beside ε: subtracting it would lose them
        model[0].bias[0] = -0.0
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.randn(1, 3, 8, 8, device=device, dtype=dtype)).square().sum().backward()
    perturbation = ascend(model, 3.0, 0.01)
    for old, new in zip(before, model.parameters(), strict=True):
        assert not torch.equal(old, new)
    perturbation.undo()
    for old, new in zip(before, model.parameters(), strict=True):
        assert bits(old.flatten()) == bits(new.detach().flatten())
        assert new.stride() == old.stride()


def test_undo_happens_once():
    model = Quadratic(1.0, 4.0).backward()
    perturbation = ascend(model, 0.5)
    perturbation.undo()
    with torch.no_grad():
        model.u.fill_(7.0)
    perturbation.undo()
    assert model.u.item() == 7.0


def test_an_error_up_there_brings_the_weights_home():
    model = Quadratic(1.0, 4.0).backward()
    before = model.weights()
    with pytest.raises(ZeroDivisionError), ascend(model, 0.5):
        raise ZeroDivisionError
    assert bits(model.weights()) == bits(before)


def test_an_outer_autocast_sees_the_moved_weights():
    model = nn.Linear(4, 1, bias=False)
    image = torch.ones(1, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        here = model(image)
        here.sum().backward()
        with ascend(model, 5.0, adaptive=False):
            there = model(image)
        again = model(image)
    assert there.item() == pytest.approx(here.item() + 10.0, abs=0.1)  # four weights go up by 5/√4 each
    assert again.item() == here.item()
