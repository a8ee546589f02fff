"""A predicted and a true mask of one organ in one case, with the counts and surface distances that metrics share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from panorgan.errors import DataError

BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class MaskPair:
    """The input of metrics. Counts and distances are computed once, on first use.

    Attributes
    ----------
    prediction, truth : bool arrays of one shape, (H, W) or (D, H, W).
    spacing : voxel size in mm, one number per axis in array order.
    """

    prediction: BoolArray
    truth: BoolArray
    spacing: Sequence[float]

    def __post_init__(self) -> None:
        _check(self.prediction, self.truth, self.spacing)

    @cached_property
    def n_prediction(self) -> int:
        """Predicted voxels."""
        return int(np.count_nonzero(self.prediction))

    @cached_property
    def n_truth(self) -> int:
        """True voxels."""
        return int(np.count_nonzero(self.truth))

    @cached_property
    def n_both(self) -> int:
        """Voxels in both masks."""
        return int(np.count_nonzero(self.prediction & self.truth))

    @property
    def n_either(self) -> int:
        """Voxels in at least one of the masks."""
        return self.n_prediction + self.n_truth - self.n_both

    @property
    def n_voxels(self) -> int:
        """Voxels of the image."""
        return self.truth.size

    @property
    def missed(self) -> bool:
        """Exactly one of the two masks is empty."""
        return (self.n_prediction == 0) != (self.n_truth == 0)

    @cached_property
    def surface_distances(self) -> tuple[FloatArray, FloatArray]:
        """From each surface to the other, in mm: (prediction to truth, truth to prediction).

        Two empty masks are 0 mm apart. Where exactly one is empty the distance is undefined: a single NaN each.
        """
        if self.missed or not self.n_either:
            none = np.array([np.nan if self.missed else 0.0])
            return none, none
        return surface_distances(self.prediction, self.truth, self.spacing)

    @cached_property
    def pooled_distances(self) -> FloatArray:
        """The surface distances of both directions in one array."""
        return np.concatenate(self.surface_distances)


def surface_distances(
    prediction: BoolArray, truth: BoolArray, spacing: Sequence[float]
) -> tuple[FloatArray, FloatArray]:
    """Distance in mm from each surface voxel to the nearest one of the other mask: (to truth, to prediction).

    The surface is every mask voxel with a face neighbour outside the mask; beyond the image border counts as
    outside. Both masks must hold at least one voxel.
    """
    # The joint bounding box holds both surfaces, and the erosion treats what lies beyond it as outside, so
    # cropping without a margin changes no distance. It makes the transform many times faster.
    box = ndimage.find_objects((prediction | truth).view(np.uint8))[0]
    prediction_surface = _surface(prediction[box])
    truth_surface = _surface(truth[box])
    to_truth = _distance_to(truth_surface, spacing)[prediction_surface]
    to_prediction = _distance_to(prediction_surface, spacing)[truth_surface]
    return to_truth, to_prediction


def _surface(mask: BoolArray) -> BoolArray:
    return mask & ~ndimage.binary_erosion(mask, border_value=0)


def _distance_to(surface: BoolArray, spacing: Sequence[float]) -> FloatArray:
    distance: FloatArray = ndimage.distance_transform_edt(~surface, sampling=tuple(spacing))
    return distance


def _check(prediction: BoolArray, truth: BoolArray, spacing: Sequence[float]) -> None:
    if prediction.shape != truth.shape:
        raise DataError(
            f"The prediction has shape {prediction.shape} but the truth has {truth.shape}.",
            code="shapes-differ",
            why="Voxels can only be compared on one grid.",
            fix="Resample the prediction to the grid of the label before scoring.",
        )
    if prediction.ndim not in (2, 3):
        raise DataError(
            f"Masks of shape {prediction.shape} cannot be scored.",
            code="not-2d-or-3d",
            why="Metrics take one 2D or 3D mask at a time.",
            fix="Remove batch and channel axes, and score each organ on its own.",
        )
    for role, mask in (("prediction", prediction), ("truth", truth)):
        if mask.dtype != np.bool_:
            raise DataError(
                f"The {role} is {mask.dtype}, not bool.",
                code="mask-not-bool",
                why="A label map or probabilities would be scored as if every non-zero voxel were the organ.",
                fix="Pass a mask such as `labels == value` or `probability > 0.5`.",
            )
    if len(spacing) != prediction.ndim or not all(math.isfinite(s) and s > 0 for s in spacing):
        raise DataError(
            f"The spacing {tuple(spacing)} does not fit a {prediction.ndim}D mask.",
            code="bad-spacing",
            why="One positive number in mm is needed per axis.",
        )
