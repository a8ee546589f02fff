"""Pairs of colours: one for light pages, one for dark ones, both readable."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from panorgan.report.figures import INK, LINE_COLOURS
from panorgan.report.tones import heat_scale, heat_tone, on_dark, tone

DARK_PAGE, LIGHT_PAGE = "#14191f", "#ffffff"
DARK_TEXT, LIGHT_TEXT = "#1c2733", "#e3e8ed"


def contrast(first: str, second: str) -> float:
    """As WCAG 2 has it, from 1 to 21."""

    def luminance(colour: str) -> float:
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
        return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))

    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


def test_heat_runs_from_warm_to_cool() -> None:
    assert heat_tone(0.0) == "--c:#de8c54;--c-dark:#8e4a1c"
    assert heat_tone(0.25) == "--c:#ecbe99;--c-dark:#644026"
    assert heat_tone(1.0) == "--c:#70accd;--c-dark:#1e5c80"
    assert heat_tone(math.nan) == ""
    assert heat_scale().startswith("--c:linear-gradient(to right, #de8c54, #faf0de, #70accd);--c-dark:linear-gradient(")


@pytest.mark.parametrize("value", [0.0, 0.2, 0.5, 0.8, 1.0])
def test_text_on_heat_is_readable(value: float) -> None:
    light, dark = re.findall("#[0-9a-f]{6}", heat_tone(value))
    assert contrast(light, DARK_TEXT) >= 4.5
    assert contrast(dark, LIGHT_TEXT) >= 4.5


@pytest.mark.parametrize("colour", [*LINE_COLOURS, INK])
def test_lines_stand_out_on_either_page(colour: str) -> None:
    assert contrast(colour, LIGHT_PAGE) >= 3
    assert contrast(on_dark(colour), DARK_PAGE) >= 3
    assert tone(colour) == f"--c:{colour};--c-dark:{on_dark(colour)}"


def test_black_and_white_change_places() -> None:
    assert (on_dark("#000000"), on_dark("#ffffff")) == ("#ffffff", "#000000")
    assert on_dark("#0072b2") == "#42b4f4"  # what Chromium draws for `invert(1) hue-rotate(180deg)`
