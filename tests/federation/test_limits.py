"""What a site says about itself: within what was agreed it counts, outside it is refused, and it buys no weight."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError
from refusing import refused
from stand_ins import StandIn, noise, stand_in_coordinator

from panorgan.errors import MessageError
from panorgan.federation.aggregation import Aggregation, SpooledUpdates
from panorgan.federation.checks import check_numbers
from panorgan.federation.events import read_events
from panorgan.federation.limits import HospitalLimits, LimitSettings, check_counts
from panorgan.federation.message import Message, MessageFile
from panorgan.methods.fediod import FedIOD
from panorgan.methods.protocol import SiteInfo
from panorgan.methods.ufps import MEAN, UFPS, VARIANCE
from panorgan.preparation.plan import PlanSettings

POOLED = PlanSettings(spacing_mm="pooled", window_hu="pooled", intensity="window")


def refusals(folder) -> dict[str, tuple[str, str]]:
    """Code and why, by site."""
    events = [event.facts for event in read_events(folder / "events.jsonl") if event.kind == "refused"]
    return {event["site"]: (event["code"], event["why"]) for event in events}


def measured(cases: float = 4.0, **changes: float) -> dict[str, float]:
    numbers = {"plan/cases": cases, "plan/ct_cases": cases, "plan/hu_low/liver": -48.0, "plan/hu_high/liver": 160.0}
    sizes = {f"plan/{what}_mm/{axis}": mm for what, mm in (("spacing", 1.5), ("extent", 300.0)) for axis in "RAS"}
    return {**numbers, **sizes, **changes}


def sites_with(numbers: dict[str, float], cases: float = 4.0) -> list[StandIn]:
    honest = [StandIn(name, noise(place), introduction=measured()) for place, name in enumerate(("east", "south"))]
    return [*honest, StandIn("north", noise(9), cases, introduction=measured(cases) | numbers)]


@pytest.mark.parametrize(
    ("cases", "code"),
    [(1e15, "too-many-cases"), (1e300, "too-many-cases"), (10_001.0, "too-many-cases"), (4.5, "bad-counts")],
)
def test_a_site_that_claims_absurdly_many_cases_is_refused_by_name(cases, code, tmp_path):
    coordinator = stand_in_coordinator(sites_with({}, cases), tmp_path)
    coordinator.run()
    assert set(coordinator.state.sites) == {"east", "south"}
    assert {site: found for site, (found, _) in refusals(tmp_path).items()} == {"north": code}


def test_the_agreed_number_of_cases_is_the_limit():
    limits = LimitSettings(most_cases_per_site=300)
    check_counts(SiteInfo("a", 300, {}), limits)
    with refused("too-many-cases", MessageError) as caught:
        check_counts(SiteInfo("a", 301, {}), limits)
    assert all(part in caught.value.why for part in ("301", "limits.most_cases_per_site", "300"))


@pytest.mark.parametrize(
    ("numbers", "code", "named"),
    [
        ({"plan/spacing_mm/S": 0.05}, "implausible-measurement", "limits.spacing_mm"),
        ({"plan/spacing_mm/R": 21.0}, "implausible-measurement", "limits.spacing_mm"),
        ({"plan/extent_mm/A": 0.5}, "implausible-measurement", "limits.extent_mm"),
        ({"plan/extent_mm/A": 1e6}, "implausible-measurement", "limits.extent_mm"),
        ({"plan/hu_high/liver": 1e9}, "implausible-measurement", "limits.hu"),
        ({"plan/hu_low/liver": -1e9}, "implausible-measurement", "limits.hu"),
        ({"plan/cases": 10_000.0, "plan/ct_cases": 10_000.0}, "measured-other-cases", "10000"),
        ({"plan/hu_low/spleen": 0.0, "plan/hu_high/spleen": 90.0}, "measured-unannotated", "'spleen'"),
        ({"plan/cases": 3.5}, "bad-statistics", "3.5"),
    ],
)
def test_measurements_that_no_scan_has_are_refused_by_name(numbers, code, named, tmp_path):
    coordinator = stand_in_coordinator(sites_with(numbers), tmp_path, plan=POOLED)
    assert set(coordinator.state.sites) == {"east", "south"}
    assert coordinator.state.plan is not None
    assert coordinator.state.plan["spacing_mm"] == [1.5, 1.5, 1.5]
    assert coordinator.state.plan["window_hu"] == [-48.0, 160.0]
    found, why = refusals(tmp_path)["north"]
    assert found == code
    assert named in why


def test_limits_are_those_of_the_federation(tmp_path):
    limits = LimitSettings(spacing_mm=(1.0, 2.0), hu=(-50.0, 160.0))
    coordinator = stand_in_coordinator(
        sites_with({"plan/spacing_mm/S": 2.5}), tmp_path / "a", plan=POOLED, limits=limits
    )
    assert set(coordinator.state.sites) == {"east", "south"}
    coordinator = stand_in_coordinator(sites_with({"plan/spacing_mm/S": 2.5}), tmp_path / "b", plan=POOLED)
    assert set(coordinator.state.sites) == {"east", "north", "south"}


def test_within_the_limits_one_site_sets_neither_window_nor_spacing(tmp_path):
    wild = {f"plan/spacing_mm/{axis}": 20.0 for axis in "RAS"} | {"plan/hu_low/liver": -1024.0}
    coordinator = stand_in_coordinator(sites_with(wild, cases=10_000.0), tmp_path, plan=POOLED)
    assert set(coordinator.state.sites) == {"east", "north", "south"}
    assert coordinator.state.plan is not None
    assert coordinator.state.plan["spacing_mm"] == [1.5, 1.5, 1.5]
    assert coordinator.state.plan["window_hu"] == [-48.0, 160.0]


@pytest.mark.parametrize("wrong", [{"spacing_mm": (2, 1)}, {"most_cases_per_site": 0}, {"largest_share": 1.5}])
def test_limits_that_limit_nothing_are_refused(wrong):
    with pytest.raises(ValidationError):
        LimitSettings(**wrong)


# -- weight --------------------------------------------------------------------------------------------------------


def shares(weights: dict[str, float], folder, largest_share: float) -> dict[str, float]:
    """What each site counts for: site i alone has a one at place i."""
    files = {}
    for place, site in enumerate(sorted(weights)):
        path = folder / f"{site}.safetensors"
        value = torch.zeros(len(weights), dtype=torch.float64)
        value[place] = 1
        path.write_bytes(Message({"w": value}).to_bytes())
        files[site] = MessageFile(path)
    mean = SpooledUpdates(files, Aggregation(largest_share=largest_share)).mean(lambda site, key: weights[site])
    return dict(zip(sorted(weights), mean["w"].tolist(), strict=True))


def test_no_site_counts_for_more_than_the_agreed_share(tmp_path):
    claimed = {"a": 100.0, "b": 60.0, "c": 40.0, "z": 9999.0}
    assert shares(claimed, tmp_path, 0.5) == pytest.approx({"a": 0.25, "b": 0.15, "c": 0.1, "z": 0.5})
    assert shares(claimed, tmp_path, 1.0)["z"] > 0.98
    honest = {"a": 100.0, "b": 60.0, "c": 40.0}
    assert shares(honest, tmp_path, 0.5) == pytest.approx({"a": 0.5, "b": 0.3, "c": 0.2})


def test_the_share_holds_in_a_run(tmp_path):
    def push(weights, task):
        return {key: value + 1 if value.is_floating_point() else value for key, value in weights.items()}

    def stay(weights, task):
        return dict(weights)

    moved = {}
    for share in (1.0, 0.5):
        sites = [StandIn("east", stay), StandIn("south", stay), StandIn("zest", push, cases=9999.0)]
        folder = tmp_path / str(share)
        coordinator = stand_in_coordinator(sites, folder, limits=LimitSettings(largest_share=share))
        before = {key: value.clone() for key, value in coordinator.state.weights.items()}
        coordinator.run()
        moved[share] = {float((coordinator.state.weights[k] - v).mean()) for k, v in before.items()}
    assert all(value == pytest.approx(0.5, abs=1e-5) for value in moved[0.5])
    assert all(value > 0.99 for value in moved[1.0])


def test_between_hospitals_no_site_counts_for_more_than_the_others_together():
    assert HospitalLimits().largest_share == 0.5
    assert HospitalLimits(most_cases_per_site=5).largest_share == 0.5


# -- numbers that a server rule computes with ------------------------------------------------------------------------

FACTS = SiteInfo("north", 4, {"liver": 4})


@pytest.mark.parametrize("cases", [5.0, 1e15, -4.0])
def test_an_update_that_rests_on_more_cases_than_the_site_has_is_refused(cases, tmp_path):
    with refused("more-cases-than-joined", MessageError):
        check_numbers({"cases": cases}, FACTS, {})
    check_numbers({"cases": 1.0}, FACTS, {})
    check_numbers({"cases": 4.0}, FACTS, {})
    check_numbers({}, FACTS, {})
    sites = [StandIn("east", noise(1)), StandIn("north", noise(2), numbers={"cases": cases})]
    coordinator = stand_in_coordinator(sites, tmp_path)
    coordinator.run()
    assert refusals(tmp_path).keys() == {"north"}
    assert coordinator.state.last_round is not None
    assert coordinator.state.last_round["sites"].keys() == {"east"}


@pytest.mark.parametrize(
    ("method", "numbers"),
    [
        (UFPS, {MEAN: -0.1}),
        (UFPS, {MEAN: 1.1}),
        (UFPS, {VARIANCE: -1e-9}),
        (UFPS, {VARIANCE: 1e300}),
        (FedIOD, {"attention/tokens": 4097.0}),
        (FedIOD, {"attention/tokens": 0.5}),
        (FedIOD, {"attention/depth": 1e300}),
        (FedIOD, {"attribution/0.1": 1e300}),
        (FedIOD, {"attribution/0.1": -1e300}),
    ],
)
def test_a_number_that_a_method_cannot_give_is_refused(method, numbers):
    with refused("number-out-of-range", MessageError):
        check_numbers(numbers, FACTS, method.ranges)
    sound = {MEAN: 0.0, VARIANCE: 0.03, "attention/tokens": 256.0, "attention/depth": 40.5, "attribution/0.1": -0.2}
    check_numbers({name: sound[name] for name in numbers}, FACTS, method.ranges)


def test_the_largest_uncertainty_that_there_can_be_lies_within_the_range():
    assert max(math.log(classes) / classes for classes in range(2, 200)) < UFPS.ranges[MEAN][1]


def test_a_site_buys_no_weight_with_its_certainty(tmp_path):
    """μ = σ = 0 is never measured, but a number like any other: the share is what holds."""
    from panorgan.methods.ufps.uncertainty_weights import SiteUncertainty, uncertainty_weights

    honest = {name: SiteUncertainty(4, 0.2, 0.004) for name in ("a", "b", "c")}
    weights = uncertainty_weights({**honest, "z": SiteUncertainty(4, 0.0, 0.0)})
    assert weights["z"] > 0.7
    assert shares(weights, tmp_path, HospitalLimits().largest_share)["z"] == pytest.approx(0.5)


def test_a_run_of_fediod_survives_a_site_that_tells_of_absurd_maps(tmp_path):
    """As tokens it would ask for more memory than there is, as depth it would be a map too large to send."""
    reported = {"attention/tokens": 16.0, "attention/depth": 3.0}
    sites = [StandIn(name, noise(place), numbers=reported) for place, name in enumerate(("east", "south"))]
    sites.append(StandIn("north", noise(9), numbers={"attention/tokens": 1e18, "attention/depth": 1e18}))
    coordinator = stand_in_coordinator(sites, tmp_path, "fediod", training={"rounds": 2})
    coordinator.run()
    assert coordinator.rule.agreed == {"attention/tokens": 16.0, "attention/depth": 3.0}
    assert refusals(tmp_path).keys() == {"north"}


def test_what_comes_besides_weights_is_in_proportion_too(tmp_path):
    """SCAFFOLD adds the sites' control variates up: one of 1e6 would steer every site, in every round that follows."""

    def with_control(size: float, seed: int):
        def train(weights, task):
            own = {key: value for key, value in weights.items() if not key.startswith("control/")}
            return noise(seed)(own, task) | {
                f"control/{key}": size * torch.ones_like(value)
                for key, value in own.items()
                if value.is_floating_point()
            }

        return train

    sizes = {"east": 0.01, "north": 1e6, "south": 0.02, "west": 0.1}
    sites = [StandIn(name, with_control(size, place)) for place, (name, size) in enumerate(sizes.items())]
    coordinator = stand_in_coordinator(sites, tmp_path, "scaffold", training={"rounds": 2, "outlier_factor": 10.0})
    coordinator.run()
    assert refusals(tmp_path).keys() == {"north"}, "a hundred times the others' is too much, ten times is not"
    assert max(float(value.abs().max()) for value in coordinator.rule.control.values()) < 1
