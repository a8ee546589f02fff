"""The page's section on analyses: curvature, loss landscape and layer similarity, as tables and figures."""

from __future__ import annotations

import base64
import math
import textwrap
from dataclasses import dataclass

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.ticker import MaxNLocator

from panorgan.federation.files import write_atomically
from panorgan.report.figures import DASHES, INK, LINE_COLOURS, Picture, dots, draw_chart
from panorgan.report.tables import NOTHING, number
from panorgan.workflows.analysis_files import ALL_SITES, Analysis, PlaceCurvature, Similarity, read_analysis
from panorgan.workflows.run import Run

_LEVELS = 12
# Light enough for dark text everywhere.
_LOW_IS_DARK = ListedColormap(colormaps["Blues"](np.linspace(0.62, 0.02, 256)), "low_is_dark")
_MOST_WRITTEN = 12
"""Up to this many layers, every field of a heat map shows its number."""
_PREFIX = "data:image/svg+xml;base64,"


@dataclass(frozen=True)
class CurvatureRow:
    """One line of the table, in words."""

    place: str
    loss: str
    gradient: str
    largest: str
    ratio: str
    trace: str


@dataclass(frozen=True)
class AnalysisSection:
    """The section's content; `landscapes` and `heat_maps` by heading."""

    analysis: Analysis
    rows: tuple[CurvatureRow, ...]
    eigenvalues: Picture | None
    landscapes: dict[str, Picture]
    same_layers: Picture | None
    heat_maps: dict[str, Picture]


def analysis_section(run: Run) -> AnalysisSection | None:
    """The section of a run; None if nothing was analysed."""
    analysis = read_analysis(run)
    if analysis is None:
        return None
    return AnalysisSection(
        analysis,
        tuple(map(curvature_row, analysis.curvature)),
        eigenvalue_chart(analysis),
        landscape_charts(analysis),
        same_layer_chart(analysis),
        {pair.other: heat_map(pair) for pair in analysis.similarity if pair.kind == "run"},
    )


def write_figures(run: Run) -> list[str]:
    """Write every figure as an SVG file next to the tables, and return their names."""
    section = analysis_section(run)
    if section is None:
        return []
    pictures = {"eigenvalues": section.eigenvalues, "cka_same_layers": section.same_layers}
    pictures |= {f"landscape_{place.replace(' ', '_')}": picture for place, picture in section.landscapes.items()}
    pictures |= {f"cka_{index}": picture for index, picture in enumerate(section.heat_maps.values(), start=1)}
    names = []
    for name, picture in pictures.items():
        if picture is not None:
            names.append(f"{name}.svg")
            write_atomically(run.analysis_folder / names[-1], base64.b64decode(picture.uri.removeprefix(_PREFIX)))
    return names


def curvature_row(place: PlaceCurvature) -> CurvatureRow:
    """Numbers as text; curvatures of networks differ by orders of magnitude, so they have three digits."""
    trace = digits(place.trace)
    if math.isfinite(place.trace_standard_error):
        trace += f" ± {digits(place.trace_standard_error, 2)}"
    return CurvatureRow(
        place.place,
        number(place.loss, 3),
        digits(place.gradient_norm),
        digits(place.largest),
        digits(place.ratio),
        trace,
    )


def digits(value: float, count: int = 3) -> str:
    """`1234.5` → `1230`, `0.012345` → `0.0123`; powers of ten only where necessary."""
    if not math.isfinite(value):
        return NOTHING
    if value and not 1e-4 <= abs(value) < 1e6:
        return f"{value:.{count - 1}e}"
    decimals = count - 1 - math.floor(math.log10(abs(value))) if value else 0
    return f"{round(value, decimals):.{max(decimals, 0)}f}"


def eigenvalue_chart(analysis: Analysis) -> Picture | None:
    """The largest eigenvalues by rank, a line per place."""
    places = [place for place in analysis.curvature if place.eigenvalues]
    if not places:
        return None

    def draw(axes: Axes) -> None:
        for index, place in enumerate(places):
            ranks = range(1, len(place.eigenvalues) + 1)
            whole = place.place == ALL_SITES
            colour = INK if whole else LINE_COLOURS[(index - 1) % len(LINE_COLOURS)]
            style = "-" if whole else DASHES[(index - 1) // len(LINE_COLOURS) % len(DASHES)]
            width = 2.4 if whole else 1.4
            look = dots(place.eigenvalues)
            axes.plot(ranks, place.eigenvalues, style, color=colour, linewidth=width, label=place.place, **look)
        axes.set_xlabel("rank")
        axes.set_ylabel("eigenvalue")
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))

    words = "; ".join(f"{p.place} {', '.join(digits(value) for value in p.eigenvalues)}" for p in places)
    uri = draw_chart(draw, 3.3, legend_columns=3, entries=len(places))
    return Picture(uri, f"Largest eigenvalues of the Hessian: {words}.")


