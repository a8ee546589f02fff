"""Curves and bars, drawn by matplotlib into SVG that is embedded in the page."""

from __future__ import annotations

import base64
import io
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from panorgan.anatomy import catalogue
from panorgan.report.tables import duration, number, plural, size, title
from panorgan.workflows.run import Run

INK, QUIET = "#1c2733", "#8a949e"
FEDERATION, EXTERNAL = "#2b6c94", "#b0662a"

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: small, sharp, searchable
    "svg.hashsalt": "panorgan",  # the same run gives the same bytes
    "text.parse_math": False,  # a dollar sign in a site's name is a dollar sign
    "font.family": "DejaVu Sans",  # comes with matplotlib; the page puts the reader's own fonts first
    "font.size": 11,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": QUIET,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e9ec",
    "grid.linewidth": 0.8,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 10,
}
LINE_COLOURS = ("#0072b2", "#d55e00", "#00805e", "#a8477f", "#5b4a9c", "#8f7000", "#3f8fc0", "#59636e")
DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))
MARKERS = "osD^vPX*<>ph"
_PHASES = {
    "sites": ("training at the sites", "#2b6c94"),
    "aggregate": ("aggregation", "#d08c3f"),
    "validate": ("validation at the sites", "#8fbcd4"),
    "checkpoint": ("checkpoint", "#6d6a8a"),
}
PHASE_NAMES = {phase: name for phase, (name, _) in _PHASES.items()}
"""Names of the parts of a round on the page."""

_WIDTH = 5.0  # inches; scaled to the column on a wide screen, still legible on a telephone
_FONTS = b"'Inter', 'Segoe UI', system-ui, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"


@dataclass(frozen=True)
class Picture:
    """An image for the page, and its text alternative.

    `own_colours`: its colours have a meaning, so that a dark page must not change them.
    """

    uri: str
    alt: str
    own_colours: bool = False


def loss_curve(run: Run) -> Picture | None:
    """Training loss of every site against the round; None when no loss was logged."""
    sites = sorted({site for round_ in run.rounds for site in round_.losses})
    if not sites:
        return None
    numbers = [round_.number for round_ in run.rounds]
    ends: list[str] = []

    def draw(axes: Axes) -> None:
        for index, site in enumerate(sites):
            values = [round_.losses.get(site, math.nan) for round_ in run.rounds]
            style = DASHES[index // len(LINE_COLOURS) % len(DASHES)]
            colour = LINE_COLOURS[index % len(LINE_COLOURS)]
            axes.plot(numbers, values, linestyle=style, color=colour, label=site, **dots(values))
            known = [value for value in values if math.isfinite(value)] or [math.nan]
            ends.append(f"{site} from {number(known[0])} to {number(known[-1])}")
        axes.set_ylabel("training loss")
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
        _finish_rounds(axes, run)

    uri = draw_chart(draw, 3.5, legend_columns=3, entries=len(sites))
    return Picture(uri, f"Training loss over {plural(len(numbers), 'round')}: {'; '.join(ends)}.")


def dice_curve(run: Run) -> Picture | None:
    """Validation Dice per organ and the mean that selects the model; None when nothing was validated."""
    rounds = [round_ for round_ in run.rounds if not math.isnan(round_.mean_dice)]
    if not rounds:
        return None
    numbers = [round_.number for round_ in rounds]
    organs = _validated_organs(run)
    means = [round_.mean_dice for round_ in rounds]

    def draw(axes: Axes) -> None:
        for organ, marker in zip(organs, itertools.cycle(MARKERS), strict=False):
            values = [round_.organ_dice(organ) for round_ in rounds]
            colour = readable_on_white(catalogue()[organ].colour)
            axes.plot(numbers, values, color=colour, linewidth=1.2, label=title(organ), **dots(values, marker))
        axes.plot(numbers, means, color=INK, linewidth=2.6, label="Mean", **dots(means))
        axes.set_ylabel("validation Dice")
        axes.set_ylim(0, 1.02)
        _finish_rounds(axes, run)

    uri = draw_chart(draw, 3.5, legend_columns=3, entries=len(organs) + 1)
    best = max(range(len(means)), key=lambda i: means[i])
    alt = f"Mean validation Dice goes from {number(means[0])} in round {numbers[0]} to {number(means[-1])} in "
    alt += f"round {numbers[-1]}; the highest is {number(means[best])} in round {numbers[best]}. At the end: "
    last = {title(organ): rounds[-1].organ_dice(organ) for organ in organs}
    alt += ", ".join(f"{name} {number(value)}" for name, value in last.items()) + "."
    return Picture(uri, alt)


def time_bars(run: Run) -> Picture | None:
    """Seconds per round, stacked by phase."""
    if not run.rounds:
        return None
    phases = {p: style for p, style in _PHASES.items() if any(p in r.seconds for r in run.rounds)}

    def draw(axes: Axes) -> None:
        layers = [[r.seconds.get(phase, 0.0) for r in run.rounds] for phase in phases]
        _stack(axes, run, layers, list(phases.values()))
        axes.set_ylabel("seconds")

    total = sum(sum(r.seconds.values()) for r in run.rounds) / len(run.rounds)
    uri = draw_chart(draw, 3.3, legend_columns=2, entries=len(phases))
    return Picture(uri, f"Time per round by phase; {duration(total)} on average.")


def traffic_bars(run: Run) -> Picture | None:
    """Megabytes per round in both directions."""
    if not any(r.bytes_sent or r.bytes_received for r in run.rounds):
        return None

    def draw(axes: Axes) -> None:
        sent = [r.bytes_sent / 1e6 for r in run.rounds]
        received = [r.bytes_received / 1e6 for r in run.rounds]
        styles = [("from server to sites", "#8fbcd4"), ("from sites to server", "#2b6c94")]
        _stack(axes, run, [sent, received], styles)
        axes.set_ylabel("megabytes")

    total = sum(r.bytes_sent + r.bytes_received for r in run.rounds) / len(run.rounds)
    uri = draw_chart(draw, 3.3, legend_columns=2, entries=2)
    return Picture(uri, f"Traffic per round in both directions; {size(total)} on average.")


def readable_on_white(colour: str) -> str:
    """The colour, darkened until a line of it stands out on white (contrast of 3 to 1)."""
    red, green, blue = to_rgb(colour)
    while 1.05 / (_luminance((red, green, blue)) + 0.05) < 3.0:
        red, green, blue = 0.95 * red, 0.95 * green, 0.95 * blue
    return to_hex((red, green, blue))


def _luminance(rgb: tuple[float, float, float]) -> float:
    """Relative luminance as in WCAG 2."""
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in rgb]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def draw_chart(
    draw: Callable[[Axes], None],
    height: float,
    legend_columns: int,
    entries: int = 0,
    width: float = _WIDTH,
) -> str:
    """Draw one chart with its legend below (none without entries); a data URI."""
    with matplotlib.rc_context(_STYLE):
        lines = math.ceil(entries / legend_columns)
        figure = Figure(figsize=(width, height + 0.22 * lines), layout="constrained")
        draw(figure.add_subplot())
        if lines:
            below = {"loc": "outside lower center", "ncols": legend_columns, "handlelength": 1.8, "columnspacing": 1.2}
            figure.legend(**below)
        file = io.BytesIO()
        # No date, no creator: nothing in the file that is not in the run.
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    # Laid out for a wide font that every matplotlib has, so that the reader's own, as in the text, fits too.
    svg = file.getvalue().replace(b"'DejaVu Sans'", _FONTS)
    return "data:image/svg+xml;base64," + base64.b64encode(svg).decode()


