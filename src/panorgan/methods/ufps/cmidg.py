"""CMIDG: images as from another scanner, by convolutions with random weights.

Ouyang et al., Causality-inspired single-source domain generalization for medical image segmentation, IEEE TMI 2022.

GIN (global intensities, non-linear): a few convolutions with fresh random weights, mixed with the image, brought back
to the image's Frobenius norm. Kernels are small, so shapes stay where they are and labels stay true.
IPA (interventional pseudo-correlation): two such images of one scan, blended by a smooth random mask, which breaks
chance correlations between places.

Every sample has its own networks. They run on the images' device, 2D and 3D, in float32 under autocast too. Weights are
a few hundred numbers drawn on the CPU, so that kernel sizes are known without asking a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveInt

from panorgan.preparation.host_to_device import in_one_copy
from panorgan.settings import Settings

# Slope of the leaky ReLU below zero.
_LEAK = 0.01
# Against division by zero; far below any intensity, and its inverse is still a float32.
_TINY = 1e-20


class CMIDGSettings(Settings):
    """The random networks and the mask that blends two of them; `paper` is Ouyang et al."""

    layers: PositiveInt = Field(
        4, description="convolutions of a random network, leaky ReLU between them", json_schema_extra={"paper": "4"}
    )
    inner_channels: PositiveInt = Field(
        2, description="channels between these convolutions", json_schema_extra={"paper": "2"}
    )
    kernel_sizes: tuple[Literal[1, 3, 5], ...] = Field(
        (1, 3),
        min_length=1,
        description="each sample and layer draws one of these kernel sizes; with 1 alone intensities change and "
        "nothing is blurred or sharpened",
        json_schema_extra={"paper": "1, 3"},
    )
    blend: float = Field(
        1.0,
        ge=0,
        le=1,
        description="α, the share of the random network's output in the mix with the image, is drawn from 0 to this; "
        "0 leaves images as they are",
        json_schema_extra={"paper": "1"},
    )
    ipa: bool = Field(
        True, description="blend two random networks' images by a smooth mask", json_schema_extra={"paper": "on"}
    )
    control_spacing: float = Field(
        0.25,
        gt=0,
        le=1,
        description="distance between the mask's control points, as a share of the image's size",
        json_schema_extra={"paper": "1/4"},
    )


@dataclass(frozen=True)
class RandomLayer:
    """One convolution for each of N samples.

    `kernel` [N, out, in, *K] is zero farther than `radius` [N] from its centre; `shift` is [N, out].
    """

    kernel: torch.Tensor
    shift: torch.Tensor
    radius: torch.Tensor


def cmidg(image: torch.Tensor, settings: CMIDGSettings, generator: torch.Generator) -> torch.Tensor:
    """Changed intensities of `image` [B, C, *S]; every draw comes from `generator`, which lives on the CPU.

    Each channel is changed as an image of its own. With `blend` 0 the image is returned and nothing is drawn.
    """
    if settings.blend == 0:
        return image
    if image.shape[1] > 1:
        return cmidg(image.flatten(0, 1).unsqueeze(1), settings, generator).view(image.shape)
    # Products of random weights reach into the thousands: half precision would lose the low contrast between organs.
    with torch.autocast(image.device.type, enabled=False):
        plain = image.float()
        if not settings.ipa:
            return gin(plain, settings, generator).to(image.dtype)
        first, second = gin(torch.cat([plain, plain]), settings, generator).chunk(2)
        mask = blend_mask(image.shape, settings.control_spacing, generator, image.device)
        return torch.lerp(second, first, mask).to(image.dtype)


def gin(image: torch.Tensor, settings: CMIDGSettings, generator: torch.Generator) -> torch.Tensor:
    """`image` [N, 1, *S] through one random network per sample, scaled to the Frobenius norm of the image."""
    layers = random_network(len(image), image.ndim - 2, settings, generator)
    share = torch.rand((len(image), *(1,) * (image.ndim - 1)), generator=generator) * settings.blend
    (share,) = in_one_copy([share], image.device)
    return mix(image, run_network(image, layers), share)


def mix(image: torch.Tensor, changed: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """(1 - α)·image + α·changed, scaled to the image's Frobenius norm; all [N, 1, *S], `share` α [N, 1, ...]."""
    mixed = torch.lerp(image, changed, share)
    wanted, found = _frobenius(image), _frobenius(mixed)
    return mixed * (wanted / found.clamp_min(_TINY))


def _frobenius(image: torch.Tensor) -> torch.Tensor:
    """Norm of every sample [N, 1, ...]."""
    norm = image
    for axis in range(image.ndim - 1, 0, -1):
        # Axis by axis: one sum over millions of float32 is wrong in the fifth digit.
        norm = torch.linalg.vector_norm(norm, dim=axis, keepdim=True)
    return norm


