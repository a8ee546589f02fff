"""Surface distances as words, Markdown, CSV and JSON, from scores that were made by hand."""

from __future__ import annotations

import csv
import io
import json

from made_comparison import made_results

from panorgan.evaluation.comparison import ALL_ORGANS, FEDERATION
from panorgan.evaluation.distances import Distance
from panorgan.report import comparison_distances as distances
from panorgan.report import comparison_tables as tables

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
    assert section[5:] == [distances.DISTANCE_NOTE]
    assert "distances were not tested" in distances.DISTANCE_NOTE


def test_external_sites_have_a_table_of_their_own() -> None:
    lines = distances.distances_markdown(made_results())
    assert lines[0] == "Sites of the federation:"
    outside = lines[lines.index("External sites:") + 2 :]
    assert outside[0] == HEADER
    assert outside[2] == "| care\\_ful | 11.00 ± 1.41 | – | 11.00 ± 1.41 |"
    assert outside[3] == "| blind | 20.00 (1 missed) | – | 20.00 (1 missed) |"


def test_where_only_external_sites_were_scored_they_are_told_alone() -> None:
    results = made_results(inside=False, organs=("liver",))
    lines = distances.distances_markdown(results)
    assert lines[0] == "External sites:"
    assert lines[2:6] == [
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
    rows = list(csv.DictReader(io.StringIO(distances.distances_csv(made_results()))))
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


def test_words_of_a_distance() -> None:
    found = made_results().distances["care_ful", ALL_ORGANS, FEDERATION]
    assert distances.millimetres(found) == "3.83 ± 1.65"
    assert distances.millimetres(found, spread=False) == "3.83"
    assert distances.missed(found) == "1 missed"
    assert distances.spoken_distance(found, "care_ful", ALL_ORGANS, "Sites of the federation") == (
        "All organs, sites of the federation, care_ful: 3.83 ± 1.65 mm; 2 cases, 2 seeds; 1 of 8 missed"
    )
    assert distances.missed(Distance(1.0, 0.0, 2, 2, 4, 0)) == distances.missed(None) == ""
    assert distances.with_missed(None) == "–"
    assert distances.spoken_distance(None, "a", "liver", "External sites") == "Liver, external sites, a: not scored"
    never = Distance(float("nan"), float("nan"), 0, 2, 4, 4)
    assert distances.spoken_distance(never, "a", "", "External sites").endswith("missed in all 4")
