"""Augmentation of whole batches on the training device.

Geometry: one random rotation and scale per sample, in millimetres, applied to all channels and soft targets (linear)
and label bits (nearest) together. Where slices are thick, what lies between them is not known: such scans are moved and
blurred within their slices only. Intensity: brightness, contrast, gamma, noise and blur, for every channel by itself.
Left and right stay where they are unless asked otherwise: a mirrored left kidney would be a wrong right kidney.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field

from panorgan.anatomy import catalogue
from panorgan.errors import ConfigError
from panorgan.preparation.batch import PackedBatch
from panorgan.preparation.host_to_device import in_one_copy
from panorgan.preparation.teacher_predictions import as_probabilities
from panorgan.settings import Settings

# Integers up to here are exact in float32, which nearest-neighbour resampling works in.
_EXACT_BITS = 24
# Voxels more than this many times longer along one axis than along another are not mixed along these two.
_THICK = 3.0


class AugmentSettings(Settings):
    """Ranges of the random changes; 0 disables a change."""

    rotation_degrees: float = Field(12.0, ge=0, description="about each axis")
    scale: float = Field(0.15, ge=0, lt=1, description="scale drawn from 1 ± this")
    geometry_probability: float = Field(0.5, ge=0, le=1, description="share of samples that are rotated and scaled")
    mirror_axes: tuple[Literal[0, 1, 2], ...] = Field(
        (), description="axes (0 = left-right, 1 = back-front, 2 = feet-head) that may be mirrored, p = 0.5 each"
    )
    brightness: float = Field(0.1, ge=0, description="shift drawn from ± this, images span [-1, 1]")
    contrast: float = Field(0.15, ge=0, lt=1, description="factor drawn from 1 ± this")
    gamma: float = Field(0.2, ge=0, lt=1, description="exponent drawn from 1 ± this")
    noise: float = Field(0.04, ge=0, description="largest standard deviation of added Gaussian noise")
    blur_probability: float = Field(0.15, ge=0, le=1, description="share of samples smoothed by a small kernel")


def refuse_swapped_sides(settings: AugmentSettings | None, organs: Iterable[str]) -> None:
    """Refuse to mirror left and right where an organ is named by its side: the label would stay, and be wrong."""
    sided = [organ for organ in organs if catalogue()[organ].side is not None]
    if settings is not None and 0 in settings.mirror_axes and sided:
        raise ConfigError(
            "Left and right must not be mirrored here.",
            code="mirrored-sides",
            where="training.augment.mirror_axes",
            why=f"axis 0 runs from side to side, and a mirrored {sided[0]} would still be called so "
            f"(sided organs: {', '.join(sided)})",
            fix=f"mirror_axes: {[axis for axis in settings.mirror_axes if axis]}",
        )


class Draws:
    """The random numbers of augmentation.

    How much each sample is turned, scaled or brightened is a handful of numbers: they are drawn on the CPU, and reach
    the images in one copy. Drawn on a GPU they would cost a hundred tiny kernels per batch, and the CPU would not
    know which samples are left as they are. Noise is drawn where the images are.
    """

    def __init__(self, seed: int, device: torch.device | str = "cpu") -> None:
        self.numbers = torch.Generator().manual_seed(seed)
        # A stream of its own, which no method uses (UFPS has two): so the numbers are the same on every device, from
        # the first batch to the last.
        self.noise = torch.Generator(device).manual_seed(seed ^ 4)

    def uniform(self, shape: tuple[int, ...], low: float, high: float) -> torch.Tensor:
        """Uniform random numbers, on the CPU."""
        return torch.rand(shape, generator=self.numbers) * (high - low) + low

    def chance(self, shape: tuple[int, ...], probability: float) -> torch.Tensor:
        """Random booleans of a shape, true with this probability."""
        return self.uniform(shape, 0, 1) < probability

    def noise_like(self, image: torch.Tensor) -> torch.Tensor:
        """Standard Gaussian noise."""
        return torch.randn(image.shape, generator=self.noise, device=self.noise.device)


@dataclass
class _Changes:
    """The changes of each sample of a batch; None for a change that no sample gets."""

    turned: torch.Tensor | None = None
    """[B] bool, which samples are rotated and scaled; `theta` of all others is the identity."""
    theta: torch.Tensor | None = None
    """[B, D, D + 1], the affine map of every sample."""
    mirrored: dict[int, torch.Tensor] = field(default_factory=dict)
    """Axis of the batch → [B] bool."""
    exponent: torch.Tensor | None = None
    factor: torch.Tensor | None = None
    shift: torch.Tensor | None = None
    blurred: torch.Tensor | None = None
    strength: torch.Tensor | None = None
    """All [B, C]: of gamma, contrast, brightness, blur (bool) and noise."""


def augment(batch: PackedBatch, settings: AugmentSettings, draws: Draws) -> PackedBatch:
    """A randomly changed copy of the batch; every draw comes from `draws`, made for the same device."""
    if batch.soft_targets is not None:
        batch = replace(batch, soft_targets=as_probabilities(batch.soft_targets))
    spacing = _spacing(batch)
    changes = _there(_drawn(batch, spacing, settings, draws), batch.image.device)
    moved = _mirror(_rotate_and_scale(batch, changes), changes)
    return replace(moved, image=_change_intensity(moved.image, _thick(spacing), changes, draws))


def _spacing(batch: PackedBatch) -> torch.Tensor:
    """Voxel size [B, D]; ones if the batch does not know it."""
    return torch.ones(len(batch), batch.image.ndim - 2) if batch.spacing is None else batch.spacing


def _drawn(batch: PackedBatch, spacing: torch.Tensor, settings: AugmentSettings, draws: Draws) -> _Changes:
    """Draw all random numbers except the noise itself, on the CPU."""
    count, changes = len(batch), _Changes()
    angle = math.radians(settings.rotation_degrees)
    if settings.geometry_probability and (angle or settings.scale):
        # grid_sample counts axes from the last one, and so does everything below.
        matrices = _random_matrices(spacing.flip(1), angle, settings.scale, draws)
        changes.turned = draws.chance((count,), settings.geometry_probability)
        matrices = torch.where(changes.turned.view(-1, 1, 1), matrices, torch.eye(spacing.shape[1]))
        # Its coordinates run from -1 to 1 along each axis: undo the patch's aspect ratio, which is one of millimetres.
        extent = torch.tensor(batch.image.shape[:1:-1]) * spacing.flip(1)
        matrices = matrices * extent[:, None, :] / extent[:, :, None]
        changes.theta = torch.cat([matrices, torch.zeros(count, spacing.shape[1], 1)], dim=2)
    for place, axis in enumerate(batch.axes[: spacing.shape[1]]):
        if axis in settings.mirror_axes:
            changes.mirrored[place] = draws.chance((count,), 0.5)
    each = count, batch.image.shape[1]
    if settings.gamma:
        changes.exponent = draws.uniform(each, 1 - settings.gamma, 1 + settings.gamma)
    if settings.contrast:
        changes.factor = draws.uniform(each, 1 - settings.contrast, 1 + settings.contrast)
    if settings.brightness:
        changes.shift = draws.uniform(each, -settings.brightness, settings.brightness)
    if settings.blur_probability:
        changes.blurred = draws.chance(each, settings.blur_probability)
    if settings.noise:
        changes.strength = draws.uniform(each, 0, settings.noise)
    return changes


def _there(changes: _Changes, device: torch.device) -> _Changes:
    """The factors for the images on their device, in one copy; flags stay on the CPU, where reading them is cheap."""
    names = [
        name for name, value in vars(changes).items() if isinstance(value, torch.Tensor) and value.is_floating_point()
    ]
    there: dict[str, Any] = dict(zip(names, in_one_copy([vars(changes)[name] for name in names], device), strict=True))
    return replace(changes, **there)


def _rotate_and_scale(batch: PackedBatch, changes: _Changes) -> PackedBatch:
    if changes.theta is None or changes.turned is None or not changes.turned.any():
        return batch
    if batch.image.device.type != "cpu":
        return _resample(batch, changes.theta)  # all at once: starting work costs more than doing it
    image, soft_targets = batch.image, batch.soft_targets
    moved = replace(
        batch,
        image=image.clone(),
        bits=batch.bits.clone(),
        soft_targets=None if soft_targets is None else soft_targets.clone(),
    )
    for one in changes.turned.nonzero():  # [1] indices, which keep the batch axis
        sample = replace(
            batch,
            image=image[one],
            bits=batch.bits[one],
            soft_targets=None if soft_targets is None else soft_targets[one],
        )
        sample = _resample(sample, changes.theta[one])
        moved.image[one], moved.bits[one] = sample.image, sample.bits
        if moved.soft_targets is not None and sample.soft_targets is not None:
            moved.soft_targets[one] = sample.soft_targets
    return moved


def _resample(batch: PackedBatch, theta: torch.Tensor) -> PackedBatch:
    """Image, bits and soft targets moved by affine maps `theta` [B, D, D + 1]."""
    image, soft_targets = batch.image, batch.soft_targets
    grid = F.affine_grid(theta, [len(image), 1, *image.shape[2:]], align_corners=False)
    return replace(
        batch,
        image=_grid_sample(image, grid, "bilinear"),
        bits=_resample_bits(batch.bits, grid, len(batch.structures)),
        soft_targets=None if soft_targets is None else _grid_sample(soft_targets, grid, "bilinear"),
    )


def _grid_sample(image: torch.Tensor, grid: torch.Tensor, mode: str) -> torch.Tensor:
    """`image` [B, C, *S] at the places of `grid` [B, *S, D]; beyond its border the border's values go on."""
    if image.device.type != "cpu" or len(image) > 1:
        return F.grid_sample(image, grid, mode=mode, padding_mode="border", align_corners=False)
    # On a CPU, threads share the batch among them: make a batch of the planes of this one sample.
    planes = grid.transpose(0, 1)
    same = image.expand(len(planes), *image.shape[1:])
    moved = F.grid_sample(same, planes, mode=mode, padding_mode="border", align_corners=False)
    return moved.transpose(0, 2)


