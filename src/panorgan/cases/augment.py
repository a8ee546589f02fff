"""Augmentation of whole batches on the training device.

Geometry: one random rotation and scale per sample, in millimetres, applied to image and companions (linear) and label
bits (nearest) together. Where slices are thick, what lies between them is not known: such scans are moved and blurred
within their slices only. Intensity: brightness, contrast, gamma, noise and blur. Left and right stay where they are
unless asked otherwise: a mirrored left kidney would be a wrong right kidney.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field

from panorgan.anatomy import catalogue
from panorgan.cases.companions import as_probabilities
from panorgan.cases.sampling import PackedBatch
from panorgan.errors import ConfigError
from panorgan.settings import Settings

# Integers up to here are exact in float32, which nearest-neighbour resampling works in.
_EXACT_BITS = 24
# Voxels more than this many times longer along one axis than along another are not mixed along these two.
_THICK = 3.0


class AugmentSettings(Settings):
    """Ranges of the random changes; zero switches one off."""

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
            where="training.augment.mirror_axes",
            why=f"axis 0 runs from side to side, and a mirrored {sided[0]} would still be called so "
            f"(sided organs: {', '.join(sided)})",
            fix=f"mirror_axes: {[axis for axis in settings.mirror_axes if axis]}",
        )


def augment(batch: PackedBatch, settings: AugmentSettings, generator: torch.Generator) -> PackedBatch:
    """A randomly changed copy of the batch; every draw comes from `generator`, which lives on the same device."""
    if batch.extra is not None:
        batch = replace(batch, extra=as_probabilities(batch.extra))
    moved = _mirror(_rotate_and_scale(batch, settings, generator), settings, generator)
    return replace(moved, image=_change_intensity(moved.image, _spacing(batch), settings, generator))


def _spacing(batch: PackedBatch) -> torch.Tensor:
    """Voxel size [B, D]; ones if the batch does not know it."""
    if batch.spacing is not None:
        return batch.spacing
    return torch.ones(batch.image.shape[0], batch.image.ndim - 2, device=batch.image.device)


def _uniform(shape: tuple[int, ...], low: float, high: float, generator: torch.Generator) -> torch.Tensor:
    return torch.rand(shape, generator=generator, device=generator.device) * (high - low) + low


def _rotate_and_scale(batch: PackedBatch, settings: AugmentSettings, generator: torch.Generator) -> PackedBatch:
    image = batch.image
    count, space = image.shape[0], image.shape[2:]
    angle = math.radians(settings.rotation_degrees)
    if settings.geometry_probability == 0 or (angle == 0 and settings.scale == 0):
        return batch
    # grid_sample counts axes from the last one, and so does everything below.
    spacing = _spacing(batch).flip(1)
    matrices = _random_matrices(spacing, angle, settings.scale, generator)
    changed = _uniform((count,), 0, 1, generator) < settings.geometry_probability
    matrices = torch.where(changed.view(-1, 1, 1), matrices, torch.eye(len(space), device=image.device))
    # Its coordinates run from -1 to 1 along each axis: undo the patch's aspect ratio, which is one of millimetres.
    # Sizes are filled in on the device, since copying them there would make it wait.
    sizes = [torch.full((count,), float(n), device=image.device) for n in reversed(space)]
    extent = torch.stack(sizes, dim=1) * spacing
    matrices = matrices * extent[:, None, :] / extent[:, :, None]
    theta = torch.cat([matrices, torch.zeros(count, len(space), 1, device=image.device)], dim=2)
    if image.device.type != "cpu":
        return _resample(batch, theta)
    # Here it costs nothing to ask which samples are meant, and much to move the others by nothing.
    extra = batch.extra
    moved = replace(batch, image=image.clone(), bits=batch.bits.clone(), extra=None if extra is None else extra.clone())
    for one in changed.nonzero():  # [1] indices, which keep the batch axis
        sample = replace(batch, image=image[one], bits=batch.bits[one], extra=None if extra is None else extra[one])
        sample = _resample(sample, theta[one])
        moved.image[one], moved.bits[one] = sample.image, sample.bits
        if moved.extra is not None and sample.extra is not None:
            moved.extra[one] = sample.extra
    return moved


def _resample(batch: PackedBatch, theta: torch.Tensor) -> PackedBatch:
    """Image, bits and companions moved by affine maps `theta` [B, D, D + 1]."""
    image, extra = batch.image, batch.extra
    grid = F.affine_grid(theta, [len(image), 1, *image.shape[2:]], align_corners=False)
    return replace(
        batch,
        image=_grid_sample(image, grid, "bilinear"),
        bits=_resample_bits(batch.bits, grid, len(batch.structures)),
        extra=None if extra is None else _grid_sample(extra, grid, "bilinear"),
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


def _random_matrices(spacing: torch.Tensor, angle: float, scale: float, generator: torch.Generator) -> torch.Tensor:
    """Rotations times scales, [count, dims, dims], in mm; thick slices (by `spacing` [count, dims]) stay in place."""
    count, dims = spacing.shape
    matrices = torch.eye(dims, device=generator.device).repeat(count, 1, 1)
    planes = [(0, 1)] if dims == 2 else [(0, 1), (0, 2), (1, 2)]
    for a, b in planes:
        turn = _uniform((count,), -angle, angle, generator)
        long, short = torch.maximum(spacing[:, a], spacing[:, b]), torch.minimum(spacing[:, a], spacing[:, b])
        turn = torch.where(long > _THICK * short, 0.0, turn)
        rotation = torch.eye(dims, device=generator.device).repeat(count, 1, 1)
        rotation[:, a, a] = rotation[:, b, b] = turn.cos()
        rotation[:, a, b], rotation[:, b, a] = -turn.sin(), turn.sin()
        matrices = matrices @ rotation
    scales = _uniform((count, 1), 1 - scale, 1 + scale, generator).expand(count, dims)
    return matrices * torch.where(_thick(spacing), 1.0, scales)[:, None, :]


def _thick(spacing: torch.Tensor) -> torch.Tensor:
    """Axes [count, dims] along which voxels are far longer than along the finest one."""
    return spacing > _THICK * spacing.amin(1, keepdim=True)


def _mirror(batch: PackedBatch, settings: AugmentSettings, generator: torch.Generator) -> PackedBatch:
    image, bits, extra = batch.image, batch.bits, batch.extra
    for place, axis in enumerate(batch.axes[: bits.ndim - 1]):
        if axis in settings.mirror_axes:
            chosen = _uniform((image.shape[0],), 0, 1, generator) < 0.5
            wide = chosen.view(-1, *(1,) * (image.ndim - 1))
            image = torch.where(wide, image.flip(2 + place), image)
            bits = torch.where(wide[:, 0], bits.flip(1 + place), bits)
            extra = None if extra is None else torch.where(wide, extra.flip(2 + place), extra)
    return replace(batch, image=image, bits=bits, extra=extra)


def _change_intensity(
    image: torch.Tensor, spacing: torch.Tensor, settings: AugmentSettings, generator: torch.Generator
) -> torch.Tensor:
    per_sample = (image.shape[0],) + (1,) * (image.ndim - 1)
    if settings.gamma:
        exponent = _uniform(per_sample, 1 - settings.gamma, 1 + settings.gamma, generator)
        image = ((image.clamp(-1, 1) + 1) / 2) ** exponent * 2 - 1
    if settings.contrast:
        image = image * _uniform(per_sample, 1 - settings.contrast, 1 + settings.contrast, generator)
    if settings.brightness:
        image = image + _uniform(per_sample, -settings.brightness, settings.brightness, generator)
    if settings.blur_probability:
        chosen = _uniform(per_sample, 0, 1, generator) < settings.blur_probability
        if image.device.type == "cpu":  # as above: only those that are meant
            image = image.clone()
            for one in chosen.flatten().nonzero():
                image[one] = _smooth(image[one], spacing[one])
        else:
            image = torch.where(chosen, _smooth(image, spacing), image)
    if settings.noise:
        strength = _uniform(per_sample, 0, settings.noise, generator)
        image = image + strength * torch.randn(image.shape, generator=generator, device=generator.device)
    return image


def _smooth(image: torch.Tensor, spacing: torch.Tensor) -> torch.Tensor:
    """A 3-tap mean along every axis but that of thick slices."""
    pool = F.avg_pool2d if image.ndim == 4 else F.avg_pool3d
    thick = _thick(spacing)
    for axis in range(image.ndim - 2):
        along = [int(axis == other) for other in range(image.ndim - 2)]
        smooth = pool(image, [1 + 2 * n for n in along], stride=1, padding=along, count_include_pad=False)
        image = torch.where(thick[:, axis].view(-1, *(1,) * (image.ndim - 1)), image, smooth)
    return image
