"""FLKD in whole runs: the frozen global model, cached teachers, drawn organs, kills, and sites that come later."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field

import pytest
import torch
from federations import make_coordinator, make_workers, run, same
from killing import Killed, deadly
from overhearing import overheard
from refusing import refused
from torch import nn

from panorgan.errors import RunError
from panorgan.federation import site as site_module
from panorgan.federation.events import read_events
from panorgan.federation.transports.local import LocalTransport
from panorgan.methods.flkd import FLKD
from panorgan.networks.organ_parts import group_of_key
from panorgan.preparation import teacher_predictions as predictions_module
from panorgan.preparation.batch import Batch
from panorgan.preparation.store import PREDICTION
from panorgan.workflows.execute import train

TRAINING = {"rounds": 2, "validate_every": 0, "local_steps": 2}
LACKS = {"north": ("kidney_left", "kidney_right", "spleen"), "south": ("liver",)}
FLKD_BOTH = {"name": "flkd"}


@dataclass
class Step:
    """What a site saw and said in one training step."""

    site: str
    round: int
    batch: Batch
    numbers: dict[str, float] = field(default_factory=dict)
    logits: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """Of the channels that local KD compares with `batch.extra`."""


@pytest.fixture
def steps(monkeypatch) -> list[Step]:
    """Every step of a training stage."""
    taken: list[Step] = []
    step, distil = FLKD.Site.step, FLKD.Site.local_distillation

    def watched_step(self, batch):
        if self.round_info.stage != "train":
            return step(self, batch)
        taken.append(Step(self.facts.name, self.round_info.round, batch))
        reported = step(self, batch)
        taken[-1].numbers = {name: float(value) for name, value in reported.items()}
        return reported

    def watched_distillation(self, logits, vocabulary, batch):
        chosen = logits[:, [vocabulary.index(name) for name in batch.soft_target_organs]]
        taken[-1].logits = chosen.detach().double()
        return distil(self, logits, vocabulary, batch)

    monkeypatch.setattr(FLKD.Site, "step", watched_step)
    monkeypatch.setattr(FLKD.Site, "local_distillation", watched_distillation)
    return taken


@pytest.fixture
def unpredicted(cache) -> None:
    """Nothing is predicted before the test begins."""
    for path in cache.rglob(f"{PREDICTION}*"):
        path.unlink()


def told_by_sites(folder) -> list[dict]:
    """The sites' numbers of every round. Not the traffic: an answer that came before a kill is not asked for again."""
    rounds = [event.facts for event in read_events(folder / "events.jsonl") if event.kind == "round"]
    return [{key: facts[key] for key in ("stage", "round", "sites")} for facts in rounds]


# -- the frozen global model -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["instance", "batch"])
def test_the_global_model_is_the_received_one_and_stays_so_all_round(tiny, tmp_path, monkeypatch, norm):
    """In eval mode: with batch norm it answers by the running statistics that were averaged, and does not move them.

    The local model's own statistics are those of supervision alone: one pass per step, with distillation or without.
    """
    seen = []
    step = FLKD.Site.step

    def watched(self, batch):
        reported = step(self, batch)
        if self.round_info.stage == "train":
            frozen = self.received_model
            assert same(dict(frozen.state_dict()), dict(self.received.tensors))
            assert not any(module.training for module in frozen.modules())
            assert not any(p.requires_grad or p.grad is not None for p in frozen.parameters())
            moved = [k for k, v in self.model.state_dict().items() if not torch.equal(v, self.received.tensors[k])]
            assert {group_of_key(key) for key in moved} == {None, *self.federation.labelled_organs()}
            norms = [m for m in self.model.modules() if isinstance(m, nn.BatchNorm3d)]
            received = self.received.tensors
            counters = [key for key in received if key.endswith("num_batches_tracked")]
            passes = {int(self.model.state_dict()[key] - received[key]) for key in counters}
            seen.append((self.facts.name, self.round_info.round, passes, bool(norms)))
        return reported

    monkeypatch.setattr(FLKD.Site, "step", watched)
    workers = make_workers(experiment := tiny(method=FLKD_BOTH, training=TRAINING, network={"norm": norm}), tmp_path)
    make_coordinator(experiment, tmp_path, LocalTransport(workers)).run()
    assert len(seen) == 2 * 2 * 2
    if norm == "batch":
        assert [passes for _, _, passes, _ in seen] == [{1}, {2}] * 4
    assert all(worker._rule.received_model is None for worker in workers.values()), "between rounds it takes no room"


# -- cached and recomputed teachers ----------------------------------------------------------------------------------

