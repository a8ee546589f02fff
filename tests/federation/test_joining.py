"""Who takes part: a site's introduction is checked like everything else it sends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from federations import THREE, Meddling, make_coordinator, make_workers
from refusing import refused

from panorgan.anatomy import Vocabulary
from panorgan.errors import RunError
from panorgan.federation.events import Event, read_events
from panorgan.federation.message import Message
from panorgan.federation.settings import Patience
from panorgan.federation.tasks import Task, answer_meta
from panorgan.federation.transports.local import LocalTransport
from panorgan.methods.protocol import Federation, SiteInfo
from panorgan.preparation.plan import PlanSettings
from panorgan.preparation.site_statistics import SiteStatistics

SMALL = {"rounds": 2, "validate_every": 0, "local_steps": 1}

NORTH_KNOWS_ALL = {
    "sites": [
        {
            "name": "north",
            "annotated": ["liver", "spleen", "kidney_left", "kidney_right"],
            "cases": 3,
            "spacing_mm": [14, 14, 14],
        },
        {"name": "south", "annotated": ["liver"], "cases": 3, "spacing_mm": [14, 14, 14]},
    ]
}


@pytest.fixture
def three(tiny):
    return lambda **training: tiny(phantom=THREE, training={**SMALL, **training})


def happened(folder, kind: str) -> list[dict]:
    return [event.facts for event in read_events(folder / "events.jsonl") if event.kind == kind]


class Joining(LocalTransport):
    """Replaces the answer of site south to the question who it is."""

    def __init__(self, workers, answer: Callable[[Message], bytes] | None) -> None:
        super().__init__(workers)
        self.answer = answer

    def exchange(self, sites, make_request, on_reply, deadline=None):
        def changed(site: str, answer: bytes) -> None:
            message = Message.from_bytes(answer)
            if site == "south" and message.meta["answers"].startswith("join"):
                if self.answer is None:
                    return  # silent
                answer = self.answer(message)
            on_reply(site, answer)

        super().exchange(sites, make_request, changed)


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (lambda message: b"garbage", "not-a-message"),
        (lambda message: Message({}, {}, message.meta).to_bytes(), "introduction-incomplete"),
        (lambda message: Message({}, message.scalars, {**message.meta, "run": "x"}).to_bytes(), "misaddressed"),
    ],
    ids=["garbage", "no counts", "another run"],
)
def test_a_bad_introduction_is_refused_by_name(tiny, tmp_path, answer, code):
    experiment = tiny(phantom=NORTH_KNOWS_ALL)
    heard: list[Event] = []
    coordinator = make_coordinator(experiment, tmp_path, Joining(make_workers(experiment, tmp_path), answer), heard)
    assert set(coordinator.federation.sites) == {"north"}
    (reported,) = [event.facts for event in heard if event.kind == "refused"]
    assert (reported["site"], reported["code"]) == ("south", code)


def test_too_few_sites_at_the_start(tiny, tmp_path):
    """Reported before training, not after a round."""
    experiment = tiny(phantom=NORTH_KNOWS_ALL, training={"min_sites": 2})
    with refused("too-few-sites", RunError) as caught:
        make_coordinator(experiment, tmp_path, Joining(make_workers(experiment, tmp_path), None))
    assert all(number in caught.value.what for number in ("1", "2")), "how many there are, and are needed"
    assert caught.value.fix
    assert not (tmp_path / "checkpoints").exists()


def test_a_site_without_cases_at_the_start_is_refused_by_name_and_the_run_begins(three, tmp_path):
    def meddle(site: str, kind: str, answer: bytes):
        if (site, kind) == ("west", "join"):
            answer = Message(scalars={"train_cases": 0.0}, meta=Message.from_bytes(answer).meta).to_bytes()
        return [(site, answer)]

    experiment = three()
    transport = Meddling(make_workers(experiment, tmp_path), meddle)
    coordinator = make_coordinator(experiment, tmp_path, transport, listed=frozenset({"north", "south", "west"}))
    coordinator.run()
    assert coordinator.finished
    assert coordinator.members == ["north", "south"]
    (reported,) = happened(tmp_path, "refused")
    assert (reported["number"], reported["site"], reported["code"]) == (0, "west", "no-training-cases")
    assert transport.asked.count(("join", "west")) == 1, "it is not asked again before every round"


# -- newcomers, when the run has begun ---------------------------------------------------------------------------


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
        cases, _ = self.counts()
        return replace(STATISTICS, cases=cases, ct_cases=cases).as_numbers()

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
    assert answer.scalars["annotated/liver"] == answer.scalars["train_cases"] > 0
    assert any(name.startswith("plan/") for name in answer.scalars) == (plan is None)


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
    facts = {name: SiteInfo(name, 1, {"liver": 1}) for name in ("west", "north", "south")}
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
