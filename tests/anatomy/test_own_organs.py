"""Organs that the catalogue does not know: described, checked, and known from then on."""

import pickle
import subprocess
import sys
from collections.abc import Iterator

import pytest
from refusing import refused

from panorgan.agreement import Agreement
from panorgan.anatomy import OwnOrgan, Vocabulary, ancestors, catalogue, children, declare_organs, find_organ
from panorgan.anatomy.catalogue import added, remove_added
from panorgan.config import parse_experiment
from panorgan.errors import AnatomyError, ConfigError
from panorgan.settings import validated


@pytest.fixture(autouse=True)
def only_the_catalogue() -> Iterator[None]:
    remove_added()
    yield
    remove_added()


def declare(**organs: dict) -> None:
    declare_organs({name: OwnOrgan(**own) for name, own in organs.items()})


def agreement(**content) -> Agreement:
    return validated(Agreement, {"vocabulary": ["liver"], **content}, "experiment.yaml")


def test_a_bare_name_is_enough() -> None:
    agreed = agreement(organs=["zorbium"], vocabulary=["Zorbium", "liver"])
    assert agreed.vocabulary == ("zorbium", "liver")
    organ = catalogue()["zorbium"]
    assert (organ.title, organ.parent, organ.kind, organ.snomed_value) == ("Zorbium", None, "organ", "")
    assert len(organ.colour) == 7
    assert list(catalogue())[-1] == "zorbium"


def test_everything_can_be_said() -> None:
    declare(
        zorbium={"title": "The zorbium", "snomed": {"value": 41216001, "meaning": "Zorb"}, "colour": "#AABBCC"},
        zorbium_left={"parent": "zorbium", "relation": "part", "side": "left", "snomed": 41216001},
        zorbium_right={"parent": "zorbium", "relation": "part", "side": "right", "aliases": ["right zorb"]},
        zorbium_tumour={"parent": "Zorbium", "kind": "tumour"},
        spur={"parent": "left kidney"},
    )
    assert catalogue()["zorbium"].colour == "#aabbcc"
    assert catalogue()["zorbium"].snomed_meaning == "Zorb"
    assert catalogue()["zorbium_left"].modifier_meaning == "Left"
    assert find_organ("Right-Zorb").name == "zorbium_right"
    assert children("zorbium", "part") == ("zorbium_left", "zorbium_right")
    assert ancestors("spur") == ("kidney_left", "kidney")
    assert catalogue()["zorbium_tumour"].relation == "inside"
    vocabulary = Vocabulary(["zorbium_left", "zorbium_right", "zorbium_tumour"])
    assert vocabulary.members("zorbium") == ("zorbium_left", "zorbium_right", "zorbium_tumour")


@pytest.mark.parametrize(
    ("organs", "code", "words"),
    [
        ({"liver": {}}, "organ-known", "liver"),
        ({"Leber Lappen": {}}, "bad-organ-name", "leber_lappen"),
        ({"background": {}}, "bad-organ-name", "background"),
        ({"x": {}}, "bad-organ-name", "'x'"),
        ({"values": {}}, "bad-organ-name", "torch"),
        ({"post_cava": {}}, "organ-known", "inferior_vena_cava"),
        ({"zorbium": {"aliases": ["Spleen"]}}, "organ-known", "spleen"),
        ({"zorbium": {"parent": "livr"}}, "parent-unknown", "'liver'"),
        ({"zorbium": {"parent": "zorbium"}}, "parents-in-a-circle", "zorbium"),
        ({"zorb": {"parent": "zarb"}, "zarb": {"parent": "zorb"}}, "parents-in-a-circle", "zarb"),
        ({"zorbium": {"parent": "kidney", "relation": "part"}}, "union-complete", "kidney_left"),
        ({"zorb": {"aliases": ["zz"]}, "zarb": {"aliases": ["Z_Z"]}}, "organ-name-shared", "zorb"),
        ({"zorbium": {"colour": "red"}}, "bad-colour", "#d55e00"),
        ({"zorbium": {"snomed": "T-62000"}}, "bad-snomed", "digits"),
        ({"zorbium": {"relation": "part"}}, "relation-without-parent", "parent"),
        ({"zorbium": {"parent": "liver", "relation": "part", "kind": "tumour"}}, "part-with-kind", "kind"),
        ({"zorbium": {"titel": "Z"}}, "unknown-setting", "title"),
        ({"zorbium": {"title": "a\x1b[31m"}}, "bad-organ-text", "plain"),
        ({"zorbium": {"side": "middle"}}, "bad-setting", "left"),
    ],
)
def test_what_cannot_be_used_is_refused(organs: dict, code: str, words: str) -> None:
    with refused(code) as caught:
        agreement(organs=organs)
    assert caught.value.where.startswith("experiment.yaml: organs")
    assert words in str(caught.value)
    assert not added() or code == "bad-organ-name"  # torch's words are found last


