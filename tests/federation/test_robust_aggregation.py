"""Trimmed mean and median over sites: by hand, in any order, and against a site that lies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusing import refused
from stand_ins import StandIn, noise, stand_in_coordinator

from panorgan.errors import ConfigError
from panorgan.federation import robust
from panorgan.federation.aggregation import Aggregation, SpooledUpdates
from panorgan.federation.events import read_events
from panorgan.federation.message import Message, MessageFile
from panorgan.federation.robust import median, trimmed_mean
from panorgan.federation.settings import TrainingSettings, refuse_few_sites

MEDIAN, TRIMMED = Aggregation("median"), Aggregation("trimmed_mean")


def spooled(folder: Path, updates: dict[str, dict[str, torch.Tensor]], aggregation: Aggregation) -> SpooledUpdates:
    files = {}
    for site, tensors in updates.items():
        path = folder / f"{site}.safetensors"
        path.write_bytes(Message(tensors).to_bytes())
        files[site] = MessageFile(path)
    return SpooledUpdates(files, aggregation)


def tensors(*rows: list[float]) -> list[torch.Tensor]:
    return [torch.tensor(row) for row in rows]


def test_median_by_hand():
    five = tensors([1.0, -9.0], [2.0, 4.0], [3.0, 0.0], [100.0, 5.0], [-50.0, 6.0])
    assert median(five).tolist() == [2.0, 4.0]
    assert median(five[:4]).tolist() == [2.5, 2.0]  # halfway between 2 and 3, and between 0 and 4


def test_trimmed_mean_by_hand():
    five = tensors([1.0, -9.0], [2.0, 4.0], [6.0, 0.0], [100.0, 5.0], [-50.0, 8.0])
    assert trimmed_mean(five, [1.0] * 5, 1).tolist() == [3.0, 3.0]  # of 1, 2, 6, and of 4, 0, 5
    # weights 1, 2, 3, 4, 5: (1·1 + 2·2 + 3·6)/6, and (2·4 + 3·0 + 4·5)/9
    assert trimmed_mean(five, [1.0, 2.0, 3.0, 4.0, 5.0], 1).tolist() == pytest.approx([23 / 6, 28 / 9])
    assert trimmed_mean(five, [1.0] * 5, 2).tolist() == median(five).tolist()
    assert trimmed_mean(five, [1.0] * 5, 9).tolist() == median(five).tolist()  # one value is always kept


def test_whole_numbers_stay_whole():
    counters = [torch.tensor(n) for n in (10, 11, 1000, 12, 0)]
    assert (median(counters).item(), median(counters).dtype) == (11, torch.int64)
    assert trimmed_mean(counters, [1.0] * 5, 1).item() == 11


@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("aggregation", [MEDIAN, TRIMMED], ids=lambda a: a.kind)
def test_types_and_shapes_are_kept_and_equal_tensors_stay_equal(kind, aggregation, tmp_path):
    value = (torch.randn(3, 4, generator=torch.Generator().manual_seed(0)) * 100).to(kind)
    updates = spooled(tmp_path, {site: {"w": value} for site in "abcde"}, aggregation)
    found = updates.mean(lambda site, key: 1.0)["w"]
    assert (found.dtype, found.shape) == (kind, value.shape)
    assert torch.equal(found, value)


def test_blocks_make_no_difference(monkeypatch):
    values = [torch.randn(1000, generator=torch.Generator().manual_seed(seed)) for seed in range(5)]
    weights = [3.0, 1.0, 4.0, 1.0, 5.0]
    whole = median(values), trimmed_mean(values, weights, 1)
    monkeypatch.setattr(robust, "_VALUES", 35)
    assert torch.equal(median(values), whole[0])
    assert torch.equal(trimmed_mean(values, weights, 1), whole[1])


@settings(max_examples=25, deadline=None)
@given(st.permutations(list("abcdef")), st.sampled_from([MEDIAN, TRIMMED]), st.integers(0, 1000))
def test_order_of_arrival_does_not_matter(tmp_path_factory, order, aggregation, seed):
    generator = torch.Generator().manual_seed(seed)
    values = {site: {"w": torch.randn(20, generator=generator).round(decimals=1)} for site in "abcdef"}
    weights = dict(zip("abcdef", torch.rand(6, generator=generator).tolist(), strict=True))
    folder = tmp_path_factory.mktemp("order")
    one = spooled(folder, values, aggregation).mean(lambda site, key: weights[site])
    other = spooled(folder, {site: values[site] for site in order}, aggregation).mean(lambda site, key: weights[site])
    assert torch.equal(one["w"], other["w"])


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000))
def test_a_trimmed_mean_that_leaves_nobody_out_is_the_mean(tmp_path_factory, seed):
    generator = torch.Generator().manual_seed(seed)
    values = {site: {"w": torch.randn(20, generator=generator)} for site in "abcde"}
    weights = dict(zip("abcde", torch.rand(5, generator=generator).tolist(), strict=True))
    mean = spooled(tmp_path_factory.mktemp("m"), values, Aggregation()).mean(lambda site, key: weights[site])["w"]
    kept = trimmed_mean([values[site]["w"] for site in "abcde"], [weights[site] for site in "abcde"], 0)
    torch.testing.assert_close(kept, mean)


@pytest.mark.parametrize(
    ("sites", "share", "kept"),
    [
        ("abc", 0.2, 1),  # at least one at either end
        ("abcde", 0.2, 3),
        ("abcde", 0.01, 3),
        ("abcdefghij", 0.2, 6),
        ("abcdefghij", 0.29, 6),
        ("abcdefghij", 0.3, 4),
        ("abcde", 0.49, 1),
    ],
)
def test_how_many_are_left_out(sites, share, kept, tmp_path):
    """Site i sends i ones among zeros, far apart: the mean over those kept shows how many they were."""
    updates = {site: {"w": torch.tensor([10.0**place])} for place, site in enumerate(sites)}
    found = spooled(tmp_path, updates, Aggregation("trimmed_mean", share)).mean(lambda site, key: 1.0)["w"].item()
    first = (len(sites) - kept) // 2
    assert found == pytest.approx(sum(10.0**place for place in range(first, first + kept)) / kept)


@pytest.mark.parametrize("aggregation", [MEDIAN, TRIMMED], ids=lambda a: a.kind)
def test_keys_of_one_or_two_sites_are_averaged(aggregation, tmp_path):
    """Heads that few sites own: two cannot outvote each other, and a site alone keeps what it sent."""
    values = {site: {"shared": torch.tensor([float(v)])} for site, v in zip("abcde", (1, 2, 3, 4, 1000), strict=True)}
    values["a"]["head"], values["b"]["head"] = torch.tensor([1.0]), torch.tensor([5.0])
    values["c"]["own"] = torch.tensor([7.0])
    found = spooled(tmp_path, values, aggregation).mean(lambda site, key: 3.0 if site == "b" else 1.0)
    assert found["head"].item() == 4.0
    assert found["own"].item() == 7.0
    assert 2.0 <= found["shared"].item() <= 4.0


@pytest.mark.parametrize("aggregation", [MEDIAN, TRIMMED], ids=lambda a: a.kind)
def test_a_site_without_weight_has_no_say(aggregation, tmp_path):
    values = {site: {"w": torch.tensor([float(v)])} for site, v in zip("abcdef", (1, 2, 3, 4, 5, 3), strict=True)}
    with_all = spooled(tmp_path, values, aggregation).mean(lambda site, key: 0.0 if site in "de" else 1.0)["w"]
    without = spooled(tmp_path, {s: values[s] for s in "abcf"}, aggregation).mean(lambda site, key: 1.0)["w"]
    assert torch.equal(with_all, without)
    assert not spooled(tmp_path, values, aggregation).mean(lambda site, key: 0.0)


# -- in a run ------------------------------------------------------------------------------------------------------


def lies(weights, task):
    return {key: value * 100 if value.is_floating_point() else value for key, value in weights.items()}


def distance(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    return max(float((first[key] - second[key]).abs().max()) for key in first)


@pytest.mark.parametrize("aggregation", ["median", "trimmed_mean"])
def test_one_liar_among_five_does_not_move_the_model(aggregation, tmp_path):
    """It sends 100 times the weights, claims most of the cases, and the outlier factor lets it through."""
    honest = [StandIn(f"site-{place}", noise(place)) for place in range(4)]
    liar = StandIn("site-4", lies, cases=9999.0)
    found = {}
    for name, sites, kind in (
        ("honest", honest, "mean"),
        ("attacked", [*honest, liar], "mean"),
        ("robust", [*honest, liar], aggregation),
    ):
        training = {"rounds": 3, "aggregation": kind, "outlier_factor": 1e12}
        coordinator = stand_in_coordinator(sites, tmp_path / name, training=training)
        coordinator.run()
        assert not [event for event in read_events(tmp_path / name / "events.jsonl") if event.kind == "refused"]
        found[name] = coordinator.state.weights
    assert distance(found["robust"], found["honest"]) < 0.2  # steps of 0.01, three rounds, the largest of all weights
    assert distance(found["attacked"], found["honest"]) > 1e4


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "scaffold", "multihead", "ufps", "fediod"])
def test_every_method_that_averages_gets_it(method, tmp_path):
    """The same updates, mean and median: another model, so the choice reaches the method."""
    weights = {}
    for kind in ("mean", "median"):
        sites = [StandIn(f"site-{place}", noise(place)) for place in range(5)]
        training = {"rounds": 4, "aggregation": kind}
        coordinator = stand_in_coordinator(sites, tmp_path / kind, method, training=training)
        coordinator.run()
        weights[kind] = coordinator.state.weights
    assert distance(weights["mean"], weights["median"]) > 1e-4


@pytest.mark.parametrize("kind", ["median", "trimmed_mean"])
def test_fewer_than_five_sites_are_refused(kind, tiny, tiny_content):
    with refused("too-few-for-robust", ConfigError) as caught:
        tiny(training={"aggregation": kind})
    assert "training.aggregation" in caught.value.where
    assert "2" in caught.value.why
    refuse_few_sites(TrainingSettings(aggregation=kind), 5, "")
    refuse_few_sites(TrainingSettings(), 1, "")
    with refused("too-few-for-robust", ConfigError):
        refuse_few_sites(TrainingSettings(aggregation=kind), 4, "")


def test_five_training_sites_will_do(tiny):
    names = ("a", "b", "c", "d", "e")
    sites = [{"name": name, "annotated": ["liver", "spleen", "kidney"], "cases": 3} for name in names]
    assert tiny(phantom={"sites": sites}, training={"aggregation": "median"}).training.aggregation == "median"
    external = [{**site, "external": site["name"] == "e"} for site in sites]
    with refused("too-few-for-robust", ConfigError):
        tiny(phantom={"sites": external}, training={"aggregation": "median"})