MOVED = {"rotation_degrees": 30.0, "scale": 0.3, "geometry_probability": 1.0, "mirror_axes": [1, 2]}


def watched_run(tiny, folder, steps: list[Step], **changes) -> list[Step]:
    """A teacher's round of three steps, then the three steps of training."""
    training = {"rounds": 1, "validate_every": 0, "local_steps": 3, "augment": MOVED, **changes.pop("training", {})}
    method = {"name": "flkd", "n_sampled_teachers": 2, **changes.pop("method", {})}
    steps.clear()
    run(tiny(method=method, training=training, **changes), folder)
    return list(steps)


@pytest.mark.parametrize("bits", [8, 4])
def test_cached_and_recomputed_teachers_agree_within_quantisation(
    tiny, tmp_path, monkeypatch, unpredicted, steps, bits
):
    """|Δloss| ≤ mean over voxels of |Δloss of a voxel| ≤ mean of |x| / 510, in every step, with geometry on.

    −(t log σ(x) + (1 − t) log(1 − σ(x))) = log(1 + e^x) − t·x is linear in the target t. A stored target is off by at
    most 1/510, and so is what is interpolated from such targets, since interpolation weights sum to 1. Four bits break
    the bound voxel by voxel (though not always in the mean, where rounding up and down cancel).
    The weights are held still in training: after a first step on slightly other targets, later ones would differ for
    another reason.
    """
    apply = FLKD.Site.apply_gradients
    monkeypatch.setattr(FLKD.Site, "apply_gradients", lambda self: self.round_info.stage == "train" or apply(self))
    monkeypatch.setattr(predictions_module, "LEVELS", 2**bits - 1)
    method = {"pretrain": 2.0}
    stored = watched_run(tiny, tmp_path / "stored", steps, method=method)
    fresh = watched_run(tiny, tmp_path / "fresh", steps, method={**method, "teacher_cache": False})
    assert len(stored) == len(fresh) == 2 * 3
    for one, other in zip(stored, fresh, strict=True):
        assert torch.equal(one.batch.image, other.batch.image)
        assert torch.equal(one.batch.masks, other.batch.masks)
        assert one.batch.soft_target_organs == other.batch.soft_target_organs
        assert one.numbers["loss/global_kd"] == other.numbers["loss/global_kd"]
        x = one.logits
        assert torch.equal(x, other.logits)
        apart = (one.batch.soft_targets.double() - other.batch.soft_targets.double()).abs()
        assert apart.max() > 0, "one of the two runs did not do what it should"
        assert (apart.max() <= 1 / 510 + 1e-6) == (bits == 8)
        bound = float(x.abs().mean()) / 510 + 1e-6  # and what float32 rounds
        assert (float((apart * x.abs()).mean()) <= bound) == (bits == 8)
        if bits == 8:
            assert 0 < abs(one.numbers["loss/local_kd"] - other.numbers["loss/local_kd"]) <= bound
            assert abs(one.numbers["loss"] - other.numbers["loss"]) <= bound


# -- drawn organs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sampled", "local_steps"), [(1, 12), (2, 6), (None, 2)])
def test_so_many_organs_are_drawn_and_each_has_its_turn(tiny, tmp_path, steps, sampled, local_steps):
    training = {"rounds": 2, "local_steps": local_steps, "augment": None}
    taken = watched_run(tiny, tmp_path, steps, method={"n_sampled_teachers": sampled}, training=training)
    drawn = {
        (site, round_): [step.batch.soft_target_organs for step in taken if (step.site, step.round) == (site, round_)]
        for site in LACKS
        for round_ in (1, 2)
    }
    for (site, _), names in drawn.items():
        assert len(names) == local_steps
        assert {len(set(step)) for step in names} == {min(sampled or 9, len(LACKS[site]))}
        assert {name for step in names for name in step} == set(LACKS[site])
    assert (drawn["north", 1] == drawn["north", 2]) == (sampled is None)


def test_what_is_drawn_changes_no_patch_and_depends_on_the_round_alone(tiny, tmp_path, steps):
    """Not on what was learned, and not on what distillation weighs; without it, the same patches are cut and moved."""
    runs = {
        name: watched_run(tiny, tmp_path / name, steps, **changes)
        for name, changes in {
            "both": {},
            "local": {"method": {"global_weight": 0}},
            "another rate": {"training": {"optimizer": {"learning_rate": 0.1}}},
            "global": {"method": {"local_weight": 0}},
            "neither": {"method": {"local_weight": 0, "global_weight": 0}},
        }.items()
    }
    for other in runs.values():
        for one, two in zip(runs["both"], other, strict=True):
            assert torch.equal(one.batch.image, two.batch.image)
            assert torch.equal(one.batch.masks, two.batch.masks)
    drawn = {name: [step.batch.soft_target_organs for step in taken] for name, taken in runs.items()}
    assert drawn["both"] == drawn["local"] == drawn["another rate"]
    assert set(drawn["neither"]) == set(drawn["global"]) == {()}


