"""SegViz: what is shared and what is not, the unweighted mean, fine-tuning, and sites that join later."""

from __future__ import annotations

import pytest
import torch
from federations import make_coordinator, make_workers, run, same
from overhearing import overheard, spooled

from panorgan.anatomy import Vocabulary
from panorgan.config import parse_experiment
from panorgan.federation.transports.local import LocalTransport
from panorgan.methods.protocol import Federation, RoundInfo, SiteInfo
from panorgan.methods.segviz import SegViz, SegVizConfig
from panorgan.networks import UNetSettings
from panorgan.networks.organ_parts import group_of_key
from panorgan.workflows.execute import train
from panorgan.workflows.model_bundle import load_model

TRAINING = {"rounds": 2, "validate_every": 0, "local_steps": 1}
BATCH = {"norm": "batch"}


def representation(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value for key, value in weights.items() if group_of_key(key) is None}


def task_blocks(weights: dict[str, torch.Tensor], *organs: str) -> dict[str, torch.Tensor]:
    return {key: value for key, value in weights.items() if group_of_key(key) in organs}


# -- the split -------------------------------------------------------------------------------------------------------


def test_the_task_block_is_the_last_two_convolutions_and_nothing_else():
    federation = Federation(Vocabulary(["liver"]), {"a": SiteInfo("a", 1, {"liver": 1})})
    network = SegViz(SegVizConfig()).build_network(UNetSettings(features=(4, 8, 8), norm="batch"), federation, "a")
    keys = set(network.state_dict())
    statistics = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
    block = {f"task_blocks.liver.0.adn.N.{name}" for name in statistics}
    block |= {"task_blocks.liver.0.conv.weight", "task_blocks.liver.1.conv.conv.weight"}
    block |= {"task_blocks.liver.1.conv.conv.bias"}
    assert {key for key in keys if group_of_key(key) is not None} == block
    assert {key.split(".")[0] for key in keys - block} == {"encoder", "bottleneck", "decoder"}
    # The last level up keeps the first of its two convolutions; all statistics of the rest are shared.
    last = {key for key in keys if key.startswith("decoder.1.")}
    assert last == {"decoder.1.transp_conv.conv.weight", "decoder.1.conv1.conv.weight"} | {
        f"decoder.1.norm1.{name}" for name in statistics
    }


def test_the_mean_is_unweighted_and_task_blocks_stay_with_their_owners(tmp_path):
    sites = {
        "a": SiteInfo("a", 1, {"liver": 1}),
        "b": SiteInfo("b", 3, {"liver": 3}),
        "c": SiteInfo("c", 8, {"spleen": 8}),
    }
    shared, liver, spleen = "encoder.0.conv1.conv.weight", "task_blocks.liver.0.conv.weight", "task_blocks.spleen.0.x"
    start = {key: torch.tensor([0.0]) for key in (shared, liver, spleen)}
    rule = SegViz.Server(SegVizConfig(), Federation(Vocabulary(["liver", "spleen"]), sites), start)
    rule.round_info = RoundInfo("train", 1, 1)
    updates = {"a": {shared: 1.0, liver: 2.0}, "b": {shared: 2.0, liver: 10.0}, "c": {shared: 6.0, spleen: 7.0}}
    rule.aggregate(spooled(tmp_path, {s: {k: torch.tensor([v]) for k, v in a.items()} for s, a in updates.items()}))
    assert {key: value.item() for key, value in rule.weights.items()} == {shared: 3.0, liver: 6.0, spleen: 7.0}


def test_the_mean_of_a_run_by_hand(tiny, tmp_path):
    """From the messages: the representation is the plain mean of both sites, each task block its one owner's."""
    plain = {"name": "segviz", "server_step": 1}
    coordinator, sites = overheard(tiny(method=plain, training=TRAINING, network=BATCH), tmp_path)
    coordinator.run(rounds=1)
    north, south = sites["north"].sent[0].tensors, sites["south"].sent[0].tensors
    assert sites["north"].sent[0].scalars["cases"] != sites["south"].sent[0].scalars["cases"]
    for key, value in representation(coordinator.state.weights).items():
        torch.testing.assert_close(value.double(), (north[key].double() + south[key].double()) / 2)
    weights = coordinator.state.weights
    assert same(task_blocks(weights, "liver"), task_blocks(north, "liver"))
    owned = ("spleen", "kidney_left", "kidney_right")
    assert same(task_blocks(weights, *owned), task_blocks(south, *owned))


