"""Augmentation: labels move with the image, and every draw comes from `Draws`."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError
from refusing import refused

from panorgan.preparation import augment as augment_module
from panorgan.preparation.augment import AugmentSettings, Draws, augment, refuse_swapped_sides
from panorgan.preparation.batch import PackedBatch

NOTHING = {
    "rotation_degrees": 0,
    "scale": 0,
    "mirror_axes": (),
    "brightness": 0,
    "contrast": 0,
    "gamma": 0,
    "noise": 0,
    "blur_probability": 0,
}


def only(**changes: object) -> AugmentSettings:
    """Everything off but what is named."""
    return AugmentSettings(**{**NOTHING, **changes})


def draws(seed: int = 0) -> Draws:
    return Draws(seed)


def packed(image: torch.Tensor, bits: torch.Tensor, structures: int = 1) -> PackedBatch:
    """`image` and `bits` are both [B, *S]."""
    count = image.shape[0]
    names = tuple(f"s{t}" for t in range(structures))
    annotated = torch.ones(count, structures, dtype=torch.bool)
    return PackedBatch(image[:, None].float(), bits.long(), annotated, names, tuple(map(str, range(count))))


def noise_batch(count: int = 3, shape: tuple[int, ...] = (10, 8, 6)) -> PackedBatch:
    image = torch.rand(count, *shape, generator=draws(1).numbers) * 2 - 1
    return packed(image, image > 0)


def ellipsoid(count: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Half as wide as the patch along each axis, and off its centre."""
    axes = torch.meshgrid(*[torch.linspace(-1, 1, n) for n in shape], indexing="ij")
    return (sum((axis - 0.2) ** 2 for axis in axes) < 0.25).expand(count, *shape)


def test_all_off_is_the_identity() -> None:
    batch = noise_batch()
    changed = augment(batch, only(), draws())
    assert torch.equal(changed.image, batch.image)
    assert torch.equal(changed.bits, batch.bits)


def test_zero_probability_switches_geometry_off() -> None:
    batch = noise_batch()
    changed = augment(batch, only(rotation_degrees=30, scale=0.2, geometry_probability=0), draws())
    assert torch.equal(changed.image, batch.image)
    assert torch.equal(changed.bits, batch.bits)


def test_noise_leaves_all_other_numbers_alone() -> None:
    """It is drawn where the images are: the numbers must not depend on whether that is here."""
    batch, settings = noise_batch(), {"brightness": 0.3, "contrast": 0.2}
    with_noise, without = draws(2), draws(2)
    for _ in range(3):
        augment(batch, only(noise=0.1, **settings), with_noise)
        augment(batch, only(**settings), without)
        without.uniform((3,), 0, 1)  # the strength of the noise is a number too
    assert torch.equal(with_noise.uniform((4,), 0, 1), without.uniform((4,), 0, 1))


def test_the_seed_decides_and_the_input_is_left_alone() -> None:
    batch = noise_batch()
    before = batch.image.clone(), batch.bits.clone()
    state = torch.get_rng_state()
    settings = AugmentSettings(geometry_probability=1, mirror_axes=(0,), blur_probability=0.5)
    first, again, other = (augment(batch, settings, draws(seed)) for seed in (7, 7, 8))
    assert torch.equal(first.image, again.image)
    assert torch.equal(first.bits, again.bits)
    assert not torch.equal(first.image, other.image)
    assert torch.equal(batch.image, before[0])
    assert torch.equal(batch.bits, before[1])
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.annotated, batch.annotated)
    assert (first.structures, first.cases) == (batch.structures, batch.cases)


@pytest.mark.parametrize("shape", [(24, 24, 24), (32, 20, 12), (40, 28)])
def test_image_and_labels_move_together(shape) -> None:
    mask = ellipsoid(6, shape)
    settings = only(rotation_degrees=25, scale=0.2, geometry_probability=1)
    changed = augment(packed(mask, mask), settings, draws())
    moved = changed.bits == 1
    # The nearest voxel has at least this weight in the linear mean, so the two never contradict each other.
    weight = 0.5 ** len(shape)
    assert ((changed.image[:, 0] - moved.float()).abs() <= 1 - weight + 1e-4).all()
    agree = changed.image[:, 0] > 0.5
    dice = 2 * (agree & moved).flatten(1).sum(1) / (agree.flatten(1).sum(1) + moved.flatten(1).sum(1))
    assert (dice > 0.95).all()
    still = 2 * (mask & moved).flatten(1).sum(1) / (mask.flatten(1).sum(1) + moved.flatten(1).sum(1))
    assert int((still < 0.97).sum()) >= 4  # and they did move


