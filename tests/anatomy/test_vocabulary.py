"""The vocabulary: what may be in it, and how annotated structures map onto it."""

import copy
import pickle

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st
from refusing import refused

from panorgan.anatomy import Vocabulary, ancestors, catalogue, children
from panorgan.errors import AnatomyError, PanorganError


def parts_below(name: str) -> list[str]:
    return [below for part in children(name, "part") for below in (part, *parts_below(part))]


def drop_unions_with_parts(names: list[str]) -> list[str]:
    """Keep the names whose parts are not there too."""
    return [name for name in names if not set(parts_below(name)) & set(names)]


organ_lists = st.lists(st.sampled_from(sorted(catalogue())), min_size=1, max_size=14, unique=True)
vocabularies = organ_lists.map(drop_unions_with_parts).map(Vocabulary)


def error_of(code: str, call, *args, **kwargs) -> PanorganError:
    with refused(code, AnatomyError) as caught:
        call(*args, **kwargs)
    assert caught.value.fix
    return caught.value


def test_it_behaves_like_a_sequence_of_names() -> None:
    vocabulary = Vocabulary(["Spleen", "Left Kidney", "liver"])
    assert vocabulary.organs == ("spleen", "kidney_left", "liver")
    assert list(vocabulary) == ["spleen", "kidney_left", "liver"]
    assert len(vocabulary) == 3
    assert vocabulary[1] == "kidney_left"
    assert vocabulary.index("liver") == 2
    assert "liver" in vocabulary
    assert "Left Kidney" not in vocabulary
    assert vocabulary.colour("spleen") == catalogue()["spleen"].colour


def test_equality_hash_and_copies() -> None:
    one, same = Vocabulary(["liver", "spleen"]), Vocabulary(["LIVER", "spl"])
    assert one == same
    assert len({one, same}) == 1
    assert one != Vocabulary(["spleen", "liver"])
    assert pickle.loads(pickle.dumps(one)) == one
    assert copy.deepcopy(one) == one
    with pytest.raises(AttributeError):
        one.organs = ("spleen",)  # type: ignore[misc]


def test_bad_vocabularies_are_refused() -> None:
    error_of("empty-vocabulary", Vocabulary, [])
    assert "'kidney_left'" in error_of("organ-twice", Vocabulary, ["kidney_left", "Left Kidney"]).fix
    assert "kidney_left, kidney_right" in error_of("union-with-part", Vocabulary, ["kidney", "kidney_left"]).fix
    assert "kidney_left, kidney_right" in error_of("union-with-part", Vocabulary, ["kidney_left", "kidney"]).fix
    assert "'lung'" in error_of("union-with-part", Vocabulary, ["lung", "lung_upper_lobe_left"]).fix
    assert "'liver'" in error_of("unknown-organ", Vocabulary, ["livver"]).fix
    assert "['liver']" in error_of("names-not-a-list", Vocabulary, "liver").fix


def test_index_and_colour_of_an_absent_organ_are_refused() -> None:
    vocabulary = Vocabulary(["liver", "spleen"])
    assert "liver, spleen" in error_of("not-in-vocabulary", vocabulary.index, "kidney").fix
    assert "liver, spleen" in error_of("not-in-vocabulary", vocabulary.colour, "kidney").fix


KIDNEY_SIDES = ["kidney_left", "kidney_right"]


