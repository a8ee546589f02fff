"""Volume, mean intensity and cut-off sides, against numbers worked out by hand and by numpy."""

from __future__ import annotations

import numpy as np
import pytest

from panorgan.anatomy import Vocabulary
from panorgan.evaluation.organ_statistics import OrganStatistics, organ_statistics

VOCABULARY = Vocabulary(["liver", "liver_tumour", "spleen", "kidney_left"])
RAS = np.diag([2.0, 3.0, 5.0, 1.0])


def test_they_equal_numpy_on_the_label_map():
    random = np.random.default_rng(0)
    labels = random.integers(0, 5, size=(7, 6, 5)).astype(np.uint8)
    scan = random.normal(40, 100, size=labels.shape).astype(np.float32)
    found = organ_statistics(labels, scan, RAS, VOCABULARY)
    for organ, ids in {"liver": [1, 2], "liver_tumour": [2], "spleen": [3], "kidney_left": [4]}.items():
        mask = np.isin(labels, ids)
        assert found[organ].voxels == mask.sum()
        assert found[organ].volume_ml == pytest.approx(mask.sum() * 30 / 1000, rel=1e-12)
        assert found[organ].mean_intensity == pytest.approx(scan[mask].mean(dtype=np.float64), rel=1e-9)


def test_an_empty_organ_has_no_intensity():
    found = organ_statistics(np.zeros((2, 2, 2), np.uint8), np.ones((2, 2, 2)), RAS, VOCABULARY, ["spleen"])
    assert list(found) == ["spleen"]
    assert (found["spleen"].voxels, found["spleen"].volume_ml, found["spleen"].mean_intensity) == (0, 0.0, None)
    assert found["spleen"].cut_off == ()


# Array axes to RAS: as they are, flipped, and swapped.
LPS = np.diag([-2.0, -3.0, 5.0, 1.0])
SAR = RAS[[2, 1, 0, 3]]  # the first axis runs to S, the third to R


@pytest.mark.parametrize(
    ("affine", "corner", "sides"),
    [
        (RAS, (0, 3, 3), {"left"}),
        (RAS, (6, 6, 6), {"right", "anterior", "superior"}),
        (LPS, (0, 3, 3), {"right"}),
        (LPS, (3, 6, 3), {"posterior"}),
        (SAR, (0, 3, 3), {"inferior"}),
        (SAR, (3, 3, 6), {"right"}),
        (RAS, (3, 3, 3), set()),
    ],
)
def test_an_organ_is_cut_off_where_it_touches_the_edge(affine, corner, sides):
    labels = np.zeros((7, 7, 7), np.uint8)
    labels[corner] = 2
    found = organ_statistics(labels, np.zeros(labels.shape), affine, VOCABULARY)
    assert set(found["liver_tumour"].cut_off) == sides
    assert set(found["liver"].cut_off) == sides, "a tumour at the edge is the organ at the edge"
    assert found["spleen"].cut_off == ()


@pytest.mark.parametrize(
    ("mean", "written"),
    [(89.77796785666051, 89.78), (-3.14159, -3.14), (0.000512345, 0.0005123), (0.0, 0.0), (1234.5678, 1234.57)],
)
def test_a_file_holds_no_more_digits_than_mean_something(mean, written):
    found = OrganStatistics(22213, 22213 * 0.054, mean, ("superior",)).as_json()
    assert found == {"voxels": 22213, "volume_ml": 1199.502, "mean_intensity": written, "cut_off": ["superior"]}
