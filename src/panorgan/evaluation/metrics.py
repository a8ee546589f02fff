"""How well one predicted organ mask matches the true one: overlap, surface distances in mm, volume.

One call scores one organ of one case. An organ that is unknown in a case must not be scored; the caller
leaves it out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from panorgan.errors import ConfigError, DataError

METRICS = ("dice", "jaccard", "hd", "hd95", "assd", "nsd", "sensitivity", "specificity", "rve")

BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float64]

# Headers store the spacing as 32-bit floats: a distance equal to the tolerance may come out a hair above it.
_ROUNDING_SLACK_MM = 1e-4


@dataclass(frozen=True)
class Score:
    """The metrics of one organ in one case. Distances are in mm; NaN means not defined.

    Attributes
    ----------
    dice, jaccard : overlap, 0 to 1.
    hd : Hausdorff distance, the largest surface distance in either direction.
    hd95 : the larger of the two directed 95th percentiles (as MONAI has it; not a percentile of
        the pooled distances).
    assd : average symmetric surface distance, the mean over the distances of both directions pooled.
    nsd : normalised surface Dice, the share of both surfaces that lies within the tolerance of the other.
        Surface voxels are counted; their area is not estimated.
    sensitivity, specificity : share of true foreground / true background voxels that were predicted so.
        Specificity depends on how much background the image holds.
    rve : relative volume error, (V_pred − V_true) / V_true; negative when too little was predicted.
    missed : exactly one of the two masks is empty.
    """

    dice: float
    jaccard: float
    hd: float
    hd95: float
    assd: float
    nsd: float
    sensitivity: float
    specificity: float
    rve: float
    missed: bool


def score(prediction: BoolArray, truth: BoolArray, spacing: Sequence[float], nsd_tolerance_mm: float = 2.0) -> Score:
    """Score a predicted mask against the true one.

    Both empty: overlap, nsd and sensitivity are 1, distances and rve 0. One empty: overlap and nsd are 0,
    distances NaN, `missed` is true; rve is −1 when the prediction is empty, and NaN (like sensitivity) when
    the truth is.

    Parameters
    ----------
    prediction, truth : bool arrays of one shape, (H, W) or (D, H, W).
    spacing : voxel size in mm, one number per axis in array order.
    nsd_tolerance_mm : surface points this near to the other surface count as matched in `nsd`.
    """
    prediction, truth = np.asarray(prediction), np.asarray(truth)
    _check(prediction, truth, spacing, nsd_tolerance_mm)

    n_prediction, n_truth = int(np.count_nonzero(prediction)), int(np.count_nonzero(truth))
    n_both = int(np.count_nonzero(prediction & truth))
    n_either = n_prediction + n_truth - n_both
    n_background = truth.size - n_truth
    missed = (n_prediction == 0) != (n_truth == 0)

    if missed:
        hd = hd95 = assd = math.nan
        nsd = 0.0
    elif n_either == 0:
        hd = hd95 = assd = 0.0
        nsd = 1.0
    else:
        to_truth, to_prediction = surface_distances(prediction, truth, spacing)
        pooled = np.concatenate([to_truth, to_prediction])
        hd = float(pooled.max())
        hd95 = float(max(np.percentile(to_truth, 95), np.percentile(to_prediction, 95)))
        assd = float(pooled.mean())
        nsd = float(np.mean(pooled <= nsd_tolerance_mm + _ROUNDING_SLACK_MM))

    return Score(
        dice=2 * n_both / (n_prediction + n_truth) if n_either else 1.0,
        jaccard=n_both / n_either if n_either else 1.0,
        hd=hd,
        hd95=hd95,
        assd=assd,
        nsd=nsd,
        sensitivity=_rate(n_both, n_truth, n_prediction),
        specificity=_rate(truth.size - n_either, n_background, truth.size - n_prediction),
        rve=_relative_error(n_prediction, n_truth),
        missed=missed,
    )


def dice(prediction: BoolArray, truth: BoolArray) -> float:
    """Dice alone, for the validation of every round; 1 when both masks are empty."""
    total = int(np.count_nonzero(prediction)) + int(np.count_nonzero(truth))
    return 2 * int(np.count_nonzero(prediction & truth)) / total if total else 1.0


def surface_distances(
    prediction: BoolArray, truth: BoolArray, spacing: Sequence[float]
) -> tuple[FloatArray, FloatArray]:
    """Distance in mm from each surface voxel to the nearest one of the other mask: (to truth, to prediction).

    The surface is every mask voxel with a face neighbour outside the mask; beyond the image border counts as
    outside. Both masks must hold at least one voxel.
    """
    # The joint bounding box holds both surfaces, and the erosion takes what lies beyond it as outside, so
    # cropping without any margin changes no distance. It makes the transform many times faster.
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


def _rate(n_hit: int, n_true: int, n_predicted: int) -> float:
    """Hits over true voxels; with nothing to hit, 1 when nothing was predicted and undefined otherwise."""
    if n_true:
        return n_hit / n_true
    return math.nan if n_predicted else 1.0


def _relative_error(n_prediction: int, n_truth: int) -> float:
    if n_truth:
        return (n_prediction - n_truth) / n_truth
    return math.nan if n_prediction else 0.0


def _check(prediction: BoolArray, truth: BoolArray, spacing: Sequence[float], nsd_tolerance_mm: float) -> None:
    if prediction.shape != truth.shape:
        raise DataError(
            f"The prediction has shape {prediction.shape} but the truth has {truth.shape}.",
            why="Voxels can only be compared on one grid.",
            fix="Resample the prediction to the grid of the label before scoring.",
        )
    if prediction.ndim not in (2, 3):
        raise DataError(
            f"Masks of shape {prediction.shape} cannot be scored.",
            why="Metrics take one 2D or 3D mask at a time.",
            fix="Remove batch and channel axes, and score each organ on its own.",
        )
    for role, mask in (("prediction", prediction), ("truth", truth)):
        if mask.dtype != np.bool_:
            raise DataError(
                f"The {role} is {mask.dtype}, not bool.",
                why="A label map or probabilities would be scored as if every non-zero voxel were the organ.",
                fix="Pass a mask such as `labels == value` or `probability > 0.5`.",
            )
    if len(spacing) != prediction.ndim or not all(math.isfinite(s) and s > 0 for s in spacing):
        raise DataError(
            f"The spacing {tuple(spacing)} does not fit a {prediction.ndim}D mask.",
            why="One positive number in mm is needed per axis.",
        )
    if not nsd_tolerance_mm >= 0:
        raise ConfigError(
            f"The surface Dice tolerance is {nsd_tolerance_mm} mm.",
            fix="Use zero or a positive number of mm.",
        )
