"""Strip plots of the doctor's page: one dot per case, so that outliers are visible."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.ticker import LogLocator, MaxNLocator

from panorgan.anatomy import catalogue
from panorgan.data_doctor import CaseFacts, Checkup, Severity
from panorgan.data_doctor.summary import short_number
from panorgan.report.thumbnails import colour_of

_FEWEST = 3  # fewer dots are read faster as numbers
_LANES = 5
_MOST_ROWS = 24
_WIDE = 20  # from this ratio on, small values would all lie on the left end
_EQUAL = 1e-3  # closer values are equal but for rounding, which a plot would magnify
_PLAIN = "#2b6c94"


@dataclass(frozen=True)
class Dot:
    """One case: `x` and `lane` from 0 to 1; `marked` where the case has an error or a warning; `row` in
    the case table."""

    x: float
    lane: float
    marked: bool
    spoken: str
    row: int = 0


@dataclass(frozen=True)
class StripRow:
    """One line of dots: a site, or an organ."""

    name: str
    colour: str
    dots: tuple[Dot, ...]


@dataclass(frozen=True)
class Strip:
    """One plot. `ticks` are (x from 0 to 1, text)."""

    title: str
    words: str
    ticks: tuple[tuple[float, str], ...]
    rows: tuple[StripRow, ...]


Values = Mapping[str, Sequence[tuple[CaseFacts, float]]]
"""By the name of a row: cases with their value."""


def make_strips(checkup: Checkup, title_of: Callable[[str], str]) -> list[Strip]:
    """Voxel size and brightness per site, volume per organ; plots with too few cases are left out."""
    row_of = {(case.site, case.case): row for row, case in enumerate(checkup.cases)}
    bad = {(f.site, f.case) for f in checkup.findings if f.severity >= Severity.warning}
    sites = [source.site for source in checkup.sources]

    def per_site(value: Callable[[CaseFacts], float]) -> Values:
        return {site: [(case, value(case)) for case in checkup.cases if case.site == site] for site in sites}

    volumes: dict[str, list[tuple[CaseFacts, float]]] = {}
    for case in checkup.cases:
        for structure in case.structures:
            volumes.setdefault(structure.name, []).append((case, structure.volume_ml))
    order = {name: place for place, name in enumerate(catalogue())}
    volumes = dict(sorted(volumes.items(), key=lambda item: order.get(item[0], len(order))))
    plots = [
        _strip("Longest voxel side (mm)", "", per_site(_voxel_side), bad, row_of),
        _strip("Median intensity", "Over the whole scan, air included.", per_site(_median), bad, row_of),
        _strip("Volume (ml)", "Empty masks are left out.", _without_empty(volumes), bad, row_of, title_of=title_of),
    ]
    return [plot for plot in plots if plot is not None]


def _voxel_side(case: CaseFacts) -> float:
    return max(case.spacing_mm) if case.spacing_mm else math.nan


def _median(case: CaseFacts) -> float:
    return case.intensity.get("median", math.nan)


def _without_empty(values: Values) -> Values:
    return {name: [(case, value) for case, value in own if value > 0] for name, own in values.items()}


def _strip(
    title: str,
    words: str,
    values: Values,
    bad: set[tuple[str, str]],
    row_of: Mapping[tuple[str, str], int],
    title_of: Callable[[str], str] | None = None,
) -> Strip | None:
    """One plot; None if there is nothing to compare: too few dots, or equal values."""
    kept = {name: [(case, value) for case, value in own if math.isfinite(value)] for name, own in values.items()}
    kept = {name: own for name, own in list(kept.items())[:_MOST_ROWS] if own}
    numbers = [value for own in kept.values() for _, value in own]
    if len(numbers) < _FEWEST or math.isclose(min(numbers), max(numbers), rel_tol=_EQUAL):
        return None
    log = min(numbers) > 0 and max(numbers) > _WIDE * min(numbers)
    place, ticks = _scale(numbers, log)
    rows = []
    for name, own in kept.items():
        dots = tuple(
            Dot(
                place(value),
                (number % _LANES + 0.5) / _LANES,
                (case.site, case.case) in bad,
                f"{case.case}: {short_number(value)}",
                row_of[case.site, case.case],
            )
            for number, (case, value) in enumerate(own)
        )
        rows.append(StripRow(title_of(name) if title_of else name, colour_of(name) if title_of else _PLAIN, dots))
    return Strip(title, f"{words} Logarithmic scale.".strip() if log else words, ticks, tuple(rows))


def _scale(numbers: Sequence[float], log: bool) -> tuple[Callable[[float], float], tuple[tuple[float, str], ...]]:
    """Where a value lies from 0 to 1, and the ticks; the ticks around the data are the ends of the axis."""
    low, high = min(numbers), max(numbers)
    locator = LogLocator() if log else MaxNLocator(6)
    marks = [float(mark) for mark in locator.tick_values(low, high) if mark > 0 or not log]
    first = max((mark for mark in marks if mark <= low), default=low)
    last = min((mark for mark in marks if mark >= high), default=high)
    convert: Callable[[float], float] = math.log10 if log else float

    def place(value: float) -> float:
        return (convert(value) - convert(first)) / (convert(last) - convert(first))

    return place, tuple((place(mark), short_number(mark)) for mark in marks if first <= mark <= last)
