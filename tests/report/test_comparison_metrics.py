"""Metrics besides Dice as words, Markdown, CSV and JSON, from scores that were made by hand."""

from __future__ import annotations

import csv
import io
import json

from made_comparison import made_results

from panorgan.evaluation.comparison import ALL_ORGANS, FEDERATION
from panorgan.evaluation.metric_means import MetricMean
from panorgan.evaluation.metrics import METRICS
from panorgan.report import comparison_metrics as metrics
from panorgan.report import comparison_tables as tables

ASSD = METRICS["assd"]

HEADER = "| method | Liver | Spleen | **All organs** |"


def test_markdown_tells_means_and_what_was_missed() -> None:
    text = tables.markdown(made_results(external=False))
    section = text.split("## Average surface distance in mm\n\n")[1].split("\n\n## ")[0].splitlines()
    assert section[:4] == [
        HEADER,
        "| --- | ---: | ---: | ---: |",
        "| care\\_ful | 2.50 ± 0.71 | 5.50 ± 2.12 (1 missed) | 3.83 ± 1.65 (1 missed) |",
        "| blind | 1.00 ± 0.00 | – (4 missed) | 1.00 ± 0.00 (4 missed) |",
    ]
    assert section[5:] == [metrics.note(ASSD)]
    assert "lower is better" in metrics.note(ASSD)
    assert "ASSD was not tested" in metrics.note(ASSD)


def test_external_sites_have_a_table_of_their_own() -> None:
    lines = metrics.metric_markdown(made_results(), ASSD)
    assert lines[2] == "Sites of the federation:"
    outside = lines[lines.index("External sites:") + 2 :]
    assert outside[0] == HEADER
    assert outside[2] == "| care\\_ful | 11.00 ± 1.41 | – | 11.00 ± 1.41 |"
    assert outside[3] == "| blind | 20.00 (1 missed) | – | 20.00 (1 missed) |"


def test_where_only_external_sites_were_scored_they_are_told_alone() -> None:
    results = made_results(inside=False, organs=("liver",))
    lines = metrics.metric_markdown(results, ASSD)
    assert lines[2] == "External sites:"
    assert lines[4:8] == [
        "| method | Liver | **All organs** |",
        "| --- | ---: | ---: |",
        "| care\\_ful | 11.00 ± 1.41 | 11.00 ± 1.41 |",
        "| blind | 20.00 (1 missed) | 20.00 (1 missed) |",
    ]
    assert "Sites of the federation:" not in lines
    text = tables.markdown(results)
    assert "## Federation" not in text
    assert "| blind | 0.250 ± 0.354 | −0.250 |" in text, "against the reference, at external sites"


def test_csv_has_every_figure() -> None:
    rows = list(csv.DictReader(io.StringIO(metrics.metric_csv(made_results(), ASSD))))
    by_key = {(row["method"], row["organ"], row["place"], row["site"]): row for row in rows}
    assert list(rows[0])[:5] == ["method", "organ", "place", "site", "mean"]
    assert len(by_key) == len(rows) == len(made_results().comparison.figures)
    spleen = by_key["care_ful", "spleen", "federation", ""]
    assert (float(spleen["mean"]), spleen["seeds"], spleen["cases"], spleen["missed"]) == (5.5, "2", "2", "1")
    never = by_key["blind", "spleen", "site", "north"]
    assert (never["mean"], never["sd"], never["scores"], never["missed"]) == ("", "", "4", "4")
    assert float(by_key["care_ful", "all", "external", ""]["mean"]) == 11.0


def test_json_has_every_figure() -> None:
    content = json.loads(json.dumps(tables.as_json(made_results()), allow_nan=False))
    found = {(d["method"], d["organ"], d["place"], d["site"]): d for d in content["distances"]}
    assert len(found) == len(content["figures"])
    liver = found["care_ful", "liver", "federation", ""]
    assert (liver["mean"], liver["seeds"], liver["cases"], liver["missed"]) == (2.5, 2, 2, 0)
    never = found["blind", "spleen", "federation", ""]
    assert (never["mean"], never["sd"], never["seeds"], never["missed"]) == (None, None, 0, 4)
    assert found["care_ful", "all", "external", ""]["mean"] == 11.0


def test_words_of_a_mean() -> None:
    found = made_results().means["assd"]["care_ful", ALL_ORGANS, FEDERATION]
    assert metrics.metric_mean(found, ASSD) == "3.83 ± 1.65"
    assert metrics.metric_mean(found, ASSD, spread=False) == "3.83"
    assert metrics.left_out(found, ASSD) == "1 missed"
    assert metrics.spoken_mean(found, ASSD, "care_ful", ALL_ORGANS, "Sites of the federation") == (
        "All organs, sites of the federation, care_ful: 3.83 ± 1.65 mm; 2 cases, 2 seeds; 1 of 8 missed"
    )
    assert metrics.left_out(MetricMean(1.0, 0.0, 2, 2, 4, 0), ASSD) == metrics.left_out(None, ASSD) == ""
    assert metrics.with_left_out(None, ASSD) == "–"
    assert metrics.spoken_mean(None, ASSD, "a", "liver", "External sites") == "Liver, external sites, a: not scored"
    never = MetricMean(float("nan"), float("nan"), 0, 2, 4, 4)
    assert metrics.spoken_mean(never, ASSD, "a", "", "External sites").endswith("missed in all 4")
