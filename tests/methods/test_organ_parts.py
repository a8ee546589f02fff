"""Parts of single organs in a federation: which keys travel, whose mean they are, and what they reduce to."""

from __future__ import annotations

import pytest
import torch
from federations import ALL, Tampering, make_coordinator, make_workers, run, same
from overhearing import overheard, spooled
from torch import nn

from panorgan.anatomy import Vocabulary
from panorgan.federation.admission import first_weights
from panorgan.federation.events import read_events
from panorgan.federation.message import Message
from panorgan.federation.optimizers import load_optimizer_state, make_optimizer, optimizer_state
from panorgan.federation.settings import OptimizerSettings
from panorgan.losses import partial_dice_ce
from panorgan.methods.base import MethodConfig, ServerRule, SiteTools
from panorgan.methods.protocol import Federation, Payload, RoundInfo, SiteInfo
from panorgan.methods.registry import find_method
from panorgan.networks import UNetSettings, organ_network
from panorgan.networks.organ_parts import group_of_key
from panorgan.preparation.batch import Batch
from panorgan.preparation.sampling import PatchSampler
from panorgan.seeds import derive_seed
from panorgan.workflows.execute import train

KINDS = {"multihead": "heads", "segviz": "task_blocks", "multidecoder": "decoders", "multiencoder": "encoders"}
OWN = {"north": {"liver"}, "south": {"spleen", "kidney_left", "kidney_right"}}  # south annotates the union `kidney`
PLAIN = {"name": "fedavg", "server_step": 1}
SHORT = {"rounds": 2, "validate_every": 2, "local_steps": 1}


def facts(**sites: tuple[int, dict[str, int]]) -> dict[str, SiteInfo]:
    return {name: SiteInfo(name, cases, annotated) for name, (cases, annotated) in sites.items()}


def groups(keys) -> set[str | None]:
    return {group_of_key(key) for key in keys}


# -- which keys travel -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["instance", "batch"])
@pytest.mark.parametrize("method", KINDS)
def test_a_site_sends_and_receives_the_shared_weights_and_its_own_parts(tiny, tmp_path, method, norm):
    experiment = tiny(method={"name": method, "unlabelled": "marginal"}, training=SHORT, network={"norm": norm})
    coordinator, sites = overheard(experiment, tmp_path)
    coordinator.run()
    weights = coordinator.state.weights
    shared = {key for key in weights if group_of_key(key) is None}
    assert shared
    assert groups(weights) == {None, "liver", "spleen", "kidney_left", "kidney_right"}
    for name, site in sites.items():
        own = {key for key in weights if group_of_key(key) in OWN[name]}
        assert groups(own) == OWN[name]
        assert len(site.sent) == 2
        for message in (*site.received, *site.sent):
            assert set(message.tensors) == shared | own
        model = site.worker._rule.model
        assert set(model.state_dict()) == shared | own, "a site holds no part of another's organ"
        assert all(key.startswith(f"{KINDS[method]}.") for key in own)


@pytest.mark.parametrize("norm", ["instance", "batch"])
@pytest.mark.parametrize("method", KINDS)
def test_with_the_received_model_a_site_gets_foreign_parts_and_neither_moves_nor_sends_them(
    tiny, tmp_path, method, norm
):
    settings = {"name": method, "unlabelled": "received"}
    coordinator, sites = overheard(tiny(method=settings, training=SHORT, network={"norm": norm}), tmp_path)
    coordinator.run()
    for name, site in sites.items():
        sent = {key for key in coordinator.state.weights if group_of_key(key) in {None, *OWN[name]}}
        for message in site.received:
            assert set(message.tensors) == set(coordinator.state.weights)
        for message in site.sent:
            assert set(message.tensors) == sent
        parameters = dict(site.worker._rule.model.named_parameters())
        last = site.received[-1].tensors
        foreign = parameters.keys() - sent
        assert foreign
        assert all(torch.equal(parameters[key], last[key]) for key in foreign)


@pytest.mark.parametrize("method", ["multihead", "segviz"])
def test_heads_and_task_blocks_are_held_unless_the_paper_is_asked_for(method):
    assert find_method(method).Config().unlabelled == "received"
    assert find_method("multidecoder").Config().unlabelled == "marginal"
    if method == "segviz":
        assert find_method(method).recipe["method.unlabelled"] == "marginal"


