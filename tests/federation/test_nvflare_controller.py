"""Questions as NVFlare's tasks, with NVFlare's own bookkeeping; only the wire is left out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

pytest.importorskip("nvflare", reason="the network extra is not installed")

from nvflare.apis.client import Client
from nvflare.apis.controller_spec import Task
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.apis.impl.wf_comm_server import WFCommServer
from nvflare.apis.shareable import ReservedHeaderKey, Shareable
from nvflare.apis.signal import Signal

from panorgan.federation.transports.base import OnReply
from panorgan.federation.transports.nvflare import controller
from panorgan.federation.transports.nvflare.controller import MESSAGE, TASK, NVFlareTransport, SegmentController

PATIENCE = 20.0
"""Seconds after which a test gives up. Nothing is expected to take that long."""


class Engine:
    """What NVFlare's bookkeeping asks of the server around it."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.clients = [Client(name, f"token of {name}") for name in names]
        self._contexts = FLContextManager(engine=self, identity_name="server", job_id="job")

    def get_clients(self) -> list[Client]:
        return self.clients

    def new_context(self) -> FLContext:
        return self._contexts.new_context()

    def fire_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """No listener."""


class Segment(SegmentController):
    """A segment whose control flow is never started: the test itself does the asking."""

    def run_segment(self, transport: NVFlareTransport) -> None:
        raise AssertionError("not started here")


class Server:
    """NVFlare's list of tasks, and sites that fetch from it and submit to it, as the server's threads do."""

    def __init__(self, *names: str) -> None:
        self.engine = Engine(names)
        self.communicator = WFCommServer()
        self.communicator._engine = self.engine  # without initialize_run: its monitor runs when the test says so
        segment = Segment()
        segment.set_communicator(self.communicator)
        self.abort = Signal()
        self.transport = NVFlareTransport(segment, self.engine.new_context(), self.abort)

    def fetch(self, site: str) -> tuple[str, bytes]:
        """A site asks for work until there is some; the task's id, and the request."""
        client = next(client for client in self.engine.clients if client.name == site)
        ends = time.monotonic() + PATIENCE
        while time.monotonic() < ends:
            name, number, data = self.communicator.process_task_request(client, self.engine.new_context())
            if name:
                assert name == TASK
                return number, data[MESSAGE]
            time.sleep(0.005)
        raise AssertionError(f"{site} was given nothing to do")

    def submit(self, site: str, number: str, answer: bytes) -> None:
        """A site sends its answer."""
        client = next(client for client in self.engine.clients if client.name == site)
        result = Shareable({MESSAGE: answer})
        result.set_return_code(ReturnCode.OK)
        result.set_header(ReservedHeaderKey.TASK_ID, number)
        self.communicator.process_submission(client, TASK, number, result, self.engine.new_context())

    def standing(self) -> list[Task]:
        return list(self.communicator._tasks)

    def wait_for_tasks(self, count: int) -> None:
        ends = time.monotonic() + PATIENCE
        while len(self.standing()) < count:
            assert time.monotonic() < ends, "no site is asked"
            time.sleep(0.005)


class Exchange:
    """A question that is put in a thread of its own, like the coordinator's."""

    def __init__(self, ask: Callable[[], None]) -> None:
        self._ask = ask
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self._ask()
        except BaseException as error:
            self.error = error

    def end(self) -> None:
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive(), "the question never ends"


@contextmanager
def asking(server: Server, on_reply: OnReply, *sites: str, deadline: float | None = None) -> Iterator[Exchange]:
    """Put a question; every request is the name of its site. It is over when the block is left."""
    exchange = Exchange(lambda: server.transport.exchange(sites, str.encode, on_reply, deadline))
    exchange.thread.start()
    try:
        yield exchange
    finally:
        server.abort.trigger("the test is over")
        exchange.thread.join(PATIENCE)


