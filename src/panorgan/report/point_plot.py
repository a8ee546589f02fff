"""Box plots whose points are cases: each point knows its row of the page's case table, so that it can be named.

A group of points is one path of zero-length strokes: hundreds of cases times dozens of organs stay a small file, and a
page shows them without its script.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.cbook import boxplot_stats

WIDTH, LEFT, RIGHT = 480.0, 138.0, 14.0
_TOP, _LANE, _GAP, _LINE = 6.0, 24.0, 12.0, 15.0
_TICKS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
_MANY = 80  # points of a lane; more are drawn smaller
_LETTERS = 19  # in one line of a name


@dataclass(frozen=True)
class Point:
    """One case: its value, and its row in the case table."""

    value: float
    row: int
    hollow: bool = False


@dataclass(frozen=True)
class Lane:
    """One box with its points, of one colour. `square`: external sites. `boxed`: there is a box around the points."""

    points: Sequence[Point]
    colour: str
    column: int
    square: bool = False
    boxed: bool = True


@dataclass(frozen=True)
class Band:
    """Lanes with one name."""

    name: str
    lanes: Sequence[Lane]


@dataclass(frozen=True)
class Dots:
    """Points that look alike. `path` has one move per point, `rows` their rows in the same order."""

    path: str
    rows: str
    hollow: bool


@dataclass(frozen=True)
class DrawnLane:
    """A lane in the units of the picture. `box` and `median` are paths, or empty; `dense`: of many points."""

    colour: str
    column: int
    square: bool
    dense: bool
    box: str
    median: str
    dots: tuple[Dots, ...]


@dataclass(frozen=True)
class DrawnBand:
    """A band; `lines` are those of its name, each with its height."""

    name: str
    lines: tuple[tuple[float, str], ...]
    lanes: tuple[DrawnLane, ...]


@dataclass(frozen=True)
class PointPlot:
    """A plot of values from 0 to 1. `ticks` are (x, text), `bottom` is where the axis lies."""

    height: float
    bottom: float
    ticks: tuple[tuple[float, str], ...]
    bands: tuple[DrawnBand, ...]
    alt: str
    width: float = WIDTH


def draw_points(bands: Sequence[Band], alt: str) -> PointPlot:
    """Lay out bands from top to bottom."""
    drawn, top = [], _TOP
    for band in bands:
        lines = wrapped(band.name)
        height = max(_LANE * len(band.lanes), _LINE * len(lines))
        first = top + (height - _LANE * len(band.lanes)) / 2 + _LANE / 2
        lanes = tuple(_draw_lane(lane, first + _LANE * place) for place, lane in enumerate(band.lanes))
        middle = top + height / 2 + 4.2 - _LINE * (len(lines) - 1) / 2
        drawn.append(DrawnBand(band.name, tuple((middle + _LINE * i, line) for i, line in enumerate(lines)), lanes))
        top += height + _GAP
    ticks = tuple((x_of(value), f"{value:g}") for value in _TICKS)
    return PointPlot(height=top + 34, bottom=top, ticks=ticks, bands=tuple(drawn), alt=alt)


def x_of(value: float) -> float:
    """The position of a value from 0 to 1."""
    return LEFT + value * (WIDTH - LEFT - RIGHT)


def wrapped(name: str) -> list[str]:
    """A long name in up to three lines, broken at blanks, pluses and underscores where there are any."""
    lines: list[str] = []
    rest = name
    while len(rest) > _LETTERS and len(lines) < 2:
        cut = max(rest.rfind(letter, 1, _LETTERS + 1) for letter in " +_-")
        cut = cut if cut > _LETTERS // 3 else _LETTERS
        lines.append(rest[:cut].rstrip())
        rest = rest[cut:].lstrip()
    return [*lines, rest if len(rest) <= _LETTERS else rest[: _LETTERS - 1] + "…"]


def _draw_lane(lane: Lane, middle: float) -> DrawnLane:
    box, median = _box([point.value for point in lane.points], middle) if lane.boxed and lane.points else ("", "")
    places: dict[bool, list[tuple[str, int]]] = {}
    for index, point in enumerate(lane.points):
        # Spread over the box in a fixed pattern, so that equal scores stay visible.
        y = middle + ((index * 0.382) % 1 - 0.5) * 0.7 * _LANE
        places.setdefault(point.hollow, []).append((f"M{x_of(point.value):.1f},{y:.1f}h0", point.row))
    dots = tuple(
        Dots("".join(move for move, _ in own), " ".join(str(row) for _, row in own), hollow)
        for hollow, own in sorted(places.items())
    )
    return DrawnLane(lane.colour, lane.column, lane.square, len(lane.points) > _MANY, box, median, dots)


def _box(values: Sequence[float], middle: float) -> tuple[str, str]:
    """The middle half, whiskers up to 1.5 times its width, and the median: as matplotlib draws them."""
    (stats,) = boxplot_stats(values)
    names = ("whislo", "q1", "med", "q3", "whishi")
    low, first, median, third, high = (x_of(float(stats[name])) for name in names)
    up, down, end = middle - 0.38 * _LANE, middle + 0.38 * _LANE, 0.2 * _LANE
    box = f"M{first:.1f},{up:.1f}H{third:.1f}V{down:.1f}H{first:.1f}Z"
    box += f"M{low:.1f},{middle:.1f}H{first:.1f}M{third:.1f},{middle:.1f}H{high:.1f}"
    box += "".join(f"M{x:.1f},{middle - end:.1f}v{2 * end:.1f}" for x in (low, high))
    return box, f"M{median:.1f},{up:.1f}V{down:.1f}"
