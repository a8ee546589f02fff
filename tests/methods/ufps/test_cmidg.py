"""CMIDG: other intensities, same anatomy, every number drawn from the generator."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from scipy.interpolate import BSpline

from panorgan.methods.ufps import cmidg as module
from panorgan.methods.ufps.cmidg import (
    CMIDGSettings,
    RandomLayer,
    blend_mask,
    cmidg,
    gin,
    mix,
    random_network,
    run_network,
    smooth_field,
)
from panorgan.phantom import PhantomConfig, PhantomSite, generate_case

SHAPES = [(3, 1, 14, 11), (3, 1, 10, 8, 6)]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def noise(shape: tuple[int, ...], seed: int = 1) -> torch.Tensor:
    return torch.rand(shape, generator=generator(seed)) * 2 - 1


def norms(image: torch.Tensor) -> torch.Tensor:
    return image.double().flatten(1).norm(dim=1)


def layer(kernel: list[object], shift: list[float], radius: int) -> RandomLayer:
    """The same convolution for one sample; `kernel` is [out, in, *K]."""
    return RandomLayer(torch.tensor(kernel)[None], torch.tensor(shift)[None], torch.tensor([radius]))


@pytest.fixture(scope="module")
def phantom() -> torch.Tensor:
    """A small CT [1, 1, R, A, S], HU / 500 within [-1, 1]."""
    site = PhantomSite(name="a", annotated=("liver",), cases=1, spacing_mm=(4.0, 4.0, 8.0), orientation="RAS")
    config = PhantomConfig(organs=("liver", "spleen", "kidney_left", "kidney_right"), sites=(site,))
    hu = np.asarray(generate_case(config, site, 0).hu, dtype=np.float32)
    return (torch.from_numpy(hu).clamp(-500, 500) / 500)[None, None]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ipa", [False, True])
def test_no_blend_is_the_identity_and_draws_nothing(shape, ipa) -> None:
    image, draws = noise(shape), generator(3)
    changed = cmidg(image, CMIDGSettings(blend=0, ipa=ipa), draws)
    assert torch.equal(changed, image)
    assert torch.equal(draws.get_state(), generator(3).get_state())


@pytest.mark.parametrize("shape", [*SHAPES, (1, 1, 1, 5), (2, 1, 1, 7, 1)])
@pytest.mark.parametrize("ipa", [False, True])
def test_the_generator_decides_and_the_input_is_left_alone(shape, ipa) -> None:
    image = noise(shape)
    before, state = image.clone(), torch.get_rng_state()
    settings = CMIDGSettings(ipa=ipa)
    first, again, other = (cmidg(image, settings, generator(seed)) for seed in (7, 7, 8))
    assert first.shape == image.shape
    assert first.dtype == torch.float32
    assert torch.isfinite(first).all()
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(image, before)
    assert torch.equal(torch.get_rng_state(), state)
    draws = generator(7)
    assert not torch.equal(cmidg(image, settings, draws), cmidg(image, settings, draws))


def test_autocast_changes_nothing() -> None:
    image = noise(SHAPES[1])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = cmidg(image, CMIDGSettings(), generator())
    assert torch.equal(inside, cmidg(image, CMIDGSettings(), generator()))


@pytest.mark.parametrize("ipa", [False, True])
def test_half_precision_images_are_computed_in_float32(ipa) -> None:
    image = noise(SHAPES[0]).half()
    changed = cmidg(image, CMIDGSettings(ipa=ipa), generator())
    assert changed.dtype == torch.float16
    assert torch.equal(changed, cmidg(image.float(), CMIDGSettings(ipa=ipa), generator()).half())


@pytest.mark.parametrize("shape", [*SHAPES, (2, 1, 1500, 1500)])
def test_the_frobenius_norm_of_every_sample_is_kept(shape) -> None:
    image = noise(shape) * torch.arange(1, shape[0] + 1).view(-1, *(1,) * (len(shape) - 1))
    changed = cmidg(image, CMIDGSettings(ipa=False), generator())
    torch.testing.assert_close(norms(changed) / norms(image), torch.ones(shape[0]).double(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ipa", [False, True])
def test_nothing_stays_nothing(shape, ipa) -> None:
    image = noise(shape)
    image[1] = 0
    changed = cmidg(image, CMIDGSettings(ipa=ipa), generator())
    assert (changed[1] == 0).all()
    assert (norms(changed[[0, 2]]) > 0.05 * norms(image[[0, 2]])).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_samples_are_changed_independently(shape) -> None:
    same = noise((1, *shape[1:])).expand(shape).contiguous()
    changed = cmidg(same, CMIDGSettings(), generator())
    assert not any(torch.equal(changed[a], changed[b]) for a in range(3) for b in range(a))
    other = same.clone()
    other[1] = noise((1, *shape[2:]), seed=5)
    mixed = cmidg(other, CMIDGSettings(), generator())
    assert torch.equal(mixed[[0, 2]], changed[[0, 2]])
    assert not torch.equal(mixed[1], changed[1])


def test_a_network_on_one_voxel_by_hand() -> None:
    layers = [layer([[[[1.0]]], [[[-1.0]]]], [0.5, 1.0], 0), layer([[[[2.0]], [[10.0]]]], [-1.0], 0)]
    # 2 → (2.5, -1) → leaky (2.5, -0.01) → 2·2.5 - 10·0.01 - 1
    assert run_network(torch.full((1, 1, 1, 1), 2.0), layers).item() == pytest.approx(3.9)


@pytest.mark.parametrize("dims", [2, 3])
def test_gin_on_three_voxels_by_hand(dims) -> None:
    def along_the_last_axis(*taps: float) -> list[object]:
        kernel = torch.zeros((3,) * dims)
        kernel[(1,) * (dims - 1)] = torch.tensor(taps)
        return kernel.tolist()

    image = torch.tensor([1.0, 2.0, -2.0]).view(1, 1, *(1,) * (dims - 1), 3)
    layers = [
        # The border's values go on: (1), 1, 2, -2, (-2).
        # First channel: 1 + 2 - 2, 1 + 4 + 2, 2 - 4 + 2, each less 2: (-1, 5, -2). Second channel: the image.
        layer([[along_the_last_axis(1, 2, -1)], [along_the_last_axis(0, 1, 0)]], [-2.0, 0.0], 1),
        # Leaky: (-0.01, 5, -0.02) and (1, 2, -0.02). Twice the first plus the second plus 0.02:
        layer([[along_the_last_axis(0, 2, 0), along_the_last_axis(0, 1, 0)]], [0.02], 1),
    ]
    changed = run_network(image, layers)
    torch.testing.assert_close(changed.flatten(), torch.tensor([1.0, 12.02, -0.04]))
    # A quarter of it: (0.75 + 0.25, 1.5 + 3.005, -1.5 - 0.01), whose squares sum to 23.575125; the image's sum to 9.
    mixed = mix(image, changed, torch.full((1,) * (dims + 2), 0.25))
    expected = torch.tensor([1.0, 4.505, -1.51]) * 3 / math.sqrt(23.575125)
    torch.testing.assert_close(mixed.flatten(), expected)


def test_networks_have_normal_weights_and_both_kernel_sizes() -> None:
    layers = random_network(400, 3, CMIDGSettings(), generator())
    assert [tuple(one.kernel.shape[1:3]) for one in layers] == [(2, 1), (2, 2), (2, 2), (1, 2)]
    for one in layers:
        small = one.radius == 0
        assert 0.4 < float(small.float().mean()) < 0.6
        rim = one.kernel.clone()
        rim[..., 1, 1, 1] = 0
        assert (rim[small] == 0).all()
        assert (rim[~small].flatten(1).abs().amax(1) > 0).all()
        for weights in (one.kernel[..., 1, 1, 1], one.kernel[~small], one.shift):
            assert float(weights.mean()) == pytest.approx(0, abs=0.2)
            assert float(weights.std()) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("changes", [{"layers": 1}, {"layers": 3, "inner_channels": 3}, {"kernel_sizes": (1, 3, 5)}])
@pytest.mark.parametrize("shape", SHAPES)
def test_all_samples_at_once_are_each_sample_by_itself(shape, changes) -> None:
    """Small kernels are cut out of their zeros; the result is the same."""
    convolve = F.conv2d if len(shape) == 4 else F.conv3d
    features = noise(shape)
    for one in random_network(3, len(shape) - 2, CMIDGSettings(**changes), generator(4)):
        padded = F.pad(features, (one.kernel.shape[-1] // 2,) * (2 * (len(shape) - 2)), mode="replicate")
        samples = zip(padded, one.kernel, one.shift, strict=True)
        expected = torch.stack([convolve(*sample) for sample in samples])
        torch.testing.assert_close(module._convolve(features, one), expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(module._grouped(features, one.kernel, one.shift), expected, atol=1e-4, rtol=1e-4)
        features = expected


def test_faint_images_keep_their_norm_too() -> None:
    faint = noise(SHAPES[0]) * 1e-8
    torch.testing.assert_close(mix(faint, 0 * faint, torch.full((3, 1, 1, 1), 0.5)), faint, rtol=1e-5, atol=0)


def test_alpha_runs_from_none_to_blend(monkeypatch) -> None:
    """With a network that says 1 everywhere and an image of zeros and ones, α can be read from the ratio of the two."""
    monkeypatch.setattr(module, "run_network", lambda image, layers: torch.ones_like(image))
    image = torch.tensor([0.0, 1.0]).repeat(500, 1).view(500, 1, 1, 2)
    zero, one = gin(image, CMIDGSettings(blend=0.6), generator()).flatten(1).T
    alpha = zero / one  # (1 - α)·0 + α to (1 - α)·1 + α
    assert 0 <= float(alpha.min()) < 0.02
    assert 0.58 < float(alpha.max()) <= 0.6
    assert float(alpha.mean()) == pytest.approx(0.3, abs=0.03)


@pytest.mark.parametrize("shape", SHAPES)
def test_with_kernels_of_one_voxel_equal_voxels_stay_equal(shape) -> None:
    image = (noise(shape) * 3).round() / 3
    changed = cmidg(image, CMIDGSettings(kernel_sizes=(1,), ipa=False), generator())
    for before, after in zip(image, changed, strict=True):
        for value in before.unique():
            same = after[before == value]
            assert float(same.max() - same.min()) < 1e-5
    assert not torch.allclose(changed, image, atol=0.05)


@pytest.mark.parametrize("shape", [(1, 1, 15, 15), (1, 1, 15, 15, 15)])
def test_a_voxel_reaches_no_farther_than_the_kernels(shape) -> None:
    """Four kernels of three voxels: four voxels each way, and the middle of the reach is the voxel."""
    image = noise(shape)
    other = image.clone()
    other[(0, 0, *(7,) * (len(shape) - 2))] += 0.5
    layers = random_network(1, len(shape) - 2, CMIDGSettings(kernel_sizes=(3,)), generator())
    touched = (run_network(image, layers) != run_network(other, layers))[0, 0].nonzero()
    assert touched.amin(0).tolist() == [3] * (len(shape) - 2)
    assert touched.amax(0).tolist() == [11] * (len(shape) - 2)


def edges(image: torch.Tensor) -> torch.Tensor:
    """Magnitude of the gradient of slices [B, 1, R, A], less its mean, with norm 1."""
    along = torch.gradient(image[:, 0], dim=(1, 2))
    strength = torch.stack(along).norm(dim=0)
    strength = strength - strength.mean((1, 2), keepdim=True)
    return strength / strength.flatten(1).norm(dim=1).view(-1, 1, 1)


@pytest.mark.parametrize("three_dimensional", [False, True])
def test_edges_stay_at_their_place(phantom, three_dimensional) -> None:
    middle = phantom.shape[-1] // 2
    image = phantom[..., middle - 4 : middle + 4] if three_dimensional else phantom[..., middle]
    changed = cmidg(image.expand(24, *image.shape[1:]), CMIDGSettings(), generator())
    if three_dimensional:
        image, changed = image[..., 4], changed[..., 4]
    shifts = [(r, a) for r in range(-3, 4) for a in range(-3, 4)]
    moved = torch.stack([(edges(image) * edges(changed).roll(shift, (1, 2))).sum((1, 2)) for shift in shifts])
    best = [shifts[place] for place in moved.argmax(0).tolist()]
    # Some draws turn edges into double lines, whose matching is a matter of chance; nothing moves on the whole.
    assert sum(shift == (0, 0) for shift in best) >= 12
    assert sum(max(map(abs, shift)) <= 1 for shift in best) >= 18
    assert abs(np.mean(best, axis=0)).max() < 0.5


def test_ipa_blends_two_networks_by_the_mask() -> None:
    image, settings, draws = noise(SHAPES[1]), CMIDGSettings(control_spacing=0.5), generator(2)
    first, second = gin(torch.cat([image, image]), settings, draws).chunk(2)
    mask = blend_mask(image.shape, 0.5, draws)
    changed = cmidg(image, settings, generator(2))
    torch.testing.assert_close(changed, mask * first + (1 - mask) * second)
    torch.testing.assert_close(norms(torch.cat([first, second])), norms(torch.cat([image, image])), rtol=1e-5, atol=0)
    assert not torch.allclose(first, second, atol=0.05)


@pytest.mark.parametrize("shape", [(6, 1, 40, 32), (6, 1, 32, 24, 40)])
def test_masks_run_smoothly_from_zero_to_one(shape) -> None:
    field = smooth_field(shape, 0.25, generator())
    mask = blend_mask(shape, 0.25, generator())
    assert field.shape == mask.shape == torch.Size(shape)
    assert float(field.min()) >= 0
    assert float(field.max()) <= 1
    spread = field.flatten(1).amax(1) - field.flatten(1).amin(1)
    assert (mask.flatten(1).amin(1) == 0).all()
    assert (mask.flatten(1).amax(1) == 1).all()
    for axis in range(2, len(shape)):
        # A cubic B-spline rises by no more than its control points do: 1 at most from one to the next.
        step = 1 / (shape[axis] * 0.25)
        assert float(field.diff(dim=axis).abs().max()) <= step + 1e-6
        assert (mask.diff(dim=axis).abs().flatten(1).amax(1) <= step / spread + 1e-6).all()
        # Not flat along any axis, and no straight ramp either: every sample falls somewhere and rises elsewhere.
        assert (mask.diff(dim=axis).flatten(1).amax(1) > step / 10).all()
        assert (mask.diff(dim=axis).flatten(1).amin(1) < -step / 10).all()
    assert not any(torch.equal(mask[a], mask[b]) for a in range(6) for b in range(a))


def test_spline_weights_by_hand() -> None:
    # Four voxels, a control point every voxel's width: voxel centres lie half-way between the points.
    half_way = module._spline_basis(4, 0.25, torch.device("cpu"))
    assert half_way.shape == (4, 7)
    expected = torch.tensor([1 / 48, 23 / 48, 23 / 48, 1 / 48])
    for row, weights in enumerate(half_way):
        torch.testing.assert_close(weights[row : row + 4], expected)
        assert float(weights.sum()) == pytest.approx(1)
    # One voxel, a control point every half of its width: its centre lies at one of them.
    at_a_point = module._spline_basis(1, 0.5, torch.device("cpu"))
    torch.testing.assert_close(at_a_point, torch.tensor([[0, 1 / 6, 4 / 6, 1 / 6, 0]]))


@pytest.mark.parametrize(("size", "spacing"), [(17, 0.25), (40, 0.3), (9, 1.0), (64, 0.07)])
def test_spline_weights_are_those_of_scipy(size, spacing) -> None:
    basis = module._spline_basis(size, spacing, torch.device("cpu"))
    places = (np.arange(size) + 0.5) / (size * spacing)
    # Knots three beyond each end; the spline of point j lives on knots j - 3 ... j + 1, counted from the first point.
    knots = np.arange(-3, basis.shape[1] + 1)
    expected = BSpline.design_matrix(places, knots, 3).toarray()
    torch.testing.assert_close(basis.double(), torch.from_numpy(expected), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"layers": 0},
        {"inner_channels": 0},
        {"kernel_sizes": ()},
        {"kernel_sizes": (2,)},
        {"blend": 1.5},
        {"blend": -0.1},
        {"control_spacing": 0},
    ],
)
def test_impossible_settings_are_refused(wrong) -> None:
    with pytest.raises(ValidationError):
        CMIDGSettings(**wrong)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("shape", SHAPES)
def test_on_a_gpu(shape) -> None:
    """The same numbers are drawn, so the same image comes out."""
    image, settings = noise(shape), CMIDGSettings()
    here, there, again = (cmidg(where, settings, generator(3)) for where in (image, image.cuda(), image.cuda()))
    assert there.is_cuda
    assert torch.equal(there, again)
    torch.testing.assert_close(there.cpu(), here, rtol=1e-2, atol=1e-2 * float(here.abs().max()))  # TF32 convolutions
    alone = cmidg(image.cuda(), CMIDGSettings(ipa=False), generator(3))
    torch.testing.assert_close(norms(alone).cpu(), norms(image), rtol=1e-5, atol=0)