@pytest.mark.parametrize(
    ("vocabulary", "structure", "members"),
    [
        (["liver"], "liver", ["liver"]),
        (["liver", "liver_tumour", "spleen"], "liver", ["liver", "liver_tumour"]),
        (["liver_tumour", "hepatic_vessel", "liver"], "liver", ["liver_tumour", "hepatic_vessel", "liver"]),
        (["liver", "liver_tumour"], "Liver tumor", ["liver_tumour"]),
        (["kidney"], "kidneys", ["kidney"]),
        (["kidney", "kidney_tumour"], "kidney", ["kidney", "kidney_tumour"]),
        (KIDNEY_SIDES, "kidney", KIDNEY_SIDES),
        ([*KIDNEY_SIDES, "kidney_tumour"], "kidney", [*KIDNEY_SIDES, "kidney_tumour"]),
        ([*KIDNEY_SIDES, "kidney_tumour"], "kidney_left", ["kidney_left"]),
        (
            [
                "lung_left",
                "lung_upper_lobe_right",
                "lung_middle_lobe_right",
                "lung_lower_lobe_right",
                "lung_tumour",
            ],
            "lung",
            [
                "lung_left",
                "lung_upper_lobe_right",
                "lung_middle_lobe_right",
                "lung_lower_lobe_right",
                "lung_tumour",
            ],
        ),
        (["Anterior", "Posterior"], "hippocampus", ["hippocampus_anterior", "hippocampus_posterior"]),
        (["RV", "MYO", "LV"], "LV", ["heart_left_ventricle"]),
    ],
)
def test_members(vocabulary: list[str], structure: str, members: list[str]) -> None:
    assert Vocabulary(vocabulary).members(structure) == tuple(members)


@pytest.mark.parametrize(
    ("vocabulary", "structure", "code", "named"),
    [
        (["kidney_left", "liver"], "kidney", "union-incomplete", "kidney_right"),
        (
            ["lung_left", "lung_upper_lobe_right"],
            "lung",
            "union-incomplete",
            "lung_middle_lobe_right, lung_lower_lobe_right",
        ),
        (["lung_upper_lobe_left", "lung_lower_lobe_left"], "lung", "union-incomplete", "lung_right"),
        (["kidney"], "kidney_left", "part-of-union", "kidney_left, kidney_right"),
        (["hippocampus"], "Anterior", "part-of-union", "'hippocampus'"),
        (["liver"], "spleen", "not-in-vocabulary", "'spleen'"),
        (["liver_tumour"], "liver", "not-in-vocabulary", "'liver'"),
        (["liver"], "liver_tumour", "not-in-vocabulary", "'liver_tumour'"),
        (["liver"], "no such organ", "unknown-organ", "`panorgan organs`"),
    ],
)
def test_members_refused(vocabulary: list[str], structure: str, code: str, named: str) -> None:
    assert named in error_of(code, Vocabulary(vocabulary).members, structure).fix


@pytest.mark.parametrize(
    ("vocabulary", "names", "resolved"),
    [
        (["liver", "spleen"], ["Spleen", "LIVER"], ["spleen", "liver"]),
        (["liver", "spleen"], ["liver", "Liver"], ["liver"]),
        (["liver", "kidney"], ["Right Kidney", "liver", "lkidney"], ["kidney", "liver"]),
        (["kidney"], ["kidney", "kidney_left"], ["kidney"]),
        (KIDNEY_SIDES, ["kidney"], ["kidney"]),
        (KIDNEY_SIDES, ["kidney_right", "kidney_left"], ["kidney_right", "kidney_left"]),
        (KIDNEY_SIDES, ["kidney_left"], ["kidney_left"]),
        (["kidney", "kidney_tumour"], ["renal tumor", *KIDNEY_SIDES], ["kidney_tumour", "kidney"]),
        (
            ["lung"],
            [
                "lung_upper_lobe_left",
                "lung_lower_lobe_left",
                "lung_upper_lobe_right",
                "lung_middle_lobe_right",
                "lung_lower_lobe_right",
            ],
            ["lung"],
        ),
        (["lung"], ["lung_right", "lung_upper_lobe_left", "lung_lower_lobe_left"], ["lung"]),
        (["hippocampus"], ["Anterior", "Posterior"], ["hippocampus"]),
        (["RV", "MYO", "LV"], ["MLV", "LVC"], ["heart_myocardium", "heart_left_ventricle"]),
        (["liver"], [], []),
    ],
)
def test_resolve(vocabulary: list[str], names: list[str], resolved: list[str]) -> None:
    assert Vocabulary(vocabulary).resolve(names) == tuple(resolved)
    assert Vocabulary(vocabulary).resolve(names, ignore_unknown=True) == tuple(resolved)


