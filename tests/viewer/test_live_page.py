"""The live page as browsers get it: events over HTTP, and what a reader sees while a run goes on."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from devtools import chromium
from live_runs import SCORES, begin, log_of, write_round

import panorgan
from panorgan.checksums import sealed_json
from panorgan.config import Experiment
from panorgan.federation.files import write_atomically
from panorgan.viewer.live_page import live_server, stream
from panorgan.viewer.live_status import DrivenRun, LatestStatus, SimulatedRun
from panorgan.viewer.local_server import LocalServer
from panorgan.workflows.lock import only_one_process
from panorgan.workflows.run import Run

PATIENCE = 300
"""Seconds until a test is given up; machines with other runs are slow."""


@pytest.fixture
def run(tiny: Callable[..., Experiment], tmp_path: Path) -> Run:
    run = Run(tmp_path / "run")
    run.path.mkdir()
    run.manifest_file.write_text(sealed_json({"run": "r", "experiment": tiny().as_json(), "sites": {}}))
    return run


@pytest.fixture
def server(run: Run) -> Iterator[LocalServer]:
    with live_server(SimulatedRun(run.path)) as server:
        yield server


def messages(url: str, until: Callable[[str, Any], bool]) -> list[tuple[str, Any]]:
    """Server-sent events as a browser gets them, up to the one that is waited for."""
    found: list[tuple[str, Any]] = []
    with urllib.request.urlopen(f"{url}events", timeout=PATIENCE) as answer:
        assert answer.headers["Content-Type"] == "text/event-stream"
        kind = ""
        for line in answer:
            name, _, content = line.decode().rstrip("\n").partition(": ")
            if name == "event":
                kind = content
            elif name == "data":
                found.append((kind, json.loads(content)))
                if until(*found[-1]):
                    return found
    raise AssertionError("the server ended the events")


def test_a_browser_gets_the_log_and_then_the_state(run: Run, server: LocalServer) -> None:
    begin(log_of(run.path))
    found = messages(server.url, lambda kind, content: kind == "status")
    assert [kind for kind, _ in found] == ["reset", "log", "status"]
    assert [event["event"] for event in found[1][1]] == ["started", "joined"]
    assert found[2][1]["state"] == "interrupted"


def test_two_browsers_get_every_event(run: Run, server: LocalServer) -> None:
    log = log_of(run.path)
    begin(log)
    counts: list[int] = []
    read = threading.Barrier(3, timeout=PATIENCE)

    def follow() -> None:
        seen: list[str] = []

        def until(kind: str, content: Any) -> bool:
            if kind == "log":
                seen.extend(event["event"] for event in content)
            if kind == "status" and len(seen) == 2:
                read.wait()
            return "round" in seen

        messages(server.url, until)
        counts.append(seen.count("joined"))

    threads = [threading.Thread(target=follow, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    read.wait()
    write_round(log, 1)
    for thread in threads:
        thread.join(PATIENCE)
    assert counts == [1, 1]


def test_the_state_comes_again_only_when_it_has_changed(run: Run) -> None:
    stopping = threading.Event()
    pieces = stream(LatestStatus(SimulatedRun(run.path)), stopping)
    first = [next(pieces).split(b"\n")[0] for _ in range(2)]
    assert first == [b"retry: 1000", b"event: status"]
    begin(log_of(run.path))
    assert next(pieces).startswith(b"event: log")
    stopping.set()
    assert [piece.split(b"\n")[0] for piece in pieces] == [b"event: status"]


def test_nothing_is_sent_while_nothing_happens(run: Run) -> None:
    class Looks(threading.Event):
        """Stops the server after so many looks."""

        left = 4

        def wait(self, timeout: float | None = None) -> bool:
            self.left -= 1
            if not self.left:
                self.set()
            return self.is_set()

    begin(log_of(run.path))
    pieces = list(stream(LatestStatus(SimulatedRun(run.path)), Looks()))
    assert [piece.split(b"\n")[0] for piece in pieces] == [b"retry: 1000", b"event: log", b"event: status"]


def test_only_the_page_s_own_files_are_served(server: LocalServer) -> None:
    for name in ("live.js", "charts.js", "record.js", "words.js", "style.css", "live.css"):
        with urllib.request.urlopen(f"{server.url}static/{name}") as answer:
            policy = answer.headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
    for name in ("../live_page.py", "..%2flive_page.py", "live.html", ""):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{server.url}static/{name}")
        assert refused.value.code == 404


# -- in a browser --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_a_reader_sees_while_a_run_goes_on(run: Run, server: LocalServer, tmp_path: Path) -> None:
    log = log_of(run.path)
    begin(log)
    with chromium(tmp_path) as browser, only_one_process(run.path):
        page = browser.open(server.url)
        page.wait_for("document.querySelector('#state').dataset.state === 'running'")
        assert page.text("#title") == "tiny"
        write_round(log, 1, validation=SCORES, best={"round": 1, "dice": 0.75})
        page.wait_for("document.body.dataset.rounds === '1'")
        write_round(log, 2, validation={**SCORES, "north": {"liver": 0.8}}, best={"round": 1, "dice": 0.75})
        log.record("refused", number=2, site="south", code="not-finite", reason="<b>NaN</b>.", why="key a")
        log.record("notice", number=2, code="organ-floods", text="liver floods")
        page.wait_for("document.querySelectorAll('#log-lines li[data-level]').length === 2")
        assert page.text("#tile-round .value") == "3 of 3"
        # North's mean is 0.8, south's (0.5 + 0.7) / 2 = 0.6.
        assert page.text("#tile-dice .value") == "0.700"
        assert page.text("#scores tr[data-organ=liver] td[data-site=north].down") == "0.800"
        assert page.text("#scores tr[data-organ=spleen] td[data-site=north]") == ""
        assert page.text("#sites tr[data-site=south] td:nth-of-type(1)") == "1.000"
        codes = page.value("[...document.querySelectorAll('#log-lines code')].map((code) => code.textContent)")
        assert codes == ["organ-floods", "not-finite"]
        assert "<b>NaN</b>" in page.text("#log-lines"), "a text of a site is not markup"

        names = "[...document.querySelectorAll('#dice path.line')].map((line) => line.dataset.name)"
        assert page.value(names) == ["kidney left", "liver", "spleen", "mean"]
        page.choose("#dice-site", "north")
        assert page.value(names) == ["liver", "mean"]
        page.press("#loss svg", "ArrowRight")
        assert page.text("#loss .readout") == "round 1: north 1.00 · south 2.00"

        page.choose("#log-filter", "marked")
        assert page.value("document.querySelectorAll('#log-lines li').length") == 2
        assert browser.complaints == []


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_nothing_is_wider_than_a_telephone(run: Run, server: LocalServer, tmp_path: Path, dark: bool) -> None:
    log = log_of(run.path)
    begin(log)
    write_round(log, 1, validation=SCORES, best={"round": 1, "dice": 0.75})
    log.record("refused", number=2, site="south", code="not-finite", reason="x" * 200, why="")
    with chromium(tmp_path) as browser:
        page = browser.open(server.url, width=400, dark=dark)
        page.wait_for("document.body.dataset.rounds === '1'")
        assert page.value("document.documentElement.scrollWidth <= window.innerWidth")
        paper = page.value("getComputedStyle(document.body).backgroundColor")
        assert (paper == "rgb(255, 255, 255)") == (not dark)
        assert browser.complaints == []


@pytest.mark.slow
def test_two_browsers_follow_a_run_from_before_its_beginning_to_its_end(
    tiny: Callable[..., Experiment], tmp_path: Path
) -> None:
    """The run is killed in between and resumed: nothing is shown twice."""
    place = tmp_path / "run"

    class KilledError(Exception):
        pass

    def kill(event: panorgan.Event) -> None:
        if event.kind == "round" and event.facts["number"] == 2:
            raise KilledError

    with live_server(SimulatedRun(place)) as server, chromium(tmp_path) as browser:
        pages = [browser.open(server.url), browser.open(server.url, width=400, dark=True)]
        for page in pages:
            page.wait_for("document.querySelector('#state').dataset.state === 'new'")
        with pytest.raises(KilledError):
            panorgan.train(tiny(), place, listeners=(kill,))
        for page in pages:
            page.wait_for("document.querySelector('#state').dataset.state === 'interrupted'")
            assert page.text("#tile-round .value") == "3 of 3"
        panorgan.train(tiny(), place, resume=True)
        for page in pages:
            page.wait_for("document.querySelector('#state').dataset.state === 'finished'")
            page.wait_for("document.body.dataset.rounds === '3'")
            assert page.text("#tile-round .value") == "3 of 3"
            assert page.value("document.querySelectorAll('#loss circle[data-name=north]').length") == 3
        assert browser.complaints == []


@pytest.mark.slow
def test_two_browsers_see_who_a_federation_waits_for(tiny: Callable[..., Experiment], tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="the network extra is not installed")
    from trial_federation import write_server_kit

    kit = write_server_kit(tmp_path / "server", tiny().agreement())
    control = kit.path / "run" / "control"
    control.mkdir(parents=True)

    def driver(state: str, **facts: Any) -> None:
        content = {"state": state, "why": "", "segment": 1, "job": "job-1", "updated": time.time(), **facts}
        write_atomically(control / "driver.json", json.dumps(content))

    driver("waiting", why="for south", connected={"north": time.time()})
    with live_server(DrivenRun(kit)) as server, chromium(tmp_path) as browser, only_one_process(control):
        pages = [browser.open(server.url), browser.open(server.url, width=400, dark=True)]
        for page in pages:
            page.wait_for("document.querySelector('#waits [data-site=south]')")
            assert page.value("document.querySelectorAll('#waits p').length") == 1
        log = log_of(kit.path / "run")
        begin(log)
        asked = {"kind": "train", "round": 1, "total": 3, "stage": "train", "since": time.time()}
        asked |= {"asked": ["north", "south"], "answered": {"south": 2.5}}
        write_atomically(control / "job.json", json.dumps(asked))
        driver("running", connected=dict.fromkeys(("north", "south"), time.time()))
        for page in pages:
            page.wait_for("document.querySelector('#waits [data-site=north]')")
            assert page.value("document.querySelector('#sites tr[data-site=south]').dataset.state") == "answered"
            assert page.text("#sites tr[data-site=south] td:nth-of-type(2)") == "2.5 s"
        for number in (1, 2, 3):
            write_round(log, number)
        log.record("finished", rounds=3, sites=["north"], without=["south"])
        driver("finished", connected={})
        for page in pages:
            page.wait_for("document.querySelector('#state').dataset.state === 'finished'")
            assert page.text("#waits") == ""
        assert browser.complaints == []


@pytest.mark.slow
def test_a_lost_connection_is_said_and_mended(run: Run, tmp_path: Path) -> None:
    begin(log_of(run.path))
    with chromium(tmp_path) as browser:
        with live_server(SimulatedRun(run.path)) as server:
            page = browser.open(server.url)
            page.wait_for("document.querySelector('#state').dataset.state === 'interrupted'")
            port, token = server.port, server.token
        page.wait_for("'lost' in document.querySelector('#connection').dataset")
        again = live_server(SimulatedRun(run.path), port)
        again.token = token
        with again:
            page.wait_for("!('lost' in document.querySelector('#connection').dataset)")
            page.wait_for("document.querySelectorAll('#log-lines li').length === 2")
