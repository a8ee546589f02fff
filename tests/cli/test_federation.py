"""`panorgan federation`: kinds of kits, exit codes, and what is printed for people, logs and programs."""

from __future__ import annotations

import contextlib
import io
import json
import math
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import yaml

pytest.importorskip("cryptography", reason="the network extra is not installed")

from rich.console import Console
from trial_federation import Authority, free_port, write_server_kit, write_site_kit

from panorgan.cli import federation_run, federation_view, foreground
from panorgan.cli import main as cli
from panorgan.cli.federation_run import show_status
from panorgan.config import Experiment
from panorgan.deployment.approval import reopen
from panorgan.deployment.control import Control
from panorgan.deployment.folders import ServerKit, SiteKit
from panorgan.deployment.kit_files import load_coordinator_file
from panorgan.deployment.processes import running_process, write_process_id
from panorgan.deployment.settings import FederationSettings
from panorgan.deployment.status import read_status
from panorgan.evaluation.metrics import METRICS
from panorgan.federation.events import Event, EventLog
from panorgan.settings import validated
from panorgan.workflows.lock import only_one_process

ROUND = {
    "number": 1, "stage": "train", "round": 1, "rounds": 3, "total": 3,
    "sites": {"north": {"loss": 0.5}, "south": {"loss": 0.7}},
    "validation": {"north": {"liver": 0.9}, "south": {"kidney_left": 0.5}}, "best": {"round": 1, "dice": 0.7},
    "bytes_sent": 2_000_000, "bytes_received": 1_000, "seconds": {"sites": 30.0, "aggregate": 1.0},
}  # fmt: skip
CASES = (("a", 0.9, 2.0), ("b", 0.8, 3.0), ("c", 0.0, math.nan))
JOINED = {
    "north": {"train_cases": 3, "annotated": {"liver": 3}},
    "south": {"train_cases": 2, "annotated": {"kidney_left": 2}},
}