# -- fine-tuning -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["instance", "batch"])
def test_fine_tuning_freezes_the_representation_bit_for_bit(tiny, tmp_path, norm):
    method = {"name": "segviz", "finetune_rounds": 2}
    coordinator, sites = overheard(
        tiny(method=method, training={**TRAINING, "rounds": 1}, network={"norm": norm}), tmp_path
    )
    assert [(round_info.stage, round_info.round) for round_info in coordinator.schedule] == [
        ("train", 1),
        ("finetune", 1),
        ("finetune", 2),
    ]
    coordinator.run(rounds=1)
    trained = {key: value.clone() for key, value in coordinator.state.weights.items()}
    coordinator.run()
    tuned = coordinator.state.weights
    assert same(representation(tuned), representation(trained))
    for organ in coordinator.setup.vocabulary:
        before, after = task_blocks(trained, organ), task_blocks(tuned, organ)
        moved = {key for key in before if not torch.equal(before[key], after[key])}
        # All weights move (the second output serves no tumour here, yet its row shares tensors with the first);
        # with batch norm the block's own statistics do too.
        assert moved == before.keys()
    for site in sites.values():
        assert [set(message.tensors) == set(site.sent[0].tensors) for message in site.sent] == [True, False, False]
        assert all(group_of_key(key) is not None for message in site.sent[1:] for key in message.tensors)
        assert any(group_of_key(key) is None for key in site.received[1].tensors), "the average still goes out"
        model = site.worker._rule.model
        frozen = representation(dict(model.state_dict()))
        assert all(torch.equal(frozen[key], trained[key]) for key in frozen), "not even at the site does it move"


def test_a_site_that_sends_the_representation_while_fine_tuning_is_refused():
    federation = Federation(Vocabulary(["liver"]), {"a": SiteInfo("a", 1, {"liver": 1})})
    network = SegViz(SegVizConfig()).build_network(UNetSettings(features=(4, 8)), federation)
    rule = SegViz.Server(SegVizConfig(finetune_rounds=1), federation, network.state_dict())
    rule.round_info = RoundInfo("train", 1, 1)
    assert set(rule.expects("a")) == set(network.state_dict())
    rule.round_info = RoundInfo("finetune", 1, 1)
    assert {group_of_key(key) for key in rule.expects("a")} == {"liver"}


def test_without_fine_tuning_there_is_one_stage():
    assert [stage.name for stage in SegViz(SegVizConfig()).stages(5)] == ["train"]


# -- joining late ----------------------------------------------------------------------------------------------------

LATE = {"south": 3}
FOUR = {**TRAINING, "rounds": 4}
NEW = ("spleen", "kidney_left", "kidney_right")


def test_a_new_organ_is_nowhere_before_its_site_joins_and_has_a_task_block_after(tiny, tmp_path):
    experiment = tiny(method={"name": "segviz", "unlabelled": "marginal"}, training=FOUR)
    coordinator, sites = overheard(experiment, tmp_path / "late", joins_at=LATE)
    # The same federation, but the newcomer never comes.
    alone = make_coordinator(
        experiment,
        tmp_path / "alone",
        LocalTransport({"north": make_workers(experiment, tmp_path / "alone")["north"]}),
        awaited=("south",),
    )
    method, image = experiment.build_method(), torch.randn(1, 1, 16, 16, 16)
    for _ in range(2):
        coordinator.run(rounds=1)
        alone.run(rounds=1)
        assert same(coordinator.state.weights, alone.state.weights)
    assert {group_of_key(key) for key in coordinator.state.weights} == {None, "liver"}
    network = method.build_network(experiment.network, coordinator.federation)
    network.load_state_dict(coordinator.state.weights)
    index = list(network.vocabulary).index("spleen")
    assert (network(image)[:, index] == -1e4).all()
    before = {key: value.clone() for key, value in coordinator.state.weights.items()}

    coordinator.run(rounds=1)
    newcomer = sites["south"].received[0].tensors
    assert same(representation(newcomer), representation(before)), "it begins with what the others have made"
    assert {group_of_key(key) for key in newcomer} == {None, *NEW}
    # Nothing changed for the other: its third round is the one it would have had anyway.
    alone.run(rounds=1)
    mine = task_blocks(coordinator.state.weights, "liver")
    assert same(mine, task_blocks(alone.state.weights, "liver"))
    assert not same(representation(coordinator.state.weights), representation(alone.state.weights))
    assert set(sites["north"].received[2].tensors) == set(sites["north"].received[0].tensors)

    coordinator.run()
    network = method.build_network(experiment.network, coordinator.federation)
    network.load_state_dict(coordinator.state.weights)
    assert set(network.groups) == {"liver", *NEW}
    assert (network(image)[:, index] > -1e4).any()


