"""The table of single cases and the points that refer to it."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import checkups
import made_comparison
import numpy as np
import pytest
from made_run import OUTLIER, made_run

from panorgan.evaluation.comparison import EXTERNAL
from panorgan.evaluation.metrics import METRICS
from panorgan.report import write_report
from panorgan.report.case_table import CaseTable, Column
from panorgan.report.comparison_best import best_values
from panorgan.report.comparison_cases import ComparisonCases
from panorgan.report.comparison_figures import looks
from panorgan.report.doctor_cases import doctor_cases
from panorgan.report.first_screen import last_step, next_steps, worst_organ, worst_site
from panorgan.report.point_plot import Band, Lane, Point, PointPlot, draw_points, wrapped, x_of
from panorgan.report.run_cases import DICE, dice_points, run_cases
from panorgan.report.tables import make_scores
from panorgan.workflows.run import Run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(made_run(tmp_path_factory.mktemp("made") / "run"))


def points_of(plot: PointPlot) -> dict[int, list[tuple[float, bool]]]:
    """By row of the table: where its points lie, and whether they are hollow."""
    found: dict[int, list[tuple[float, bool]]] = {}
    for band in plot.bands:
        for lane in band.lanes:
            for dots in lane.dots:
                xs = [float(x) for x in re.findall(r"M([\d.]+),", dots.path)]
                for row, x in zip(map(int, dots.rows.split()), xs, strict=True):
                    found.setdefault(row, []).append((x, dots.hollow))
    return found


# -- the data of a page --------------------------------------------------------------------------------------


def test_words_are_written_once_and_no_name_ends_the_script() -> None:
    columns = [Column("Case", role="case"), Column("Dice", digits=3, better="higher", runs=["", None])]
    table = CaseTable(columns, [["</script><b>&", 0.123456], ["ä", math.nan], ["ä", None]], leading=1, place="run")
    text = str(table.as_script())
    assert not set("<>&") & set(text)
    content = json.loads(text)
    assert content["columns"] == [
        {"name": "Case", "role": "case", "words": ["</script><b>&", "ä"]},
        {"name": "Dice", "better": "higher", "digits": 3, "runs": ["", None]},
    ]
    assert content["rows"] == [[0, 0.1235], [1, None], [1, None]]


def test_an_empty_table_has_columns() -> None:
    content = json.loads(str(CaseTable([Column("Case", role="case")], [], 0, "").as_script()))
    assert (content["rows"], content["columns"]) == ([], [{"name": "Case", "role": "case", "words": []}])


def test_a_page_of_many_scores_is_modest(tmp_path: Path) -> None:
    """A score takes less than 70 bytes: its row, its point and its share of a case's name."""
    sites = [f"hospital_{number}" for number in range(10)]
    small, large = (write_report(made_run(tmp_path / str(n), sites, cases=n), tmp_path / "cache") for n in (10, 110))
    assert large.stat().st_size - small.stat().st_size < 70 * len(sites) * 100 * 2


# -- a run ---------------------------------------------------------------------------------------------------


def test_every_score_of_a_run_is_a_row_and_a_point(run: Run) -> None:
    table, plot = run_cases(run), dice_points(run)
    assert plot is not None
    points = points_of(plot)
    assert len(table.rows) == len(run.scores) == 24
    assert sorted(points) == list(range(24))
    for row, ((x, hollow),) in points.items():
        assert x == pytest.approx(x_of(float(table.rows[row][DICE])), abs=0.06)
        assert hollow == (table.rows[row][3] != "labelled here")
    site, case, _, dice = OUTLIER
    assert [case, site, "Spleen", "labelled here", dice] in [list(row[:5]) for row in table.rows]


def test_rows_have_the_metrics_of_the_report(run: Run) -> None:
    table = run_cases(run)
    assert [column.name for column in table.columns[4:]] == ["Dice", "HD95 (mm)", "ASSD (mm)", "NSD"]
    assert table.columns[2].keys == {"Liver": "liver", "Spleen": "spleen"}
    assert table.place == "run"


def test_the_first_screen_names_the_worst_organ_and_site_and_what_to_do(run: Run) -> None:
    scores = make_scores(run)
    organ, site = worst_organ(run, scores), worst_site(scores)
    assert organ is not None
    assert site is not None
    means = {o: np.mean([r["dice"] for r in run.scores if (r["organ"], r["split"]) == (o, "test")]) for o in run.organs}
    assert (organ.name.lower(), organ.summary.mean) == min(means.items(), key=lambda item: item[1])
    sites = {s: np.mean([r["dice"] for r in run.scores if r["site"] == s]) for s in ("north", "south", "island")}
    assert (site.name, site.summary.mean) == min(sites.items(), key=lambda item: item[1])
    (step,) = next_steps(run, scores, has_baselines=False, pooled=False)
    assert step.command == "panorgan compare EXPERIMENT.yaml --methods solo,fedavg"
    assert next_steps(run, scores, has_baselines=True, pooled=False) == []
    assert "missed" in last_step(scores)