@pytest.fixture
def command(capfd, monkeypatch) -> Callable[..., tuple[int, str, str]]:
    """Run `panorgan federation …` in this process; returns exit code, stdout, stderr."""
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # a command sets it; what tests start later shall not have it

    def invoke(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["panorgan", "federation", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            cli.main()
        out, err = capfd.readouterr()
        return int(left.value.code or 0), out, err

    return invoke


@pytest.fixture
def server(tiny: Callable[..., Experiment], tmp_path: Path) -> ServerKit:
    return write_server_kit(tmp_path / "pilot" / "server", tiny().agreement(), free_port())


@pytest.fixture
def site(tiny: Callable[..., Experiment], tmp_path: Path) -> SiteKit:
    folder = tmp_path / "pilot" / "sites" / "north"
    return write_site_kit(folder, Authority(), tiny().agreement(), tmp_path / "data", free_port())


@pytest.fixture
def engine(monkeypatch) -> ModuleType:
    """A stand-in for the module that drives a run: what it does is set by the test."""
    stand_in = ModuleType("panorgan.deployment.drive")
    monkeypatch.setitem(sys.modules, "panorgan.deployment.drive", stand_in)
    return stand_in


def log_of(kit: ServerKit) -> EventLog:
    run = kit.run(load_coordinator_file(kit))
    run.mkdir(parents=True, exist_ok=True)
    return EventLog(run / "events.jsonl")


# -- which kit ---------------------------------------------------------------------------------------------------


def test_all_commands_are_there(command) -> None:
    out = command("--help")[1]
    for name in ("init", "preflight", "server", "site", "start", "status", "watch", "stop", "score", "egress"):
        assert f" {name} " in out


def test_stop_at_a_site_stops_what_runs_there(command, site: SiteKit) -> None:
    assert command("stop", site.path)[1].strip() == "Nothing runs from this kit on this machine."
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)  # panorgan"])
    site.process_id.write_text(str(sleeper.pid))
    threading.Thread(target=sleeper.wait).start()  # a real parent collects its dead too
    assert command("stop", site.path, "--json")[1].strip() == '{"stopped": true}'
    assert sleeper.wait(60) == -signal.SIGTERM


def test_a_copied_kit_does_not_take_the_process_of_the_first_for_its_own(command, site: SiteKit, tmp_path) -> None:
    program = "import time; print(flush=True); time.sleep(60)  # panorgan"
    sleeper = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    try:
        assert sleeper.stdout.readline() == b"\n"
        write_process_id(site, sleeper.pid)
        assert running_process(site) == sleeper.pid
        twin = SiteKit(Path(shutil.copytree(site.path, tmp_path / "twin")))
        assert running_process(twin) is None
        assert command("stop", twin.path, "--json")[1].strip() == '{"stopped": false}'
        assert sleeper.poll() is None
    finally:
        sleeper.kill()
        sleeper.wait()


@pytest.mark.parametrize("name", ["server", "start", "status", "watch"])
def test_a_sites_kit_is_refused_at_the_server(command, site: SiteKit, name: str) -> None:
    code, _, err = command(name, site.path)
    assert code == 2
    assert "[is-site-kit]" in err
    assert f"'{name}' is for the coordinator's machine" in err


def test_the_servers_kit_is_refused_at_a_site(command, server: ServerKit) -> None:
    code, _, err = command("site", server.path)
    assert code == 2
    assert "[is-server-kit]" in err


def test_a_folder_of_kits_names_them(command, server: ServerKit, site: SiteKit) -> None:
    err = command("status", server.path.parent)[2]
    assert "[not-a-kit]" in err
    assert f"{server.path}, {site.path}" in err


def test_a_folder_that_is_no_kit_and_one_that_is_not_there(command, tmp_path: Path) -> None:
    assert "[not-a-kit]" in command("status", tmp_path)[2]
    assert "[kit-missing]" in command("status", tmp_path / "nowhere")[2]


def test_the_kit_is_this_folder_if_none_is_given(command, server: ServerKit, monkeypatch) -> None:
    monkeypatch.chdir(server.path)
    code, out, _ = command("status", "--json")
    assert code == 0
    assert json.loads(out)["state"] == "new"


# -- init --------------------------------------------------------------------------------------------------------


def test_the_example_is_a_federation_file(command, tmp_path: Path) -> None:
    path = tmp_path / "federation.yaml"
    code, out, _ = command("init", path, "--example")
    assert code == 0
    assert f"panorgan federation init {path}" in out
    content = yaml.safe_load(path.read_text())
    settings = validated(FederationSettings, content, "example")
    assert settings.sites["west"].joins_later
    assert settings.rounds == FederationSettings.model_fields["rounds"].default, "the example shows the defaults"
    assert "[file-exists]" in command("init", path, "--example")[2], "a file that is there stays"
    assert yaml.safe_load(path.read_text()) == content


def test_init_without_a_file_offers_the_example(command, tmp_path: Path) -> None:
    code, _, err = command("init", tmp_path / "federation.yaml")
    assert code == 2
    assert "[settings-file-missing]" in err
    assert "--example" in err


def test_init_makes_kits_and_says_who_does_what(command, tiny, tmp_path: Path) -> None:
    pytest.importorskip("nvflare", reason="the network extra is not installed")
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(tiny().agreement().as_json()))
    content = {"experiment": "experiment.yaml", "server": {"host": "localhost"}, "sites": ["north", "south"]}
    (tmp_path / "federation.yaml").write_text(yaml.safe_dump(content))
    out_folder = tmp_path / "kits"
    code, out, _ = command("init", tmp_path / "federation.yaml", "--out", out_folder)
    assert code == 0
    assert out.count("made") == 3
    for words in ("panorgan federation start", "edit local/site.yaml", "a private key", str(out_folder / "ca")):
        assert words in out.replace("\n", " ")
    code, out, _ = command("init", tmp_path / "federation.yaml", "--out", out_folder, "--json")
    reported = json.loads(out)
    assert (reported["made"], reported["kept"]) == ([], ["server", "north", "south"])
    assert Path(reported["sites"]["north"]).is_dir()


# -- preflight ---------------------------------------------------------------------------------------------------


def test_preflight_fails_loudly(command, site: SiteKit) -> None:
    code, out, _ = command("preflight", site.path)
    assert code == 2
    assert "FAIL  connection" in out
    assert "fix" in out
    assert "failed. Fix that" in out
    assert "\x1b[" not in out


def test_preflight_for_programs(command, server: ServerKit) -> None:
    code, out, _ = command("preflight", server.path, "--json")
    reported = json.loads(out)
    assert (code, reported["ready"]) == (2, False)
    certificate = next(check for check in reported["checks"] if check["name"] == "certificate")
    assert (certificate["verdict"], bool(certificate["fix"])) == ("failed", True)


# -- status ------------------------------------------------------------------------------------------------------


def test_status_fits_into_eighty_columns(server: ServerKit) -> None:
    log = log_of(server)
    log.record("started", job="job-1")
    log.record("joined", sites=JOINED)
    log.record("failed", number=1, site="south", code="memory")
    log.record("refused", number=1, site="south", reason="Site south sent values that are not finite.", why="in head")
    log.record("round", **ROUND)
    out = io.StringIO()
    federation_view.show(Console(file=out, width=80), read_status(server))
    shown = out.getvalue()
    assert max(map(len, shown.splitlines())) <= 80
    for words in (
        "interrupted",
        "round 2 of 3",
        "north",
        "1 refused, 1 failed",
        "0.700 in round 1",
        "2.0 MB",
        "kidney left",
    ):
        assert words in shown
    assert "31 s" in shown.split("recent")[1], "how long the round took"


