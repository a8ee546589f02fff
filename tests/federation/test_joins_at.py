"""A site that joins at a chosen round of a simulation: nothing knows of it before, and it counts from then on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from federations import make_coordinator, make_workers, same
from refusing import refused

from panorgan.errors import ConfigError
from panorgan.federation.events import read_events
from panorgan.federation.transports.local import LocalTransport

PLAIN = {"weight_decay": 0.0, "learning_rate": 0.01}
TRAINING = {"rounds": 3, "validate_every": 1, "local_steps": 2, "optimizer": PLAIN}


def start(tiny, folder, sites=None, **setup: Any):
    """A coordinator of the tiny federation with sigmoid channels, with all sites or some."""
    experiment = tiny(network={"activation": "sigmoid"}, training=TRAINING, **setup.pop("changes", {}))
    workers = make_workers(experiment, folder)
    present = {name: workers[name] for name in sites or workers}
    return make_coordinator(experiment, folder, LocalTransport(present), **setup)


@pytest.mark.parametrize("method", ["fedavg", "solo"])
def test_before_the_join_nothing_knows_of_the_site(tiny, tmp_path, method):
    """Two rounds are bit-identical to those of a federation in which the site cannot be reached."""
    changes = {"method": {"name": method}}
    late = start(tiny, tmp_path / "late", changes=changes, joins_at={"south": 3})
    without = start(tiny, tmp_path / "without", ["north"], changes=changes, awaited=("south",))
    assert set(late.state.sites) == {"north"}
    for _ in range(2):
        late.run(rounds=1)
        without.run(rounds=1)
        assert same(late.state.weights, without.state.weights)
        assert late.state.best == without.state.best is not None
    assert late.members == ["north"]
    late.run()
    assert late.members == ["north", "south"]


def test_the_newcomers_organ_is_learned_from_then_on_and_older_rounds_are_no_longer_the_best(tiny, tmp_path):
    """Sigmoid channels: without labels of the spleen, nothing moves its output weights."""
    late = start(tiny, tmp_path, joins_at={"south": 3})
    first = {key: late.state.weights[key].clone() for key in late.state.weights if key.startswith("head")}
    assert first, "the output layer has another name"
    index = list(late.setup.vocabulary).index("spleen")
    liver = list(late.setup.vocabulary).index("liver")

    def moved(channel: int) -> bool:
        return any(not torch.equal(late.state.weights[key][channel], then[channel]) for key, then in first.items())

    late.run(rounds=2)
    assert moved(liver)
    assert not moved(index)
    late.state.best = {"round": 2.0, "dice": 1.0}  # no later round could beat it
    late.run()
    assert moved(index)
    assert late.state.best is not None
    assert late.state.best["round"] == 3
    assert late.delivered_weights()[0] == 3
    events = [event for event in read_events(tmp_path / "events.jsonl") if event.kind in ("joined", "late_join")]
    assert [event.kind for event in events] == ["joined", "late_join"]
    assert list(events[0].facts["sites"]) == ["north"]
    assert (events[1].facts["number"], events[1].facts["site"]) == (3, "south")
    rounds = [event.facts for event in read_events(tmp_path / "events.jsonl") if event.kind == "round"]
    assert [sorted(facts["sites"]) for facts in rounds] == [["north"], ["north"], ["north", "south"]]


def test_the_others_members_never_notice_in_solo(tiny, tmp_path):
    changes = {"method": {"name": "solo"}}
    late = start(tiny, tmp_path / "late", changes=changes, joins_at={"south": 2})
    early = start(tiny, tmp_path / "early", changes=changes)
    late.run()
    early.run()
    mine = [key for key in late.state.weights if key.startswith("members.site-north.")]
    assert mine
    assert all(torch.equal(late.state.weights[key], early.state.weights[key]) for key in mine)
    assert late.state.weights.keys() == early.state.weights.keys()
    assert not same(late.state.weights, early.state.weights)


def test_organs_that_nobody_else_knows_are_awaited(tiny, tmp_path):
    """South's spleen and kidneys may come later; a site that never comes may not bring them."""
    assert start(tiny, tmp_path / "late", joins_at={"south": 2}).state.rounds_done == 0
    with refused("unlabelled-organ", ConfigError) as caught:
        start(tiny, tmp_path / "never", ["north"])
    assert "spleen" in caught.value.what


def test_a_join_that_a_kill_kept_out_of_the_log_is_written_down_later(tiny, tmp_path):
    """The checkpoint knows the newcomer, the log does not yet."""
    late = start(tiny, tmp_path, joins_at={"south": 2})
    late.run(rounds=1)
    log, lines = tmp_path / "events.jsonl", (tmp_path / "events.jsonl").read_text().splitlines(keepends=True)
    assert late.state.best is not None
    late._admit_newcomers()
    assert late.state.best is None, "a round that never knew the newcomer counts as the best"
    assert "late_join" in log.read_text()
    log.write_text("".join(lines))
    again = start(tiny, tmp_path, joins_at={"south": 2})
    assert set(again.state.sites) == {"north", "south"}
    (reported,) = [event.facts for event in read_events(log) if event.kind == "late_join"]
    assert (reported["number"], reported["site"], reported["annotated"]) == (2, "south", {"kidney": 2, "spleen": 2})
    again.run()
    assert sum(event.kind == "late_join" for event in read_events(log)) == 1


def test_the_first_line_about_who_joined_is_written_down_later_too(tiny, tmp_path):
    first = start(tiny, tmp_path)
    (tmp_path / "events.jsonl").unlink()
    start(tiny, tmp_path)
    (reported,) = read_events(tmp_path / "events.jsonl")
    assert reported.kind == "joined"
    assert reported.facts["sites"] == first.state.sites