def test_requests_and_answers_travel_as_tasks():
    server, answers = Server("north", "south"), {}
    with asking(server, answers.__setitem__, "north", "south") as exchange:
        for site in ("south", "north"):
            number, request = server.fetch(site)
            assert request == site.encode()
            server.submit(site, number, b"answer of " + request)
        exchange.end()
    assert exchange.error is None
    assert answers == {"north": b"answer of north", "south": b"answer of south"}
    server.communicator.check_tasks()
    assert server.standing() == []


# -- an answer that is being read when patience ends -------------------------------------------------------------


class SlowReader:
    """Reads an answer in two halves; the test says when the second one comes."""

    def __init__(self) -> None:
        self.began, self.go_on = threading.Event(), threading.Event()
        self.read: list[str] = []

    def __call__(self, site: str, answer: bytes) -> None:
        self.read.append("half")
        self.began.set()
        assert self.go_on.wait(PATIENCE)
        self.read.append("whole")


class Clock:
    """A clock that moves when the test says so."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize("patience_ends", ["deadline", "gone"])
def test_an_answer_that_is_being_read_is_read_to_its_end_and_counts(patience_ends, monkeypatch):
    """The question must not end while its answer is half on disk: the round would go on without it."""
    clock = Clock()
    monkeypatch.setattr(controller, "time", clock)
    server, reader, gone = Server("north"), SlowReader(), set()
    server.transport.gone = lambda: gone
    with asking(server, reader, "north", deadline=60.0) as exchange:
        number, _ = server.fetch("north")
        submitting = threading.Thread(target=server.submit, args=("north", number, b"answer"), daemon=True)
        submitting.start()
        assert reader.began.wait(PATIENCE)
        if patience_ends == "deadline":
            clock.now += 61.0
        else:
            gone.add("north")
        exchange.thread.join(1.0)  # time enough to end too early
        ended_too_early = not exchange.thread.is_alive()
        reader.go_on.set()
        exchange.end()
        submitting.join(PATIENCE)
    assert not ended_too_early
    assert reader.read == ["half", "whole"]
    assert exchange.error is None


@pytest.mark.parametrize("fetched", [False, True], ids=["never fetched", "fetched"])
def test_an_answer_that_comes_when_patience_has_ended_is_dropped(fetched):
    server, answers = Server("north", "south"), {}
    gone: set[str] = set()
    server.transport.gone = lambda: gone
    with asking(server, answers.__setitem__, "north") as exchange:
        number = server.fetch("north")[0] if fetched else "made up"
        gone.add("north")
        exchange.end()
        server.submit("north", number, b"too late")
        server.communicator.check_tasks()
        server.submit("north", number, b"much too late")
    assert answers == {}
    assert server.standing() == []


# -- a task that was sent twice ----------------------------------------------------------------------------------


@pytest.mark.parametrize("then", ["answers", "is gone"])
def test_a_task_that_was_fetched_twice_does_not_end_the_watch_over_tasks(then):
    """The line broke: the site fetches again. NVFlare notes such a task twice, and its monitor dies of that."""
    server, answers, gone = Server("north", "south"), {}, set()
    server.transport.gone = lambda: gone
    with asking(server, answers.__setitem__, "north", "south") as exchange:
        server.wait_for_tasks(2)  # with another task behind it, NVFlare does not notice that it sends again
        first, again = server.fetch("north"), server.fetch("north")
        assert first == again == (first[0], b"north")
        noted = [client_task.id for task in server.standing() for client_task in task.client_tasks]
        assert noted == [first[0], first[0]], "NVFlare has mended this: the workaround can go"
        if then == "answers":
            server.submit("north", first[0], b"answer")
        else:
            gone.add("north")
        number, _ = server.fetch("south")
        server.submit("south", number, b"answer")
        exchange.end()
        server.communicator.check_tasks()  # what the monitor's thread does; an error here would be its end
    assert exchange.error is None
    assert set(answers) == ({"north", "south"} if then == "answers" else {"south"})
    assert server.standing() == []