def dots(values: Sequence[float], marker: str = "o") -> dict[str, Any]:
    """Markers distinguish lines without colour; about a dozen per line are enough."""
    return {"marker": marker, "markersize": 4.5, "markevery": max(1, len(values) // 12)}


def _finish_rounds(axes: Axes, run: Run) -> None:
    """Whole rounds below, a line at the delivered one, and stage names when there are several stages."""
    first, last = run.rounds[0].number, run.rounds[-1].number
    margin = max(0.5, 0.02 * (last - first))
    axes.set_xlim(first - margin, last + margin)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=[1, 2, 5, 10], min_n_ticks=1))
    axes.set_xlabel("round")
    if run.delivered_round is not None:
        axes.axvline(run.delivered_round, color=INK, linewidth=1, linestyle=(0, (3, 3)), zorder=1)
        late = run.delivered_round > (first + last) / 2
        axes.annotate(
            f"delivered: round {run.delivered_round} ",
            (run.delivered_round, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(-3 if late else 3, 3),
            textcoords="offset points",
            ha="right" if late else "left",
            va="bottom",
            fontsize=9.5,
        )
    stages = list(dict.fromkeys(round_.stage for round_ in run.rounds))
    for stage in stages[1:]:
        start = next(round_.number for round_ in run.rounds if round_.stage == stage)
        axes.axvline(start - 0.5, color=QUIET, linewidth=1)
        axes.annotate(stage, (start - 0.4, 0.02), xycoords=("data", "axes fraction"), fontsize=9.5, color=QUIET)


def _validated_organs(run: Run) -> list[str]:
    """Structures that some round validated, the vocabulary first."""
    found = {s for r in run.rounds for scores in (r.validation or {}).values() for s in scores}
    return [organ for organ in run.vocabulary if organ in found] + sorted(found - set(run.vocabulary))


def _stack(axes: Axes, run: Run, layers: Sequence[Sequence[float]], styles: Sequence[tuple[str, str]]) -> None:
    """Bars on bars, one per round: one shape per layer, so that a thousand rounds stay a small file."""
    first, last = run.rounds[0].number, run.rounds[-1].number
    places = [round_.number - first for round_ in run.rounds]
    base = np.zeros(last - first + 1)
    edges = np.arange(first, last + 2) - 0.5
    for layer, (name, colour) in zip(layers, styles, strict=True):
        heights = np.zeros_like(base)
        heights[places] = layer
        axes.stairs(base + heights, edges, baseline=base, fill=True, color=colour, label=name)
        base = base + heights
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=[1, 2, 5, 10], min_n_ticks=1))
    axes.set_xlabel("round")