def test_one_organ_at_one_site_is_not_the_worst(tmp_path: Path) -> None:
    run = Run(made_run(tmp_path / "run", ("north", "island"), ("liver",)))
    scores = make_scores(run)
    assert worst_organ(run, scores) is None
    assert worst_site(scores) is not None  # the external one is another


# -- a comparison --------------------------------------------------------------------------------------------


def test_a_comparison_has_a_row_per_case_and_organ_with_all_methods() -> None:
    results = made_comparison.made_results()
    cases = ComparisonCases(results)
    table, plots = cases.table(), cases.plots(looks(results.plan.labels, results.plan.reference))
    assert [column.name for column in table.columns[5:]] == ["care_ful", "blind"]
    assert [list(row) for row in table.rows] == [
        ["x1", "island", "Liver", "external site", 0, 0.5, 0.25],  # blind missed it in one of two seeds
        ["c1", "north", "Liver", "labelled here", 0, 0.5, 0.5],
        ["c2", "north", "Liver", "labelled here", 0, 0.5, 0.5],
        ["c1", "north", "Spleen", "not labelled here", 0, 0.5, 0.0],
        ["c2", "north", "Spleen", "not labelled here", 0, 0.25, 0.0],
    ]
    liver = points_of(plots["liver"])
    assert {row: [x for x, _ in sorted(some)] for row, some in liver.items()} == {
        0: [x_of(0.25), x_of(0.5)],
        1: [x_of(0.5)] * 2,
        2: [x_of(0.5)] * 2,
    }
    assert [lane.square for lane in plots["liver"].bands[0].lanes] == [False, True]
    assert list(points_of(plots["spleen"])) == [3, 4]


def test_best_of_a_comparison_goes_by_each_metric() -> None:
    results = made_comparison.made_results()
    found = best_values(results)
    place = results.comparison.first_place
    assert found["best"]("spleen", place) == {"care_ful"}
    assert found["best"]("liver", place) == frozenset()  # equal
    assert found["best_metric"](METRICS["assd"], "liver", place) == {"blind"}  # 1 mm against 2.5
    assert found["best_metric"](METRICS["assd"], "liver", EXTERNAL) == frozenset()  # 11 mm, 20 mm with a miss


# -- the doctor ----------------------------------------------------------------------------------------------


def test_the_doctors_table_counts_what_was_found() -> None:
    checkup = checkups.sick()
    table = doctor_cases(checkup)
    rows = {row[0]: row for row in table.rows}
    assert len(rows) == len(checkup.cases)
    for name, row in rows.items():
        found = [finding for finding in checkup.findings if finding.case == name and finding.site == row[1]]
        assert row[5] == len(found)
        assert row[3] == (max(finding.severity for finding in found).name if found else "none")
    assert table.columns[5].runs == ["/data/north", "/data/south"]
    assert rows["south_000"][4] == 1


# -- drawing -------------------------------------------------------------------------------------------------


def test_a_box_holds_the_middle_half() -> None:
    lane = Lane([Point(value, row) for row, value in enumerate((0.2, 0.4, 0.5, 0.6, 0.8))], "#000000", 4)
    (drawn,) = draw_points([Band("Liver", [lane])], "").bands[0].lanes
    xs = [float(x) for x in re.findall(r"[MH]([\d.]+)", drawn.box)]
    assert xs[:3] == pytest.approx([x_of(0.4), x_of(0.6), x_of(0.4)], abs=0.06)
    assert min(xs) == pytest.approx(x_of(0.2), abs=0.06)
    assert max(xs) == pytest.approx(x_of(0.8), abs=0.06)
    assert drawn.median.startswith(f"M{x_of(0.5):.1f},")


def test_long_names_take_up_to_three_lines() -> None:
    assert wrapped("Liver") == ["Liver"]
    assert wrapped("flkd+local_weight=0+global_weight=1") == ["flkd+local_weight=0", "+global_weight=1"]
    assert wrapped("Left ventricular myocardium") == ["Left ventricular", "myocardium"]
    lines = wrapped("x" * 100)
    assert len(lines) == 3
    assert lines[2].endswith("…")