def landscape_charts(analysis: Analysis) -> dict[str, Picture]:
    """Contours of the loss per place, all with the same levels, so that they are comparable."""
    plane = analysis.landscape
    if plane is None:
        return {}
    losses = {place: np.array(rows) for place, rows in plane.losses.items()}
    known = np.concatenate([values[np.isfinite(values)] for values in losses.values()])
    levels = MaxNLocator(_LEVELS).tick_values(float(known.min()), float(known.max())) if known.size else np.arange(2)
    middle = len(plane.steps) // 2

    def chart(place: str, values: np.ndarray) -> Picture:
        def draw(axes: Axes) -> None:
            # Rows are the first direction, drawn to the right.
            shown = np.ma.masked_invalid(values.T)
            axes.contourf(plane.steps, plane.steps, shown, levels=levels, cmap=_LOW_IS_DARK)
            lines = axes.contour(plane.steps, plane.steps, shown, levels=levels, colors=INK, linewidths=0.5)
            axes.clabel(lines, fontsize=9)
            axes.plot(0, 0, "o", ms=6, mfc="white", mec=INK, mew=1.4)
            axes.set_aspect("equal")
            axes.xaxis.set_major_locator(MaxNLocator(4))
            axes.yaxis.set_major_locator(MaxNLocator(4))
            axes.grid(visible=False)
            axes.set_xlabel("first direction")
            axes.set_ylabel("second direction")

        finite = values[np.isfinite(values)]
        least, most = (number(float(bound(finite)) if finite.size else None, 2) for bound in (np.min, np.max))
        words = f"Loss landscape of {place}: {number(float(values[middle, middle]), 2)} at the model, "
        return Picture(
            draw_chart(draw, 4.4, legend_columns=1), f"{words}from {least} to {most} around it.", own_colours=True
        )

    return {place: chart(place, values) for place, values in losses.items()}


def same_layer_chart(analysis: Analysis) -> Picture | None:
    """CKA of each layer with the same layer of other models, a line per model."""
    pairs = analysis.similarity
    if not pairs:
        return None
    layers = list(dict.fromkeys(layer for pair in pairs for layer in pair.layers))

    def draw(axes: Axes) -> None:
        for index, pair in enumerate(pairs):
            known = dict(zip(pair.layers, pair.same_layer, strict=True))
            values = [known.get(layer, math.nan) for layer in layers]
            style = DASHES[index // len(LINE_COLOURS) % len(DASHES)]
            colour = LINE_COLOURS[index % len(LINE_COLOURS)]
            axes.plot(range(len(layers)), values, linestyle=style, marker="o", ms=4.5, color=colour, label=_name(pair))
        axes.set_xticks(range(len(layers)), layers, rotation=45, ha="right", rotation_mode="anchor")
        axes.set_ylim(0, 1.02)
        axes.set_ylabel("linear CKA")

    words = "; ".join(
        f"{_name(pair)}: lowest {number(min(pair.same_layer), 2)} at {pair.layers[int(np.argmin(pair.same_layer))]}"
        for pair in pairs
    )
    uri = draw_chart(draw, 3.9, legend_columns=2, entries=len(pairs), width=max(5.0, 1.5 + 0.32 * len(layers)))
    return Picture(uri, f"Similarity of the same layers in two models. {words}.")


def heat_map(pair: Similarity) -> Picture:
    """CKA of every layer with every layer of another model."""
    values, count = np.array(pair.cka), len(pair.layers)

    def draw(axes: Axes) -> None:
        axes.pcolormesh(np.ma.masked_invalid(values), cmap="Blues", vmin=0, vmax=1.4, edgecolors="white", linewidth=1)
        if count <= _MOST_WRITTEN:
            for i, j in np.ndindex(values.shape):
                axes.text(j + 0.5, i + 0.5, number(float(values[i, j]), 2), ha="center", va="center", fontsize=9)
        axes.set_xticks(np.arange(count) + 0.5, pair.layers, rotation=45, ha="right", rotation_mode="anchor")
        axes.set_yticks(np.arange(count) + 0.5, pair.layers)
        axes.invert_yaxis()
        axes.grid(visible=False)
        axes.set_ylabel("this run")
        axes.set_xlabel("\n".join(textwrap.wrap(pair.other, 40)))

    size = max(4.6, 1.8 + 0.3 * count)
    words = ", ".join(f"{layer} {number(v, 2)}" for layer, v in zip(pair.layers, pair.same_layer, strict=True))
    uri = draw_chart(draw, size, legend_columns=1, width=max(5.0, size + 0.4))
    return Picture(uri, f"Similarity of layers with {pair.other}; the same layers: {words}.", own_colours=True)


def _name(pair: Similarity) -> str:
    return pair.other if pair.kind == "run" else f"{pair.other} before averaging"
