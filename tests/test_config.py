"""Experiment files: what is accepted, and how refusals read."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from refusing import refused

from panorgan.config import load_experiment, parse_experiment
from panorgan.errors import AnatomyError, ConfigError, PanorganError
from panorgan.evaluation.forgetting import GLOBAL_MODEL

EXAMPLES = Path(__file__).parent.parent / "examples"


def write(tmp_path: Path, content: object) -> Path:
    path = tmp_path / "experiment.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda p: p.name)
def test_examples_load(path):
    assert load_experiment(path).vocabulary


def test_the_demo_is_the_phantom_example():
    packaged = Path(__file__).parent.parent / "src" / "panorgan" / "cli" / "demo.yaml"
    # The example's first line leads an editor to the schema in the repository.
    assert packaged.read_text() == (EXAMPLES / "phantom.yaml").read_text().partition("\n")[2]


def test_the_name_of_a_method_is_enough(tmp_path, tiny_content):
    path = write(tmp_path, {**tiny_content(), "method": "fedprox"})
    assert load_experiment(path).method == load_experiment(path, ["method={name: fedprox}"]).method
    assert load_experiment(path, ["method=scaffold"]).method["name"] == "scaffold"


def test_overrides_reach_nested_settings(tmp_path, tiny_content):
    path = write(tmp_path, tiny_content())
    changed = load_experiment(
        path,
        [
            "training.rounds=7",
            "method.name=fedprox",
            "method.mu=0.5",
            "training.augment=null",
            "network.features=[2,4]",
        ],
    )
    assert changed.training.rounds == 7
    assert changed.method["mu"] == 0.5
    assert changed.training.augment is None
    assert changed.network.features == (2, 4)


def test_folders_are_relative_to_the_file(tmp_path):
    path = write(tmp_path, {"vocabulary": ["liver"], "sites": {"a": {"folder": "data/a", "withheld": "/full"}}})
    site = load_experiment(path).sites["a"]
    assert site.folder == (tmp_path / "data" / "a").resolve()
    assert site.withheld == Path("/full")


def test_aliases_become_canonical_and_the_phantom_draws_the_vocabulary(tiny_content):
    content = tiny_content()
    content["vocabulary"] = ["Liver", "spleen", "Left Kidney", "right kidney"]
    experiment = parse_experiment(content)
    assert experiment.vocabulary == ("liver", "spleen", "kidney_left", "kidney_right")
    assert experiment.phantom.organs == experiment.vocabulary


@pytest.mark.parametrize(
    ("changes", "code", "names"),
    [
        ({"trainning": {}}, "unknown-setting", "'training'"),
        ({"training": {"roundz": 3}}, "unknown-setting", "'rounds'"),
        ({"training": {"optimizer": {"lerning_rate": 1}}}, "unknown-setting", "'learning_rate'"),
        ({"method": {"name": "fedprox", "nu": 1}}, "unknown-setting", " mu,"),
        ({"method": {"mu": 1}}, "method-without-name", "method"),
        ({"vocabulary": ["liverr"]}, "unknown-organ", "'liver'"),
        ({"vocabulary": ["liver", "Liver"]}, "organ-twice", "'liver'"),
        ({"training": {"rounds": 0}}, "bad-setting", "training.rounds"),
        ({"training": {"rounds": "many"}}, "bad-setting", "'many'"),
        ({"plan": {"window_hu": [10, 10]}}, "window-empty", "[10, 10]"),
        ({"plan": {"spacing_mm": [1, 0, 1]}}, "size-not-positive", "[1, 0, 1]"),
        ({"training": {"sampling": {"patch_size": [16, 16, 18]}}}, "patch-does-not-fit", "of 4, at least 8"),
        ({"training": {"sampling": {"patch_size": [16, 16, 4]}}}, "patch-does-not-fit", "of 4, at least 8"),
        ({"network": {"dimensions": 2}}, "network-needs-slices", "[x, y, 1]"),
        ({"training": {"sampling": {"patch_size": [16, 16, 1]}}}, "network-needs-volumes", "[16, 16, 1]"),
        ({"training": {"sampling": {"patch_size": [16, 1, 1]}}}, "several-flat-axes", "[16, 1, 1]"),
        (
            {"network": {"dimensions": 2}, "training": {"sampling": {"patch_size": [1, 16, 18]}}},
            "patch-does-not-fit",
            "of 4, at least 8, for a network with 3 levels (network.features)",
        ),
        (
            {"network": {"strides": [[1, 1, 1], [2, 2, 1], [2, 2, 2]]}}
            | {"training": {"sampling": {"patch_size": [16, 16, 3]}}},
            "patch-does-not-fit",
            "of [4, 4, 2], at least [8, 8, 4], for a network with 3 levels (network.features and network.strides)",
        ),
        ({"network": {"strides": [[1, 1, 1], [2, 2, 2]]}}, "strides-per-level", "2 levels"),
        ({"network": {"strides": [[1, 1], [2, 2], [2, 2]]}}, "strides-per-axis", "3 numbers"),
        ({"network": {"strides": [[2, 2, 2], [2, 2, 2], [2, 2, 2]]}}, "strides-begin-with-one", "network"),
        ({"network": {"norm": "group", "groups": 3}}, "features-per-group", "multiples of 3"),
        ({"method": {"name": "multihead"}, "network": {"organs": "decoders"}}, "method-decides", "heads"),
        ({"method": {"name": "fedavg_pl"}, "network": {"activation": "sigmoid"}}, "method-decides", "softmax"),
        (
            {"training": {"augment": {"mirror_axes": [0, 2]}}},
            "mirrored-sides",
            "(sided organs: kidney_left, kidney_right)\n  fix: mirror_axes: [2]",
        ),
        ({"splits": {"validation": 0.5, "test": 0.5}}, "no-share-for-training", "splits"),
        ({"phantom": {"sites": [{"name": "a", "annotated": ["livre"]}]}}, "not-drawable", "'liver'"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refusals_have_a_code_and_name_what_is_wrong(tmp_path, tiny_content, changes, code, names):
    path = write(tmp_path, tiny_content(**changes))
    with refused(code) as caught:
        load_experiment(path)
    assert names in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "names", "hint"),
    [
        ({"method": {"name": "fedavgg"}}, "fedavgg", "'fedavg'"),
        ({"method": {"name": "ufps", "schedule_start": 0.5}}, "0.5", "0.4"),
    ],
)
def test_what_a_method_refuses_is_refused_with_the_file(tmp_path, tiny_content, changes, names, hint):
    path = write(tmp_path, tiny_content(**changes))
    with pytest.raises(ConfigError) as caught:
        load_experiment(path)
    assert names in caught.value.what
    assert hint in str(caught.value)
    assert caught.value.where.startswith(str(path))


def test_a_setting_that_must_be_given(tmp_path):
    with refused("missing-setting", ConfigError) as caught:
        load_experiment(write(tmp_path, {"sites": {"a": {"folder": "x"}}}))
    assert caught.value.where.endswith(": vocabulary")


def test_a_refusal_of_settings_that_disagree_does_not_recite_them_all(tmp_path, tiny_content):
    path = write(tmp_path, tiny_content(training={"sampling": {"patch_size": [16, 16, 18]}}))
    with refused("patch-does-not-fit") as caught:
        load_experiment(path)
    assert "[16, 16, 18]" in caught.value.why
    assert "learning_rate" not in caught.value.why


def test_saying_what_the_method_decides_anyway_is_no_error(tiny):
    for organs in ("channels", "heads"):  # the first is what stands there when nothing is said
        experiment = tiny(method={"name": "multihead"}, network={"organs": organs})
        assert experiment.build_method().network_settings(experiment.network).organs == "heads"
    experiment = tiny(network={"organs": "decoders"})
    assert experiment.build_method().network_settings(experiment.network).organs == "decoders"


@pytest.mark.parametrize("patch_size", [[16, 8, 1], [16, 1, 8], [1, 8, 16]])
def test_slices_may_lie_across_any_axis(tiny_content, patch_size):
    experiment = parse_experiment(
        tiny_content(network={"dimensions": 2}, training={"sampling": {"patch_size": patch_size}})
    )
    assert list(experiment.training.sampling.patch_size) == patch_size


def test_strides_allow_a_flat_patch(tiny_content):
    changes = {"network": {"strides": [[1, 1, 1], [2, 2, 1], [2, 2, 1]]}}
    assert parse_experiment(tiny_content(**changes, training={"sampling": {"patch_size": [16, 16, 3]}}))


def test_neither_or_both_sources_of_sites(tiny_content):
    content = tiny_content()
    content["sites"] = {"a": {"folder": "x"}}
    with refused("sites-or-phantom"):
        parse_experiment(content)
    with refused("sites-or-phantom"):
        parse_experiment({"vocabulary": ["liver"]})


@pytest.mark.parametrize(
    ("content", "code"),
    [
        ("", "not-a-mapping"),
        ("- a\n- b\n", "not-a-mapping"),
        ("a: [1", "not-yaml"),
        ("\ttabs: 1", "not-yaml"),
        ("1: 2", "setting-not-named"),
    ],
)
def test_files_that_are_not_experiments(tmp_path, content, code):
    with refused(code, ConfigError):
        load_experiment(write(tmp_path, content))


def test_a_missing_file_and_a_malformed_override(tmp_path, tiny_content):
    with refused("settings-file-missing"):
        load_experiment(tmp_path / "absent.yaml")
    with refused("override-malformed"):
        load_experiment(write(tmp_path, tiny_content()), ["rounds 3"])


def test_a_key_that_stands_twice_is_refused(tmp_path):
    text = "vocabulary: [liver]\nsites:\n  a: {folder: x}\n  b: {folder: y}\n  a: {folder: z}\n"
    with refused("not-yaml") as caught:
        load_experiment(write(tmp_path, text))
    assert "'a' is repeated" in caught.value.why


@pytest.mark.parametrize("name", ["../elsewhere", "a/b", ""])
def test_a_name_must_be_fit_for_a_folder(tiny_content, name):
    with refused("bad-setting", ConfigError) as caught:
        parse_experiment(tiny_content(name=name))
    assert caught.value.where == "name"


@pytest.mark.parametrize("part", [[0, 2], [3, 2], [1, 0]])
def test_a_part_must_exist(part):
    with refused("bad-part", ConfigError) as caught:
        parse_experiment({"vocabulary": ["liver"], "sites": {"a": {"folder": "x", "part": part}}})
    assert caught.value.where == "sites.a.part"


def test_site_names_must_be_plain(tiny_content):
    with refused("bad-site-name", ConfigError) as caught:
        parse_experiment({"vocabulary": ["liver"], "sites": {"st. mary": {"folder": "x"}}})
    assert "'st. mary'" in caught.value.why


@pytest.mark.parametrize(
    ("sites", "changes", "code", "named"),
    [
        ({"a": {}, "b": {"external": True, "joins_at": 2}}, {}, "external-site-joins", "sites.b"),
        ({"a": {}, "b": {"joins_at": 99}}, {}, "never-joins", "99"),
        ({"a": {"joins_at": 2}, "b": {"joins_at": 3}}, {}, "too-few-beginners", "a, b"),
        ({"a": {}, GLOBAL_MODEL: {}}, {"local_models": True}, "reserved-site-name", GLOBAL_MODEL),
        ({"a": {}, "b": {"joins_at": 9}}, {"local_models": 0.5}, "local-models-before-join", "round 5"),
    ],
)
def test_sites_that_do_not_go_together(sites, changes, code, named):
    folders = {name: {"folder": "x", **site} for name, site in sites.items()}
    with refused(code, ConfigError) as caught:
        parse_experiment({"vocabulary": ["liver"], "sites": folders, "training": {"rounds": 10}, **changes})
    assert named in str(caught.value)


def test_fingerprint_ignores_hardware_and_name_only(tiny):
    base = tiny()
    assert tiny(name="other", hardware={"device": "cpu", "threads": 1}).fingerprint() == base.fingerprint()
    assert tiny(seed=5).fingerprint() != base.fingerprint()
    assert tiny(training={"rounds": 9}).fingerprint() != base.fingerprint()
    assert base.with_method("solo").fingerprint() != base.fingerprint()


def test_an_organ_error_keeps_its_kind(tmp_path, tiny_content):
    with refused("union-with-part", AnatomyError) as caught:
        load_experiment(write(tmp_path, tiny_content(vocabulary=["kidney", "kidney_left"])))
    assert caught.value.fix


def test_settings_of_a_method_that_the_file_names_alone(tmp_path, tiny_content):
    """`method: fedprox` is short for `method: {name: fedprox}`."""
    path = write(tmp_path, tiny_content(method="fedprox"))
    assert load_experiment(path, ["method.mu=0.5"]).build_method().config.mu == 0.5
    assert load_experiment(path, ["method.name=fedavg"]).method["name"] == "fedavg"


@pytest.mark.parametrize(
    ("override", "code", "names"),
    [
        ("name=[a", "override-not-yaml", "'[a'"),
        ("phantom.sites.0.cases=3", "override-not-a-group", "'phantom.sites'"),
        ("name.first=3", "override-not-a-group", "'name'"),
        ("rounds 3", "override-malformed", "'rounds 3'"),
    ],
)
def test_overrides_that_cannot_be_applied(tmp_path, tiny_content, override, code, names):
    with refused(code, ConfigError) as caught:
        load_experiment(write(tmp_path, tiny_content()), [override])
    assert names in caught.value.what
    assert caught.value.where == "--set"
    assert caught.value.fix


@pytest.mark.parametrize(
    ("overrides", "where"),
    [
        (["training.rounds=0"], "--set training.rounds"),
        (["training.local_steps=2", "training.rounds=many"], "--set training.rounds"),
        (["training={rounds: 0}"], "--set training: rounds"),
        (["training.roundz=3"], "--set training.roundz"),
        (["method.name=fedprox", "method.nu=1"], "--set method.nu"),
        (["vocabulary=[liverr]"], "--set vocabulary, with {file}"),
        (["method.name=fedavgg"], "--set method.name"),
        (["seed=1", "training.sampling.patch_size=[16,16,18]"], "--set training.sampling.patch_size, with {file}"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_an_error_of_an_override_names_it_and_not_the_file(tmp_path, tiny_content, overrides, where):
    path = write(tmp_path, tiny_content())
    with pytest.raises(PanorganError) as caught:
        load_experiment(path, overrides)
    assert caught.value.where == where.format(file=path)


def test_an_error_of_the_file_stays_the_files(tmp_path, tiny_content):
    path = write(tmp_path, tiny_content(training={"rounds": 0}))
    with pytest.raises(ConfigError) as caught:
        load_experiment(path, ["seed=3", "training.local_steps=2"])
    assert caught.value.where == f"{path}: training.rounds"
    assert load_experiment(path, ["training.rounds=1"]).training.rounds == 1


@pytest.mark.parametrize(
    "content",
    [
        "",
        "a: [1",
        {"vocabulary": ["liver"], "sites": [{"folder": "x"}]},
        {"vocabulary": ["liver"], "sites": "x"},
        {"vocabulary": None, "phantom": {}},
        {"vocabulary": ["liver"], "sites": {"a": {"folder": "x"}}, "training": {"rounds": 0}},
        {"vocabulary": ["liver"], "sites": {"a": {"folder": "x"}}, "postprocess": "sharpen"},
        {"vocabulary": ["liver"]},
        {1: 2},
    ],
    ids=lambda content: str(content)[-40:],
)
def test_every_refusal_has_a_code_and_a_fix(tmp_path, content):
    with pytest.raises(PanorganError) as caught:
        load_experiment(write(tmp_path, content))
    assert caught.value.code
    assert caught.value.fix
    assert caught.value.where


def test_an_unknown_postprocessing_is_refused_before_training(tmp_path, tiny_content):
    with refused("unknown-postprocess") as caught:
        load_experiment(write(tmp_path, tiny_content(postprocess="sharpen")))
    assert "flkd" in caught.value.fix


def test_a_slip_inside_the_phantom_is_found_there(tmp_path, tiny_content):
    with refused("unknown-setting") as caught:
        load_experiment(write(tmp_path, tiny_content(phantom={"sitez": []})))
    assert caught.value.where.endswith("phantom: sitez")
    assert "field_of_view_mm" in caught.value.fix


@pytest.mark.parametrize(("old", "new"), [("exclusive", "softmax"), ("independent", "sigmoid")])
def test_the_activation_is_read_under_its_older_name_and_written_so(tiny_content, old, new):
    experiments = [parse_experiment(tiny_content(network=n)) for n in ({"convention": old}, {"activation": new})]
    assert [experiment.network.activation for experiment in experiments] == [new, new]
    assert [experiment.as_json()["network"]["convention"] for experiment in experiments] == [old, old]
    assert experiments[0].fingerprint() == experiments[1].fingerprint()


def test_the_activation_is_named_once(tiny_content):
    with pytest.raises(ConfigError) as caught:
        parse_experiment(tiny_content(network={"convention": "exclusive", "activation": "sigmoid"}))
    assert caught.value.code == "unknown-setting"
