"""FLKD without distillation, and where there is nothing to distil: the multi-head baseline, bit for bit."""

from __future__ import annotations

import pytest
import torch
from federations import ALL, make_coordinator, make_workers, same

from panorgan.federation.events import read_events
from panorgan.federation.transports.local import LocalTransport
from panorgan.methods.flkd import FLKD, FLKDConfig

TRAINING = {"rounds": 2, "validate_every": 0, "local_steps": 2}


class Idle(FLKD):
    """All stages happen, whatever distillation weighs."""

    def stages(self, rounds):
        return FLKD(FLKDConfig(pretrain=1.0)).stages(rounds)


def by_round(experiment, folder, method=None) -> list[dict[str, torch.Tensor]]:
    """The weights after every training round."""
    transport = LocalTransport(make_workers(experiment, folder, method))
    coordinator = make_coordinator(experiment, folder, transport, method=method)
    outcomes = []
    while not coordinator.finished:
        coordinator.run(rounds=1)
        if coordinator.rule.round_info.stage == "train":
            outcomes.append(dict(coordinator.state.weights))
    return outcomes


def all_same(first, second) -> bool:
    return len(first) == len(second) and all(same(one, other) for one, other in zip(first, second, strict=True))


BASELINE = {"name": "multihead", "unlabelled": "marginal", "organ_parts": "everyone", "weighting": "uniform"}


@pytest.mark.parametrize("keep_state", [False, True])
def test_without_distillation_it_is_the_multi_head_baseline(tiny, tmp_path, keep_state):
    """Bit for bit after every round, whether teachers are trained and exchanged or not."""
    training = {**TRAINING, "optimizer": {"keep_state": keep_state}}
    common = {"training": training, "network": {"norm": "batch"}}
    off = {"name": "flkd", "global_weight": 0, "local_weight": 0}
    baseline = by_round(tiny(method=BASELINE, **common), tmp_path / "baseline")
    assert len(baseline) == 2
    assert all_same(by_round(tiny(method=off, **common), tmp_path / "off"), baseline)
    idle = Idle(FLKDConfig(global_weight=0, local_weight=0))
    assert all_same(by_round(tiny(method=off, **common), tmp_path / "idle", idle), baseline)
    weighted = {**BASELINE, "weighting": "cases"}
    assert not all_same(by_round(tiny(method=weighted, **common), tmp_path / "weighted"), baseline)
    for name, weight in (("global", {"local_weight": 0}), ("local", {"global_weight": 0})):
        distilled = by_round(tiny(method={"name": "flkd", **weight}, **common), tmp_path / name)
        assert not any(same(one, other) for one, other in zip(distilled, baseline, strict=True)), name


def everybody_knows(*names: str) -> dict:
    cases = {"north": 5, "south": 4}
    return {"sites": [{"name": n, "annotated": ALL, "cases": cases[n], "spacing_mm": [12, 12, 12]} for n in names]}


@pytest.mark.parametrize("names", [("north",), ("north", "south")])
def test_where_every_site_knows_everything_distillation_changes_nothing(tiny, tmp_path, names):
    """All sites own all organs: FedAvg on the same network. One site: plain training, which that is (see
    test_organ_parts). Teachers are trained and exchanged all the same."""
    common = {"phantom": everybody_knows(*names), "training": TRAINING}
    fedavg = {"name": "fedavg", "weighting": "uniform"}
    plain = by_round(tiny(method=fedavg, network={"organs": "heads"}, **common), tmp_path / "plain")
    assert all_same(by_round(tiny(method={"name": "flkd"}, **common), tmp_path / "flkd"), plain)
    reported = [event.facts for event in read_events(tmp_path / "flkd" / "events.jsonl") if event.kind == "round"]
    assert [facts["stage"] for facts in reported] == ["pretrain", "exchange", "train", "train"]
    assert all(set(facts["sites"]["north"]) == {"loss", "cases"} for facts in reported[2:])
