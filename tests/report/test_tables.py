"""Numbers as words and colours."""

from __future__ import annotations

from panorgan.evaluation.statistics import summarise
from panorgan.report.figures import readable_on_white
from panorgan.report.tables import duration, interval, mean_sd, plural, size, spell_number


def test_words_for_numbers() -> None:
    assert size(999) == "999 B"
    assert size(1_500_000) == "1.5 MB"
    assert size(2_340_000_000) == "2.3 GB"
    assert [duration(s) for s in (0, 0.001, 0.42, 59, 200, 18_720)] == [
        "0 s",
        "under 0.01 s",
        "0.42 s",
        "59 s",
        "3 min 20 s",
        "5 h 12 min",
    ]
    assert (plural(1, "site"), plural(1200, "case")) == ("1 site", "1,200 cases")
    assert (spell_number(7), spell_number(13)) == ("seven", "13")


def test_summaries_in_words() -> None:
    one = summarise([0.5])
    assert (mean_sd(one), interval(one)) == ("0.500", "–")
    assert mean_sd(summarise([0.5, 0.7])) == "0.600 ± 0.141"
    assert mean_sd(None) == "–"


def test_pale_lines_are_darkened_and_dark_ones_kept() -> None:
    assert readable_on_white("#b2182b") == "#b2182b"
    assert readable_on_white("#f0e442") != "#f0e442"
