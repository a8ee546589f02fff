"""Sites that are silent, fail, come late or come back: what the coordinator does, and that nothing is lost."""

from __future__ import annotations

import pytest
import torch
from federations import THREE, Meddling, make_coordinator, make_workers, same

from panorgan.anatomy import Vocabulary
from panorgan.federation.admission import first_weights
from panorgan.federation.checkpoint import Checkpoints
from panorgan.federation.collecting import SitesMissingError
from panorgan.federation.events import Event, read_events
from panorgan.federation.message import Message
from panorgan.federation.settings import Patience
from panorgan.methods.exchange import Federation, SiteFacts

SMALL = {"rounds": 2, "validate_every": 0, "local_steps": 1, "optimizer": {"keep_state": True}}


@pytest.fixture
def three(tiny):
    return lambda method="fedavg", **training: tiny(
        phantom=THREE, method={"name": method}, training={**SMALL, **training}
    )


def happened(folder, kind: str) -> list[dict]:
    return [event.facts for event in read_events(folder / "events.jsonl") if event.kind == kind]


def undisturbed(experiment, folder):
    coordinator = make_coordinator(experiment, folder, Meddling(make_workers(experiment, folder)))
    coordinator.run()
    return coordinator


class Failing:
    """North says `times` times that it could not train, then it can. An answer of `None` is silence."""

    def __init__(self, times: int, code: str | None = "memory", kind: str = "train") -> None:
        self.left, self.code, self.kind = times, code, kind

    def __call__(self, site: str, kind: str, answer: bytes):
        if (site, kind) == ("north", self.kind) and self.left > 0:
            self.left -= 1
            if self.code is None:
                return []
            answer = Message(meta={**Message.from_bytes(answer).meta, "failed": self.code}).to_bytes()
        return [(site, answer)]


# -- silence and failures ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["memory", None], ids=["fails", "is silent"])
@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_wait_goes_no_further_without_a_site_and_then_gives_the_same_bits(code, kind, three, tmp_path):
    experiment = three(validate_every=1)
    folder, patience = tmp_path / "waiting", Patience(on_missing="wait")
    meddle = Failing(1, code, kind)
    transport = Meddling(make_workers(experiment, folder), meddle)
    with pytest.raises(SitesMissingError, match="Site north did not answer: round 1 cannot") as caught:
        make_coordinator(experiment, folder, transport, patience=patience).run()
    assert caught.value.sites == ("north",)
    assert caught.value.why == ("north reports 'memory'" if code else "")
    assert [facts["sites"] for facts in happened(folder, "missing")] == [["north"]]
    assert Checkpoints(folder / "checkpoints").load_latest().rounds_done == 0

    again = make_coordinator(experiment, folder, transport, patience=patience)
    again.run()
    calm = undisturbed(experiment, tmp_path / "calm")
    assert again.state.rounds_done == 2
    assert same(again.state.weights, calm.state.weights)
    assert again.state.scores == calm.state.scores
    assert again.state.best == calm.state.best


def test_proceed_is_content_with_enough_answers(three, tmp_path):
    experiment = three(rounds=1, min_sites=2)
    transport = Meddling(make_workers(experiment, tmp_path), Failing(1, None))
    coordinator = make_coordinator(experiment, tmp_path, transport, patience=Patience(on_missing="proceed"))
    coordinator.run()
    assert happened(tmp_path, "missing") == [{"number": 1, "sites": ["north"]}]
    assert set(happened(tmp_path, "round")[0]["sites"]) == {"south", "west"}


def test_proceed_with_too_few_answers_names_who_is_missing(three, tmp_path):
    experiment = three(rounds=1, min_sites=3)
    transport = Meddling(make_workers(experiment, tmp_path), Failing(1, None))
    with pytest.raises(SitesMissingError, match="Only 2 usable answers in round 1, 3 are needed") as caught:
        make_coordinator(experiment, tmp_path, transport, patience=Patience(on_missing="proceed")).run()
    assert caught.value.sites == ("north",)