@pytest.mark.parametrize("method", ["multihead", "segviz"])
def test_shared_weights_are_drawn_back_to_what_foreign_parts_said(method):
    """Without a label at all, a site that has moved away is drawn back, in shared weights and in no part."""
    federation = Federation(Vocabulary(["liver", "spleen"]), facts(a=(1, {"liver": 1}), b=(1, {"spleen": 1})))
    built = find_method(method)(find_method(method).Config())
    torch.manual_seed(0)
    model = built.build_network(UNetSettings(features=(4, 8)), federation, "a")
    tools = SiteTools(model, torch.optim.SGD(model.parameters(), 0.1))
    site = built.Site(built.config, federation.sites["a"], federation, tools)
    site.round_info = RoundInfo("train", 1, 1)
    site.received = Payload({key: value.clone() for key, value in model.state_dict().items()})
    site.before_round()
    image, masks = torch.randn(1, 1, 8, 8, 8), torch.zeros(1, 1, 8, 8, 8, dtype=torch.bool)
    batch = Batch(image, masks, torch.tensor([[False]]), ("liver",), ("case",))
    site.loss(batch).backward()
    assert all(p.grad is None or p.grad.abs().max() < 1e-6 for p in model.parameters()), "it is where it was"
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if group_of_key(name) is None:
                parameter.mul_(1.1)
    model.zero_grad()
    site.loss(batch).backward()
    moved = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 1e-7}
    assert {group_of_key(name) for name in moved} == {None}


@pytest.mark.parametrize("method", KINDS)
def test_everyone_sends_everything_when_asked_to(tiny, tmp_path, method):
    """A part that a site has no label for comes back as it was."""
    settings = {"name": method, "organ_parts": "everyone", "unlabelled": "marginal"}
    experiment = tiny(method=settings, training=SHORT)
    coordinator, sites = overheard(experiment, tmp_path)
    coordinator.run()
    for name, site in sites.items():
        for received, sent in zip(site.received, site.sent, strict=True):
            assert set(sent.tensors) == set(received.tensors) == set(coordinator.state.weights)
            kept = {key for key in sent.tensors if torch.equal(sent.tensors[key], received.tensors[key])}
            foreign = {key for key in sent.tensors if group_of_key(key) not in {None, *OWN[name]}}
            assert foreign
            assert foreign <= kept
            assert any(group_of_key(key) in OWN[name] for key in sent.tensors.keys() - kept)


@pytest.mark.parametrize("method", KINDS)
def test_a_foreign_part_is_refused_by_name(tiny, tmp_path, method):
    """North knows the liver only; it may not write to the spleen's part."""
    experiment = tiny(method={"name": method}, training={**SHORT, "rounds": 1, "validate_every": 0})
    coordinator = make_coordinator(experiment, tmp_path, transport := Tampering(make_workers(experiment, tmp_path)))
    foreign = next(key for key in coordinator.state.weights if group_of_key(key) == "spleen")
    before = {key: value.clone() for key, value in coordinator.state.weights.items()}

    def change(site: str, answer: bytes) -> bytes:
        message = Message.from_bytes(answer)
        extra = {foreign: before[foreign]} if site == "north" else {}
        return Message({**message.tensors, **extra}, message.scalars, message.meta).to_bytes()

    transport.change = change
    coordinator.run()
    (refused,) = [event.facts for event in read_events(tmp_path / "events.jsonl") if event.kind == "refused"]
    assert refused["site"] == "north"
    assert foreign in refused["why"]
    liver = [key for key in before if group_of_key(key) == "liver"]
    assert all(torch.equal(coordinator.state.weights[key], before[key]) for key in liver), "no other site owns it"


# -- whose mean ------------------------------------------------------------------------------------------------------