def _resample_bits(bits: torch.Tensor, grid: torch.Tensor, structures: int) -> torch.Tensor:
    """Nearest neighbour; bits travel in float32, so more than 24 structures go in several passes."""

    def nearest(some: torch.Tensor) -> torch.Tensor:
        return _grid_sample(some[:, None].float(), grid, "nearest")[:, 0].to(bits.dtype)

    if structures <= _EXACT_BITS:
        return nearest(bits)
    moved = torch.zeros_like(bits)
    for low in range(0, structures, _EXACT_BITS):
        moved |= nearest((bits >> low) & (2**_EXACT_BITS - 1)) << low
    return moved


def _random_matrices(spacing: torch.Tensor, angle: float, scale: float, draws: Draws) -> torch.Tensor:
    """Rotations times scales, [count, dims, dims], in mm; thick slices (by `spacing` [count, dims]) stay in place."""
    count, dims = spacing.shape
    matrices = torch.eye(dims).repeat(count, 1, 1)
    planes = [(0, 1)] if dims == 2 else [(0, 1), (0, 2), (1, 2)]
    for a, b in planes:
        turn = draws.uniform((count,), -angle, angle)
        long, short = torch.maximum(spacing[:, a], spacing[:, b]), torch.minimum(spacing[:, a], spacing[:, b])
        turn = torch.where(long > _THICK * short, 0.0, turn)
        rotation = torch.eye(dims).repeat(count, 1, 1)
        rotation[:, a, a] = rotation[:, b, b] = turn.cos()
        rotation[:, a, b], rotation[:, b, a] = -turn.sin(), turn.sin()
        matrices = matrices @ rotation
    scales = draws.uniform((count, 1), 1 - scale, 1 + scale).expand(count, dims)
    return matrices * torch.where(_thick(spacing), 1.0, scales)[:, None, :]