def test_all_organs_or_none() -> None:
    with refused("organ-known"):
        declare(zorbium={}, liver={})
    assert not added()


def test_two_meanings_in_one_process_are_refused_and_new_colours_are_not() -> None:
    declare(zorbium={"parent": "liver", "colour": "#010203"})
    declare(zorbium={"parent": "liver", "colour": "#030201", "aliases": ["zorb"]})
    assert (catalogue()["zorbium"].colour, find_organ("zorb").name) == ("#030201", "zorbium")
    for other in ({"parent": "spleen"}, {}, {"parent": "liver", "side": "left"}, {"parent": "liver", "kind": "cyst"}):
        with refused("organ-redefined"):
            declare(zorbium=other)
    assert catalogue()["zorbium"].parent == "liver"


def test_an_experiment_must_describe_the_organs_that_it_uses() -> None:
    agreement(organs=["zorbium"], vocabulary=["zorbium"])
    with refused("unknown-organ", AnatomyError):
        agreement(vocabulary=["zorbium"])


def test_a_finished_model_keeps_its_organs_when_the_catalogue_learns_them() -> None:
    """A name of today's catalogue, and one of today's aliases, as organs of a model that is older than both."""
    own = {"spleen": OwnOrgan(), "milt_test": OwnOrgan(aliases=("pancreas",)), "spl": OwnOrgan()}
    before = catalogue()["spleen"]
    declare_organs(own, finished=True)
    assert catalogue()["spleen"] is before
    assert find_organ("pancreas").name == "pancreas"
    assert Vocabulary(["spleen", "spl", "milt_test"]).organs == ("spleen", "spl", "milt_test")


def test_fingerprints_without_own_organs_stay_as_they_were() -> None:
    agreed = agreement(postprocess="none")  # the default when it was written down
    assert "organs" not in agreed.as_json()
    assert agreed.fingerprint() == "7e65d8322354e89e"
    own = agreement(organs={"zorbium": {"side": "left"}}, postprocess="none")
    assert own.as_json()["organs"]["zorbium"]["side"] == "left"
    assert own.fingerprint() != agreed.fingerprint()
    assert validated(Agreement, own.as_json(), "").fingerprint() == own.fingerprint()


def test_a_sided_organ_is_never_mirrored() -> None:
    organs = {"zorbium_left": {"side": "left"}}
    with refused("mirrored-sides", ConfigError):
        agreement(organs=organs, vocabulary=["zorbium_left"], training={"augment": {"mirror_axes": [0]}})


def test_another_process_knows_the_organs_of_an_experiment_that_it_is_given(tiny_content, tmp_path) -> None:
    content = tiny_content(organs={"zorbium": {"parent": "liver"}}, vocabulary=["zorbium", "liver"])
    del content["phantom"]
    given = tmp_path / "experiment.pickle"
    given.write_bytes(pickle.dumps(parse_experiment({**content, "sites": {"here": {"folder": "x"}}})))
    program = (
        "import pickle, sys; from panorgan.anatomy import ancestors\n"
        "print(pickle.load(open(sys.argv[1], 'rb')).vocabulary, ancestors('zorbium'))"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(given)], capture_output=True, text=True, check=True)
    assert ended.stdout.split("\n")[0] == "('zorbium', 'liver') ('liver',)"
