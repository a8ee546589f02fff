"""The module table as a picture: a dot per row, with the spread over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes

from panorgan.evaluation.comparison import ALL_ORGANS, EXTERNAL, FEDERATION, Comparison, Figure
from panorgan.report.comparison_figures import Look, wrap_label
from panorgan.report.comparison_tables import over_seeds
from panorgan.report.figures import INK, QUIET, Picture, draw_chart

_NARROWEST = 0.05
"""Minimum width of the Dice axis: differences in the third digit must not look large."""
_APART = 0.16


def module_chart(comparison: Comparison, styles: Mapping[str, Look]) -> Picture | None:
    """Mean Dice of every row ± SD over seeds, first row on top; None when nothing was scored in the federation."""
    inside = {label: comparison.figure(label, ALL_ORGANS, FEDERATION) for label in comparison.methods}
    outside = {label: comparison.figure(label, ALL_ORGANS, EXTERNAL) for label in comparison.methods}
    if not any(inside.values()):
        return None
    labels = list(comparison.methods)[::-1]
    names = [wrap_label(label, 22) for label in labels]
    apart = _APART if any(outside.values()) else 0.0

    def draw(axes: Axes) -> None:
        if reference := comparison.figure(comparison.reference, ALL_ORGANS, FEDERATION):
            axes.axvline(reference.mean, color=INK, linewidth=1, linestyle=(0, (3, 3)), zorder=1)
        for height, label in enumerate(labels):
            _dot(axes, inside[label], height + apart, "o", styles[label].colour, styles[label].colour)
            _dot(axes, outside[label], height - apart, "D", QUIET, "white")
        axes.set_yticks(range(len(labels)), names)
        axes.set_ylim(-0.6, len(labels) - 0.4)
        axes.set_xlim(*_limits([figure for figure in (*inside.values(), *outside.values()) if figure]))
        axes.set_xlabel("Dice")
        axes.grid(visible=False, axis="y")

    lines = sum(max(2, name.count("\n") + 1) for name in names)
    said = [f"{label} {over_seeds(figure)}" for label, figure in inside.items() if figure]
    uri = draw_chart(draw, 0.9 + 0.2 * lines, legend_columns=1)
    return Picture(uri, f"Mean Dice in the federation: {', '.join(said)}.")


def _dot(axes: Axes, figure: Figure | None, height: float, marker: str, colour: str, face: str) -> None:
    if figure is None:
        return
    spread = None if math.isnan(figure.sd) else figure.sd
    look: dict[str, Any] = {"color": colour, "mfc": face, "mec": colour, "markersize": 6, "capsize": 3}
    axes.errorbar(figure.mean, height, xerr=spread, fmt=marker, elinewidth=1.2, zorder=3, **look)


def _limits(figures: list[Figure]) -> tuple[float, float]:
    """Both ends of the Dice axis: all bars with a margin, limited to the range of Dice."""
    spreads = [0.0 if math.isnan(figure.sd) else figure.sd for figure in figures]
    low = min(figure.mean - spread for figure, spread in zip(figures, spreads, strict=True))
    high = max(figure.mean + spread for figure, spread in zip(figures, spreads, strict=True))
    middle, half = (low + high) / 2, max(0.58 * (high - low), _NARROWEST / 2)
    return max(-0.01, middle - half), min(1.01, middle + half)