def fix_matrix(monkeypatch: pytest.MonkeyPatch, matrix: torch.Tensor) -> None:
    """Every sample is moved by this one."""
    monkeypatch.setattr(augment_module, "_random_matrices", lambda spacing, *_: matrix.repeat(len(spacing), 1, 1))


def test_scale_alone_changes_the_volume_by_its_cube(monkeypatch) -> None:
    fix_matrix(monkeypatch, 0.8 * torch.eye(3))
    axes = torch.meshgrid(*[torch.arange(n) - (n - 1) / 2 for n in (40, 32, 48)], indexing="ij")
    ball = (sum(axis**2 for axis in axes) < 10**2)[None]
    changed = augment(packed(ball, ball), only(scale=0.1, geometry_probability=1), draws())
    # Reading at 0.8 of the distance from the centre shows everything 1 / 0.8 as large.
    assert float(changed.bits.sum() / ball.sum()) == pytest.approx(1 / 0.8**3, rel=0.03)


def quarter_turn(a: int, b: int, dims: int = 3) -> torch.Tensor:
    """Output position → input position, in the order last array axis first: in_a = -out_b, in_b = out_a."""
    matrix = torch.eye(dims)
    matrix[a, a] = matrix[b, b] = 0
    matrix[a, b], matrix[b, a] = -1, 1
    return matrix


@pytest.mark.parametrize(
    ("plane", "start", "end"),
    [
        # Shape (8, 12, 6), centre (3.5, 5.5, 2.5). Coordinates 0, 1, 2 are array axes 2, 1, 0.
        # Plane (1, 2): y_in = -x_out and x_in = y_out, so x = 2.5, y = -1.5 goes to x = 1.5, y = 2.5.
        ((1, 2), (6, 4, 2), (5, 8, 2)),
        # Plane (0, 2): z_in = -x_out and x_in = z_out, so x = 1.5, z = 0.5 goes to x = -0.5, z = 1.5.
        ((0, 2), (5, 4, 3), (3, 4, 4)),
        # Plane (0, 1): z_in = -y_out and y_in = z_out, so y = -0.5, z = -1.5 goes to y = 1.5, z = -0.5.
        ((0, 1), (6, 5, 1), (6, 7, 2)),
    ],
)
def test_a_quarter_turn_of_an_uneven_patch_does_not_shear(monkeypatch, plane, start, end) -> None:
    fix_matrix(monkeypatch, quarter_turn(*plane))
    image = torch.zeros(1, 8, 12, 6)
    image[0][start] = 1
    changed = augment(packed(image, image), only(rotation_degrees=90, geometry_probability=1), draws())
    assert changed.image[0, 0][end] == pytest.approx(1, abs=1e-4)
    assert changed.image.sum() == pytest.approx(1, abs=1e-3)
    assert changed.bits[0].nonzero().tolist() == [list(end)]


def test_a_quarter_turn_in_two_dimensions(monkeypatch) -> None:
    fix_matrix(monkeypatch, quarter_turn(0, 1, 2))
    image = torch.zeros(1, 8, 6)
    image[0, 5, 4] = 1  # x = 1.5, y = 1.5; y_in = -x_out and x_in = y_out, so x = -1.5, y = 1.5
    changed = augment(packed(image, image), only(rotation_degrees=90, geometry_probability=1), draws())
    assert changed.bits[0].nonzero().tolist() == [[2, 4]]


@pytest.mark.parametrize("dims", [2, 3])
def test_random_matrices_are_rotations_times_scales(dims) -> None:
    matrices = augment_module._random_matrices(torch.ones(200, dims), math.radians(20), 0.1, draws())
    scales = torch.linalg.det(matrices) ** (1 / dims)
    assert 0.9 <= float(scales.min()) < 0.92
    assert 1.08 < float(scales.max()) <= 1.1
    rotations = matrices / scales[:, None, None]
    identity = torch.eye(dims).expand(200, dims, dims)
    torch.testing.assert_close(rotations @ rotations.transpose(1, 2), identity, atol=1e-5, rtol=0)
    turned = torch.rad2deg(torch.atan2(rotations[:, 1, 0], rotations[:, 0, 0])).abs().max()
    assert 10 < float(turned) < 30


