"""Learning curves and box plots of several methods, in colours that are distinguishable with any colour vision."""

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
from matplotlib.colors import to_rgb
from matplotlib.ticker import MaxNLocator

from panorgan.evaluation.comparison import Score
from panorgan.evaluation.statistics import EXTERNAL_SPLIT
from panorgan.report.figures import DASHES, INK, LINE_COLOURS, MARKERS, QUIET, Picture, dots, draw_chart
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
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=[1, 2, 5, 10]))

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


def case_boxes(scores: Mapping[str, Sequence[Score]], styles: Mapping[str, Look], organ: str) -> Picture | None:
    """Dice of every case (mean over its seeds), a box per method over the federation; external cases beside it."""
    values = {method: over_cases([s for s in some if s.organ == organ]) for method, some in scores.items()}
    values = {method: some for method, some in values.items() if some}
    if not values:
        return None
    methods = list(values)[::-1]
    names = [wrap_label(method, 20) for method in methods]

    def draw(axes: Axes) -> None:
        for place, method in enumerate(methods):
            _one_box(axes, values[method], place, styles[method])
        axes.set_yticks(range(len(methods)), names)
        axes.set_ylim(-0.6, len(methods) - 0.4)
        axes.set_xlim(-0.02, 1.02)
        axes.set_xlabel("Dice")
        axes.grid(visible=False, axis="y")

    lines = sum(max(2, name.count("\n") + 1) for name in names)
    uri = draw_chart(draw, 0.9 + 0.23 * lines, legend_columns=1)
    medians = [f"{m} {number(float(np.median(_inside(values[m]) or [math.nan])))}" for m in values]
    return Picture(uri, f"{title(organ)}: median Dice over the cases of the federation: {', '.join(medians)}.")


CaseScore = tuple[Score, float]
"""One of a case's scores (they share site and organ) and its mean over the seeds."""


def over_cases(scores: Sequence[Score]) -> list[CaseScore]:
    """One value per case: the mean over the seeds that tested it."""
    found: dict[tuple[str, str], list[Score]] = {}
    for score in scores:
        found.setdefault((score.site, score.case), []).append(score)
    return [(some[0], float(np.mean([s.dice for s in some]))) for _, some in sorted(found.items())]


def _inside(values: Sequence[CaseScore]) -> list[float]:
    return [value for score, value in values if score.split != EXTERNAL_SPLIT]


def _one_box(axes: Axes, values: Sequence[CaseScore], place: float, look: Look) -> None:
    line = {"color": look.colour, "linewidth": 1.1}
    if inside := _inside(values):
        axes.boxplot(
            [inside],
            positions=[place],
            orientation="horizontal",
            widths=0.56,
            showfliers=False,
            manage_ticks=False,
            patch_artist=True,
            boxprops={"facecolor": (*to_rgb(look.colour), 0.14), "edgecolor": look.colour, "linewidth": 1.1},
            medianprops={"color": look.colour, "linewidth": 2.4},
            whiskerprops=line,
            capprops=line,
        )
    for index, (score, value) in enumerate(values):
        # Spread over the box in a fixed pattern, so that equal scores stay visible.
        offset = ((index * 0.382) % 1 - 0.5) * 0.42
        if score.split == EXTERNAL_SPLIT:
            axes.plot(value, place + offset, "D", ms=3.8, mfc="white", mec=QUIET, mew=1.0, zorder=3)
        else:
            face = look.colour if score.labelled else "white"
            axes.plot(value, place + offset, "o", ms=3.8, mfc=face, mec=look.colour, mew=0.9, zorder=3)


def wrap_label(label: str, width: int) -> str:
    """A long name in several lines, one for each of its settings."""
    if len(label) <= width:
        return label
    return "\n".join(line for piece in re.split(r"(?=\+)", label) for line in textwrap.wrap(piece, width))
