"""The descriptions of methods and of what they send. `test_every_method.py` compares them with what is sent."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from functools import reduce
from typing import Literal

import pytest
import torch
from pydantic import Field

from panorgan.anatomy import Vocabulary
from panorgan.config import parse_experiment
from panorgan.methods.about.metadata import as_yaml, describe, fields_of
from panorgan.methods.about.uploads import EXAMPLE_SITES, example_federation, uploads
from panorgan.methods.base import Method, MethodConfig, ServerRule, Stage
from panorgan.methods.registry import methods
from panorgan.networks import UNet, UNetSettings
from panorgan.networks.settings import OrganParts
from panorgan.settings import Settings

HEAD_BYTES = 4 * 162
HEAD_BIAS = "head.conv.conv.bias"


def reported(name: str) -> list[tuple[str, str, str]]:
    return [(s.stage, s.rounds, s.words) for s in describe(methods()[name]).sent]


# -- words -----------------------------------------------------------------------------------------------------------


def test_a_description_is_what_the_file_says():
    described = describe(methods()["segviz"])
    assert described.title == "SegViz"
    assert described.explanation == "all sites share a representation block; every organ keeps a task block of its own."
    assert described.text.startswith(described.explanation + "\n\nKanhere et al.")
    assert described.summary.startswith("Selective weight synchronisation")
    assert {field.name for field in described.own_fields} == {"weighting", "unlabelled", "finetune_rounds"}
    assert {field.name for field in described.fields} > set(MethodConfig.model_fields)


def test_a_method_without_words_is_described_by_its_name():
    silent = type("Silent", (Method,), {"name": "silent", "__module__": "nowhere"})
    described = describe(silent)
    assert (described.title, described.explanation, described.paper) == ("silent", "", "")


class Colour(StrEnum):
    """A choice."""

    RED = "red"
    BLUE = "blue"


class Inner(Settings):
    """Settings within settings."""

    depth: int = 1


class ManyTypes(MethodConfig):
    """One field of every kind."""

    plain: float = 0.5
    share: float = Field(0.25, ge=0, le=1)
    rate: float = Field(1e-4, gt=0, lt=1)
    count: int | None = Field(None, ge=1)
    switch: bool = True
    word: str = "x"
    choice: Literal["a", "b"] = "b"
    fixed: Literal["a"] = "a"
    colour: Colour = Colour.RED
    sizes: tuple[int, ...] = (1, 2)
    inner: Inner = Inner()
    made: list[int] = Field(default_factory=list)
    needed: int = Field(description="no default", json_schema_extra={"paper": "7"})


@pytest.mark.parametrize(
    ("name", "words", "default"),
    [
        ("plain", "number", "0.5"),
        ("share", "number ≥ 0, ≤ 1", "0.25"),
        ("rate", "number > 0, < 1", "0.0001"),
        ("count", "whole number ≥ 1 or `null`", "null"),
        ("switch", "`true` or `false`", "true"),
        ("word", "text", "x"),
        ("choice", "`a` or `b`", "b"),
        ("fixed", "only `a`", "a"),
        ("colour", "`red` or `blue`", "red"),
        ("sizes", "list of: whole number", "[1, 2]"),
        ("inner", "settings", "{depth: 1}"),
        ("made", "list of: whole number", "[]"),
        ("needed", "whole number", "(required)"),
    ],
)
def test_types_and_defaults_in_plain_words(name, words, default):
    field = next(field for field in fields_of(ManyTypes) if field.name == name)
    assert (field.type, as_yaml(field.default)) == (words, default)
    assert field.paper == ("7" if name == "needed" else "")


def test_a_method_that_needs_a_setting_is_described_without_measuring():
    class Needy(Method):
        """Cannot be made without a setting."""

        name = "needy"
        Config = ManyTypes

    described = describe(Needy)
    assert (described.sent, described.variants, described.stages, described.network) == ((), (), (), "any")


# -- what leaves a site ----------------------------------------------------------------------------------------------


def test_which_weights_each_method_sends():
    others = "of organs that it does not annotate"
    assert reported("fedavg") == reported("fedprox") == [("train", "every round", "all weights")]
    assert reported("scaffold") == [("train", "every round", "all weights, and `control/*`")]
    for name, part in {"multihead": "heads", "multidecoder": "decoders", "multiencoder": "encoders"}.items():
        assert reported(name) == [("train", "every round", f"all weights but the {part} {others}")]
    assert reported("segviz") == [("train", "every round", f"all weights but the task blocks {others}")]
    assert reported("solo") == [("train", "every round", "the weights of its own network, which no other site trains")]


def test_teachers_are_sent_once_and_then_all_weights():
    assert reported("flkd") == [
        ("pretrain", "before the last round", "numbers alone"),
        ("pretrain", "last round", "`teacher/*`"),
        ("exchange", "once", "numbers alone"),
        ("train", "every round", "all weights"),
    ]


def test_pooled_methods_send_nothing():
    pooled = [describe(method) for method in methods().values() if method.pooled]
    assert len(pooled) >= 4
    assert all(described.sent == described.variants == () for described in pooled)


def test_sizes_by_hand():
    """A head is 162 floats; the example sites have 3, 2 and 3 of the 7 organs."""
    assert [len(organs) for organs in EXAMPLE_SITES.values()] == [3, 2, 3]
    organs = example_federation().vocabulary
    assert len(organs) == 7
    plain = 4 * sum(weight.numel() for weight in UNet(organs, UNetSettings()).state_dict().values())
    (fedavg,) = describe(methods()["fedavg"]).sent
    assert fedavg.size == plain
    assert fedavg.relative == 1
    (scaffold,) = describe(methods()["scaffold"]).sent
    assert scaffold.relative == 2  # every weight of the default network is trained, and has a control variate
    (owners,) = describe(methods()["multihead"]).sent
    (everyone,) = uploads(methods()["multihead"](MethodConfig(organ_parts="everyone")))
    assert everyone.size - owners.size == pytest.approx(HEAD_BYTES * (7 - 8 / 3))


def test_a_part_of_a_sites_own_is_told_from_what_all_share():
    ((stage, _, words),) = reported("med3d")
    assert (stage, words) == (
        "train",
        "what all sites share, and the weights of its own part, which no other site trains",
    )


def test_settings_that_change_it_are_found():
    def variants(name: str) -> dict[str, list[tuple[str, str]]]:
        found = describe(methods()[name]).variants
        return {variant.setting: [(s.stage, s.words) for s in variant.sent] for variant in found}

    segviz = variants("segviz")
    assert segviz["method.organ_parts: everyone"] == [("train", "all weights")]
    assert segviz["method.finetune_rounds: 2"][1] == ("finetune", "the task blocks of its own organs, no other weights")
    assert describe(methods()["segviz"]).optional_stages == ("finetune",)
    assert variants("flkd") == {"method.local_weight: 0": [("train", "all weights")]}
    heads = "all weights but the heads of organs that it does not annotate"
    assert variants("fedavg") == {"network.organs: heads": [("train", heads)]}
    assert variants("solo") == {}


def test_who_decides_about_the_network():
    found = {name: describe(method).network for name, method in methods().items()}
    assert found["fedavg"] == found["central_full"] == "any"
    assert found["solo"] == "own"
    assert found["flkd"] == found["multihead"] == "heads"
    assert describe(methods()["solo"]).network_words == "Several networks, each for its own organs, combined into one."
    assert describe(methods()["fedavg"]).network_words == ""


# -- rules of methods to come ----------------------------------------------------------------------------------------


def sent_by(expects, organs: OrganParts = "channels", rounds: int = 20, **more: object) -> list[tuple[str, str, float]]:
    """The description of a method whose server expects `expects(rule, site)`."""
    rule = type("Server", (ServerRule,), {"expects": expects})
    method = type("MadeUp", (Method,), {"name": "made_up", "Server": rule, **more})
    found = uploads(method(MethodConfig()), UNetSettings(organs=organs, features=(4, 8), norm="batch"), rounds=rounds)
    return [(s.rounds, s.words, s.size) for s in found]


def keys(rule: ServerRule, *starts: str) -> dict[str, torch.Tensor]:
    return {key: value for key, value in rule.weights.items() if key.startswith(starts)}


def test_parts_that_stay_at_home_are_named():
    def without_norm(rule: ServerRule, site: str) -> Mapping[str, torch.Tensor]:
        with torch.device("meta"):
            norm = set(UNet(Vocabulary(["liver"]), UNetSettings(features=(4, 8), norm="batch")).parts()["norm"])
        return {key: value for key, value in rule.weights.items() if key not in norm}

    assert [words for _, words, _ in sent_by(without_norm)] == ["all weights but those of the part norm"]
    assert [w for _, w, _ in sent_by(lambda rule, site: keys(rule, "encoder", "bottleneck", "decoder"))] == [
        "all weights but those of the part head"
    ]
    assert [w for _, w, _ in sent_by(lambda rule, site: keys(rule, "encoder", HEAD_BIAS))] == [
        "weights of the parts encoder, some of head"
    ]


def test_sites_that_send_different_parts():
    def one_more(rule: ServerRule, site: str) -> Mapping[str, torch.Tensor]:
        return keys(rule, "encoder", *(["bottleneck"] if site == "north" else []))

    ((when, words, _),) = sent_by(one_more)
    assert (when, words) == ("every round", "weights of the parts encoder, bottleneck (not the same at every site)")


def test_rounds_that_differ_are_told_apart():
    extra = {"mask/a": torch.empty(8, dtype=torch.uint8, device="meta")}

    def every_fifth(rule: ServerRule, site: str) -> Mapping[str, torch.Tensor]:
        return extra if rule.round_info.round % 5 == 0 else {}

    declared = {"tensors": {"mask/*": "Which weights move most."}}
    assert sent_by(every_fifth, **declared) == [
        ("16 rounds of 20", "numbers alone", 0),
        ("4 rounds of 20", "`mask/*`", 8),
    ]
    assert sent_by(every_fifth)[1][1] == "`mask/a`", "undeclared, so by its own name"
    first = sent_by(lambda rule, site: extra if rule.round_info.round == 1 else {}, **declared)
    assert first[0] == ("first round", "`mask/*`", 8)
    once = {"stages": lambda self, rounds: (Stage("train", 1),), **declared}
    assert sent_by(lambda rule, site: extra, **once) == [("once", "`mask/*`", 8)]


# -- recipes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, method in methods().items() if method.recipe])
def test_a_recipe_is_an_experiment(name: str, tiny_content) -> None:
    """Every setting exists, and the experiment can be read. Papers that mirror left and right have no sided organs."""
    sites = [{"name": "north", "annotated": ["liver"]}, {"name": "south", "annotated": ["spleen"]}]
    tiny = {**tiny_content(), "vocabulary": ["liver", "spleen"], "phantom": {"sites": sites}}
    content = {**tiny, "method": {"name": name}, "network": {}, "training": {}, "plan": {}}
    for setting, value in methods()[name].recipe.items():
        *parents, last = setting.split(".")
        place = content
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    experiment = parse_experiment(content)
    for setting, value in methods()[name].recipe.items():
        section, *path = setting.split(".")
        found = experiment.build_method().config if section == "method" else getattr(experiment, section)
        read = reduce(getattr, path, found)
        assert read == (tuple(value) if isinstance(value, list) else value), setting