def test_a_ball_in_millimetres_stays_a_ball_when_turned(monkeypatch) -> None:
    """Voxels of 1 × 1 × 3 mm: turned by 45° about R, a 12 mm ball off the centre moves and keeps its shape."""
    spacing = torch.tensor([1.0, 1.0, 3.0])
    shape = (48, 64, 24)
    places = [(torch.arange(n) - (n - 1) / 2) * s for n, s in zip(shape, spacing, strict=True)]
    mm = torch.meshgrid(*places, indexing="ij")
    ball = (mm[0] ** 2 + (mm[1] - 14) ** 2 + mm[2] ** 2 <= 12**2)[None]
    c = math.sqrt(0.5)
    # Last axis first: S_in = c·(S_out − A_out), A_in = c·(S_out + A_out), so A = 14, S = 0 goes to A = S = 14·c.
    fix_matrix(monkeypatch, torch.tensor([[c, -c, 0], [c, c, 0], [0, 0, 1]]))
    batch = replace(packed(ball, ball), spacing=spacing[None])
    settings = only(rotation_degrees=45, geometry_probability=1)
    moved = augment(batch, settings, draws()).bits[0] == 1
    centre = [float(axis[moved].mean()) for axis in mm]
    assert centre == pytest.approx([0, 14 * c, 14 * c], abs=0.3)
    distance = (mm[0] ** 2 + (mm[1] - 14 * c) ** 2 + (mm[2] - 14 * c) ** 2).sqrt()
    # Nearest neighbour is off by half a voxel at most, 1.7 mm along its diagonal.
    assert moved[distance < 12 - 1.7].all()
    assert not moved[distance > 12 + 1.7].any()
    in_voxels = augment(replace(batch, spacing=None), settings, draws()).bits[0] == 1
    assert in_voxels[distance > 12 + 1.7].any()


def test_three_times_as_long_is_not_yet_thick() -> None:
    spacing = torch.tensor([[1.0, 1.0, 3.0], [1.0, 1.0, 3.1], [1.0, 4.0, 4.0]])
    assert augment_module._thick(spacing).tolist() == [[False] * 3, [False, False, True], [False, True, True]]


def test_thick_slices_are_turned_and_scaled_in_their_plane_only() -> None:
    """1.5 × 1.5 × 8 mm, last axis first: nothing enters or leaves the thick axis, whose scale stays 1."""
    spacing = torch.tensor([[8.0, 1.5, 1.5], [2.0, 2.0, 2.0]]).repeat(100, 1)
    matrices = augment_module._random_matrices(spacing, math.radians(30), 0.2, draws())
    slices, cubes = matrices[0::2], matrices[1::2]
    assert torch.equal(slices[:, 0], torch.tensor([1.0, 0.0, 0.0]).expand(100, 3))
    assert torch.equal(slices[:, :, 0], torch.tensor([1.0, 0.0, 0.0]).expand(100, 3))
    scales = torch.linalg.det(slices[:, 1:, 1:]).sqrt()
    assert 0.8 <= float(scales.min()) < 0.85
    assert 1.15 < float(scales.max()) <= 1.2
    assert float(slices[:, 1, 2].abs().max()) > 0.3
    assert float(cubes[:, 0, 1].abs().max()) > 0.3  # the others of the batch turn about every axis


def test_thick_slices_are_blurred_in_their_plane_only() -> None:
    image = torch.zeros(2, 5, 5, 5)
    image[:, 2, 2, 2] = 27
    batch = replace(packed(image, image > 0), spacing=torch.tensor([[1.0, 1.0, 8.0], [1.0, 1.0, 1.0]]))
    slices, cube = augment(batch, only(blur_probability=1), draws()).image[:, 0]
    expected = torch.zeros(5, 5, 5)
    expected[1:4, 1:4, 2] = 3
    torch.testing.assert_close(slices, expected)
    assert float(cube[2, 2, 1]) == pytest.approx(1)


