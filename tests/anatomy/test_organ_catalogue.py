"""The catalogue: facts of organs.toml, finding an organ, family links, refusals at load."""

import itertools
import re
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusing import refused

from panorgan.anatomy import ancestors, catalogue, children, find_organ
from panorgan.anatomy.catalogue import parse_catalogue
from panorgan.errors import AnatomyError

NAMES_AND_ALIASES = [(text, organ.name) for organ in catalogue().values() for text in (organ.name, *organ.aliases)]

# Machado, Oliveira and Fernandes (2009), severity 1.0, on linear RGB.
VISIONS = {
    "normal": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
}
SEEN_TOGETHER = [
    "liver",
    "liver_tumour",
    "hepatic_vessel",
    "spleen",
    "kidney_left",
    "kidney_right",
    "kidney_tumour",
    "pancreas",
    "pancreas_tumour",
    "gallbladder",
    "stomach",
    "oesophagus",
    "duodenum",
    "small_bowel",
    "colon",
    "urinary_bladder",
    "adrenal_gland_left",
    "adrenal_gland_right",
    "aorta",
    "inferior_vena_cava",
    "portal_and_splenic_vein",
    "spine",
]


def lab(colour: str, vision: np.ndarray) -> np.ndarray:
    """CIELAB (D65) of "#rrggbb" as seen with this vision. Shape (3,)."""
    rgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ np.clip(vision @ linear, 0, 1) / np.array([0.9505, 1.0, 1.089])
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@st.composite
def rewritten(draw: st.DrawFn) -> tuple[str, str]:
    """A name or alias with its case and separators changed, and the organ it must lead to."""
    text, organ = draw(st.sampled_from(NAMES_AND_ALIASES))
    letters = re.sub(r"[\s_-]", "", text)
    separator = st.text(" _-\t", max_size=2)
    pieces = [draw(separator)]
    for letter in letters:
        pieces += [letter.upper() if draw(st.booleans()) else letter.lower(), draw(separator)]
    return "".join(pieces), organ


@given(rewritten())
def test_any_case_and_separators_of_any_alias_find_the_organ(pair: tuple[str, str]) -> None:
    text, organ = pair
    assert find_organ(text).name == organ


@pytest.mark.parametrize(
    ("text", "organ"),
    [
        ("Left Kidney", "kidney_left"),
        ("lkidney", "kidney_left"),
        ("kidneyL", "kidney_left"),
        ("kidneys", "kidney"),
        ("esophagus", "oesophagus"),
        ("arota", "aorta"),
        ("postcava", "inferior_vena_cava"),
        ("portal_vein_and_splenic_vein", "portal_and_splenic_vein"),
        ("gall bladder", "gallbladder"),
        ("bladder", "urinary_bladder"),
        ("Liver_tumor", "liver_tumour"),
        ("liver cancer", "liver_tumour"),
        ("Colon cancer primaries", "colon_tumour"),
        ("left lung upper lobe", "lung_upper_lobe_left"),
        ("LV", "heart_left_ventricle"),
        ("LVC", "heart_left_ventricle"),
        ("MLV", "heart_myocardium"),
        ("RV", "heart_right_ventricle"),
        ("Anterior", "hippocampus_anterior"),
        ("Posterior", "hippocampus_posterior"),
    ],
)
def test_names_found_in_public_data_sets(text: str, organ: str) -> None:
    assert find_organ(text).name == organ


@pytest.mark.parametrize(
    ("text", "suggested"),
    [("livr", "liver"), ("pancrea", "pancreas"), ("esophagos", "oesophagus"), ("left kidny", "kidney_left")],
)
def test_unknown_name_suggests_canonical_names_only(text: str, suggested: str) -> None:
    with refused("unknown-organ", AnatomyError) as caught:
        find_organ(text)
    assert repr(suggested) in caught.value.fix
    shown = re.findall(r"'([^']+)'", caught.value.fix)
    assert set(shown) <= set(catalogue())


@pytest.mark.parametrize("text", ["tumor", "cancer", "vessel", "cyst", "left", ""])
def test_words_that_name_no_organ_are_refused(text: str) -> None:
    with refused("unknown-organ"):
        find_organ(text)


def test_nothing_near_gives_no_suggestion() -> None:
    with refused("unknown-organ") as caught:
        find_organ("zzzzqqqq")
    assert [name for name in catalogue() if repr(name) in caught.value.fix] == []
    assert "`panorgan organs`" in caught.value.fix


