"""The module table and its picture, from scores that were made by hand."""

from __future__ import annotations

import csv
import io
import re

import pytest
from made_ablation import SITES, made_ablation

from panorgan.evaluation.comparison import EXTERNAL, FEDERATION, Place
from panorgan.report import ablation as report
from panorgan.report import ablation_figures as figures
from panorgan.report import comparison_tables as tables
from panorgan.report.comparison_figures import looks


def test_columns_are_sites_then_external_ones_then_the_federation() -> None:
    _, results = made_ablation()
    assert report.places(results.comparison) == [*(Place("site", site) for site in (*SITES, "island")), FEDERATION]
    _, several = made_ablation(external=("island", "coast"))
    assert report.places(several.comparison)[-3:] == [Place("site", "island"), EXTERNAL, FEDERATION]
    _, none = made_ablation(external=())
    assert report.places(none.comparison) == [*(Place("site", site) for site in SITES), FEDERATION]


def test_markdown_has_ticks_means_differences_and_the_papers_figures() -> None:
    """`PL` has 0.6 and 0.62 by seed, so 0.610 ± 0.014; `PL+aRCE` is better by 0.1 in each of 18 patients."""
    lines = report.markdown_lines(*made_ablation())
    header, _, solo, plain, better, *_ = lines[2:]
    assert header == (
        "| row | PL | aRCE | WS | UA | GMT | sUSAM | north | south | west | island (external) | Federation "
        "| against PL | p (Holm) | paper |"
    )
    assert plain == (
        "| PL | ✓ |  |  |  |  |  | 0.610 ± 0.014 | 0.610 ± 0.014 | 0.610 ± 0.014 | 0.510 ± 0.014 | 0.610 ± 0.014 "
        "| reference | – | 73.07 |"
    )
    assert better.startswith("| PL+aRCE | ✓ | ✓ |  |  |  |  | 0.710 ± 0.014 |")
    assert better.endswith("| +0.100 ▲ | < 0.001 | – |")
    assert solo.startswith("| SOLO |  |  |  |  |  |  | 0.410 ")
    assert solo.endswith("| −0.200 ▼ | < 0.001 | 70.05 |")
    assert len({line.count("|") for line in lines[2:-3]}) == 1
    assert report.PAPER_NOTE in lines


def test_without_figures_of_the_paper_there_is_no_column_for_them() -> None:
    lines = report.markdown_lines(*made_ablation(paper=False))
    assert lines[2].endswith("| p (Holm) |")
    assert report.PAPER_NOTE not in lines


def test_csv_has_a_column_per_module() -> None:
    ablation, results = made_ablation()
    text = tables.scores_csv(results.comparison, lambda label: report.ticks(ablation, label))
    rows = list(csv.DictReader(io.StringIO(text)))
    assert list(rows[0])[:4] == ["method", "module_PL", "module_aRCE", "module_WS"]
    by_row = {row["method"]: [int(row[f"module_{m}"]) for m in ablation.modules] for row in rows}
    assert by_row["SOLO"] == [0, 0, 0, 0, 0, 0]
    assert by_row["PL+WS"] == [1, 0, 1, 0, 0, 0]


def test_the_picture_names_every_row_and_its_axis_holds_every_bar() -> None:
    comparison = made_ablation()[1].comparison
    picture = figures.module_chart(comparison, looks(comparison.methods, comparison.reference))
    assert picture is not None
    assert picture.uri.startswith("data:image/svg+xml;base64,")
    assert re.findall(r"(\S+) (0\.\d{3}) ± 0\.014", picture.alt)[:3] == [
        ("SOLO", "0.410"),
        ("PL", "0.610"),
        ("PL+aRCE", "0.710"),
    ]
    low, high = figures._limits(list(comparison.figures.values()))
    assert low < min(f.mean - f.sd for f in comparison.figures.values())
    assert high > max(f.mean + f.sd for f in comparison.figures.values())


def test_rows_that_hardly_differ_do_not_look_far_apart() -> None:
    ablation, results = made_ablation(gain=0.0001)
    some = [results.comparison.figure(label) for label in ("PL", "PL+aRCE")]
    low, high = figures._limits([figure for figure in some if figure])
    assert high - low == pytest.approx(0.05, rel=0.01)
    assert ablation.plan.reference == "PL"
