"""Metrics against hand-computed numbers, against MONAI where definitions agree, and by property."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from monai.metrics import (
    DiceMetric,
    compute_average_surface_distance,
    compute_hausdorff_distance,
    compute_surface_dice,
)
from recorded_masks import blobs, recorded_masks

from panorgan.errors import ConfigError, DataError
from panorgan.evaluation.mask_pair import MaskPair
from panorgan.evaluation.metrics import METRICS, Metric, is_missed, normalised_surface_dice, score

ISOTROPIC = (1.0, 1.0, 1.0)
PERFECT = {metric.name: 1.0 if metric.better == "higher" else 0.0 for metric in METRICS.values()}


def box(shape: tuple[int, ...], *sides: tuple[int, int]) -> np.ndarray:
    """A bool array that is True inside start:stop per axis."""
    mask = np.zeros(shape, dtype=bool)
    mask[tuple(slice(start, stop) for start, stop in sides)] = True
    return mask


@pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)
def test_every_entry_says_what_its_values_do(metric: Metric) -> None:
    """In range; without a value exactly where it says, which is never for two empty masks."""
    low, high = metric.range
    for name, prediction, truth, spacing in recorded_masks():
        when = {
            "never": False,
            "one mask empty": prediction.any() != truth.any(),
            "truth empty": prediction.any() and not truth.any(),
            "prediction empty": truth.any() and not prediction.any(),
            "no background": truth.all() and not prediction.all(),
        }
        value = metric.compute(MaskPair(prediction, truth, spacing))
        assert math.isnan(value) == when[metric.undefined], name
        assert math.isnan(value) or low <= value <= high, name


def test_entries_do_not_get_in_each_others_way() -> None:
    assert all(name == metric.name for name, metric in METRICS.items())
    assert not set(METRICS) & {"model", "split", "site", "case", "organ", "missed"}
    assert len({metric.table_name for metric in METRICS.values()}) == len(METRICS)


# One voxel against one voxel, d voxels apart along one axis: every distance is d × spacing of that axis.
@pytest.mark.parametrize(("axis", "distance_mm"), [(0, 10.0), (1, 3.0), (2, 1.5)])
def test_two_voxels_are_apart_by_the_spacing_of_their_axis(axis: int, distance_mm: float) -> None:
    prediction = box((5, 5, 5), (1, 2), (1, 2), (1, 2))
    result = score(prediction, np.roll(prediction, 2, axis=axis), spacing=(5.0, 1.5, 0.75))
    assert (result["hd"], result["hd95"], result["assd"]) == pytest.approx((distance_mm,) * 3)
    assert (result["dice"], result["jaccard"], result["sensitivity"], result["rve"]) == (0, 0, 0, 0)
    assert result["specificity"] == pytest.approx(123 / 124)
    assert not is_missed(result)


def test_diagonal_distance_is_euclidean_in_mm() -> None:
    prediction = box((4, 5), (0, 1), (0, 1))
    truth = box((4, 5), (3, 4), (4, 5))
    # 3 rows of 1 mm and 4 columns of 2 mm: √(3² + 8²).
    assert score(prediction, truth, spacing=(1.0, 2.0))["hd"] == pytest.approx(math.sqrt(73))


def test_rectangle_one_column_too_wide() -> None:
    # Truth: rows 1–2 × columns 1–2 (4 pixels). Prediction: one column more, 4 mm away (6 pixels). All pixels
    # are surface.
    prediction = box((4, 5), (1, 3), (1, 4))
    truth = box((4, 5), (1, 3), (1, 3))
    result = score(prediction, truth, spacing=(1.0, 4.0))
    assert result["dice"] == pytest.approx(2 * 4 / 10)
    assert result["jaccard"] == pytest.approx(4 / 6)
    assert result["sensitivity"] == 1
    assert result["specificity"] == pytest.approx(14 / 16)
    assert result["rve"] == pytest.approx(0.5)
    # Directed distances: prediction → truth 0,0,0,0,4,4; truth → prediction 0,0,0,0.
    assert result["hd"] == pytest.approx(4)
    assert result["hd95"] == pytest.approx(4)
    assert result["assd"] == pytest.approx(8 / 10)
    assert result["nsd"] == pytest.approx(8 / 10)  # 2 mm are less than 4


def test_hd95_is_the_larger_directed_percentile_not_the_pooled_one() -> None:
    # Truth is one pixel. The prediction is that pixel and one 10 mm away: distances 0, 10 | 0.
    prediction = np.array([[True, *[False] * 9, True]])
    truth = np.array([[True, *[False] * 10]])
    result = score(prediction, truth, spacing=(1.0, 1.0))
    # 95th percentile of (0, 10) by linear interpolation is 9.5; of the pooled (0, 0, 10) it would be 9.
    assert result["hd95"] == pytest.approx(9.5)
    assert result["hd"] == pytest.approx(10)
    assert result["assd"] == pytest.approx(10 / 3)


def test_cube_shifted_by_one_slice() -> None:
    # 3×3×3 cubes, shifted by one 2.5 mm slice. Surface: 26 voxels each (all but the centre).
    prediction = box((8, 7, 7), (2, 5), (2, 5), (2, 5))
    truth = box((8, 7, 7), (3, 6), (2, 5), (2, 5))
    result = score(prediction, truth, spacing=(2.5, 1.0, 1.0))
    assert result["dice"] == pytest.approx(18 / 27)
    assert result["jaccard"] == pytest.approx(18 / 36)
    # Prediction slices 2, 3, 4 against the truth's surface in slices 3, 4, 5. Slice 2 (9 voxels) is 2.5 off.
    # Slice 3 (a ring of 8) lies on the truth's full end face. Slice 4 lies on the truth's ring, but for its
    # centre voxel, which is 1 mm from that ring. The other way round is the mirror image.
    assert result["hd"] == pytest.approx(2.5)
    assert result["hd95"] == pytest.approx(2.5)
    assert result["assd"] == pytest.approx((9 * 2.5 + 1 * 1.0) / 26)
    assert result["nsd"] == pytest.approx(17 / 26)
    tight = normalised_surface_dice(MaskPair(prediction, truth, (2.5, 1.0, 1.0)), tolerance_mm=0.5)
    assert tight == pytest.approx(16 / 26)


def test_the_image_border_is_outside_so_a_full_image_has_a_surface() -> None:
    full = np.ones((3, 3), dtype=bool)
    centre = box((3, 3), (1, 2), (1, 2))
    # The centre is no surface of the full image. Its 8 border pixels lie 1 (4×) or √2 (4×) away; back: 1.
    result = score(full, centre, spacing=(1.0, 1.0))
    assert result["assd"] == pytest.approx((4 + 4 * math.sqrt(2) + 1) / 9)
    assert result["specificity"] == 0


def test_a_distance_equal_to_the_tolerance_counts_as_matched() -> None:
    first, second = box((1, 8), (0, 1), (0, 1)), box((1, 8), (0, 1), (3, 4))
    spacing = float(np.float32(0.7))
    pair = MaskPair(first, second, (1.0, spacing))
    assert normalised_surface_dice(pair, tolerance_mm=2.1) == 1
    assert normalised_surface_dice(pair, tolerance_mm=2.09) == 0


def test_both_empty_is_a_perfect_score() -> None:
    empty = np.zeros((3, 4, 5), dtype=bool)
    assert score(empty, empty, ISOTROPIC) == PERFECT


def test_an_empty_prediction_is_a_miss() -> None:
    truth = box((3, 4, 5), (0, 2), (0, 2), (0, 2))
    result = score(np.zeros_like(truth), truth, ISOTROPIC)
    assert is_missed(result)
    assert (result["dice"], result["jaccard"], result["nsd"], result["sensitivity"]) == (0, 0, 0, 0)
    assert (result["specificity"], result["rve"]) == (1, -1)
    assert all(math.isnan(value) for value in (result["hd"], result["hd95"], result["assd"]))


def test_a_prediction_where_nothing_is_there_is_a_miss() -> None:
    prediction = box((3, 4, 5), (0, 2), (0, 2), (0, 3))
    result = score(prediction, np.zeros_like(prediction), ISOTROPIC)
    assert is_missed(result)
    assert (result["dice"], result["jaccard"], result["nsd"]) == (0, 0, 0)
    assert result["specificity"] == pytest.approx(48 / 60)
    undefined = (result["hd"], result["hd95"], result["assd"], result["sensitivity"], result["rve"])
    assert all(math.isnan(value) for value in undefined)


def test_specificity_without_any_background() -> None:
    full = np.ones((2, 2), dtype=bool)
    assert score(full, full, (1.0, 1.0))["specificity"] == 1
    assert math.isnan(score(box((2, 2), (0, 1), (0, 2)), full, (1.0, 1.0))["specificity"])


@pytest.mark.parametrize(
    ("code", "prediction", "truth", "spacing"),
    [
        ("shapes-differ", np.zeros((3, 3), bool), np.zeros((3, 4), bool), (1.0, 1.0)),
        ("shapes-differ", np.zeros((3, 3), bool), np.zeros((3, 3, 1), bool), (1.0, 1.0)),
        ("not-2d-or-3d", np.zeros(3, bool), np.zeros(3, bool), (1.0,)),
        ("not-2d-or-3d", np.zeros((1, 2, 2, 2), bool), np.zeros((1, 2, 2, 2), bool), (1.0, 1.0, 1.0, 1.0)),
        ("mask-not-bool", np.zeros((3, 3), np.uint8), np.zeros((3, 3), bool), (1.0, 1.0)),
        ("mask-not-bool", np.zeros((3, 3), bool), np.zeros((3, 3), np.float32), (1.0, 1.0)),
        ("bad-spacing", np.zeros((3, 3), bool), np.zeros((3, 3), bool), (1.0, 1.0, 1.0)),
        ("bad-spacing", np.zeros((3, 3), bool), np.zeros((3, 3), bool), (1.0, 0.0)),
        ("bad-spacing", np.zeros((3, 3), bool), np.zeros((3, 3), bool), (1.0, math.nan)),
    ],
)
def test_arrays_that_do_not_fit_are_refused(code, prediction, truth, spacing) -> None:
    with pytest.raises(DataError) as error:
        score(prediction, truth, spacing)
    assert error.value.code == code


@pytest.mark.parametrize("tolerance", [-1.0, math.nan])
def test_a_senseless_tolerance_is_refused(tolerance: float) -> None:
    mask = np.ones((2, 2), bool)
    with pytest.raises(ConfigError) as error:
        normalised_surface_dice(MaskPair(mask, mask, (1.0, 1.0)), tolerance_mm=tolerance)
    assert error.value.code == "bad-tolerance"


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("shape", "spacing"), [((9, 17, 15), (3.0, 0.8, 1.3)), ((24, 31), (0.7, 2.0))], ids=["3d", "2d"]
)
def test_agrees_with_monai(seed: int, shape: tuple[int, ...], spacing: tuple[float, ...]) -> None:
    prediction, truth = blobs(seed, shape)
    result = score(prediction, truth, spacing)
    y_pred, y = (torch.from_numpy(mask)[None, None].float() for mask in (prediction, truth))
    kwargs = {"include_background": True, "spacing": list(spacing)}

    assert result["dice"] == pytest.approx(DiceMetric()(y_pred, y).item())
    assert result["hd"] == pytest.approx(compute_hausdorff_distance(y_pred, y, **kwargs).item())
    hd95 = compute_hausdorff_distance(y_pred, y, percentile=95, **kwargs).item()
    assert result["hd95"] == pytest.approx(hd95, rel=1e-5)
    assd = compute_average_surface_distance(y_pred, y, symmetric=True, **kwargs).item()
    assert result["assd"] == pytest.approx(assd, rel=1e-5)
    # MONAI switches to sub-voxel surfaces as soon as it knows the spacing, so nsd is compared without one.
    nsd = compute_surface_dice(y_pred, y, [2.0], include_background=True).item()
    ours = score(prediction, truth, (1.0,) * len(shape))["nsd"]
    assert ours == pytest.approx(nsd)


masks_3d = hnp.arrays(bool, (4, 5, 3))
spacings = st.tuples(*[st.floats(0.3, 6.0, allow_subnormal=False)] * 3)


@settings(max_examples=60, deadline=None)
@given(masks_3d, masks_3d, spacings)
def test_overlap_and_distances_are_symmetric_and_in_range(first, second, spacing) -> None:
    forth, back = score(first, second, spacing), score(second, first, spacing)
    for name in ("dice", "jaccard", "hd", "hd95", "assd", "nsd"):
        assert forth[name] == pytest.approx(back[name], nan_ok=True)
    for name in ("dice", "jaccard", "nsd", "sensitivity", "specificity"):
        value = forth[name]
        assert math.isnan(value) or 0 <= value <= 1
    assert is_missed(forth) == is_missed(back) == (first.any() != second.any())
    assert forth["dice"] == pytest.approx(2 * forth["jaccard"] / (1 + forth["jaccard"]))
    if not is_missed(forth):
        diagonal = math.dist((0, 0, 0), np.multiply(spacing, (3, 4, 2)))
        assert 0 <= forth["hd95"] <= forth["hd"] <= diagonal + 1e-9
        assert 0 <= forth["assd"] <= forth["hd"] + 1e-9


@settings(max_examples=30, deadline=None)
@given(masks_3d, spacings)
def test_a_mask_matches_itself(mask, spacing) -> None:
    assert score(mask, mask, spacing) == PERFECT


@settings(max_examples=40, deadline=None)
@given(masks_3d, masks_3d, spacings, st.lists(st.integers(0, 3), min_size=6, max_size=6))
def test_padding_the_image_changes_nothing_but_specificity(first, second, spacing, widths) -> None:
    pad = list(zip(widths[:3], widths[3:], strict=True))
    plain = score(first, second, spacing)
    padded = score(np.pad(first, pad), np.pad(second, pad), spacing)
    del plain["specificity"], padded["specificity"]
    assert padded == pytest.approx(plain, nan_ok=True)


@settings(max_examples=30, deadline=None)
@given(masks_3d, masks_3d, spacings, st.permutations(range(3)))
def test_turning_the_image_with_its_spacing_changes_nothing(first, second, spacing, axes) -> None:
    turned = score(first.transpose(axes), second.transpose(axes), [spacing[axis] for axis in axes])
    plain = score(first, second, spacing)
    assert turned == pytest.approx(plain, nan_ok=True)
