"""The report's section on analyses: numbers as they are in analysis.json, figures that say what they show."""

from __future__ import annotations

import base64
import math
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from panorgan.report.analyses import (
    analysis_section,
    curvature_row,
    digits,
    eigenvalue_chart,
    heat_map,
    landscape_charts,
    same_layer_chart,
    write_figures,
)
from panorgan.workflows.analysis_files import (
    ALL_SITES,
    Analysis,
    Landscape,
    PlaceCurvature,
    Similarity,
    write_analysis,
)
from panorgan.workflows.run import Run


@pytest.fixture
def analysis() -> Analysis:
    values = (12.5, 6.0, 4.0, 3.0, 2.5)
    curvature = tuple(PlaceCurvature(place, 0.75, 0.1, values, 123.4, 5.6) for place in (ALL_SITES, "north", "site<b>"))
    plane = ((3.0, 2.0, 3.0), (2.0, 1.0, 2.0), (3.0, math.nan, 3.0))
    landscape = Landscape((-1.0, 0.0, 1.0), {ALL_SITES: plane, "north": plane})
    same = Similarity("flkd (tiny)", "run", ("encoder.0", "bottleneck"), ((0.91, 0.3), (0.2, 0.42)))
    local = Similarity("north", "local", ("encoder.0", "bottleneck", "head"), ((1.0,) * 3, (1.0,) * 3, (1.0,) * 3))
    return Analysis({"settings": {"split": "validation"}}, curvature, landscape, (same, local))


def svg(uri: str) -> str:
    prefix = "data:image/svg+xml;base64,"
    assert uri.startswith(prefix)
    text = base64.b64decode(uri.removeprefix(prefix)).decode()
    ET.fromstring(text)
    return text


def test_numbers_have_so_many_digits():
    assert [digits(v) for v in (1234.5, 12.345, 0.012345, 0.0, 1.0)] == ["1230", "12.3", "0.0123", "0", "1.00"]
    assert [digits(v) for v in (1.5e7, 2e-7, math.nan)] == ["1.50e+07", "2.00e-07", "–"]
    assert digits(-4.567, 2) == "-4.6"


def test_a_row_tells_what_papers_quote(analysis):
    row = curvature_row(analysis.curvature[0])
    assert (row.loss, row.largest, row.ratio, row.trace) == ("0.750", "12.5", "5.00", "123 ± 5.6")
    bare = PlaceCurvature("north", 0.75, 0.1, (), math.nan, math.nan)
    assert (curvature_row(bare).largest, curvature_row(bare).ratio, curvature_row(bare).trace) == ("–", "–", "–")


def test_figures_say_what_they_show(analysis):
    eigenvalues = eigenvalue_chart(analysis)
    assert "north 12.5, 6.00, 4.00, 3.00, 2.50" in eigenvalues.alt
    assert "site&lt;b&gt;" in svg(eigenvalues.uri)
    planes = landscape_charts(analysis)
    assert list(planes) == [ALL_SITES, "north"]
    assert "1.00 at the model, from 1.00 to 3.00 around it" in planes["north"].alt
    svg(planes["north"].uri)
    lines = same_layer_chart(analysis)
    assert "flkd (tiny): lowest 0.42 at bottleneck" in lines.alt
    assert "north before averaging" in svg(lines.uri)
    fields = heat_map(analysis.similarity[0])
    assert "0.91" in svg(fields.uri)
    assert "bottleneck 0.42" in fields.alt


def test_what_was_not_asked_for_has_no_figure():
    bare = Analysis({}, (PlaceCurvature(ALL_SITES, 1.0, 1.0, (), math.nan, math.nan),), None, ())
    assert eigenvalue_chart(bare) is None
    assert landscape_charts(bare) == {}
    assert same_layer_chart(bare) is None


def test_a_landscape_without_a_single_number_is_still_drawn():
    """A diverged model has one."""
    empty = ((math.nan,) * 3,) * 3
    bare = Analysis({}, (), Landscape((-1.0, 0.0, 1.0), {ALL_SITES: empty}), ())
    svg(landscape_charts(bare)[ALL_SITES].uri)


def test_figures_are_written_beside_the_tables(analysis, tmp_path: Path):
    run = Run(tmp_path)
    assert write_figures(run) == []
    write_analysis(run, analysis)
    names = write_figures(run)
    assert names == [
        "eigenvalues.svg",
        "cka_same_layers.svg",
        "landscape_all_sites.svg",
        "landscape_north.svg",
        "cka_1.svg",
    ]
    for name in names:
        assert ET.fromstring((run.analysis_folder / name).read_text()).tag.endswith("svg")
    section = analysis_section(run)
    assert [row.place for row in section.rows] == [ALL_SITES, "north", "site<b>"]
    assert list(section.heat_maps) == ["flkd (tiny)"], "lines are enough for the sites' models"
