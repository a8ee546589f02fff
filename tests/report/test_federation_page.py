"""The coordinator's report: rounds, validation, drop-outs, refusals and the model, from a server's folders alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from browser import blocked, visit
from devtools import chromium
from live_runs import JOINED, SCORES, begin, log_of, write_round

import panorgan
from panorgan.checksums import sealed_json
from panorgan.config import Experiment
from panorgan.federation.events import Event
from panorgan.report.federation_log import notices, pauses, score_table, site_parts, troubles
from panorgan.report.federation_page import render_federation
from panorgan.workflows.run import Run


def seconds(**phases: float) -> dict[str, object]:
    return {"seconds": phases}


@pytest.fixture
def run(tiny: Callable[..., Experiment], tmp_path: Path) -> Run:
    """A server's run folder: three rounds, south missing in the second, one refusal, and the model delivered."""
    run = Run(tmp_path / "server" / "run")
    log = log_of(run.path)
    agreement = tiny().agreement()
    manifest = {"run": "r", "created": "2026-11-18T19:01:15+0000", "federation": "pilot", "versions": {"panorgan": "1"}}
    content = {**manifest, "experiment": agreement.as_json(), "fingerprint": agreement.fingerprint()}
    run.manifest_file.write_text(sealed_json(content))
    begin(log)
    write_round(log, 1, validation=SCORES, best={"round": 1, "dice": 0.75})
    log.record("missing", number=2, sites=["south"])
    write_round(log, 2, sites={"north": {"loss": 0.5}})
    log.record("refused", number=3, site="south", code="not-finite", reason="<b>NaN</b>.", why="key a")
    log.record("failed", number=3, site="south", code="memory")
    write_round(log, 3, validation={**SCORES, "north": {"liver": 0.8}}, best={"round": 1, "dice": 0.75})
    log.record("notice", number=3, code="organ-floods", text="liver floods")
    log.record("finished", rounds=3, sites=["north"], without=["south"])
    run.model_folder.mkdir()
    (run.model_folder / "model.json").write_text(json.dumps({"round": 1, "parameters": 1234}))
    return run


def test_each_sites_part(run: Run) -> None:
    north, south = site_parts(run._log, ["north"])
    assert (north.used, north.missed, north.refused, north.failed, north.has_model) == (3, 0, 0, 0, True)
    assert (south.used, south.missed, south.refused, south.failed, south.has_model) == (2, 1, 1, 1, False)
    assert (south.train_cases, south.annotated) == (2, JOINED["south"]["annotated"])


def test_a_site_that_joins_late_misses_no_earlier_round() -> None:
    events = [
        Event("joined", {"sites": {"north": JOINED["north"]}}),
        Event("round", {"number": 1, "sites": {"north": {}}}),
        Event("late_join", {"number": 2, "site": "south", **JOINED["south"]}),
        Event("round", {"number": 2, "sites": {"north": {}}}),
        Event("round", {"number": 2, "sites": {"north": {}, "south": {}}}),  # repeated after a kill
    ]
    _, south = site_parts(events, [])
    assert (south.joined_in, south.used, south.missed) == (2, 1, 0)


def test_pauses_are_what_no_round_accounts_for() -> None:
    """Rounds of 10 s that end at 100, 140 and 153: 30 s and 3 s between them."""
    facts = {"seconds": {"sites": 9.0, "aggregate": 1.0}, "sites": {}}
    events = [
        Event("round", {"number": 1, **facts}, 100.0),
        Event("missing", {"number": 2, "sites": ["south"]}, 110.0),
        Event("resumed", {}, 120.0),
        Event("round", {"number": 2, **facts}, 140.0),
        Event("round", {"number": 3, **facts}, 153.0),
    ]
    (pause,) = pauses(events)
    assert (pause.before, pause.seconds) == (2, 30.0)
    assert "south" in pause.why


def test_the_table_is_that_of_the_delivered_round(run: Run) -> None:
    table = score_table(run.rounds, 1)
    assert table is not None
    assert (table.number, table.sites, table.mean) == (1, ("north", "south"), pytest.approx(0.75))
    assert table.cells["spleen"] == {"south": 0.5}
    assert table.overall == {"north": 0.9, "south": pytest.approx(0.6)}
    newest = score_table(run.rounds, 2)  # not validated: the newest that was
    assert newest is not None
    assert newest.number == 3
    assert score_table([], None) is None


def test_troubles_and_notices_have_their_codes(run: Run) -> None:
    assert [line.code for line in troubles(run._log)] == ["", "not-finite", "memory"]
    assert [line.code for line in notices(run._log)] == ["organ-floods"]


def test_the_page_says_all_of_it(run: Run) -> None:
    page = panorgan.write_report(run).read_text()
    for words in ("pilot", "not-finite", "memory", "organ-floods", "0.750", "1,234"):
        assert words in page
    assert "<b>NaN</b>" not in page, "a text of a site is not markup"
    assert "&lt;b&gt;NaN" in page
    assert "<image" not in page


def test_a_run_that_has_just_begun_has_a_page_too(run: Run) -> None:
    run.events_file.unlink()
    for path in run.model_folder.iterdir():
        path.unlink()
    assert "pilot" in render_federation(Run(run.path))


def test_a_damaged_line_of_the_log_is_named(run: Run) -> None:
    lines = run.events_file.read_bytes().splitlines(keepends=True)
    run.events_file.write_bytes(b"".join([*lines[:3], lines[3].replace(b"south", b"s0uth"), *lines[4:]]))
    assert "line 4 of events.jsonl is damaged" in render_federation(Run(run.path))


@pytest.mark.slow
def test_nothing_of_the_page_is_blocked(run: Run, tmp_path: Path) -> None:
    dom, log = visit(render_federation(run), tmp_path)
    assert "</html>" in dom
    assert blocked(log) == []
    with chromium(tmp_path / "telephone") as browser:
        page = browser.open((tmp_path / "visited.html").as_uri(), width=400)
        page.wait_for("document.querySelector('footer')")
        assert page.value("document.documentElement.scrollWidth <= window.innerWidth")


def test_the_command_takes_the_servers_kit(run: Run, tiny: Callable[..., Experiment], capsys) -> None:
    pytest.importorskip("cryptography", reason="the network extra is not installed")
    from trial_federation import write_server_kit

    from panorgan.cli.report import write_and_say

    kit = write_server_kit(run.path.parent, tiny().agreement())
    write_and_say(kit.path, as_json=True)
    assert json.loads(capsys.readouterr().out) == {"report": str(run.report_file)}
    assert "interrupted" not in run.report_file.read_text(), "the log says that it has finished"
