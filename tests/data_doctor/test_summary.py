"""Findings of one kind together, and each source in a few numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import checkups
import pytest

from panorgan.data_doctor import Severity
from panorgan.data_doctor.summary import Place, StructureCount, axis_ranges, group_findings, summarise_sources


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([], ""),
        ([(512, 512, 80)], "512 × 512 × 80"),
        ([(0.7, 0.7, 5.0), (0.9766, 0.7, 1.5)], "0.7–0.977 × 0.7 × 1.5–5"),
        ([(10, 10), (10, 10, 10)], "mixed: 2D, 3D"),
    ],
)
def test_ranges_along_each_axis(values: Sequence[Sequence[float]], words: str) -> None:
    assert axis_ranges(values) == words


def test_mixed_modalities_are_counted() -> None:
    cases = (checkups.case("north", 0), checkups.case("north", 1, modality="MR"), checkups.case("north", 2))
    (summary,) = summarise_sources(replace(checkups.healthy(), cases=cases))
    assert summary.modality == "CT (2), MR (1)"


def test_a_source_in_numbers() -> None:
    north, south = summarise_sources(checkups.sick())
    assert (north.cases, north.patients, north.layout) == (20, 20, "nnunet")
    assert north.size == "512 × 512 × 80–99"
    assert north.structures == {"liver": StructureCount(19, 0), "spleen": StructureCount(19, 1)}
    assert south.spacing_mm == "0.75 × 0.75 × 5"
    assert south.splits == {}


def test_several_scans_of_one_patient_are_one_patient() -> None:
    cases = tuple(checkups.case("north", number, patient="p", split="test") for number in range(3))
    (summary,) = summarise_sources(replace(checkups.healthy(), cases=cases))
    assert (summary.cases, summary.patients) == (3, 1)
    assert summary.splits == {"test": 3}


def test_groups_are_ordered_by_severity_then_by_how_many_they_concern() -> None:
    finding = checkups.sick().findings[0]
    rare = replace(finding, code="a-rare", severity=Severity.warning)
    many = [replace(finding, code="z-many", severity=Severity.warning, case=f"c{n}") for n in range(3)]
    bad = replace(finding, code="m-bad", severity=Severity.error)
    assert [group.code for group in group_findings([rare, *many, bad])] == ["m-bad", "z-many", "a-rare"]


def test_same_words_are_one_variant_and_a_case_counts_once() -> None:
    finding = checkups.sick().findings[0]
    again = replace(finding, structure="liver")
    other = replace(finding, why="another reason")
    (group,) = group_findings([finding, again, other])
    assert group.count == 3
    assert [variant.why for variant in group.variants] == [finding.why, "another reason"]
    assert group.places == (Place(finding.site, finding.case),)
    assert group.cases == 1
    assert group.what == finding.what
    assert group.fix == finding.fix
    (mixed,) = group_findings([finding, replace(finding, what="Something else.", fix="Another fix.")])
    assert (mixed.what, mixed.fix) == ("", "")
