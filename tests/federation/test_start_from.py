"""Training that starts from another model: what is taken, what begins as usual, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch
import yaml
from federations import make_coordinator, make_workers
from refusing import refused
from safetensors.torch import load_file

from panorgan.anatomy import Vocabulary
from panorgan.config import load_agreement, load_experiment, parse_experiment
from panorgan.errors import ConfigError, RunError
from panorgan.federation.checkpoint import Checkpoints
from panorgan.federation.start_settings import StartSettings, weights_hash
from panorgan.federation.starting_weights import take_over
from panorgan.federation.transports.local import LocalTransport
from panorgan.methods.registry import methods
from panorgan.networks import UNet, UNetSettings, organ_network
from panorgan.workflows.execute import train
from panorgan.workflows.model_bundle import load_model
from panorgan.workflows.starting_model import reader_of

SMALL = UNetSettings(features=(4, 8), organ_prior=None)
HEAD = "head.conv.conv.weight"


def unet(*organs: str, **settings: object) -> UNet:
    return UNet(Vocabulary(organs), SMALL.model_copy(update=settings))


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory):
    """A run whose model knows two of the organs, in another order of channels than a larger vocabulary has."""
    experiment = tiny(
        vocabulary=["spleen", "kidney_left", "kidney_right"],
        phantom={
            "sites": [{"name": "south", "annotated": ["spleen", "kidney"], "cases": 4, "spacing_mm": [12, 12, 12]}]
        },
        training={"rounds": 1, "validate_every": 1},
    )
    return train(experiment, tmp_path_factory.mktemp("first") / "run")


# -- rows and parts ----------------------------------------------------------------------------------------------------


def test_rows_follow_the_names_of_organs():
    old, new = unet("spleen", "kidney_left"), unet("liver", "spleen", "kidney_left")
    drawn = {key: value.clone() for key, value in new.state_dict().items()}
    weights, taken = take_over(new, old)
    theirs = old.state_dict()
    for organ in ("background", "spleen", "kidney_left"):
        row, place = weights[HEAD][new.channels.index(organ)], old.channels.index(organ)
        assert torch.equal(row, theirs[HEAD][place]), organ
    assert torch.equal(weights[HEAD][new.channels.index("liver")], drawn[HEAD][new.channels.index("liver")])
    others = [key for key in weights if not key.startswith("head.")]
    assert all(torch.equal(weights[key], theirs[key]) for key in others)
    assert (taken.tensors, taken.organs, taken.fresh_organs) == (len(weights), ("spleen", "kidney_left"), ("liver",))
    assert torch.equal(new.state_dict()[HEAD], drawn[HEAD]), "the drawn network stays as it is"


def test_the_same_index_is_not_the_same_organ():
    old, new = unet("spleen"), unet("liver")
    weights, taken = take_over(new, old)
    assert torch.equal(weights[HEAD][1], new.state_dict()[HEAD][1])
    assert torch.equal(weights[HEAD][0], old.state_dict()[HEAD][0])  # background
    assert (taken.organs, taken.fresh_organs) == ((), ("liver",))


def test_parts_of_organs_follow_their_names():
    heads = SMALL.model_copy(update={"organs": "heads"})
    old = organ_network(Vocabulary(["spleen", "liver"]), heads)
    new = organ_network(Vocabulary(["spleen", "pancreas"]), heads)
    weights, taken = take_over(new, old)
    assert torch.equal(weights["heads.spleen.0.weight"], old.state_dict()["heads.spleen.0.weight"])
    assert torch.equal(weights["heads.pancreas.0.weight"], new.state_dict()["heads.pancreas.0.weight"])
    assert (taken.organs, taken.fresh_organs, taken.fresh_parts) == (("spleen",), ("pancreas",), ("head:pancreas",))


def test_another_way_to_separate_organs_keeps_the_features():
    heads = SMALL.model_copy(update={"organs": "heads"})
    old, new = unet("spleen"), organ_network(Vocabulary(["spleen"]), heads)
    weights, taken = take_over(new, old)
    encoder = [key for key in weights if key.startswith("encoder.")]
    assert encoder
    assert all(torch.equal(weights[key], old.state_dict()[key]) for key in encoder)
    assert set(taken.fresh_parts) == {"embedding", "head:spleen"}
    assert taken.fresh_organs == ("spleen",)


def test_sigmoids_do_not_begin_with_rows_of_a_softmax():
    old, new = unet("spleen"), unet("spleen", activation="sigmoid")
    weights, taken = take_over(new, old)
    assert torch.equal(weights[HEAD], new.state_dict()[HEAD])
    assert taken.fresh_organs == ("spleen",)


def test_another_shape_is_refused():
    with pytest.raises(ConfigError) as raised:
        take_over(unet("spleen", features=(8, 16)), unet("spleen"))
    assert raised.value.code == "start-other-network"


# -- the setting -------------------------------------------------------------------------------------------------------


def test_a_path_is_read_relative_to_the_file(finished, tiny_content, tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "first").symlink_to(finished.path)
    content = tiny_content(training={"start_from": "runs/first"})
    file = tmp_path / "experiment.yaml"
    file.write_text(yaml.safe_dump(content))
    start = load_experiment(file).training.start_from
    assert start == load_agreement(file).training.start_from
    assert start.sha256 == weights_hash(finished.model_folder)
    assert (start.name, start.organs) == ("tiny", ("background", "spleen", "kidney_left", "kidney_right"))


def test_the_fingerprint_counts_the_weights_and_not_their_place(finished, tiny, tiny_content):
    plain = tiny()
    assert "start_from" not in plain.as_json()["training"]
    started = tiny(training={"start_from": str(finished.path)})
    assert started.fingerprint() != plain.fingerprint()
    assert started.fingerprint() == tiny(training={"start_from": str(finished.model_folder)}).fingerprint()
    sent = started.agreement().without_places()
    assert sent.fingerprint() == started.agreement().fingerprint()
    assert "folder" not in sent.as_json()["training"]["start_from"]
    other = {**started.training.start_from.as_json(), "sha256": "0" * 64}
    assert tiny(training={"start_from": other}).fingerprint() != started.fingerprint()


def test_what_holds_no_model_is_refused(tiny, tmp_path):
    with pytest.raises(RunError) as raised:
        tiny(training={"start_from": str(tmp_path)})
    assert raised.value.code == "no-model"
    (tmp_path / "model.json").write_text("{}")
    with pytest.raises(RunError) as raised:
        tiny(training={"start_from": str(tmp_path)})
    assert raised.value.code == "start-unreadable"


def test_another_network_is_refused_before_anything_is_read(finished, tiny, tmp_path):
    experiment = tiny(network={"features": [4, 8, 16]}, training={"start_from": str(finished.path)})
    with pytest.raises(ConfigError) as raised:
        train(experiment, tmp_path / "run")
    assert raised.value.code == "start-other-network"
    assert "network.features" in raised.value.why
    assert not (tmp_path / "run").exists()


def test_another_model_in_the_folder_is_refused(finished, tiny, tmp_path):
    start = StartSettings(folder=finished.path).model_copy(update={"sha256": "0" * 64})
    experiment = tiny(training={"start_from": start.as_json()})
    with pytest.raises(RunError) as raised:
        train(experiment, tmp_path / "run")
    assert raised.value.code == "start-changed"


# -- runs --------------------------------------------------------------------------------------------------------------


def test_a_run_starts_from_it_and_says_so(finished, tiny, tmp_path):
    experiment = tiny(training={"rounds": 1, "start_from": str(finished.path)})
    folder = tmp_path / "run"
    workers = make_workers(experiment, folder)
    coordinator = make_coordinator(experiment, folder, LocalTransport(workers), start=reader_of(experiment))
    first, known = coordinator.state.weights, load_file(finished.model_folder / "model.safetensors")
    assert torch.equal(first["encoder.0.conv1.conv.weight"], known["encoder.0.conv1.conv.weight"])
    event = next(
        json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines() if "start_from" in line
    )
    assert event["organs"] == ["spleen", "kidney_left", "kidney_right"]
    assert event["fresh_organs"] == ["liver"]
    assert event["sha256"] == weights_hash(finished.model_folder)


ANOTHER_NETWORK = ("c2fnas", "fedmenu")
OF_THE_DECODER = ("multiencoder", "pipofan")


@pytest.mark.parametrize("method", ANOTHER_NETWORK)
def test_a_network_of_another_kind_cannot_start_from_a_u_net(method, finished, tiny, tmp_path):
    experiment = tiny(method={"name": method}, training={"rounds": 1, "start_from": str(finished.path)})
    transport = LocalTransport(make_workers(experiment, tmp_path))
    with refused("start-other-network", ConfigError):
        make_coordinator(experiment, tmp_path, transport, start=reader_of(experiment))


@pytest.mark.parametrize("method", sorted(set(methods()) - set(ANOTHER_NETWORK)))
def test_every_method_starts_from_it(method, finished, tiny, tmp_path):
    """Each in one round of each stage; a site that trains alone first begins with the model too."""
    experiment = tiny(method={"name": method}, training={"rounds": 1, "start_from": str(finished.path)})
    if experiment.build_method().pooled:
        pytest.skip("pooled methods have one site: the rule is the same")
    folder = tmp_path / "run"
    workers = make_workers(experiment, folder)
    coordinator = make_coordinator(experiment, folder, LocalTransport(workers), start=reader_of(experiment))
    known, first = load_model(finished.path, "cpu").network.state_dict(), coordinator.state.weights
    part = "decoder.0.conv_block" if method in OF_THE_DECODER else "encoder.0"  # what all organs share
    # The second network of cps begins at random: it must differ from the first.
    taken = [key for key in first if key.endswith(f"{part}.conv1.conv.weight") and not key.startswith("twin.")]
    assert taken
    assert all(torch.equal(first[key], known[f"{part}.conv1.conv.weight"]) for key in taken)
    received: dict[str, dict] = {}
    for name, worker in workers.items():
        original = worker._run_steps

        def run_steps(rule, task, name=name, original=original):
            means = original(rule, task)
            received.setdefault(name, {"stage": task.round_info.stage, "model": rule.model})
            return means

        worker._run_steps = run_steps
    coordinator.run(1)
    assert Checkpoints(folder / "checkpoints").load_latest().rounds_done == 1
    for name, seen in received.items():  # two steps from the start, not from a random beginning
        own = seen["model"].state_dict()
        key = next(key for key in own if key.endswith(f"{part}.conv1.conv.weight"))
        assert (own[key] - known[f"{part}.conv1.conv.weight"]).abs().max() < 0.06, (name, seen["stage"])


def test_resumed_from_a_checkpoint_it_needs_the_model_no_more(finished, tiny, tmp_path):
    content = {"rounds": 2, "validate_every": 1, "start_from": str(finished.path)}
    whole = train(tiny(training=content), tmp_path / "whole")
    experiment = tiny(training=content)
    folder = tmp_path / "halted"
    workers = make_workers(experiment, folder)
    make_coordinator(experiment, folder, LocalTransport(workers), start=reader_of(experiment)).run(1)

    def gone():
        raise AssertionError("read again")

    workers = make_workers(experiment, folder)
    again = make_coordinator(experiment, folder, LocalTransport(workers), start=gone)
    again.run()
    expected = load_file(whole.model_folder / "model.safetensors")
    assert all(torch.equal(expected[key], value) for key, value in again.delivered_weights()[1].items())


def test_the_manifest_parses_without_the_folder(finished, tiny, tmp_path):
    run = train(tiny(training={"rounds": 1, "start_from": str(finished.path)}), tmp_path / "run")
    content = json.loads(run.manifest_file.read_text())["experiment"]
    assert content["training"]["start_from"]["sha256"] == weights_hash(finished.model_folder)
    content["training"]["start_from"]["folder"] = "/gone"
    assert parse_experiment(content).fingerprint() == run.manifest["fingerprint"]