def test_the_delivered_model_holds_all_task_blocks(tiny_content, tmp_path):
    content = tiny_content(method={"name": "segviz"}, training={**FOUR, "validate_every": 2})
    content["phantom"]["sites"][1]["joins_at"] = 3
    result = train(parse_experiment(content), tmp_path / "run")
    model = load_model(tmp_path / "run", torch.device("cpu"))
    assert set(model.network.groups) == {"liver", *NEW}
    assert {row["organ"] for row in result.scores} == set(content["vocabulary"])


@pytest.mark.parametrize("done", [1, 2, 3])
def test_resumed_around_a_join_and_fine_tuning_it_ends_with_the_same_bits(tiny, tmp_path, done):
    experiment = tiny(
        method={"name": "segviz", "finetune_rounds": 1},
        training={**FOUR, "rounds": 3, "optimizer": {"keep_state": True}},
        network=BATCH,
    )
    late = {"joins_at": {"south": 2}}
    whole, _ = overheard(experiment, tmp_path / "whole", **late)
    whole.run()
    first, _ = overheard(experiment, tmp_path / "broken", **late)
    first.run(rounds=done)
    again, _ = overheard(experiment, tmp_path / "broken", **late)
    again.run()
    assert again.finished
    assert same(again.state.weights, whole.state.weights)


def test_two_owners_share_a_task_block_and_a_newcomer_takes_it_over(tiny, tmp_path):
    """A late site with an organ that is known already begins with the task block that is there."""
    spacing = [14, 14, 14]
    phantom = {
        "sites": [
            {"name": "east", "annotated": ["liver", "spleen"], "cases": 3, "spacing_mm": spacing},
            {"name": "west", "annotated": ["kidney", "liver"], "cases": 3, "spacing_mm": spacing},
        ]
    }
    experiment = tiny(phantom=phantom, method={"name": "segviz"}, training=TRAINING)
    coordinator, sites = overheard(experiment, tmp_path, joins_at={"west": 2})
    coordinator.run(rounds=1)
    learned = {key: value.clone() for key, value in task_blocks(coordinator.state.weights, "liver").items()}
    coordinator.run()
    assert same(task_blocks(sites["west"].received[0].tensors, "liver"), learned)
    for key, value in task_blocks(coordinator.state.weights, "liver").items():
        both = sum(site.sent[-1].tensors[key].double() for site in sites.values()) / 2
        torch.testing.assert_close(value.double(), both, check_dtype=False, rtol=1e-6, atol=1e-7)


def test_one_site_alone_never_notices_the_average(tiny, tmp_path):
    """Uniform or by cases: with one site the mean is that site."""
    phantom = {
        "sites": [{"name": "north", "annotated": ["liver", "spleen", "kidney"], "cases": 4, "spacing_mm": [14, 14, 14]}]
    }
    uniform = run(tiny(phantom=phantom, method={"name": "segviz"}, training=TRAINING), tmp_path / "uniform")
    weighted = run(
        tiny(phantom=phantom, method={"name": "segviz", "weighting": "cases"}, training=TRAINING), tmp_path / "cases"
    )
    assert same(uniform.state.weights, weighted.state.weights)