HEAD, FOREIGN, SHARED = "heads.liver.0.weight", "heads.spleen.0.weight", "embedding.conv.conv.weight"
THREE_SITES = facts(a=(1, {"liver": 1}), b=(3, {"liver": 3}), c=(4, {"spleen": 4}))
SENT = {
    "a": {SHARED: 1.0, HEAD: 2.0},
    "b": {SHARED: 2.0, HEAD: 10.0},
    "c": {SHARED: 4.0, FOREIGN: 7.0},
}
SENT_BY_ALL = {
    "a": {SHARED: 1.0, HEAD: 2.0, FOREIGN: 0.0},
    "b": {SHARED: 2.0, HEAD: 10.0, FOREIGN: 0.0},
    "c": {SHARED: 4.0, HEAD: 0.0, FOREIGN: 7.0},
}


@pytest.mark.parametrize(
    ("config", "sent", "expected"),
    [
        # (1·1 + 3·2 + 4·4)/8; (1·2 + 3·10)/4; c alone
        ({}, SENT, {SHARED: 23 / 8, HEAD: 8.0, FOREIGN: 7.0}),
        ({"weighting": "uniform"}, SENT, {SHARED: 7 / 3, HEAD: 6.0, FOREIGN: 7.0}),
        # (1·2 + 3·10 + 4·0)/8; (1·0 + 3·0 + 4·7)/8
        ({"organ_parts": "everyone"}, SENT_BY_ALL, {SHARED: 23 / 8, HEAD: 4.0, FOREIGN: 3.5}),
        (
            {"organ_parts": "everyone", "weighting": "uniform"},
            SENT_BY_ALL,
            {SHARED: 7 / 3, HEAD: 4.0, FOREIGN: 7 / 3},
        ),
    ],
)
def test_a_part_is_averaged_over_its_owners(tmp_path, config, sent, expected):
    federation = Federation(Vocabulary(["liver", "spleen"]), THREE_SITES)
    start = {key: torch.tensor([-1.0]) for key in (SHARED, HEAD, FOREIGN)}
    rule = ServerRule(MethodConfig(**config), federation, start)
    assert {site: set(rule.expects(site)) for site in "abc"} == {site: set(keys) for site, keys in sent.items()}
    assert {site: set(rule.broadcast(site).tensors) for site in "abc"} == {s: set(keys) for s, keys in sent.items()}
    rule.aggregate(
        spooled(tmp_path, {s: {k: torch.tensor([v]) for k, v in tensors.items()} for s, tensors in sent.items()})
    )
    assert {key: value.item() for key, value in rule.weights.items()} == pytest.approx(expected)


def test_a_part_waits_for_owners_who_did_not_answer(tmp_path):
    rule = ServerRule(
        MethodConfig(),
        Federation(Vocabulary(["liver", "spleen"]), THREE_SITES),
        {key: torch.tensor([-1.0]) for key in (SHARED, HEAD, FOREIGN)},
    )
    rule.aggregate(spooled(tmp_path, {"a": {SHARED: torch.tensor([1.0]), HEAD: torch.tensor([2.0])}}))
    assert {key: value.item() for key, value in rule.weights.items()} == {SHARED: 1.0, HEAD: 2.0, FOREIGN: -1.0}


def test_owners_of_tumours_and_unions():
    """An organ and its tumour share one part: a site that annotates either trains it. A union trains its parts."""
    vocabulary = Vocabulary(["liver", "liver_tumour", "kidney_left", "kidney_right", "kidney_tumour"])
    federation = Federation(
        vocabulary,
        facts(
            a=(1, {"liver": 1}), b=(1, {"liver_tumour": 1}), c=(2, {"kidney": 2, "liver": 1}), d=(1, {"kidney_left": 1})
        ),
    )
    network = organ_network(vocabulary, UNetSettings(features=(8, 8), organs="heads"))
    rule = ServerRule(MethodConfig(), federation, network.state_dict())
    assert {site: groups(rule.weights_of(site)) - {None} for site in "abcd"} == {
        "a": {"liver"},
        "b": {"liver"},
        "c": {"liver", "kidney_left", "kidney_right"},  # not `kidney`, whose only output is its tumour
        "d": {"kidney_left"},
    }