def test_no_two_organs_share_a_name() -> None:
    owners = defaultdict(set)
    for text, organ in NAMES_AND_ALIASES:
        owners[re.sub(r"[\s_-]", "", text).lower()].add(organ)
    assert {text: names for text, names in owners.items() if len(names) > 1} == {}


def test_keys_are_snake_case_and_colours_are_distinct() -> None:
    assert all(re.fullmatch(r"[a-z]+(_[a-z0-9]+)*", name) for name in catalogue())
    assert len({organ.colour for organ in catalogue().values()}) == len(catalogue())


@pytest.mark.parametrize("vision", VISIONS)
def test_organs_seen_together_stay_apart_for_every_eye(vision: str) -> None:
    seen = {name: lab(catalogue()[name].colour, VISIONS[vision]) for name in SEEN_TOGETHER}
    closest = min((np.linalg.norm(seen[a] - seen[b]), a, b) for a, b in itertools.combinations(seen, 2))
    assert closest[0] > 12, closest  # a difference of about 2 is just visible


def test_sides_agree_with_names_and_modifiers() -> None:
    for organ in catalogue().values():
        words = organ.name.split("_")
        named = next((side for side in ("left", "right") if side in words and organ.kind != "cavity"), None)
        assert organ.side == named
        if organ.side and organ.snomed_value and "right" not in organ.snomed_meaning:
            assert organ.modifier_meaning.lower() == organ.side


def test_the_catalogue_is_read_only() -> None:
    with pytest.raises(TypeError):
        catalogue()["liver"] = catalogue()["spleen"]  # type: ignore[index]
    with pytest.raises(AttributeError):
        catalogue()["liver"].title = "Spleen"  # type: ignore[misc]


def test_ancestors_and_children() -> None:
    assert ancestors("liver") == ()
    assert ancestors("Liver tumor") == ("liver",)
    assert ancestors("lung_upper_lobe_left") == ("lung_left", "lung")
    assert children("kidney") == ("kidney_left", "kidney_right", "kidney_tumour", "kidney_cyst")
    assert children("kidneys", "part") == ("kidney_left", "kidney_right")
    assert children("kidney", "inside") == ("kidney_tumour", "kidney_cyst")
    assert children("hippocampus", "part") == ("hippocampus_anterior", "hippocampus_posterior")
    assert children("spleen") == ()


def entry(name: str, extra: str = "", kind: str = "organ") -> str:
    return (
        f'[{name}]\ntitle = "T"\nregion = "abdomen"\nkind = "{kind}"\ncolour = "#000000"\n'
        f'snomed = {{ value = "1", meaning = "M" }}\n{extra}\n'
    )


def test_a_sound_catalogue_is_read() -> None:
    organs = parse_catalogue(entry("a", 'aliases = ["A 1"]') + entry("b", 'parent = "a"\nrelation = "inside"'))
    assert list(organs) == ["a", "b"]
    assert organs["b"].parent == "a"
    assert organs["a"].aliases == ("A 1",)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (entry("a", 'aliases = ["LV"]') + entry("b", 'aliases = ["l-v"]'), "organ-name-shared"),
        (entry("a") + entry("b", 'aliases = ["A"]'), "organ-name-shared"),
        (entry("a", 'parent = "b"\nrelation = "inside"'), "parent-unknown"),
        (entry("a", 'parent = "a"\nrelation = "inside"'), "parents-in-a-circle"),
        (
            entry("a", 'parent = "b"\nrelation = "inside"') + entry("b", 'parent = "a"\nrelation = "inside"'),
            "parents-in-a-circle",
        ),
        (entry("a") + entry("b", 'parent = "a"'), "parent-without-relation"),
        (entry("a", 'relation = "inside"'), "parent-without-relation"),
        (entry("a") + entry("b", 'parent = "a"\nrelation = "part"'), "part-by-half"),
        (entry("a") + entry("b", 'parent = "a"\nrelation = "inside"', kind="part"), "part-by-half"),
        (entry("a", 'colours = "red"'), "bad-catalogue-entry"),
        (entry("a").replace("#000000", "black"), "bad-catalogue-entry"),
        ("[a", "catalogue-not-toml"),
    ],
)
def test_a_broken_catalogue_is_refused(text: str, code: str) -> None:
    with refused(code, AnatomyError) as caught:
        parse_catalogue(text)
    assert caught.value.fix
    assert caught.value.where == "organs.toml"
