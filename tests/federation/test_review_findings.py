"""What a hostile review found in the coordinator, the collector and the site: each of these went wrong once."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from federations import THREE, Meddling, make_coordinator, make_workers

from panorgan.anatomy import Vocabulary
from panorgan.cases.planning import PlanSettings, SiteStatistics
from panorgan.federation import collecting
from panorgan.federation.checks import read_scores
from panorgan.federation.collecting import Collector, Question, SitesMissingError
from panorgan.federation.events import EventLog, read_events
from panorgan.federation.message import Message
from panorgan.federation.settings import Patience
from panorgan.federation.tasks import Task, answer_meta, failure_meta
from panorgan.federation.transports.local import LocalTransport
from panorgan.methods.exchange import Content, Federation, SiteFacts

SMALL = {"rounds": 2, "validate_every": 0, "local_steps": 1}


@pytest.fixture
def three(tiny):
    return lambda **training: tiny(phantom=THREE, training={**SMALL, **training})


def happened(folder, kind: str) -> list[dict]:
    return [event.facts for event in read_events(folder / "events.jsonl") if event.kind == kind]


# -- the collector -----------------------------------------------------------------------------------------------


class Clock:
    """A clock that moves when somebody is asked, and at no other time."""

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
    monkeypatch.setattr(collecting, "time", clock)
    task = Task("join", "run")
    transport = AlwaysFailing(clock, takes, task)

    def read(site: str, answer: bytes) -> None:
        read_scores(answer, task, site)

    collector = Collector(transport, EventLog(), patience)
    heard = collector.ask(["north"], Question(task, lambda site: Content(), 1), read, deadline)
    assert heard.failed == {"north": "memory"}
    return transport.deadlines


def test_the_deadline_covers_all_retries_of_a_question(monkeypatch):
    """100 s, of which every trial takes 40: 100, 60, 20 are left, and then nothing."""
    assert asked_with(monkeypatch, Patience(deadline=100.0, retries=3), takes=40.0) == [100.0, 60.0, 20.0, 0.0]


def test_a_question_may_have_a_deadline_of_its_own(monkeypatch):
    assert asked_with(monkeypatch, Patience(deadline=None, retries=1), takes=10.0, deadline=25.0) == [25.0, 15.0]
    assert asked_with(monkeypatch, Patience(deadline=None, retries=1), takes=10.0) == [None, None]


def test_an_outlier_is_asked_again_when_the_round_is_resumed(three, tmp_path):
    """Its answer is not kept on disk: the site may have been mended meanwhile."""
    experiment = three(rounds=1, min_sites=3, outlier_factor=10.0)
    sick = {"north"}

    def meddle(site: str, kind: str, answer: bytes):
        if kind == "train" and site in sick:
            message = Message.from_bytes(answer)
            blown_up = {
                key: value * 1e4 if value.is_floating_point() else value for key, value in message.arrays.items()
            }
            answer = Message(blown_up, message.numbers, message.meta).to_bytes()
        return [(site, answer)]

    transport = Meddling(make_workers(experiment, tmp_path), meddle)
    with pytest.raises(SitesMissingError, match="Only 2 usable answers") as caught:
        make_coordinator(experiment, tmp_path, transport).run()
    assert caught.value.sites == ("north",)
    assert [facts["site"] for facts in happened(tmp_path, "refused")] == ["north"]
    assert "out of all proportion" in happened(tmp_path, "refused")[0]["reason"]

    sick.clear()
    transport.asked.clear()
    again = make_coordinator(experiment, tmp_path, transport)
    again.run()
    assert [site for kind, site in transport.asked if kind == "train"] == ["north"], "and only that one"
    assert set(happened(tmp_path, "round")[0]["sites"]) == {"north", "south", "west"}


# -- the best round ----------------------------------------------------------------------------------------------


class Scores:
    """Sites say these mean Dice scores, one after the other."""

    def __init__(self, **told: list[float]) -> None:
        self.told = told

    def __call__(self, site: str, kind: str, answer: bytes):
        if kind == "evaluate":
            meta = Message.from_bytes(answer).meta
            answer = Message(numbers={"dice/liver": self.told[site].pop(0)}, meta=meta).to_bytes()
        return [(site, answer)]


def test_a_site_that_leaves_takes_its_score_out_of_the_best_round(three, tmp_path):
    """(0.9 + 0.5 + 0.7) / 3 = 0.7 with north, (0.6 + 0.6) / 2 = 0.6 without: not worse, but another mean."""
    experiment = three(validate_every=1)
    meddle = Scores(north=[0.9], south=[0.5, 0.6], west=[0.7, 0.6])
    transport = Meddling(make_workers(experiment, tmp_path), meddle)
    first = make_coordinator(experiment, tmp_path, transport)
    first.run(rounds=1)
    assert first.state.best == {"round": 1.0, "dice": pytest.approx(0.7)}

    again = make_coordinator(experiment, tmp_path, transport, listed=frozenset({"south", "west"}))
    again.run()
    assert again.state.best == {"round": 2.0, "dice": pytest.approx(0.6)}
    assert again.delivered_weights()[0] == 2


def test_the_best_round_outlives_a_restart_with_the_same_sites(three, tmp_path):
    """The control: who scored is part of the checkpoint."""
    experiment = three(validate_every=1)
    meddle = Scores(north=[0.9, 0.6], south=[0.5, 0.6], west=[0.7, 0.6])
    transport = Meddling(make_workers(experiment, tmp_path), meddle)
    make_coordinator(experiment, tmp_path, transport).run(rounds=1)
    again = make_coordinator(experiment, tmp_path, transport)
    again.run()
    assert again.state.rounds_done == 2
    assert again.state.best == {"round": 1.0, "dice": pytest.approx(0.7)}


# -- who takes part ----------------------------------------------------------------------------------------------


def test_a_site_without_cases_at_the_start_is_refused_by_name_and_the_run_begins(three, tmp_path):
    def meddle(site: str, kind: str, answer: bytes):
        if (site, kind) == ("west", "join"):
            answer = Message(numbers={"train_cases": 0.0}, meta=Message.from_bytes(answer).meta).to_bytes()
        return [(site, answer)]

    experiment = three()
    transport = Meddling(make_workers(experiment, tmp_path), meddle)
    coordinator = make_coordinator(experiment, tmp_path, transport, listed=frozenset({"north", "south", "west"}))
    coordinator.run()
    assert coordinator.finished
    assert coordinator.members == ["north", "south"]
    refused = {"number": 0, "site": "west", "reason": "Site west cannot join.", "why": "it has no training cases"}
    assert happened(tmp_path, "refused") == [refused]
    assert transport.asked.count(("join", "west")) == 1, "it is not asked again before every round"


def test_the_plan_does_not_depend_on_whether_a_late_site_is_there_at_the_start(three, tmp_path):
    """With `required`, the others join after checkpoint 0, even those that are connected all along."""
    experiment = three(rounds=1)
    transport = Meddling(make_workers(experiment, tmp_path))
    coordinator = make_coordinator(experiment, tmp_path, transport, required=("north", "south"), awaited=("west",))
    assert set(coordinator.state.sites) == {"north", "south"}
    coordinator.run()
    assert set(coordinator.state.sites) == {"north", "south", "west"}
    assert [facts["site"] for facts in happened(tmp_path, "late_join")] == ["west"]


STATISTICS = SiteStatistics(3, 3, (14.0, 14.0, 14.0), (364.0, 320.0, 220.0), {"liver": (0.0, 100.0)})


class Measured:
    """A site's cases, and how often it had to measure them."""

    def __init__(self, data) -> None:
        self.data, self.measured = data, 0

    def counts(self):
        return self.data.counts()

    def statistics(self):
        self.measured += 1
        return STATISTICS.as_numbers()

    def prepared(self, plan):
        return self.data

    def contents(self):
        return {}