@pytest.mark.parametrize("method", KINDS)
def test_networks_of_sites_and_of_the_federation_have_equal_names_and_shapes(method):
    vocabulary = Vocabulary(["liver", "liver_tumour", "spleen", "pancreas"])
    federation = Federation(vocabulary, facts(a=(1, {"liver": 1}), b=(1, {"spleen": 1, "liver_tumour": 1})))
    built = find_method(method)(find_method(method).Config(unlabelled="marginal"))
    whole = built.build_network(UNetSettings(features=(4, 8)), federation)
    assert whole.groups == ("liver", "spleen")  # no site annotates the pancreas yet
    assert tuple(whole.vocabulary) == tuple(vocabulary)
    for site, own in (("a", ("liver",)), ("b", ("liver_tumour", "spleen"))):
        network = built.build_network(UNetSettings(features=(4, 8)), federation, site)
        assert tuple(network.vocabulary) == own
        shapes = {key: value.shape for key, value in whole.state_dict().items()}
        assert all(shapes[key] == value.shape for key, value in network.state_dict().items())


# -- reductions ------------------------------------------------------------------------------------------------------

ONE_SITE = {"sites": [{"name": "north", "annotated": ALL, "cases": 5, "spacing_mm": [12, 12, 12]}]}
TWO_SITES = {
    "sites": [
        {"name": "north", "annotated": ALL, "cases": 5, "spacing_mm": [12, 12, 12]},
        {"name": "south", "annotated": ALL, "cases": 4, "spacing_mm": [11, 11, 13]},
    ]
}


@pytest.mark.parametrize("method", KINDS)
def test_one_site_is_plain_training(tiny, tmp_path, method):
    """A loop without rules, messages or means ends with the same bits."""
    training = {"rounds": 2, "validate_every": 0, "local_steps": 2, "augment": None}
    experiment = tiny(phantom=ONE_SITE, method={"name": method}, training=training)
    coordinator = run(experiment, tmp_path)
    worker = make_workers(experiment, tmp_path / "again")["north"]
    cases, optimizer = worker.data.train, experiment.training.optimizer
    vocabulary = Vocabulary(experiment.vocabulary)
    federation = Federation(vocabulary, {"north": worker.facts()})
    network = organ_network(vocabulary, experiment.network.model_copy(update={"organs": KINDS[method]}))
    network.load_state_dict(first_weights(experiment.build_method(), experiment.network, federation, experiment.seed))
    network = network.to(memory_format=torch.channels_last_3d)
    descent = torch.optim.AdamW(network.parameters(), weight_decay=optimizer.weight_decay)
    for round_ in (1, 2):
        sampler = PatchSampler(cases, tuple(sorted(ALL)), experiment.training.sampling)
        for step, packed in enumerate(sampler.batches(2, derive_seed(experiment.seed, "north", "train", round_))):
            batch = packed.unpack()
            descent.param_groups[0]["lr"] = optimizer.rate((round_ - 1 + step / 2) / 2)
            descent.zero_grad()
            partial_dice_ce(network(batch.image), batch, vocabulary, "sigmoid", dice_over="batch").mean().backward()
            nn.utils.clip_grad_norm_(network.parameters(), optimizer.clip_norm)
            descent.step()
    assert same(coordinator.state.weights, dict(network.state_dict()))


@pytest.mark.parametrize("kind", sorted(set(KINDS.values())))
def test_when_all_sites_own_all_organs_it_is_fedavg(tiny, tmp_path, kind):
    name = next(method for method, own in KINDS.items() if own == kind)
    common = {"phantom": TWO_SITES, "training": SHORT}
    outcomes = [
        run(tiny(method={"name": name, "weighting": "cases"}, **common), tmp_path / "owners"),
        run(tiny(method={"name": name, "weighting": "cases", "organ_parts": "everyone"}, **common), tmp_path / "all"),
        run(tiny(method=PLAIN, network={"organs": kind}, **common), tmp_path / "fedavg"),
    ]
    uniform = run(tiny(method={"name": name, "weighting": "uniform"}, **common), tmp_path / "uniform")
    assert same(outcomes[0].state.weights, outcomes[1].state.weights)
    assert same(outcomes[0].state.weights, outcomes[2].state.weights)
    assert not same(outcomes[0].state.weights, uniform.state.weights), "the two sites have unequal numbers of cases"