def test_a_site_that_fails_is_asked_again(three, tmp_path):
    experiment = three(rounds=1)
    transport = Meddling(make_workers(experiment, tmp_path / "a"), Failing(2))
    patience = Patience(on_missing="wait", retries=2)
    coordinator = make_coordinator(experiment, tmp_path / "a", transport, patience=patience)
    coordinator.run()
    asked = [site for kind, site in transport.asked if kind == "train"]
    assert asked == ["north", "south", "west", "north", "north"], "only the one that failed"
    assert [(facts["site"], facts["code"]) for facts in happened(tmp_path / "a", "failed")] == [("north", "memory")] * 2
    assert not happened(tmp_path / "a", "missing")
    assert same(coordinator.state.weights, undisturbed(experiment, tmp_path / "b").state.weights)


def test_patience_ends(three, tmp_path):
    experiment = three(rounds=1)
    transport = Meddling(make_workers(experiment, tmp_path), Failing(2))
    with pytest.raises(SitesMissingError):
        make_coordinator(experiment, tmp_path, transport, patience=Patience(on_missing="wait", retries=1)).run()
    assert len(happened(tmp_path, "failed")) == 2


def test_nobody_waits_for_a_site_whose_answer_was_refused(three, tmp_path):
    """It has answered. To wait for another answer would let one bad site halt the whole federation."""

    def garbage(site: str, kind: str, answer: bytes):
        return [(site, b"garbage" if (site, kind) == ("north", "train") else answer)]

    experiment = three(rounds=1)
    transport = Meddling(make_workers(experiment, tmp_path), garbage)
    coordinator = make_coordinator(experiment, tmp_path, transport, patience=Patience(on_missing="wait"))
    coordinator.run()
    assert coordinator.state.rounds_done == 1
    assert [facts["site"] for facts in happened(tmp_path, "refused")] == ["north"]


def test_the_run_does_not_begin_without_a_site_that_is_required(three, tmp_path):
    experiment = three()
    transport = Meddling(make_workers(experiment, tmp_path))
    transport.absent = {"west"}
    with pytest.raises(SitesMissingError, match="cannot begin without west") as caught:
        make_coordinator(experiment, tmp_path, transport, required=("south", "west"))
    assert caught.value.sites == ("west",)
    assert not (tmp_path / "checkpoints").exists()


def test_a_site_that_is_silent_at_validation_counts_with_its_last_score(three, tmp_path):
    """Means: (0.2 + 0.6 + 0.4) / 3 = 0.4, then north is silent: (0.2 + 0.7 + 0.6) / 3 = 0.5, not (0.7 + 0.6) / 2."""
    told = {"north": [0.2, None], "south": [0.6, 0.7], "west": [0.4, 0.6]}

    def meddle(site: str, kind: str, answer: bytes):
        if kind != "evaluate":
            return [(site, answer)]
        score = told[site].pop(0)
        meta = Message.from_bytes(answer).meta
        return [] if score is None else [(site, Message(numbers={"dice/liver": score}, meta=meta).to_bytes())]

    experiment = three(validate_every=1)
    coordinator = make_coordinator(experiment, tmp_path, Meddling(make_workers(experiment, tmp_path), meddle))
    coordinator.run(rounds=1)
    assert coordinator.state.best == {"round": 1.0, "dice": pytest.approx(0.4)}
    coordinator.run()
    assert coordinator.state.best == {"round": 2.0, "dice": pytest.approx(0.5)}
    assert coordinator.state.scores == {"north": 0.2, "south": 0.7, "west": 0.6}
    assert happened(tmp_path, "missing") == [{"number": 2, "sites": ["north"]}]


