"""Augmentation of whole batches on the training device.

Geometry: one random rotation and scale per sample, applied to image (linear) and label bits (nearest) together.
Intensity: brightness, contrast, gamma, noise and blur. Left and right stay where they are unless asked otherwise: a
mirrored left kidney would be a wrong right kidney.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field

from panorgan.cases.sampling import PackedBatch
from panorgan.settings import Settings

# Integers up to here are exact in float32, which nearest-neighbour resampling works in.
_EXACT_BITS = 24


class AugmentSettings(Settings):
    """Ranges of the random changes; zero switches one off."""

    rotation_degrees: float = Field(12.0, ge=0, description="about each axis")
    scale: float = Field(0.15, ge=0, lt=1, description="scale drawn from 1 ± this")
    geometry_probability: float = Field(0.5, ge=0, le=1, description="share of samples that are rotated and scaled")
    mirror_axes: tuple[Literal[0, 1, 2], ...] = Field(
        (), description="axes (0 = left-right) that may be mirrored, p = 0.5 each"
    )
    brightness: float = Field(0.1, ge=0, description="shift drawn from ± this, images span [-1, 1]")
    contrast: float = Field(0.15, ge=0, lt=1, description="factor drawn from 1 ± this")
    gamma: float = Field(0.2, ge=0, lt=1, description="exponent drawn from 1 ± this")
    noise: float = Field(0.04, ge=0, description="largest standard deviation of added Gaussian noise")
    blur_probability: float = Field(0.15, ge=0, le=1, description="share of samples smoothed by a small kernel")


def augment(batch: PackedBatch, settings: AugmentSettings, generator: torch.Generator) -> PackedBatch:
    """A randomly changed copy of the batch; every draw comes from `generator`, which lives on the same device."""
    image, bits = batch.image, batch.bits
    image, bits = _rotate_and_scale(image, bits, settings, generator, len(batch.structures))
    image, bits = _mirror(image, bits, settings, generator)
    return replace(batch, image=_change_intensity(image, settings, generator), bits=bits)


def _uniform(shape: tuple[int, ...], low: float, high: float, generator: torch.Generator) -> torch.Tensor:
    return torch.rand(shape, generator=generator, device=generator.device) * (high - low) + low


def _rotate_and_scale(
    image: torch.Tensor,
    bits: torch.Tensor,
    settings: AugmentSettings,
    generator: torch.Generator,
    structures: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    count, space = image.shape[0], image.shape[2:]
    angle = math.radians(settings.rotation_degrees)
    if settings.geometry_probability == 0 or (angle == 0 and settings.scale == 0):
        return image, bits
    matrices = _random_matrices(count, len(space), angle, settings.scale, generator)
    keep = _uniform((count, 1, 1), 0, 1, generator) >= settings.geometry_probability
    matrices = torch.where(keep, torch.eye(len(space), device=image.device), matrices)
    # grid_sample works in coordinates normalised per axis (last axis first): undo the patch's aspect ratio.
    extent = torch.tensor([float(n) for n in reversed(space)], device=image.device)
    matrices = matrices * extent[None, None, :] / extent[None, :, None]
    theta = torch.cat([matrices, torch.zeros(count, len(space), 1, device=image.device)], dim=2)
    grid = F.affine_grid(theta, [count, 1, *space], align_corners=False)
    moved = F.grid_sample(image, grid, mode="bilinear", padding_mode="border", align_corners=False)
    return moved, _resample_bits(bits, grid, structures)


def _resample_bits(bits: torch.Tensor, grid: torch.Tensor, structures: int) -> torch.Tensor:
    """Nearest neighbour; bits travel in float32, so more than 24 structures go in several passes."""
    moved = torch.zeros_like(bits)
    for low in range(0, max(structures, 1), _EXACT_BITS):
        some = (bits >> low) & (2**_EXACT_BITS - 1)
        near = F.grid_sample(some[:, None].float(), grid, mode="nearest", padding_mode="border", align_corners=False)
        moved |= near[:, 0].to(bits.dtype) << low
    return moved


def _random_matrices(count: int, dims: int, angle: float, scale: float, generator: torch.Generator) -> torch.Tensor:
    """Rotations times scales, [count, dims, dims]."""
    matrices = torch.eye(dims, device=generator.device).repeat(count, 1, 1)
    planes = [(0, 1)] if dims == 2 else [(0, 1), (0, 2), (1, 2)]
    for a, b in planes:
        turn = _uniform((count,), -angle, angle, generator)
        rotation = torch.eye(dims, device=generator.device).repeat(count, 1, 1)
        rotation[:, a, a] = rotation[:, b, b] = turn.cos()
        rotation[:, a, b], rotation[:, b, a] = -turn.sin(), turn.sin()
        matrices = matrices @ rotation
    return matrices * _uniform((count, 1, 1), 1 - scale, 1 + scale, generator)


def _mirror(
    image: torch.Tensor, bits: torch.Tensor, settings: AugmentSettings, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    for axis in settings.mirror_axes:
        chosen = _uniform((image.shape[0],), 0, 1, generator) < 0.5
        wide = chosen.view(-1, *(1,) * (image.ndim - 1))
        image = torch.where(wide, image.flip(2 + axis), image)
        bits = torch.where(wide[:, 0], bits.flip(1 + axis), bits)
    return image, bits


def _change_intensity(image: torch.Tensor, settings: AugmentSettings, generator: torch.Generator) -> torch.Tensor:
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
        image = torch.where(chosen, _smooth(image), image)
    if settings.noise:
        strength = _uniform(per_sample, 0, settings.noise, generator)
        image = image + strength * torch.randn(image.shape, generator=generator, device=generator.device)
    return image


def _smooth(image: torch.Tensor) -> torch.Tensor:
    """A 3-tap mean along every axis."""
    pool = F.avg_pool2d if image.ndim == 4 else F.avg_pool3d
    return pool(image, 3, stride=1, padding=1, count_include_pad=False)