@pytest.mark.parametrize(
    ("names", "code", "named"),
    [
        (["liver", "spleen"], "not-in-vocabulary", "'spleen'"),
        (["liver", "liver_tumour"], "not-in-vocabulary", "'liver_tumour'"),
        (["liver", "no such organ"], "unknown-organ", "`panorgan organs`"),
    ],
)
def test_resolve_refuses_or_drops_what_the_vocabulary_does_not_know(names: list[str], code: str, named: str) -> None:
    vocabulary = Vocabulary(["liver"])
    assert named in error_of(code, vocabulary.resolve, names).fix
    assert vocabulary.resolve(names, ignore_unknown=True) == ("liver",)


@pytest.mark.parametrize("ignore_unknown", [False, True])
def test_resolve_always_refuses_an_incomplete_union(ignore_unknown: bool) -> None:
    error_of("part-of-union", Vocabulary(["kidney"]).resolve, ["kidney_left"], ignore_unknown=ignore_unknown)
    half = Vocabulary(["kidney_left"])
    error = error_of("union-incomplete", half.resolve, ["kidney"], ignore_unknown=ignore_unknown)
    assert "kidney_right" in error.fix


def test_resolve_refuses_a_lone_text() -> None:
    assert "['liver']" in error_of("names-not-a-list", Vocabulary(["liver"]).resolve, "liver").fix


def test_inside() -> None:
    vocabulary = Vocabulary(["kidney_tumour", *KIDNEY_SIDES, "liver", "hepatic_vessel"])
    assert vocabulary.inside("kidney") == ("kidney_tumour",)
    assert vocabulary.inside("kidney_left") == ()
    assert vocabulary.inside("liver") == ("hepatic_vessel",)
    assert vocabulary.inside("hepatic_vessel") == ()


def test_paint_order_puts_the_tumour_after_the_sides_of_its_organ() -> None:
    vocabulary = Vocabulary(["kidney_tumour", "kidney_right", "liver_tumour", "kidney_left", "liver"])
    assert vocabulary.paint_order() == (
        "kidney_right",
        "kidney_left",
        "liver",
        "kidney_tumour",
        "liver_tumour",
    )


@given(vocabularies)
def test_paint_order_is_a_permutation_with_outer_before_inner(vocabulary: Vocabulary) -> None:
    order = vocabulary.paint_order()
    assert sorted(order) == sorted(vocabulary)
    for outer in order:
        for inner in vocabulary.inside(outer):
            assert order.index(outer) < order.index(inner)


@given(vocabularies, organ_lists)
def test_whatever_resolve_returns_has_members(vocabulary: Vocabulary, names: list[str]) -> None:
    try:
        resolved = vocabulary.resolve(names, ignore_unknown=True)
    except AnatomyError:
        reject()  # an incomplete union, tested above
    assert len(set(resolved)) == len(resolved)
    assert vocabulary.resolve(resolved) == resolved
    for structure in resolved:
        members = vocabulary.members(structure)
        assert members
        assert all(member == structure or structure in ancestors(member) for member in members)


@given(vocabularies)
def test_a_vocabulary_resolves_to_itself(vocabulary: Vocabulary) -> None:
    assert vocabulary.resolve(vocabulary) == vocabulary.organs
    for organ in vocabulary:
        assert set(vocabulary.members(organ)) == {organ, *vocabulary.inside(organ)}


@given(vocabularies, st.randoms())
def test_all_smallest_parts_resolve_like_their_unions(vocabulary: Vocabulary, random) -> None:
    """Annotating every smallest part, in any order, knows every organ of the vocabulary."""
    names = []
    for organ in vocabulary:
        below = parts_below(organ)
        names += [part for part in below if not children(part, "part")] or [organ]
    random.shuffle(names)
    assert set(vocabulary.resolve(names)) == set(vocabulary)
