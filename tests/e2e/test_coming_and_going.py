"""A site that joins late, one that leaves for good, and a stop in between: `on_missing: proceed`."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from loopback import Loopback

from panorgan.federation.events import read_events


@pytest.mark.slow
def test_the_run_goes_on_with_those_who_are_there(hospitals, experiment_with, tmp_path):
    experiment = experiment_with(
        method={"name": "solo"}, training={"rounds": 10, "local_steps": 12, "min_sites": 2, "validate_every": 5}
    )
    folder = tmp_path / "federation"
    federation = Loopback(
        folder,
        experiment,
        hospitals,
        per_segment=5,
        on_missing="proceed",
        first_wait_minutes=0,
        joins_later=["north"],
    )
    run = federation.server_kit.path / "run"

    def events(kind: str) -> list[dict]:
        return [event.facts for event in read_events(run / "events.jsonl") if event.kind == kind]

    def until(condition, seconds: float) -> None:
        ends = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < ends, federation.words()
            time.sleep(0.2)

    with federation.without("north"):
        federation.start("driver")
        until(lambda: events("round"), 240)
        assert events("joined")[0]["sites"].keys() == {"east", "south"}  # no site has the liver yet
        federation.start("north")
        until(lambda: any("north" in reported["sites"] for reported in events("round")), 300)
        federation.kill("east")
        until((run / "control" / "finished.json").exists, 400)

    reported = events("round")
    assert [one["number"] for one in reported] == list(range(1, 11))
    assert events("late_join")[0]["site"] == "north"
    first = next(one["number"] for one in reported if "north" in one["sites"])
    assert all("north" in one["sites"] for one in reported if one["number"] >= first)
    assert "east" not in reported[-1]["sites"], "it was killed and never came back"
    assert any(one["sites"] == ["east"] for one in events("missing"))
    assert events("finished")[0]["without"] == ["east"]
    card = json.loads((run / "model" / "model.json").read_text())
    assert set(card["sites"]) == {"east", "north", "south"}, "what the lost site taught is still in the model"

    scored = subprocess.run(
        [sys.executable, "-m", "panorgan", "federation", "score", str(federation.site_kits["north"].path), "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    rows = json.loads(scored.stdout.splitlines()[-1])["rows"]
    assert {row["organ"] for row in rows} == {"liver"}
    assert not (federation.site_kits["east"].model).exists()

    _check_reports(federation)


def _check_reports(federation: Loopback) -> None:
    """`panorgan report` in the server's kit, and in that of a site that has the model."""

    def report(kit: Path) -> str:
        command = [sys.executable, "-m", "panorgan", "report", str(kit), "--json"]
        answer = subprocess.run(command, capture_output=True, text=True, check=True)
        return Path(json.loads(answer.stdout.splitlines()[-1])["report"]).read_text()

    page = report(federation.server_kit.path)
    assert "Not received by east" in page
    assert "joins late: north" in page
    assert "<image" not in page
    page = report(federation.site_kits["north"].path)
    assert "<image" in page
    assert "does not verify" not in page
    assert 'data-task="deliver"' in page
