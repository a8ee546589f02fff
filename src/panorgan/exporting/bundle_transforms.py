"""MONAI transforms and an inferer that repeat `panorgan predict`, for the configuration of an exported bundle.

`bundle_scripts` writes this file into the bundle, where the modules of panorgan that it imports lie beside it. So the
bundle runs the same lines as panorgan, and gives the same label maps.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import nibabel as nib
import numpy as np
import torch
from monai.data.image_reader import NibabelReader
from monai.data.meta_tensor import MetaTensor
from monai.inferers.inferer import SlidingWindowInferer
from monai.transforms.transform import MapTransform
from numpy.typing import NDArray

from panorgan.data.volume import Volume
from panorgan.evaluation.postprocess import clean_label_map
from panorgan.preparation.plan import Plan
from panorgan.preparation.preprocess import Grid, prepare_image, to_scan_grid, with_channels

_THRESHOLD = 0.5
_FIRST_CHANNEL = re.compile(r"_0000(?=\.nii(\.gz)?$)")
_NUMBERED = re.compile(r"_\d{4}\.nii(\.gz)?$")


def scans_of(files: Sequence[str], channels: int) -> list[str | list[str]]:
    """Of each scan of several channels one 4-D file, or `<case>_0000`, `<case>_0001`, … in the order of the model."""
    found: list[str | list[str]] = []
    for file in files:
        if _FIRST_CHANNEL.search(file):
            found.append([_FIRST_CHANNEL.sub(f"_{number:04d}", file) for number in range(channels)])
        elif not _NUMBERED.search(file):
            found.append(file)
    return found


class Float32Reader(NibabelReader):
    """NIfTI with its scaling applied in float32, as panorgan reads it; nibabel would scale in float64 and round."""

    def _get_array_data(self, img: Any, filename: Any) -> NDArray[Any]:
        stored = img.dataobj
        slope, inter = getattr(stored, "slope", 1), getattr(stored, "inter", 0)
        if (slope, inter) == (1, 0):
            return np.asanyarray(stored)
        voxels: NDArray[Any] = stored.get_unscaled().astype(np.float32)
        voxels *= np.float32(slope)
        voxels += np.float32(inter)
        return voxels


class PrepareImaged(MapTransform):
    """A scan [C, X, Y, Z] as the network sees it, and beside it, as `<key>_grid`, what leads back to its own grid."""

    def __init__(self, keys: Any, plan: Mapping[str, Any]) -> None:
        super().__init__(keys)
        self.plan = Plan(**{name: tuple(v) if isinstance(v, list) else v for name, v in plan.items()})

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """The item with its image prepared."""
        item = dict(data)
        for key in self.key_iterator(item):
            image = item[key]
            first, *others = image.as_tensor().numpy()
            volume = Volume(first, np.asarray(image.affine, dtype=np.float64), tuple(others))
            grid = Grid.of(volume, self.plan)
            prepared = prepare_image(volume, self.plan, grid)
            item[key] = MetaTensor(with_channels(prepared), affine=torch.eye(4), meta=dict(image.meta))
            item[f"{key}_grid"] = _as_numbers(grid)
        return item


class SlicesInferer(SlidingWindowInferer):
    """Windows in the slices across an axis (0 = R, 1 = A, 2 = S), for a network of 2D images."""

    def __init__(self, axis: int, **settings: Any) -> None:
        super().__init__(**settings)
        self.axis = axis

    def __call__(self, inputs: torch.Tensor, network: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """One scan [1, C, X, Y, Z] → [1, channels, X, Y, Z]."""
        image = inputs.as_tensor() if isinstance(inputs, MetaTensor) else inputs
        slices = image[0].movedim(1 + self.axis, 0)
        probabilities: Any = super().__call__(slices, network, *args, **kwargs)
        return probabilities.movedim(0, 1 + self.axis).contiguous()[None]


class DecideLabelsd(MapTransform):
    """Probabilities [channels, X, Y, Z] → the label map [1, X, Y, Z] on the scan's own grid, 0 for background.

    Parameters
    ----------
    image_key : the image that `PrepareImaged` prepared.
    softmax : the most probable channel wins, and channel 0 is the background; otherwise organs above one half.
    organs : the organs by name; organ i has the label i + 1.
    paint_order : the places of the organs, outer before inner.
    outer : for every organ the places of those it lies inside of, over which it wins.
    postprocess : the name of a cleaning, `none` for none.
    """

    def __init__(
        self,
        keys: Any,
        image_key: str,
        softmax: bool,
        organs: Sequence[str],
        paint_order: Sequence[int],
        outer: Sequence[Sequence[int]],
        postprocess: str = "none",
    ) -> None:
        super().__init__(keys)
        self.image_key, self.softmax, self.organs = image_key, softmax, organs
        self.paint_order, self.outer, self.postprocess = paint_order, outer, postprocess

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """The item with label maps in place of probabilities."""
        item = dict(data)
        grid = _from_numbers(np.asarray(item[f"{self.image_key}_grid"], dtype=np.float64))
        for key in self.key_iterator(item):
            channels = torch.as_tensor(item[key]).cpu()
            if isinstance(channels, MetaTensor):
                channels = channels.as_tensor()
            decided = grid.turn_back(self._decided(channels, grid))
            labels = clean_label_map(self.postprocess, decided, self.organs, [self.organs[i] for i in self.paint_order])
            meta = dict(item[self.image_key].meta)
            whole = torch.from_numpy(labels[None])
            item[key] = MetaTensor(whole, affine=torch.as_tensor(grid.affine), meta=meta)
        return item

    def _decided(self, channels: torch.Tensor, grid: Grid) -> NDArray[np.uint8]:
        if self.softmax:
            best = to_scan_grid(channels[0], grid)
            labels = torch.zeros(best.shape, dtype=torch.uint8)
            for index in range(1, len(channels)):
                probability = to_scan_grid(channels[index], grid)
                labels[probability > best] = index
                best = torch.maximum(best, probability)
            return labels.numpy()
        labels = torch.zeros(grid.ras_shape, dtype=torch.uint8)
        best = torch.zeros(grid.ras_shape)
        for place in self.paint_order:
            probability = to_scan_grid(channels[place], grid)
            outer = torch.tensor([other + 1 for other in self.outer[place]], dtype=torch.uint8)
            wins = (probability >= _THRESHOLD) & ((probability > best) | torch.isin(labels, outer))
            labels[wins] = place + 1
            best = torch.where(wins, probability, best)
        return labels.numpy()


def _as_numbers(grid: Grid) -> NDArray[np.float64]:
    """A grid as 25 numbers, which MONAI can put into batches: shape, affine, box."""
    return np.array([*grid.shape, *grid.affine.ravel(), *np.ravel(grid.box)], dtype=np.float64)


def _from_numbers(numbers: NDArray[np.float64]) -> Grid:
    shape, affine, box = numbers[:3].astype(int), numbers[3:19].reshape(4, 4), numbers[19:25].astype(int).reshape(3, 2)
    sizes = tuple(int(n) for n in shape)
    spacing = Volume(np.empty(0), affine).spacing
    to_ras = nib.orientations.io_orientation(affine)
    return Grid(sizes, affine, to_ras, spacing, tuple((int(start), int(stop)) for start, stop in box))
