"""Colours on light and on dark pages: every tone is a pair of CSS variables, of which the style sheet takes one."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.colors import to_hex, to_rgb

# Poor scores are warm, good ones cool: light enough for dark text, or dark enough for light text; readable in print
# and with red-green colour blindness.
_LIGHT = ((222, 140, 84), (250, 240, 222), (112, 172, 205))
_DARK = ((142, 74, 28), (58, 54, 48), (30, 92, 128))
_STOPS = (0.0, 0.5, 1.0)

# What CSS computes for `invert(1) hue-rotate(180deg)`, with which a dark page shows drawings (`style.css`).
_HALF_TURN = np.array([(-0.574, 1.430, 0.144), (0.426, 0.430, 0.144), (0.426, 1.430, -0.856)])


def tone(colour: str) -> str:
    """A line's or a dot's colour, and on dark pages what it becomes within a drawing."""
    return f"--c:{colour};--c-dark:{on_dark(colour)}"


def on_dark(colour: str) -> str:
    """The colour with its lightness turned round: dark blue becomes light blue."""
    turned = _HALF_TURN @ (1 - np.array(to_rgb(colour)))
    return to_hex(tuple(np.clip(turned, 0, 1)))


def heat_tone(value: float) -> str:
    """Background of a heat map cell; none where there is no value."""
    if math.isnan(value):
        return ""
    return f"--c:{_between(value, _LIGHT)};--c-dark:{_between(value, _DARK)}"


def heat_scale() -> str:
    """The colours of the heat map from 0 to 1, as CSS gradients."""
    light, dark = (
        f"linear-gradient(to right, {', '.join(_between(s, own) for s in _STOPS)})" for own in (_LIGHT, _DARK)
    )
    return f"--c:{light};--c-dark:{dark}"


def _between(value: float, colours: tuple[tuple[int, int, int], ...]) -> str:
    channels = (np.interp(value, _STOPS, [colour[i] for colour in colours]) for i in range(3))
    return "#" + "".join(f"{round(float(channel)):02x}" for channel in channels)