def test_with_partial_labels_who_averages_a_head_matters(tiny, tmp_path):
    """Owners alone keep what they learned; everyone waters it down with heads that were never touched."""
    owners = run(tiny(method={"name": "multihead", "server_step": 1}, training=SHORT), tmp_path / "owners")
    everyone = run(
        tiny(method={"name": "multihead", "server_step": 1, "organ_parts": "everyone"}, training=SHORT),
        tmp_path / "all",
    )
    fedavg = run(tiny(method=PLAIN, network={"organs": "heads"}, training=SHORT), tmp_path / "fedavg")
    assert same(owners.state.weights, fedavg.state.weights)
    assert not same(owners.state.weights, everyone.state.weights)


def test_fedprox_on_a_multi_head_network(tiny, tmp_path):
    """The other baselines of FLKD: μ = 0 is FedAvg there too, μ > 0 is not."""
    runs = {
        mu: run(
            tiny(
                method={"name": "fedprox", "mu": mu, "server_step": 1},
                network={"organs": "heads"},
                training={**SHORT, "local_steps": 2},
            ),
            tmp_path / str(mu),
        ).state.weights
        for mu in (0.0, 1.0)
    }
    fedavg = run(
        tiny(method={"name": "multihead", "server_step": 1}, training={**SHORT, "local_steps": 2}), tmp_path / "fedavg"
    )
    assert same(runs[0.0], fedavg.state.weights)
    assert not same(runs[0.0], runs[1.0])


def test_an_optimisers_moments_stay_with_their_organ_when_another_comes_in_between():
    """A late organ may stand before the others in the network: `kidney_left` before `liver`."""
    networks = [
        organ_network(Vocabulary(organs), UNetSettings(features=(4, 8), organs="heads"))
        for organs in (["liver", "spleen"], ["liver", "spleen", "kidney_left"])
    ]
    settings = OptimizerSettings(name="adamw")
    before, after = (make_optimizer(network, settings) for network in networks)
    logits, _ = networks[0].channels_for(torch.randn(1, 1, 8, 8, 8), ["liver"])
    logits.square().sum().backward()
    before.step()
    load_optimizer_state(after, optimizer_state(before))
    was, now = dict(networks[0].named_parameters()), dict(networks[1].named_parameters())
    for name, parameter in now.items():
        if group_of_key(name) in (None, "liver"):
            assert torch.equal(after.state[parameter]["exp_avg"], before.state[was[name]]["exp_avg"])
        else:
            assert parameter not in after.state, "it has not been trained yet"


# -- whole runs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", KINDS)
def test_a_killed_run_goes_on_to_the_same_bits(tiny, tmp_path, method):
    training = {"rounds": 3, "validate_every": 0, "local_steps": 1, "optimizer": {"keep_state": True}}
    experiment = tiny(method={"name": method}, training=training, network={"norm": "batch"})
    whole = run(experiment, tmp_path / "whole")
    run(experiment, tmp_path / "broken", rounds=1)
    assert same(run(experiment, tmp_path / "broken").state.weights, whole.state.weights)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_run_delivers_a_model_of_all_organs(tiny, tmp_path, precision):
    training = {"rounds": 1, "validate_every": 1, "local_steps": 1, "precision": precision}
    experiment = tiny(
        method={"name": "multihead"},
        training=training,
        network={"norm": "group", "groups": 4, "weight_standardisation": True, "features": [8, 16]},
    )
    result = train(experiment, tmp_path / "run")
    assert {row["organ"] for row in result.scores} == set(experiment.vocabulary)


@pytest.mark.slow
@pytest.mark.parametrize("method", KINDS)
def test_each_of_them_learns(tiny, tmp_path, method):
    training = {"rounds": 10, "local_steps": 6, "validate_every": 5, "optimizer": {"learning_rate": 0.02}}
    run(tiny(method={"name": method}, training=training), tmp_path)
    rounds = [event.facts for event in read_events(tmp_path / "events.jsonl") if event.kind == "round"]
    losses = [sum(numbers["loss"] for numbers in reported["sites"].values()) for reported in rounds]
    assert losses[-1] < 0.7 * losses[0]
    assert rounds[-1]["validation"]["north"]["liver"] > 0.4
