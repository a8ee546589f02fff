"""The slices that a preview shows."""

from __future__ import annotations

import numpy as np

from panorgan.report.preview import fullest_slice


def test_each_plane_is_where_most_of_the_organs_is():
    labels = np.zeros((6, 7, 8), np.uint8)
    labels[1, 2:5, 3:6] = 1
    labels[4, 2, 6] = 2
    assert [fullest_slice(labels, axis) for axis in range(3)] == [1, 2, 3]


def test_without_organs_it_is_the_central_one():
    assert [fullest_slice(np.zeros((6, 7, 8), np.uint8), axis) for axis in range(3)] == [3, 3, 4]