class Recording(Meddling):
    """Notes who was asked with which deadline; `silent` sites take part, but do not answer."""

    def __init__(self, workers) -> None:
        super().__init__(workers)
        self.deadlines: list[tuple[tuple[str, ...], float | None]] = []
        self.silent: set[str] = set()

    def exchange(self, sites, make_request, on_reply, deadline=None):
        self.deadlines.append((tuple(sites), deadline))
        super().exchange([site for site in sites if site not in self.silent], make_request, on_reply)


def measuring(experiment, folder) -> tuple[dict, dict[str, Measured]]:
    workers = make_workers(experiment, folder)
    for worker in workers.values():
        worker.source = Measured(worker.source)
    return workers, {name: worker.source for name, worker in workers.items()}


def test_a_newcomer_is_not_asked_to_measure_when_the_plan_exists(three, tmp_path):
    experiment = three()
    workers, sources = measuring(experiment, tmp_path)
    transport = Recording(workers)
    transport.absent = {"west"}
    coordinator = make_coordinator(experiment, tmp_path, transport, plan=PlanSettings())
    coordinator.run(rounds=1)
    assert coordinator.state.plan["spacing_mm"] == [14.0, 14.0, 14.0], "measured at the first sites"
    plan = dict(coordinator.state.plan)
    transport.absent = set()
    coordinator.run()
    assert {name: source.measured for name, source in sources.items()} == {"north": 1, "south": 1, "west": 0}
    assert [facts["site"] for facts in happened(tmp_path, "late_join")] == ["west"]
    assert not happened(tmp_path, "refused")
    assert coordinator.state.plan == plan