def test_an_interrupted_run_has_an_exit_code_of_its_own(command, server: ServerKit) -> None:
    log_of(server).record("started", job="job-1")
    code, out, _ = command("status", server.path)
    assert code == 1
    assert "the driver is not running" in out
    assert "panorgan federation start" in out


def test_watching_ends_with_the_run(command, server: ServerKit, monkeypatch) -> None:
    log = log_of(server)
    log.record("started", job="job-1")
    monkeypatch.setattr(federation_run.time, "sleep", lambda seconds: log.record("finished", rounds=3))
    code, out, _ = command("status", server.path, "--watch")
    assert code == 0
    assert out.rstrip().splitlines()[-1].partition("  ")[2].startswith("finished:")


def test_watching_for_programs_tells_changes_only(server: ServerKit, monkeypatch, capsys) -> None:
    log = log_of(server)
    looks = iter(
        [lambda: None, lambda: None, lambda: log.record("joined", sites=JOINED), lambda: log.record("finished")]
    )
    monkeypatch.setattr(federation_run.time, "sleep", lambda seconds: next(looks)())
    assert show_status(server, watch=True, as_json=True) == "finished"
    reported = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["state"] for one in reported] == ["new", "interrupted", "finished"]


# -- start and stop ----------------------------------------------------------------------------------------------


def driving(kit: ServerKit, on_event: Callable[[Event], None]) -> None:
    """What the real one does: holds its lock, reports every second, silences standard output while it asks."""
    settings = load_coordinator_file(kit)
    log = log_of(kit)
    log.listeners = (on_event,)
    control = Control(kit.control(settings))
    control.folder.mkdir(parents=True, exist_ok=True)
    with only_one_process(control.folder), contextlib.redirect_stdout(io.StringIO()):
        for _ in range(3):
            on_event(Event("driver", {"state": "waiting", "why": "for south", "segment": 0}, 1000.0))
        on_event(Event("driver", {"state": "running", "why": "", "segment": 1}, 1001.0))
        log.record("started", job="job-1")
        log.record("joined", sites=JOINED)
        log.record("failed", number=1, site="south", code="memory")
        log.record("round", **ROUND)
        log.record("finished", rounds=1)


def test_start_prints_plain_lines(command, server: ServerKit, engine: ModuleType) -> None:
    engine.drive = driving
    code, out, _ = command("start", server.path)
    assert code == 0
    lines = [line.partition("  ")[2] for line in out.splitlines()]
    assert lines[:6] == [
        "waiting for south",
        "a new run",
        "joined: north (3 cases: liver), south (2 cases: kidney_left)",
        "south failed, round 1: memory (the site ran out of memory)",
        "round 1/3 (train)  31 s  validation Dice 0.700  loss north 0.500, south 0.700",
        "finished",
    ]
    assert "best validation Dice 0.700 in round 1" in out.splitlines()[-1]
    assert "\x1b[" not in out


def test_start_for_programs(command, server: ServerKit, engine: ModuleType) -> None:
    engine.drive = driving
    reported = [json.loads(line) for line in command("start", server.path, "--json")[1].splitlines()]
    assert [one["event"] for one in reported] == [
        "driver",
        "driver",
        "started",
        "joined",
        "failed",
        "round",
        "finished",
    ]
    assert reported[5]["bytes_sent"] == 2_000_000


def test_start_in_a_terminal_redraws_and_leaves_the_end(server: ServerKit, engine: ModuleType, monkeypatch) -> None:
    engine.drive = driving
    screen = io.StringIO()
    monkeypatch.setattr(federation_run, "Console", lambda file: Console(file=screen, force_terminal=True, width=80))
    federation_run.start_and_watch(server, as_json=False)
    shown = screen.getvalue()
    assert "\x1b[" in shown
    assert "all 1 rounds done" in shown.split("\x1b[2K")[-1]


def test_an_interrupted_start_says_what_goes_on(command, server: ServerKit, engine: ModuleType) -> None:
    def interrupted(kit: ServerKit, on_event: object) -> None:
        raise KeyboardInterrupt

    engine.drive = interrupted
    code, _, err = command("start", server.path)
    assert code == 130
    assert f"panorgan federation start {server.path}" in err
    assert f"panorgan federation stop {server.path} --now" in err