def _thick(spacing: torch.Tensor) -> torch.Tensor:
    """Axes [count, dims] along which voxels are far longer than along the finest one."""
    return spacing > _THICK * spacing.amin(1, keepdim=True)


def _mirror(batch: PackedBatch, changes: _Changes) -> PackedBatch:
    image, bits, soft_targets = batch.image, batch.bits, batch.soft_targets
    for place, chosen in changes.mirrored.items():
        flip = partial(torch.flip, dims=(place - (bits.ndim - 1),))  # counted from the end it is the same for all three
        image, bits = _changed_where(chosen, flip, image), _changed_where(chosen, flip, bits)
        soft_targets = None if soft_targets is None else _changed_where(chosen, flip, soft_targets)
    return replace(batch, image=image, bits=bits, soft_targets=soft_targets)


def _change_intensity(image: torch.Tensor, thick: torch.Tensor, changes: _Changes, draws: Draws) -> torch.Tensor:
    def per_sample(values: torch.Tensor) -> torch.Tensor:
        return values.view(*values.shape, *(1,) * (image.ndim - 2))

    if changes.exponent is not None:
        image = ((image.clamp(-1, 1) + 1) / 2) ** per_sample(changes.exponent) * 2 - 1
    if changes.factor is not None:
        image = image * per_sample(changes.factor)
    if changes.shift is not None:
        image = image + per_sample(changes.shift)
    if changes.blurred is not None:
        image = _smooth(image, changes.blurred.unsqueeze(2) & ~thick.unsqueeze(1))
    if changes.strength is not None:
        image = image + per_sample(changes.strength) * draws.noise_like(image)
    return image


def _smooth(image: torch.Tensor, along: torch.Tensor) -> torch.Tensor:
    """A 3-tap mean along the axes that each channel is smoothed along, `along` [B, C, D] bool on the CPU."""
    whole = image
    image = image.flatten(0, 1).unsqueeze(1)  # channels as samples of their own
    pool = F.avg_pool2d if image.ndim == 4 else F.avg_pool3d
    for axis, chosen in enumerate(along.flatten(0, 1).unbind(1)):
        window = [int(axis == other) for other in range(image.ndim - 2)]

        def smoothed(some: torch.Tensor, window: list[int] = window) -> torch.Tensor:
            return pool(some, [1 + 2 * n for n in window], stride=1, padding=window, count_include_pad=False)

        image = _changed_where(chosen, smoothed, image)
    return image.reshape(whole.shape)


def _changed_where(
    chosen: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor], samples: torch.Tensor
) -> torch.Tensor:
    """`samples` [B, …] with those changed that are `chosen` ([B] bool on the CPU), and only those."""
    if chosen.all():
        return change(samples)
    if chosen.any():
        pieces = [change(one) if flag else one for one, flag in zip(samples.split(1), chosen.tolist(), strict=True)]
        return torch.cat(pieces)
    return samples
