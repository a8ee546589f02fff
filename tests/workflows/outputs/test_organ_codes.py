"""How organs are coded: every organ of the catalogue has a code, and is found again by it."""

from __future__ import annotations

from collections import Counter

import pytest
from pydicom.dataset import Dataset

from panorgan.anatomy import OwnOrgan, catalogue, declare_organs, find_organ
from panorgan.anatomy.catalogue import built_in, remove_added
from panorgan.data.dicom_seg import segment_name
from panorgan.workflows.outputs.organ_codes import PRIVATE_SCHEME, Coding, codes_of, rgb


def segment(name: str) -> Dataset:
    """A segment as the writers describe it."""
    codes, described = codes_of(name), Dataset()
    described.SegmentNumber, described.SegmentLabel = 1, codes.label
    described.SegmentedPropertyTypeCodeSequence = [item(codes.type)]
    if codes.modifier:
        described.SegmentedPropertyTypeCodeSequence[0].SegmentedPropertyTypeModifierCodeSequence = [
            item(codes.modifier)
        ]
    if codes.region:
        described.AnatomicRegionSequence = [item(codes.region)]
        if codes.region_modifier:
            described.AnatomicRegionSequence[0].AnatomicRegionModifierSequence = [item(codes.region_modifier)]
    return described


def item(code: Coding) -> Dataset:
    coded = Dataset()
    setattr(coded, "CodeValue" if code.is_short else "LongCodeValue", code.value)
    coded.CodingSchemeDesignator, coded.CodeMeaning = code.scheme, code.meaning
    return coded


@pytest.mark.parametrize("name", built_in())
def test_every_organ_is_found_again_by_its_segment(name):
    assert find_organ(segment_name(segment(name))).name == name


def test_codes_tell_organs_apart():
    whole = Counter(
        (c.type.value, c.modifier and c.modifier.value, c.region and c.region.value, c.region_modifier)
        for c in map(codes_of, built_in())
    )
    shared = [key for key, count in whole.items() if count > 1]
    twice = {n for n in built_in() if (c := codes_of(n)) and (c.type.value, c.modifier and c.modifier.value,
             c.region and c.region.value, c.region_modifier) in shared}  # fmt: skip
    # What the catalogue itself codes alike.
    assert twice == {name for name in twice if built_in()[name].snomed_value}


def test_texts_fit_dicom():
    for name in built_in():
        codes = codes_of(name)
        for code in filter(None, (codes.category, codes.type, codes.modifier, codes.region, codes.region_modifier)):
            assert 0 < len(code.meaning) <= 64
            assert len(code.scheme) <= 16
        assert len(codes.label) <= 64


def test_what_has_no_concept_has_its_name_as_code():
    rib = codes_of("rib_left_3")
    assert rib.type == Coding("rib_left_3", catalogue()["rib_left_3"].title, PRIVATE_SCHEME)
    assert rib.modifier == Coding("7771000", "Left")
    assert rib.private
    assert not codes_of("liver").private


def test_tumours_and_cysts_are_abnormal_also_their_parts():
    abnormal = {name for name in built_in() if not codes_of(name).of_anatomy}
    assert {"liver_tumour", "kidney_cyst", "kidney_cyst_left", "brain_tumour_core"} <= abnormal
    assert not abnormal & {"liver", "hepatic_vessel", "heart_left_ventricle", "vertebra_l1"}


def test_a_part_of_a_cyst_lies_in_the_organ_of_the_cyst():
    assert codes_of("kidney_cyst_left").region == Coding("64033007", "Kidney")


def test_an_own_organ_with_a_long_title_keeps_its_name_as_label():
    declare_organs(
        {
            "knob": OwnOrgan(title="x" * 70),
            "bump": OwnOrgan(snomed=41216001),
            "dent": OwnOrgan(colour="#010203"),
            "slash": OwnOrgan(title="a\\b", aliases=["a\\b"]),
        }
    )
    try:
        assert codes_of("knob").label == "knob"
        assert codes_of("knob").type.meaning == "x" * 64
        assert codes_of("bump").type == Coding("41216001", "Bump")
        assert codes_of("bump").label == "Bump"
        assert rgb("dent") == (1, 2, 3)
        assert (codes_of("slash").label, codes_of("slash").type.meaning) == ("slash", "a/b")
    finally:
        remove_added()
