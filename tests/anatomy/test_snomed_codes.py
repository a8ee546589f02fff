"""Every SNOMED CT code and meaning of the catalogue is one that DICOM lists."""

from collections import defaultdict

import pytest

from panorgan.anatomy import Organ, catalogue

pydicom_concepts = pytest.importorskip("pydicom.sr._concepts_dict")


@pytest.fixture(scope="module")
def meanings() -> dict[str, set[str]]:
    """All meanings of each SNOMED CT code."""
    found: dict[str, set[str]] = defaultdict(set)
    for codes in pydicom_concepts.concepts["SCT"].values():
        for value, (meaning, *_) in codes.items():
            found[value].add(meaning)
    return found


@pytest.mark.parametrize("organ", catalogue().values(), ids=catalogue().keys())
def test_code_and_meaning_belong_together(organ: Organ, meanings: dict[str, set[str]]) -> None:
    assert (organ.snomed_meaning in meanings[organ.snomed_value]) if organ.snomed_value else not organ.modifier_value
    if organ.modifier_value or organ.modifier_meaning:
        assert organ.modifier_meaning in meanings[organ.modifier_value]


def test_a_code_with_its_modifier_and_parent_names_one_organ() -> None:
    """A reader of a DICOM segmentation can tell any two organs apart."""
    keys = defaultdict(list)
    for organ in (organ for organ in catalogue().values() if organ.snomed_value):
        place = organ.parent if organ.relation == "inside" else None
        keys[organ.snomed_value, organ.modifier_value, place].append(organ.name)
    assert [names for names in keys.values() if len(names) > 1] == []


def test_a_wrong_code_would_be_noticed(meanings: dict[str, set[str]]) -> None:
    assert "Liver" not in meanings[catalogue()["spleen"].snomed_value]
    assert "00000" not in meanings
