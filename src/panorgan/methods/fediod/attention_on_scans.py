"""Where in a scan a network with attention looks: its maps, laid over its input patch.

A network splits a patch into a coarse grid of places, its tokens, row by row. Every map here is on that grid and is 1
on average: 1 is what each place would have if attention were even.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from panorgan.data.case import Case
from panorgan.methods.fediod.attention_gate import mean_attention
from panorgan.methods.fediod.inter_organ import InterOrganNetwork
from panorgan.preparation.plan import Plan
from panorgan.preparation.preprocess import Grid, prepare_image, prepare_mask, with_channels
from panorgan.preparation.sampling import sliced_axis

_AXIAL = 2
_SHOWN = 0.3
"""A slice shows an organ if it holds this share of the organ's largest area."""
_SHARPNESS = 4
"""Points of a picture per token and axis."""

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class ScanPatch:
    """A patch of a prepared scan as a network sees it: `image` and `masks` [*patch_size], one voxel deep for slices.

    Of several channels, `image` is the first, and `more` are the others.

    The slice to show is number `level` along axis `across` (0 = R, 1 = A, 2 = S); `masks` are those of organs that it
    shows. `spacing` is in mm along R, A, S.
    """

    image: torch.Tensor
    masks: Mapping[str, torch.Tensor]
    across: int
    level: int
    spacing: tuple[float, float, float]
    more: tuple[torch.Tensor, ...] = ()

    def plane(self, values: torch.Tensor) -> torch.Tensor:
        """The slice out of something with the patch's shape."""
        return values.select(self.across, self.level)

    def network_view(self, values: torch.Tensor) -> torch.Tensor:
        """Something with the patch's shape, without the axis that a network of slices does not see."""
        return values.squeeze(self.across) if values.shape[self.across] == 1 else values


@dataclass(frozen=True)
class Looks:
    """Where a network looks in a patch: maps [*grid] of the attention received by all places, and as seen from
    organs."""

    received: torch.Tensor
    from_organ: Mapping[str, torch.Tensor]


def patches_of(case: Case, plan: Plan, patch_size: tuple[int, int, int], most: int = 2) -> Iterator[ScanPatch]:
    """Patches around slices that show the case's organs best, at most so many; none where there is no organ."""
    volume = case.read_image()
    grid = Grid.of(volume, plan)
    image = prepare_image(volume, plan, grid)
    masks = {name: prepare_mask(mask, grid, plan) for name, mask in case.iter_masks(volume)}
    sliced = sliced_axis(patch_size)
    across = _AXIAL if sliced is None else sliced
    for level, shown in choose_slices(masks, across, most):
        middle = _middle([masks[organ] for organ in shown], across, level, patch_size)
        windows = [_window(n, size, at) for n, size, at in zip(image.shape[-3:], patch_size, middle, strict=True)]
        cut = {name: _cut(torch.from_numpy(masks[name]).float(), patch_size, windows, 0.0) for name in shown}
        at = level - windows[across][0].start + windows[across][1].start
        inside = {name: mask for name, mask in cut.items() if mask.select(across, at).any()}
        first, *more = (_cut(one, patch_size, windows, -1.0) for one in with_channels(image))
        yield ScanPatch(first, inside, across, at, plan.spacing_mm, tuple(more))


def choose_slices(masks: Mapping[str, Mask], across: int, most: int) -> list[tuple[int, tuple[str, ...]]]:
    """Slices and the organs they show: first the slice that shows most organs at their largest, then for those left."""
    others = tuple(axis for axis in range(3) if axis != across)
    areas = {name: mask.sum(axis=others) for name, mask in masks.items() if mask.any()}
    shares = {name: area / area.max() for name, area in areas.items()}
    found: list[tuple[int, tuple[str, ...]]] = []
    left = set(shares)
    while left and len(found) < most:
        level = int(np.sum([shares[name] for name in sorted(left)], axis=0).argmax())
        shown = tuple(name for name, share in shares.items() if share[level] >= _SHOWN)
        if not left & set(shown):  # organs that lie far apart add up to a slice between them: take one of them
            level = int(shares[min(left)].argmax())
            shown = tuple(name for name, share in shares.items() if share[level] >= _SHOWN)
        found.append((level, shown))
        left -= set(shown)
    return found


@torch.no_grad()
def look(network: InterOrganNetwork, patch: ScanPatch) -> Looks:
    """A network's attention in a patch."""
    device = next(network.parameters()).device
    channels = torch.stack([patch.network_view(one) for one in (patch.image, *patch.more)])
    encoded = network.encoded(channels[None].to(device))
    mean = mean_attention(network.maps_of(encoded)).float().cpu()
    grid = tuple(encoded[-1].shape[2:])
    seen = {organ: seen_from(mean[0], grid, patch.network_view(mask)) for organ, mask in patch.masks.items()}
    return Looks(mean[0].sum(0).unflatten(0, grid), seen)


def seen_from(attention: torch.Tensor, grid: Sequence[int], mask: torch.Tensor) -> torch.Tensor:
    """How much a mask [*S] attends to each place: [*grid], the mean over its voxels of their tokens' rows of Ā [N, N].

    A token is weighted by the share that the mask covers.
    """
    covered = F.interpolate(mask[None, None].float(), size=tuple(grid), mode="area")[0, 0].flatten()
    row = covered @ attention / covered.sum()
    seen: torch.Tensor = (row * len(row)).unflatten(0, tuple(grid))
    return seen


def on_plane(found: torch.Tensor, patch: ScanPatch) -> torch.Tensor:
    """A map [*grid] on the patch's slice, a few points per token, linear between their centres as in the network."""
    whole = found.unsqueeze(patch.across) if found.ndim == 2 else found
    size = [
        patch.image.shape[axis] if axis == patch.across else _SHARPNESS * count
        for axis, count in enumerate(whole.shape)
    ]
    finer = F.interpolate(whole[None, None], size=size, mode="trilinear", align_corners=False)[0, 0]
    return patch.plane(finer)


def _middle(masks: Sequence[Mask], across: int, level: int, size: Sequence[int]) -> list[int]:
    """Around which a patch shows what the masks hold in a slice, along R, A, S; the largest where not all fit."""
    planes = [mask.take(level, axis=across) for mask in masks]
    room = [n for axis, n in enumerate(size) if axis != across]
    places = np.argwhere(np.any(planes, axis=0))
    if (places.max(0) - places.min(0) >= room).any():
        places = np.argwhere(max(planes, key=np.sum))
    middle = [int(at) for at in (places.min(0) + places.max(0) + 1) // 2]
    return [*middle[:across], level, *middle[across:]]


def _window(length: int, wanted: int, middle: int) -> tuple[slice, slice]:
    """Where a patch around `middle` lies in its scan, and the scan in the patch: inside it, or around its middle."""
    common = min(length, wanted)
    start, inside = min(max(middle - wanted // 2, 0), length - common), (wanted - common) // 2
    return slice(start, start + common), slice(inside, inside + common)


def _cut(
    values: torch.Tensor, size: tuple[int, int, int], windows: Sequence[tuple[slice, slice]], around: float
) -> torch.Tensor:
    patch = torch.full(size, around)
    patch[tuple(inside for _, inside in windows)] = values[tuple(window for window, _ in windows)]
    return patch