@pytest.mark.parametrize("plan", [None, {"spacing_mm": [14.0, 14.0, 14.0]}], ids=["no plan yet", "a plan"])
def test_what_a_site_tells_when_it_joins(plan, three, tmp_path):
    experiment = three()
    workers, _ = measuring(experiment, tmp_path)
    task = Task("join", "run", experiment=experiment.agreement().fingerprint(), plan=plan)
    answer = Message.from_bytes(workers["north"].handle(Message(meta=task.to_meta()).to_bytes()))
    assert answer.meta == answer_meta(task, "north")
    assert answer.numbers["annotated/liver"] == answer.numbers["train_cases"] > 0
    assert any(name.startswith("plan/") for name in answer.numbers) == (plan is None)


def test_everybody_waits_only_so_long_for_a_newcomer_that_says_nothing(three, tmp_path):
    """With `wait` there is no deadline for the others' rounds; a newcomer has one all the same."""
    experiment = three()
    transport = Recording(make_workers(experiment, tmp_path))
    transport.absent, transport.silent = {"west"}, {"west"}
    coordinator = make_coordinator(experiment, tmp_path, transport, patience=Patience(on_missing="wait"))
    transport.absent = set()
    coordinator.run()
    assert coordinator.finished
    assert [len(sites) for sites, deadline in transport.deadlines if deadline is None] == [2, 2, 2]
    ((sites, deadline),) = [asked for asked in transport.deadlines if asked[1] is not None]
    assert sites == ("west",), "and once per segment"
    assert deadline == pytest.approx(300.0, abs=1.0)


def test_a_federation_has_one_order_whoever_came_first():
    vocabulary = Vocabulary(["liver"])
    facts = {name: SiteFacts(name, 1, {"liver": 1}) for name in ("west", "north", "south")}
    assert list(Federation(vocabulary, facts).sites) == ["north", "south", "west"]


def test_a_restart_does_not_change_the_order_of_sites_after_a_late_join(tiny, tmp_path):
    """`north` comes after `south`: in the running coordinator it stood last, in the checkpoint it stands first."""
    experiment = tiny(method={"name": "solo"}, training={**SMALL, "rounds": 2})
    workers = make_workers(experiment, tmp_path)
    transport = LocalTransport({"south": workers["south"]})
    running = make_coordinator(experiment, tmp_path, transport, awaited=("north",))
    transport._workers["north"] = workers["north"]
    running.run(rounds=1)
    resumed = make_coordinator(experiment, tmp_path, LocalTransport(workers), awaited=("north",))
    assert list(running.federation.sites) == list(resumed.federation.sites) == ["north", "south"]
    assert running.rule.delivered().keys() == resumed.rule.delivered().keys()
