"""Events in words, as terminal and log show them."""

from __future__ import annotations

from panorgan.workflows.event_words import joined_in_words


def test_one_case_is_counted_as_one():
    sites = {
        "south": {"train_cases": 1, "annotated": {"spleen": 1, "liver": 1}},
        "north": {"train_cases": 2, "annotated": {"liver": 2}},
    }
    assert joined_in_words({"sites": sites}) == "north (2 cases: liver), south (1 case: liver, spleen)"
