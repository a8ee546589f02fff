"""Every test case of a run: the case table, and a box per organ whose points are its rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from panorgan.evaluation.metrics import LEADING, METRICS, further_metrics
from panorgan.evaluation.statistics import EXTERNAL_SPLIT, TEST_SPLIT
from panorgan.report.case_table import CaseTable, Column, metric_column
from panorgan.report.figures import EXTERNAL, FEDERATION
from panorgan.report.point_plot import Band, Lane, Point, PointPlot, draw_points
from panorgan.report.tables import number, title
from panorgan.workflows.run import Run
from panorgan.workflows.tables import Row

DICE = 4
"""The column of the case table that the plot shows."""
_SPLITS = {TEST_SPLIT: FEDERATION, EXTERNAL_SPLIT: EXTERNAL}


def run_cases(run: Run) -> CaseTable:
    """One row per organ and case, external sites included."""
    further = further_metrics("report", run.scores)
    columns = [
        Column("Case", role="case"),
        Column("Site", choose=True, role="site"),
        Column("Organ", choose=True, role="organ", keys={title(organ): organ for organ in run.organs}),
        Column("Label", choose=True),
        metric_column(METRICS[LEADING], 3, runs=[""]),
        *(metric_column(metric, metric.shown["report"]) for metric in further),
    ]
    rows = [
        [
            row["case"],
            row["site"],
            title(row["organ"]),
            _label(run, row),
            row[LEADING],
            *(row[metric.name] for metric in further),
        ]
        for row in _in_order(run)
    ]
    return CaseTable(columns, rows, leading=DICE, place=run.path.resolve().name)


def dice_points(run: Run) -> PointPlot | None:
    """Dice of every case, per organ, within the federation and outside; hollow where the site never labelled it."""
    if not run.scores:
        return None
    rows = _in_order(run)
    organs = [organ for organ in run.organs if any(row["organ"] == organ for row in rows)]
    bands = []
    for organ in organs:
        lanes = []
        for split, colour in _SPLITS.items():
            points = [
                Point(row[LEADING], place, not run.labelled_itself(row["site"], organ))
                for place, row in enumerate(rows)
                if (row["organ"], row["split"]) == (organ, split)
            ]
            if points:
                lanes.append(Lane(points, colour, DICE, square=split == EXTERNAL_SPLIT))
        bands.append(Band(title(organ), lanes))
    return draw_points(bands, f"Box plots of Dice per organ. {_describe(rows, organs)}")


def _in_order(run: Run) -> list[Row]:
    """All rows by site, case and organ: the order of the table."""
    place = {organ: number for number, organ in enumerate(run.organs)}
    return sorted(run.scores, key=lambda row: (row["site"], row["case"], place[row["organ"]]))


def _label(run: Run, row: Row) -> str:
    """Whether the site labels this organ in training."""
    if row["split"] == EXTERNAL_SPLIT:
        return "external site"
    return "labelled here" if run.labelled_itself(row["site"], row["organ"]) else "not labelled here"


def _describe(rows: Sequence[Row], organs: Sequence[str]) -> str:
    parts = []
    for organ in organs:
        for split, name in ((TEST_SPLIT, "federation"), (EXTERNAL_SPLIT, "external")):
            values = [row[LEADING] for row in rows if (row["organ"], row["split"]) == (organ, split)]
            if values:
                parts.append(f"{title(organ)}, {name}: median {number(float(np.median(values)))}")
    return "; ".join(parts) + "."
