"""Outlines of masks: which pixel centres they enclose, their area, and holes joined by keyholes."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from made_predictions import fill
from scipy import ndimage

from panorgan.workflows.outputs.contours import outlines


def drawn(*rows: str) -> np.ndarray:
    return np.array([[letter == "#" for letter in row] for row in rows])


RING = drawn("#####", "#...#", "#...#", "#####")
ISLAND = drawn("#######", "#.....#", "#.###.#", "#.#.#.#", "#.###.#", "#.....#", "#######")
SIEVE = drawn("#########", "#.#.#.#.#", "#########", "#.#.###.#", "#########")
DIAGONAL = drawn("##..", "##..", "..##", "..##")


def filled(mask: np.ndarray) -> np.ndarray:
    inside = np.zeros(mask.shape, bool)
    for ring in outlines(mask):
        inside ^= fill(ring, mask.shape[::-1]).T
    return inside


def area(ring: np.ndarray) -> float:
    """By the shoelace formula; a channel of no width is passed both ways and adds nothing."""
    x, y = ring.T
    return abs(float(x @ np.roll(y, -1) - y @ np.roll(x, -1))) / 2


def test_one_pixel_is_a_diamond_around_its_centre():
    mask = np.zeros((4, 5), bool)
    mask[1, 3] = True
    (ring,) = outlines(mask)
    assert {tuple(point) for point in ring.tolist()} == {(2.5, 1), (3, 0.5), (3.5, 1), (3, 1.5)}


def test_points_lie_halfway_between_the_centres_of_neighbours():
    mask = np.random.default_rng(1).random((20, 30)) < 0.4
    points = np.concatenate(outlines(mask))
    halves = points % 1 == 0.5
    assert (halves.sum(axis=1) == 1).all(), "one coordinate is halfway, the other at a centre"
    assert ((points % 1 == 0) | halves).all()


@pytest.mark.parametrize("mask", [RING, ISLAND, SIEVE, DIAGONAL, np.ones((3, 4), bool)])
def test_filling_the_outlines_gives_the_mask_again(mask):
    np.testing.assert_array_equal(filled(mask), mask)


@pytest.mark.parametrize("share", [0.05, 0.3, 0.5, 0.7, 0.95])
def test_filling_the_outlines_gives_random_masks_again(share):
    mask = np.random.default_rng(3).random((25, 18)) < share
    np.testing.assert_array_equal(filled(mask), mask)


def test_a_hole_is_joined_to_its_outline_and_pixels_at_a_corner_are_apart():
    assert len(outlines(RING)) == 1
    assert len(outlines(ISLAND)) == 2, "the ring with its hole, and the ring inside the hole"
    assert len(outlines(SIEVE)) == 1
    assert len(outlines(DIAGONAL)) == 2
    assert outlines(np.zeros((3, 3), bool)) == []


@pytest.mark.parametrize("mask", [RING, ISLAND, SIEVE, DIAGONAL, np.random.default_rng(5).random((30, 30)) < 0.6])
def test_the_area_is_that_of_the_pixels_less_half_a_pixel_per_outline_plus_half_per_hole(mask):
    pieces = ndimage.label(mask)[1]
    holes = ndimage.label(~np.pad(mask, 1), structure=np.ones((3, 3)))[1] - 1
    assert sum(map(area, outlines(mask))) == pytest.approx(mask.sum() - 0.5 * pieces + 0.5 * holes)


def test_straight_lines_have_no_points_between_their_ends():
    (ring,) = outlines(np.ones((40, 50), bool))
    assert len(ring) == 8


def test_channels_are_passed_there_and_back_and_are_short():
    """Each joins the nearest points: the wall between two holes is one pixel wide, and outlines cut their corners."""
    (ring,) = outlines(SIEVE)
    lines = [
        tuple(sorted((tuple(a), tuple(b)))) for a, b in zip(ring.tolist(), np.roll(ring, -1, 0).tolist(), strict=True)
    ]
    twice = [line for line, count in Counter(lines).items() if count == 2]
    holes = ndimage.label(~np.pad(SIEVE, 1), structure=np.ones((3, 3)))[1] - 1
    assert len(twice) == holes
    assert max(np.hypot(*np.subtract(a, b)) for a, b in twice) <= 2**0.5