@pytest.mark.parametrize(("options", "now"), [((), False), (("--now",), True)])
def test_stop(command, server: ServerKit, engine: ModuleType, options: tuple[str, ...], now: bool) -> None:
    asked: list[tuple[Path, bool]] = []

    def request_stop(kit: ServerKit, now: bool) -> None:
        asked.append((kit.path, now))

    engine.request_stop = request_stop
    code, out, _ = command("stop", server.path, *options)
    assert (code, asked) == (0, [(server.path, now)])
    assert "panorgan federation start" in out


@pytest.mark.parametrize("state", ["finished", "stopped"])
def test_stop_where_nothing_runs_says_why(command, server: ServerKit, engine: ModuleType, state: str) -> None:
    engine.request_stop = lambda kit, now: state
    code, out, _ = command("stop", server.path)
    assert code == 0
    assert f"The run is {state}" in out
    assert "start" not in out
    assert json.loads(command("stop", server.path, "--json")[1]) == {"stop": None, "state": state}


def test_a_sites_scores_are_shown_once_and_misses_are_counted() -> None:
    """It knows no other site's scores: a column for the federation would repeat its own."""
    usual = {"split": "test", "site": "north", "organ": "liver"}
    nowhere = dict.fromkeys(METRICS, math.nan)
    rows = [{**usual, **nowhere, "case": case, "dice": dice, "assd": assd} for case, dice, assd in CASES]
    out = io.StringIO()
    Console(file=out, width=100).print(federation_run.own_scores(rows))
    text = out.getvalue()
    assert [cell.strip() for cell in text.splitlines()[4].split("│")[1:-1]][:3] == ["liver", "3", "0.567"]
    assert text.splitlines()[4].split("│")[-2].strip() == "1"
    assert "federation" not in text


# -- in the foreground -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("folder", "said"), [("data", 0), ("gone", 1)])
def test_a_site_that_starts_without_its_data_says_so(command, site, monkeypatch, folder: str, said: int) -> None:
    reopen(site)
    site.settings.write_text(yaml.safe_dump({**yaml.safe_load(site.settings.read_text()), "data": {"folder": folder}}))
    (site.path / "data").mkdir()
    monkeypatch.setattr(foreground, "run_site", lambda kit, on_line: 0)
    assert command("site", site.path)[1].count("data.folder") == said


def test_a_site_in_the_foreground_tells_what_its_logs_say(command, site: SiteKit, monkeypatch) -> None:
    (site.path.parents[2] / "data").mkdir()
    site.log.write_text("2026-11-15 16:00:00,000 INFO answered: train/train/8, 5 bytes\n")

    def running(kit: SiteKit, on_line: Callable[[str], None]) -> int:
        on_line("running, process 1")
        with (kit.path / "log.txt").open("a") as file:
            file.write("2026 - FederatedClient - INFO - Successfully registered client:north for project pilot.\n")
        with kit.log.open("a") as file:
            file.write("2026-11-15 16:53:37,115 INFO answered: train/train/9, 59300 bytes\n")
            file.write("2026-11-15 16:53:39,115 ERROR could not answer train/train/10 (data)\nTraceback …\n")
        return 0

    monkeypatch.setattr(foreground, "run_site", running)
    code, out, _ = command("site", site.path)
    assert code == 0
    assert [line.partition("  ")[2] for line in out.splitlines()] == [
        f"site {site.path} starts; Ctrl-C stops it",
        "running, process 1",
        "connected to the server",
        "round 9, training: answered, 59,300 bytes",
        "round 10, training: failed (data); the reason is in site.log, and only the code was sent",
        "stopped",
    ]


def test_a_server_in_the_foreground_names_its_guests(command, server: ServerKit, monkeypatch) -> None:
    def running(kit: ServerKit, on_line: Callable[[str], None]) -> int:
        (kit.path / "log.txt").write_text(
            "… - ClientManager - INFO - Client: New client south@192.0.2.2 joined. Sent token.  Total clients: 1\n"
            "… - JobRunner - INFO - [identity=server, run=?] - Started run: bbc53ef5-cc for clients: south,north\n"
            "… - INFO - Remove the dead Client. Name: south.  Total clients: 0\n"
        )
        kit.turned_away.write_text("2026-01-01 turned away 192.0.2.9:4711: it showed no certificate\n")
        return 3

    monkeypatch.setattr(foreground, "run_server", running)
    code, out, _ = command("server", server.path)
    assert code == 3
    assert [line.partition("  ")[2] for line in out.splitlines()][1:] == [
        "south connected",
        "a segment starts (job bbc53ef5) with south, north",
        "south is silent and counts as gone",
        "turned away 192.0.2.9: it showed no certificate",
        "ended with code 3; engine.out and log.txt say more",
    ]