# -- kills -----------------------------------------------------------------------------------------------------------

LONG = {"name": "flkd", "pretrain": 1.0}  # pretrain, pretrain, exchange, train, train
SAVED = {**TRAINING, "optimizer": {"keep_state": True}}


KILLS = {
    # what is interrupted, at which call: two sites take two steps in each round of pretrain and train
    "a teacher half trained": (FLKD.Site, "step", 6),
    "the other site's teacher half trained": (FLKD.Site, "step", 8),
    "a teacher is done, but not sent": (FLKD.Site, "update", 3),
    "both are sent, but not kept": (FLKD.Server, "aggregate", 2),
    "between pretrain and exchange": (FLKD.Server, "aggregate", 3),
    "in the middle of predictions": (site_module, "predict_probabilities", 2),
    "after the exchange": (FLKD.Server, "aggregate", 4),
    "in training": (FLKD.Site, "step", 10),
}


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    """An uninterrupted run: its weights and what its sites sent."""
    folder = tmp_path_factory.mktemp("whole")
    coordinator = run(tiny(method=LONG, training=SAVED), folder)
    return coordinator.state.weights, told_by_sites(folder)


@pytest.mark.parametrize(("holder", "name", "call"), KILLS.values(), ids=KILLS.keys())
def test_a_killed_run_goes_on_to_the_same_bits(
    tiny, tmp_path, whole, monkeypatch, unpredicted, asked, holder, name, call
):
    """Weights and sites' numbers; and no scan is predicted twice, but for the one it died on."""
    experiment = tiny(method=LONG, training=SAVED)
    with monkeypatch.context() as patch:
        patch.setattr(holder, name, deadly(getattr(holder, name), call, works=False))
        with pytest.raises(Killed):
            run(experiment, tmp_path / "broken")
    again = run(experiment, tmp_path / "broken")
    assert again.finished
    weights, reported = whole
    assert same(again.state.weights, weights)
    assert told_by_sites(tmp_path / "broken") == reported
    assert len(asked) == sum(facts.train_cases for facts in again.federation.sites.values())


def test_one_round_per_process_gives_the_same_bits(tiny, tmp_path, whole, unpredicted, asked):
    """And the exchange is when every scan is predicted, once."""
    experiment = tiny(method=LONG, training=SAVED)
    predicted = []
    for _ in range(5):
        pieces = run(experiment, tmp_path, rounds=1)
        predicted.append(len(asked))
    weights, reported = whole
    assert same(pieces.state.weights, weights)
    assert told_by_sites(tmp_path) == reported
    scans = sum(facts.train_cases for facts in pieces.federation.sites.values())
    assert predicted == [0, 0, scans, scans, scans]


def test_a_site_that_lost_its_teachers_says_so(tiny, tmp_path):
    experiment = tiny(method=LONG, training=TRAINING)
    run(experiment, tmp_path, rounds=3)
    shutil.rmtree(tmp_path / "sites" / "north" / "vault")
    with refused("teachers-missing", RunError) as caught:
        run(experiment, tmp_path)
    assert "north, south" in caught.value.what
    assert caught.value.fix
    # Its own alone: it would not be missed before some case of its own goes without a label.
    run(experiment, tmp_path / "own", rounds=3)
    (own,) = (tmp_path / "own" / "sites" / "north" / "vault").glob("*/teacher-north-*")
    own.unlink()
    with refused("teachers-missing", RunError) as caught:
        run(experiment, tmp_path / "own")
    assert "south" not in caught.value.what
    # Before they were handed out nothing is lost: they come with the exchange.
    run(experiment, tmp_path / "early", rounds=1)
    shutil.rmtree(tmp_path / "early" / "sites" / "north" / "vault", ignore_errors=True)
    assert run(experiment, tmp_path / "early").finished


# -- coming later ----------------------------------------------------------------------------------------------------


