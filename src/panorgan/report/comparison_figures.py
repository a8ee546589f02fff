"""Learning curves of several methods, in colours that are distinguishable with any colour vision."""

from __future__ import annotations

import itertools
import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from panorgan.report.figures import DASHES, INK, LINE_COLOURS, MARKERS, Picture, dots, draw_chart
from panorgan.report.tables import number, title
from panorgan.workflows.run import Run
from panorgan.workflows.run_log import RoundRecord


@dataclass(frozen=True)
class Look:
    """The style of a method in every figure. The reference is dark and thick."""

    colour: str
    dashes: Any
    marker: str
    width: float


def looks(methods: Sequence[str], reference: str) -> dict[str, Look]:
    """One style per method; the first eight differ in colour, all in marker."""
    others = [method for method in methods if method != reference]
    markers = dict(zip(methods, itertools.cycle(MARKERS), strict=False))
    found = {
        method: Look(
            LINE_COLOURS[index % len(LINE_COLOURS)],
            DASHES[index // len(LINE_COLOURS) % len(DASHES)],
            markers[method],
            1.6,
        )
        for index, method in enumerate(others)
    }
    return {m: found.get(m, Look(INK, "-", markers[m], 2.6)) for m in methods}


Curve = dict[int, list[float]]
"""Round → Dice of every seed."""


def mean_curve(runs: Mapping[str, Sequence[Run]], styles: Mapping[str, Look]) -> Picture | None:
    """Mean validation Dice against the round, one line per method; None when nothing was validated."""
    return _curves(runs, styles, "Mean over sites", lambda round_: round_.mean_dice, 2.9)


def organ_curves(
    runs: Mapping[str, Sequence[Run]], styles: Mapping[str, Look], organs: Sequence[str]
) -> dict[str, Picture]:
    """The same for each organ that two methods validate (or the only one does), unions such as both kidneys last."""
    validated = {method: _validated(seeds) for method, seeds in runs.items()}
    found = [structure for some in validated.values() for structure in sorted(some)]
    needed = min(2, sum(bool(some) for some in validated.values()))
    shown = [s for s in dict.fromkeys([*organs, *found]) if found.count(s) >= needed > 0]
    drawn = {organ: _curves(runs, styles, title(organ), partial(_organ_dice, organ=organ), 2.9) for organ in shown}
    return {organ: picture for organ, picture in drawn.items() if picture is not None}


def _organ_dice(round_: RoundRecord, organ: str) -> float:
    return round_.organ_dice(organ)


def _validated(runs: Sequence[Run]) -> set[str]:
    rounds = [round_ for run in runs for round_ in run.rounds]
    return {structure for round_ in rounds for own in (round_.validation or {}).values() for structure in own}


def _curves(
    runs: Mapping[str, Sequence[Run]],
    styles: Mapping[str, Look],
    what: str,
    dice: Callable[[RoundRecord], float],
    height: float,
) -> Picture | None:
    curves = {method: _over_seeds(seeds, dice) for method, seeds in runs.items()}
    curves = {method: curve for method, curve in curves.items() if curve}
    if not curves:
        return None

    def draw(axes: Axes) -> None:
        for method, curve in curves.items():
            rounds = sorted(curve)
            means = [float(np.mean(curve[r])) for r in rounds]
            look = styles[method]
            if any(len(values) > 1 for values in curve.values()):
                lowest, highest = [min(curve[r]) for r in rounds], [max(curve[r]) for r in rounds]
                axes.fill_between(rounds, lowest, highest, color=look.colour, alpha=0.13, linewidth=0)
            line = {"color": look.colour, "linestyle": look.dashes, "linewidth": look.width}
            axes.plot(rounds, means, label=method, **line, **dots(means, look.marker))
        axes.set_ylabel("validation Dice")
        axes.set_ylim(0, 1.02)
        axes.set_xlabel("round")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=[1, 2, 5, 10], min_n_ticks=1))

    columns = _legend_columns(list(curves))
    uri = draw_chart(draw, height, legend_columns=columns, entries=len(curves))
    ends = [f"{method} {number(float(np.mean(curve[max(curve)])))}" for method, curve in curves.items()]
    return Picture(uri, f"{what}: validation Dice at the end of training: {', '.join(ends)}.")


def _over_seeds(runs: Sequence[Run], dice: Callable[[RoundRecord], float]) -> Curve:
    """Rounds that every seed validated, so that a mean never jumps because a seed drops out."""
    found: Curve = {}
    for run in runs:
        for round_ in run.rounds:
            if not math.isnan(value := dice(round_)):
                found.setdefault(round_.number, []).append(value)
    most = max((len(values) for values in found.values()), default=0)
    return {number: values for number, values in sorted(found.items()) if len(values) == most}


def _legend_columns(labels: Sequence[str]) -> int:
    longest = max(len(label) for label in labels)
    return 3 if longest <= 14 else 2 if longest <= 24 else 1


def wrap_label(label: str, width: int) -> str:
    """A long name in several lines, one for each of its settings."""
    if len(label) <= width:
        return label
    return "\n".join(line for piece in re.split(r"(?=\+)", label) for line in textwrap.wrap(piece, width))