@pytest.mark.parametrize("structures", [1, 24, 25, 40, 63])
def test_many_structures_stay_exact(structures) -> None:
    bits = torch.randint(0, 2**structures - 1, (2, 9, 8, 7), generator=draws().numbers)
    bits[:, :2] = 2**structures - 1
    image = torch.zeros(2, 9, 8, 7)
    settings = only(rotation_degrees=40, geometry_probability=1)
    together = augment(packed(image, bits, structures), settings, draws(3)).bits
    for t in range(structures):
        alone = augment(packed(image, (bits >> t) & 1), settings, draws(3)).bits
        assert torch.equal((together >> t) & 1, alone)
    assert (together >> structures == 0).all()


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_mirroring_flips_image_and_labels_along_the_named_axis(axis) -> None:
    batch = noise_batch(count=16)
    changed = augment(batch, only(mirror_axes=(axis,)), draws())
    flipped = 0
    for before, image, old_bits, bits in zip(batch.image, changed.image, batch.bits, changed.bits, strict=True):
        if torch.equal(image, before):
            assert torch.equal(bits, old_bits)
        else:
            flipped += 1
            assert torch.equal(image, before.flip(1 + axis))
            assert torch.equal(bits, old_bits.flip(axis))
    assert 2 <= flipped <= 14


@pytest.mark.parametrize(
    ("axes", "mirrored", "flipped"),
    [((0, 1), 0, 0), ((0, 1), 1, 1), ((0, 1), 2, None), ((1, 2), 0, None), ((1, 2), 2, 1), ((0, 2), 2, 1)],
)
def test_slices_are_mirrored_along_the_axes_of_the_body(axes, mirrored, flipped) -> None:
    """Axis numbers are R, A, S whatever the slices lie across; across a slice there is nothing to mirror."""
    batch = replace(noise_batch(count=16, shape=(10, 8)), axes=axes)
    changed = augment(batch, only(mirror_axes=(mirrored,)), draws())
    different = [not torch.equal(a, b) for a, b in zip(batch.image, changed.image, strict=True)]
    if flipped is None:
        assert not any(different)
        return
    assert 2 <= sum(different) <= 14
    turned = torch.tensor(different)
    assert torch.equal(changed.image[turned], batch.image[turned].flip(2 + flipped))
    assert torch.equal(changed.bits[turned], batch.bits[turned].flip(1 + flipped))


@pytest.mark.parametrize("wrong", [{"mirror_axes": (-1,)}, {"mirror_axes": (3,)}, {"scale": 1}, {"gamma": 1}])
def test_impossible_settings_are_refused(wrong) -> None:
    with pytest.raises(ValidationError):
        AugmentSettings(**wrong)


def test_left_and_right_stay_by_default() -> None:
    ramp = torch.linspace(-1, 1, 12)[:, None, None].expand(16, 12, 12, 12)
    changed = augment(packed(ramp, ramp > 0), AugmentSettings(noise=0), draws())
    right = changed.image[:, 0, 6:].flatten(1).mean(1)
    left = changed.image[:, 0, :6].flatten(1).mean(1)
    assert (right > left).all()


@pytest.mark.parametrize("name", ["brightness", "contrast", "gamma", "noise"])
def test_intensity_changes_leave_labels_alone(name) -> None:
    batch = noise_batch()
    changed = augment(batch, only(**{name: 0.3}), draws())
    assert torch.equal(changed.bits, batch.bits)
    assert not torch.equal(changed.image, batch.image)


def test_brightness_adds_one_number_per_sample() -> None:
    batch = noise_batch(count=50)
    shift = (augment(batch, only(brightness=0.3), draws()).image - batch.image).flatten(1)
    assert float((shift - shift[:, :1]).abs().max()) < 1e-6
    assert -0.3 <= float(shift.min()) < -0.2
    assert 0.2 < float(shift.max()) <= 0.3


def test_contrast_multiplies_by_one_number_per_sample() -> None:
    batch = noise_batch(count=50)
    factor = (augment(batch, only(contrast=0.3), draws()).image / batch.image).flatten(1)
    assert float((factor - factor[:, :1]).abs().max()) < 1e-5
    assert 0.7 <= float(factor.min()) < 0.8
    assert 1.2 < float(factor.max()) <= 1.3


def test_gamma_keeps_the_ends_and_bends_the_middle() -> None:
    values = torch.tensor([-1.0, 0.0, 1.0, 1.5]).expand(50, 4).reshape(50, 1, 2, 2)
    changed = augment(packed(values, values), only(gamma=0.5), draws()).image.flatten(1)
    assert (changed[:, 0] == -1).all()
    assert (changed[:, 2:] == 1).all()  # clipped to the window first
    # Half-way up becomes 0.5 ** exponent, exponent between 0.5 and 1.5.
    low, high = 2 * 0.5**1.5 - 1, 2 * 0.5**0.5 - 1
    assert low <= float(changed[:, 1].min()) < low + 0.1
    assert high - 0.1 < float(changed[:, 1].max()) <= high