def test_a_site_that_joins_in_training_is_taught_by_the_others_and_by_nobody_in_turn(tiny, tmp_path, steps):
    """Rounds: pretrain, exchange, train, train, train. South comes in the last but one; until then north is alone and
    owns every organ there is, so that nothing is distilled."""
    experiment = tiny(method={"name": "flkd", "pretrain": 0.3}, training={**TRAINING, "rounds": 3})
    coordinator, sites = overheard(experiment, tmp_path, joins_at={"south": 4})
    assert [round_info.stage for round_info in coordinator.schedule] == ["pretrain", "exchange"] + ["train"] * 3
    coordinator.run(rounds=3)
    assert {group_of_key(key) for key in coordinator.state.weights} == {None, "liver"}
    assert [set(step.numbers) for step in steps] == [{"loss"}] * 2
    steps.clear()
    coordinator.run()
    assert coordinator.tensor_store.names() == ("teacher/north",)
    assert {group_of_key(key) for key in coordinator.state.weights} == {None, "liver", *LACKS["north"]}
    first, second = sites["south"].received
    assert {key.split("/")[1] for key in first.tensors if key.startswith("teacher/")} == {"north"}
    assert set(second.tensors) == set(sites["south"].sent[0].tensors) == set(coordinator.state.weights)
    assert not any(key.startswith("teacher/") for message in sites["south"].sent for key in message.tensors)
    reported = {name: {frozenset(s.numbers) for s in steps if s.site == name} for name in sites}
    assert reported["north"] == {frozenset({"loss", "loss/global_kd"})}, (
        "its organs are distilled from the global model"
    )
    assert reported["south"] == {frozenset({"loss", "loss/global_kd", "loss/local_kd"})}
    assert {s.batch.soft_target_organs for s in steps if s.site == "south"} == {("liver",)}


@pytest.mark.parametrize("joins_at", [2, 3])
def test_a_site_that_joins_before_training_does_no_harm(tiny, tmp_path, joins_at):
    """In pretrain: it trains for the rounds that are left, and the other's teacher is the one it would have been.
    In the exchange it is too late for a teacher of its own."""
    experiment = tiny(method=LONG, training=SAVED)
    coordinator, sites = overheard(experiment, tmp_path / "late", joins_at={"south": joins_at})
    coordinator.run()
    assert coordinator.tensor_store.names() == (
        ("teacher/north", "teacher/south") if joins_at == 2 else ("teacher/north",)
    )
    alone = make_coordinator(
        experiment,
        tmp_path / "alone",
        LocalTransport({"north": make_workers(experiment, tmp_path / "alone")["north"]}),
        awaited=("south",),
    )
    alone.run(rounds=2)
    assert same(coordinator.tensor_store.get("teacher/north"), alone.tensor_store.get("teacher/north"))
    assert {"loss", "cases", "loss/global_kd", "loss/local_kd"} == set(sites["south"].sent[-1].scalars)


# -- whole runs ------------------------------------------------------------------------------------------------------


def test_on_slices_teachers_are_cut_like_the_image(tiny, tmp_path, steps):
    sampling = {"patch_size": [16, 16, 1], "batch_size": 4}
    experiment = tiny(method=FLKD_BOTH, training={**TRAINING, "sampling": sampling}, network={"dimensions": 2})
    result = train(experiment, tmp_path / "run")
    assert {row["organ"] for row in result.scores} == set(experiment.vocabulary)
    assert {tuple(step.batch.soft_targets.shape) for step in steps} == {(4, 1, 16, 16)}
    assert all(step.numbers["loss/local_kd"] > 0 for step in steps)


def test_lower_precision(tiny, tmp_path, steps):
    exact = watched_run(tiny, tmp_path / "float32", steps)
    rough = watched_run(tiny, tmp_path / "bfloat16", steps, training={"precision": "bfloat16"})
    for one, other in zip(exact, rough, strict=True):
        assert set(one.numbers) == {"loss", "loss/global_kd", "loss/local_kd"}
        assert other.numbers == pytest.approx(one.numbers, rel=0.1)
    assert [s.numbers for s in exact] != [s.numbers for s in rough]


@pytest.mark.slow
def test_it_learns(tiny, tmp_path):
    training = {"rounds": 8, "local_steps": 6, "validate_every": 4, "optimizer": {"learning_rate": 0.02}}
    run(tiny(method=FLKD_BOTH, training=training), tmp_path)
    rounds = [event.facts for event in read_events(tmp_path / "events.jsonl") if event.kind == "round"]
    rounds = [facts for facts in rounds if facts["stage"] == "train"]
    losses = [sum(numbers["loss"] for numbers in facts["sites"].values()) for facts in rounds]
    assert losses[-1] < 0.7 * losses[0]
    assert rounds[-1]["validation"]["north"]["liver"] > 0.4