def random_network(
    count: int, dims: int, settings: CMIDGSettings, generator: torch.Generator
) -> tuple[RandomLayer, ...]:
    """Normal weights of `count` networks from one channel to one."""
    channels = [1, *[settings.inner_channels] * (settings.layers - 1), 1]
    radii = [size // 2 for size in settings.kernel_sizes]
    return tuple(
        _random_layer(count, (outputs, inputs), dims, radii, generator) for inputs, outputs in pairwise(channels)
    )


def _random_layer(
    count: int, channels: tuple[int, int], dims: int, radii: Sequence[int], generator: torch.Generator
) -> RandomLayer:
    margin = max(radii)
    kernel = torch.randn((count, *channels, *(2 * margin + 1,) * dims), generator=generator)
    shift = torch.randn((count, channels[0]), generator=generator)
    radius = torch.tensor(radii)[torch.randint(len(radii), (count,), generator=generator)]
    # A small kernel is a large one with zeros around it.
    steps = torch.arange(-margin, margin + 1).abs()
    reach = torch.stack(torch.meshgrid(*[steps] * dims, indexing="ij")).amax(0)
    inside = reach <= radius.view(-1, *(1,) * (2 + dims))
    return RandomLayer(kernel * inside, shift, radius)


def run_network(image: torch.Tensor, layers: Sequence[RandomLayer]) -> torch.Tensor:
    """Each sample of `image` [N, 1, *S] through its own network."""
    features = image
    for number, layer in enumerate(layers):
        features = _convolve(F.leaky_relu(features, _LEAK) if number else features, layer)
    return features


def _convolve(features: torch.Tensor, layer: RandomLayer) -> torch.Tensor:
    """`features` [N, in, *S] → [N, out, *S]; samples with equal kernel sizes together, without the zeros around."""
    radii = layer.radius.tolist()
    results: dict[int, torch.Tensor] = {}
    for radius in sorted(set(radii)):
        chosen = [sample for sample, other in enumerate(radii) if other == radius]
        kernel = layer.kernel[chosen]
        for axis in range(3, kernel.ndim):
            kernel = kernel.narrow(axis, kernel.shape[axis] // 2 - radius, 2 * radius + 1)
        kernel, shift = in_one_copy([kernel, layer.shift[chosen]], features.device)
        if len(chosen) == len(radii):
            return _grouped(features, kernel, shift)
        some = torch.cat([features[sample : sample + 1] for sample in chosen])
        results.update(zip(chosen, _grouped(some, kernel, shift).split(1), strict=True))
    return torch.cat([results[sample] for sample in range(len(radii))])


def _grouped(features: torch.Tensor, kernel: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """All samples and input channels in one call, side by side as groups; then the sum over input channels."""
    convolve = F.conv2d if features.ndim == 4 else F.conv3d
    count, outputs, inputs, *size = kernel.shape
    if max(size) == 1 and features.is_cuda:  # plain sums of channels
        mixed: torch.Tensor = torch.baddbmm(shift.unsqueeze(2), kernel.flatten(2), features.flatten(2))
        return mixed.view(count, outputs, *features.shape[2:])
    # Replicate the border: zeros would be soft tissue there, and draw a frame around air or bone.
    padded = F.pad(features, (size[0] // 2,) * (2 * len(size)), mode="replicate")
    # One input per group: a single group of two channels is several times slower on a CPU.
    filters = kernel.transpose(1, 2).reshape(-1, 1, *size)
    result = convolve(padded.reshape(1, -1, *padded.shape[2:]), filters, groups=count * inputs)
    result = result.reshape(count, inputs, outputs, *features.shape[2:]).sum(1)
    return result + shift.view(count, outputs, *(1,) * len(size))


def blend_mask(
    shape: Sequence[int], spacing: float, generator: torch.Generator, device: torch.device | None = None
) -> torch.Tensor:
    """Smooth masks [B, 1, *S] for images of this shape and device, each running from 0 to 1."""
    field = smooth_field(shape, spacing, generator, device)
    axes = tuple(range(1, field.ndim))
    # A mean of many control points stays near 0.5, which would blend everything half and half.
    low, high = field.amin(axes, keepdim=True), field.amax(axes, keepdim=True)
    return (field - low) / (high - low).clamp_min(_TINY)


def smooth_field(
    shape: Sequence[int], spacing: float, generator: torch.Generator, device: torch.device | None = None
) -> torch.Tensor:
    """Cubic B-splines [B, 1, *S] of control points drawn from [0, 1]; values stay in that range."""
    device = device or generator.device
    bases = [_spline_basis(size, spacing, device) for size in shape[2:]]
    counts = (shape[0], *(basis.shape[1] for basis in bases))
    (field,) = in_one_copy([torch.rand(counts, generator=generator)], device)
    for basis in bases:  # each product consumes the first axis and appends it as the last: after D all are in order
        field = torch.tensordot(field, basis, dims=([1], [1]))
    return field[:, None]


@lru_cache(maxsize=16)
def _spline_basis(size: int, spacing: float, device: torch.device) -> torch.Tensor:
    """Weights [size, control points] at the centres of voxels; every row sums to 1."""
    places = (torch.arange(size, device=device) + 0.5) / (size * spacing)
    # A cubic spline reaches one point beyond each end of the interval it is in.
    points = torch.arange(-1, math.ceil(1 / spacing) + 2, device=device)
    distance = (places[:, None] - points).abs()
    return torch.where(distance < 1, 2 / 3 - distance**2 + distance**3 / 2, (2 - distance).clamp_min(0) ** 3 / 6)