def test_noise_is_never_stronger_than_asked() -> None:
    image = torch.zeros(40, 16, 16, 16)
    strength = augment(packed(image, image), only(noise=0.2), draws()).image.flatten(1).std(1)
    assert float(strength.max()) < 0.21
    assert float(strength.max()) > 0.15
    assert float(strength.min()) < 0.05


def test_blur_is_a_mean_of_neighbours() -> None:
    image = torch.zeros(1, 5, 5, 5)
    image[0, 2, 2, 2] = 27
    blurred = augment(packed(image, image > 0), only(blur_probability=1), draws()).image[0, 0]
    expected = torch.zeros(5, 5, 5)
    expected[1:4, 1:4, 1:4] = 1
    torch.testing.assert_close(blurred, expected)
    flat = torch.full((1, 4, 4), 0.3)
    torch.testing.assert_close(augment(packed(flat, flat), only(blur_probability=1), draws()).image[0], flat)


def test_samples_are_changed_independently() -> None:
    batch = noise_batch(count=4)
    same = packed(batch.image[:1, 0].expand(4, 10, 8, 6), batch.bits[:1].expand(4, 10, 8, 6))
    settings = AugmentSettings(geometry_probability=1, noise=0, blur_probability=0)
    changed = augment(same, settings, draws())
    assert not any(torch.equal(changed.image[a], changed.image[b]) for a in range(4) for b in range(a))
    # What happens to the first sample does not depend on the content of the others.
    others = packed(torch.cat([same.image[:1, 0], batch.image[1:, 0]]), torch.cat([same.bits[:1], batch.bits[1:]]))
    mixed = augment(others, settings, draws())
    torch.testing.assert_close(mixed.image[0], changed.image[0])
    assert torch.equal(mixed.bits[0], changed.bits[0])
    assert not torch.equal(mixed.bits[1], changed.bits[1])


def test_geometry_probability_is_a_share_of_samples() -> None:
    batch = noise_batch(count=60)
    settings = only(rotation_degrees=30, scale=0.1, geometry_probability=0.5)
    changed = augment(batch, settings, draws())
    kept = (changed.image - batch.image).abs().flatten(1).amax(1) < 1e-4
    assert 15 < int(kept.sum()) < 45
    assert torch.equal(changed.bits[kept], batch.bits[kept])


@pytest.mark.parametrize(
    ("axes", "organs", "wrong"),
    [
        ((0, 1, 2), ("liver", "kidney_left", "kidney_right"), True),
        ((0,), ("lung_upper_lobe_left",), True),
        ((1, 2), ("kidney_left", "kidney_right"), False),
        ((0, 1, 2), ("liver", "kidney", "heart_left_ventricle"), False),
    ],
    ids=["a pair", "one side", "other axes", "no organ of a side"],
)
def test_sided_organs_are_not_mirrored(axes, organs, wrong):
    settings = AugmentSettings(mirror_axes=axes)
    refuse_swapped_sides(None, organs)
    if not wrong:
        refuse_swapped_sides(settings, organs)
        return
    with refused("mirrored-sides") as caught:
        refuse_swapped_sides(settings, organs)
    assert caught.value.fix == f"mirror_axes: {[axis for axis in axes if axis]}"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("seed", range(6))
def test_a_gpu_changes_samples_as_a_cpu_does(seed: int) -> None:
    """The same numbers are drawn; only noise has a stream of its own there."""
    image, bits = torch.rand(3, 20, 18, 16, generator=draws(1).numbers), torch.zeros(3, 20, 18, 16, dtype=torch.uint8)
    bits[:, 5:12, 4:9, 6:10] = 1
    batch = replace(packed(image, bits), spacing=torch.tensor([[1.0, 1, 1], [1, 1, 5], [2, 1, 1]]))
    settings = AugmentSettings(noise=0, blur_probability=0.5, mirror_axes=(1, 2))
    here = augment(batch, settings, Draws(seed))
    device = torch.device("cuda")
    there = augment(batch.to(device), settings, Draws(seed, device))
    torch.testing.assert_close(there.image.cpu(), here.image, rtol=1e-4, atol=1e-4)
    assert (there.bits.cpu() != here.bits).float().mean() < 1e-3  # a voxel's middle may fall between two others
