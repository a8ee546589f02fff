"""Every test case of a comparison: a row per case and organ with the Dice of all methods, and their boxes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from panorgan.evaluation.comparison import Score
from panorgan.evaluation.metrics import LEADING, METRICS
from panorgan.evaluation.statistics import EXTERNAL_SPLIT
from panorgan.report.case_table import CaseTable, Column, metric_column
from panorgan.report.comparison_figures import Look
from panorgan.report.comparison_results import Results
from panorgan.report.figures import LINE_COLOURS
from panorgan.report.point_plot import Band, Lane, Point, PointPlot, draw_points
from panorgan.report.tables import number, title

FIRST = 5
"""The first column of Dice; one for each method follows."""
CaseKey = tuple[str, str, str]
"""Organ, site and case."""


class ComparisonCases:
    """The scores of all methods case by case, in one order; Dice is the mean over the seeds that tested a case."""

    def __init__(self, results: Results) -> None:
        self._results = results
        self._dice: dict[str, dict[CaseKey, float]] = {}
        self._first: dict[CaseKey, Score] = {}
        for method, scores in results.scores.items():
            found: dict[CaseKey, list[float]] = {}
            for score in sorted(scores, key=lambda score: score.seed):
                key = (score.organ, score.site, score.case)
                found.setdefault(key, []).append(score.dice)
                self._first.setdefault(key, score)
            self._dice[method] = {key: float(np.mean(values)) for key, values in found.items()}
        organs = list(results.comparison.organs)
        self._keys = sorted((k for k in self._first if k[0] in organs), key=lambda k: (organs.index(k[0]), k[1:]))

    def table(self) -> CaseTable:
        """One row per case and organ."""
        results = self._results
        seeds = [str(seed) for seed in results.plan.seeds]
        organs = {title(organ): organ for organ in results.comparison.organs}
        columns = [
            Column("Case", role="case"),
            Column("Site", choose=True, role="site"),
            Column("Organ", choose=True, role="organ", keys=organs),
            Column("Label", choose=True),
            Column("Seed", digits=0, hidden=True, role="run"),
            *(metric_column(METRICS[LEADING], 3, label, self._runs(label)) for label in results.plan.labels),
        ]
        rows = [
            [
                key[2],
                key[1],
                title(key[0]),
                _label(self._first[key]),
                seeds.index(str(self._first[key].seed)),
                *(self._dice.get(label, {}).get(key) for label in results.plan.labels),
            ]
            for key in self._keys
        ]
        place = results.plan.folder.resolve().name
        leading = FIRST + list(results.plan.labels).index(results.plan.reference)
        return CaseTable(columns, rows, leading, place, best=len(results.plan.labels) > 1)

    def plots(self, styles: Mapping[str, Look]) -> dict[str, PointPlot]:
        """By organ: a box per method over the federation, external cases next to it."""
        return {organ: self._plot(organ, styles) for organ in self._results.comparison.organs if self._rows_of(organ)}

    def _plot(self, organ: str, styles: Mapping[str, Look]) -> PointPlot:
        bands, medians = [], []
        for column, method in enumerate(self._results.plan.labels, start=FIRST):
            dice = self._dice.get(method, {})
            found = [(row, key) for row, key in self._rows_of(organ) if key in dice]
            inside = [Point(dice[k], row, not self._first[k].labelled) for row, k in found if not self._outside(k)]
            outside = [Point(dice[k], row, hollow=True) for row, k in found if self._outside(k)]
            lanes = [Lane(inside, styles[method].colour, column)]
            lanes += [Lane(outside, LINE_COLOURS[-1], column, square=True, boxed=False)] if outside else []
            if found:
                bands.append(Band(method, [lane for lane in lanes if lane.points]))
                median = float(np.median([point.value for point in inside])) if inside else math.nan
                medians.append(f"{method} {number(median)}")
        words = f"{title(organ)}: median Dice over the cases of the federation: {', '.join(medians)}."
        return draw_points(bands, words)

    def _rows_of(self, organ: str) -> list[tuple[int, CaseKey]]:
        return [(row, key) for row, key in enumerate(self._keys) if key[0] == organ]

    def _outside(self, key: CaseKey) -> bool:
        return self._first[key].split == EXTERNAL_SPLIT

    def _runs(self, label: str) -> list[str | None]:
        """The folders of a method's runs, seed by seed, relative to the page."""
        plan = self._results.plan
        folders = {run.seed: run.folder.path for run in plan.finished if run.entry.label == label}
        return [_below(folders[seed], plan.folder) if seed in folders else None for seed in plan.seeds]


def _below(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else path.name


def _label(score: Score) -> str:
    if score.split == EXTERNAL_SPLIT:
        return "external site"
    return "labelled here" if score.labelled else "not labelled here"
