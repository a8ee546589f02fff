"""Sites that are silent, fail, come late or come back: what the coordinator does, and that nothing is lost."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from federations import THREE, Meddling, make_coordinator, make_workers, same
from refusing import refused

from panorgan.anatomy import Vocabulary
from panorgan.federation import collector as collector_module
from panorgan.federation.admission import first_weights
from panorgan.federation.checkpoint import Checkpoints
from panorgan.federation.checks import read_scores
from panorgan.federation.collector import Collector, Request, SitesMissingError
from panorgan.federation.events import Event, EventLog, read_events
from panorgan.federation.message import Message
from panorgan.federation.settings import Patience
from panorgan.federation.tasks import Task, failure_meta
from panorgan.methods.protocol import Federation, Payload, SiteInfo

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
    with refused("no-answer", SitesMissingError) as caught:
        make_coordinator(experiment, folder, transport, patience=patience).run()
    assert caught.value.sites == ("north",)
    assert ("'memory'" in caught.value.why) == (code == "memory")
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
    with refused("too-few-answers", SitesMissingError) as caught:
        make_coordinator(experiment, tmp_path, transport, patience=Patience(on_missing="proceed")).run()
    assert all(number in caught.value.what for number in ("2", "3")), "how many there are, and are needed"
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
    with refused("no-answer", SitesMissingError):
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
    with refused("cannot-begin", SitesMissingError) as caught:
        make_coordinator(experiment, tmp_path, transport, required=("south", "west"))
    assert caught.value.sites == ("west",)
    assert not (tmp_path / "checkpoints").exists()


def test_a_site_that_is_silent_at_validation_counts_with_its_last_score(three, tmp_path):
    """Means: (0.2 + 0.6 + 0.4) / 3 = 0.4, then north is silent: (0.2 + 0.7 + 0.6) / 3 = 0.5, not (0.7 + 0.6) / 2."""
    reported = {"north": [0.2, None], "south": [0.6, 0.7], "west": [0.4, 0.6]}

    def meddle(site: str, kind: str, answer: bytes):
        if kind != "evaluate":
            return [(site, answer)]
        score = reported[site].pop(0)
        meta = Message.from_bytes(answer).meta
        return [] if score is None else [(site, Message(scalars={"dice/liver": score}, meta=meta).to_bytes())]

    experiment = three(validate_every=1)
    coordinator = make_coordinator(experiment, tmp_path, Meddling(make_workers(experiment, tmp_path), meddle))
    coordinator.run(rounds=1)
    assert coordinator.state.best == {"round": 1.0, "dice": pytest.approx(0.4)}
    coordinator.run()
    assert coordinator.state.best == {"round": 2.0, "dice": pytest.approx(0.5)}
    assert coordinator.state.scores == {"north": 0.2, "south": 0.7, "west": 0.6}
    assert happened(tmp_path, "missing") == [{"number": 2, "sites": ["north"]}]


# -- deadlines ---------------------------------------------------------------------------------------------------


class Clock:
    """A clock that moves with every request, and at no other time."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic


class AlwaysFailing:
    """The site takes its time, then says that it failed."""

    sites = ("north",)

    def __init__(self, clock: Clock, takes: float, task: Task) -> None:
        self.clock, self.takes, self.task = clock, takes, task
        self.deadlines: list[float | None] = []

    def exchange(self, sites: Iterable[str], make_request, on_reply, deadline=None) -> None:
        self.deadlines.append(deadline)
        self.clock.now += self.takes
        for site in sites:
            make_request(site)
            on_reply(site, Message(meta=failure_meta(self.task, site, "memory")).to_bytes())


def asked_with(monkeypatch, patience: Patience, takes: float, deadline: float | None = None) -> list[float | None]:
    clock = Clock()
    monkeypatch.setattr(collector_module, "time", clock)
    task = Task("join", "run")
    transport = AlwaysFailing(clock, takes, task)

    def read(site: str, answer: bytes) -> None:
        read_scores(answer, task, site, Vocabulary(["liver"]))

    collector = Collector(transport, EventLog(), patience)
    responses = collector.ask(["north"], Request(task, lambda site: Payload(), 1), read, deadline)
    assert responses.failed == {"north": "memory"}
    return transport.deadlines


def test_the_deadline_covers_all_retries_of_a_question(monkeypatch):
    """100 s, of which every trial takes 40: 100, 60, 20 are left, and then nothing."""
    assert asked_with(monkeypatch, Patience(deadline=100.0, retries=3), takes=40.0) == [100.0, 60.0, 20.0, 0.0]


def test_a_question_may_have_a_deadline_of_its_own(monkeypatch):
    assert asked_with(monkeypatch, Patience(deadline=None, retries=1), takes=10.0, deadline=25.0) == [25.0, 15.0]
    assert asked_with(monkeypatch, Patience(deadline=None, retries=1), takes=10.0) == [None, None]


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
    ("reported", "code"),
    [({"train_cases": 0.0}, "no-training-cases"), ({"train_cases": 3.0}, "annotates-nothing")],
)
def test_a_late_joiner_with_nothing_to_teach_is_refused_once(reported, code, three, tmp_path):
    def meddle(site: str, kind: str, answer: bytes):
        if (site, kind) == ("west", "join"):
            answer = Message(scalars=reported, meta=Message.from_bytes(answer).meta).to_bytes()
        return [(site, answer)]

    experiment = three(rounds=3)
    transport = Meddling(make_workers(experiment, tmp_path), meddle)
    transport.absent = {"west"}
    coordinator = make_coordinator(experiment, tmp_path, transport)
    coordinator.run(rounds=1)
    transport.absent = set()
    coordinator.run()
    assert set(coordinator.state.sites) == {"north", "south"}
    (refusal,) = happened(tmp_path, "refused")
    assert (refusal["number"], refusal["site"], refusal["code"]) == (1, "west", code)
    assert transport.asked.count(("join", "west")) == 1
    assert ("train", "west") not in transport.asked


def test_first_weights_depend_on_who_joins():
    """The control for the test above: another newcomer would begin with other weights."""
    from panorgan.methods.registry import find_method
    from panorgan.networks import UNetSettings

    solo = find_method("solo")
    method = solo(solo.Config())
    sites = {name: SiteInfo(name, 1, {"liver": 1}) for name in ("a", "b")}
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