# -- late joiners ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedavg", "solo"])
def test_a_site_may_join_between_rounds(method, three, tmp_path):
    experiment = three(method)
    transport = Meddling(make_workers(experiment, tmp_path))
    transport.absent = {"west"}
    make_coordinator(experiment, tmp_path, transport).run(rounds=1)
    before = Checkpoints(tmp_path / "checkpoints").load_latest()
    transport.absent = set()
    admitted: list[dict[str, torch.Tensor]] = []

    class Listening(list):
        def append(self, event: Event) -> None:
            if event.kind == "late_join":
                admitted.append(Checkpoints(tmp_path / "checkpoints").load_latest().weights)

    coordinator = make_coordinator(experiment, tmp_path, transport, Listening())
    coordinator.run()
    (weights,) = admitted
    assert {key: weights[key] for key in before.weights}.keys() == before.weights.keys()
    assert same({key: weights[key] for key in before.weights}, before.weights), "what was there is untouched"
    own = {key: value for key, value in weights.items() if key not in before.weights}
    assert bool(own) == (method == "solo")
    assert all(key.startswith("members.site-west.") for key in own)
    fresh = first_weights(
        coordinator.setup.method, experiment.network, coordinator.federation, experiment.seed, "late", "west"
    )
    assert same(own, {key: fresh[key] for key in own}), "what comes with the newcomer begins afresh"
    (joined,) = happened(tmp_path, "late_join")
    assert (joined["number"], joined["site"]) == (2, "west")
    assert [set(facts["sites"]) for facts in happened(tmp_path, "round")] == [
        {"north", "south"},
        {"north", "south", "west"},
    ]
    if own:  # and it has learnt something in its first round
        assert not same(own, {key: coordinator.state.weights[key] for key in own})


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"train_cases": 0.0}, "it has no training cases"),
        ({"train_cases": 3.0}, "it annotates nothing of the vocabulary"),
    ],
)
def test_a_late_joiner_with_nothing_to_teach_is_refused_once(told, why, three, tmp_path):
    def meddle(site: str, kind: str, answer: bytes):
        if (site, kind) == ("west", "join"):
            answer = Message(numbers=told, meta=Message.from_bytes(answer).meta).to_bytes()
        return [(site, answer)]

    experiment = three(rounds=3)
    transport = Meddling(make_workers(experiment, tmp_path), meddle)
    transport.absent = {"west"}
    coordinator = make_coordinator(experiment, tmp_path, transport)
    coordinator.run(rounds=1)
    transport.absent = set()
    coordinator.run()
    assert set(coordinator.state.sites) == {"north", "south"}
    assert happened(tmp_path, "refused") == [
        {"number": 1, "site": "west", "reason": "Site west cannot join.", "why": why}
    ]
    assert transport.asked.count(("join", "west")) == 1
    assert ("train", "west") not in transport.asked


def test_first_weights_depend_on_who_joins():
    """The control for the test above: another newcomer would begin with other weights."""
    from panorgan.methods.registry import find_method
    from panorgan.networks import UNetSettings

    solo = find_method("solo")
    method = solo(solo.Config())
    sites = {name: SiteFacts(name, 1, {"liver": 1}) for name in ("a", "b")}
    drawn = [
        first_weights(method, UNetSettings(features=(4, 8)), Federation(Vocabulary(["liver"]), sites), 0, "late", name)
        for name in ("a", "b")
    ]
    assert not same(*drawn)


# -- the log -----------------------------------------------------------------------------------------------------


def test_a_line_that_was_lost_by_a_kill_is_written_on_resume(three, tmp_path):
    """The checkpoint is on disk, the process is killed, the line of the round was never written."""
    experiment = three()
    transport = Meddling(make_workers(experiment, tmp_path))
    make_coordinator(experiment, tmp_path, transport).run(rounds=1)
    log = tmp_path / "events.jsonl"
    (line,) = happened(tmp_path, "round")
    kept = [text for text in log.read_text().splitlines(keepends=True) if '"event": "round"' not in text]
    log.write_text("".join(kept))
    assert not happened(tmp_path, "round")
    for _ in range(2):  # once is enough
        make_coordinator(experiment, tmp_path, transport)
        (restored,) = happened(tmp_path, "round")
        for name in line.keys() - {"seconds"}:
            assert restored[name] == line[name]
    make_coordinator(experiment, tmp_path, transport).run()
    assert [facts["number"] for facts in happened(tmp_path, "round")] == [1, 2]
