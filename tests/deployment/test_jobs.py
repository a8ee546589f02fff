"""What runs in the engine's jobs, without the engine: the site's machine, and a segment at the server."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import yaml
from refusing import refused
from safetensors import SafetensorError

pytest.importorskip("nvflare", reason="the network extra is not installed")

from federations import Meddling, make_workers

from panorgan.deployment import site_machine
from panorgan.deployment.approval import approve, reopen
from panorgan.deployment.control import Control, read_json
from panorgan.deployment.folders import ServerKit, SiteKit
from panorgan.deployment.kit_files import load_coordinator_file, load_site_file
from panorgan.deployment.segment import run_segment, write_outcome
from panorgan.deployment.site_machine import SiteMachine
from panorgan.errors import ConfigError
from panorgan.federation.checkpoint import Checkpoints
from panorgan.federation.collector import SitesMissingError
from panorgan.federation.message import Message
from panorgan.federation.tasks import Task, answer_meta
from panorgan.workflows.lock import BusyError, only_one_process

SMALL = {"validate_every": 0, "local_steps": 1, "min_sites": 1}


# -- a site ------------------------------------------------------------------------------------------------------


def edited(kit: SiteKit, **changes: object) -> None:
    reopen(kit)
    content = yaml.safe_load(kit.settings.read_text())
    kit.settings.write_text(yaml.safe_dump({**content, **changes}))
    approve(kit)


def test_a_wrong_setting_is_told_as_such_every_time_and_can_be_mended(copy: Path, tmp_path: Path, monkeypatch):
    """It once took the site's lock, failed, and then waited a minute for itself."""
    monkeypatch.setattr(site_machine, "ORPHANS_END_WITHIN", 0.0)
    kit = SiteKit(copy / "sites" / "north")
    (tmp_path / "scans").mkdir()
    edited(kit, name="south", data={"folder": str(tmp_path / "scans")})
    machine = SiteMachine(kit, "north")
    request = Message(meta=Task("join", "run").to_meta()).to_bytes()
    codes = [Message.from_bytes(machine.handle(request)).meta["failed"] for _ in range(3)]
    assert codes == ["config"] * 3

    edited(kit, name="north")
    assert Message.from_bytes(machine.handle(request)).meta["failed"] == "wrong-experiment", "it is open now"
    with pytest.raises(BusyError), only_one_process(kit.state(load_site_file(kit))):
        pass  # and the lock is its own


# -- the server --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (None, "ended", None),
        (OSError(errno.ENOSPC, "No space left on device"), "retry", None),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "retry", None),
        (OSError("4096 requested and 100 written"), "retry", None),
        (SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"), "retry", None),
        (ConfigError("No site annotates spleen.", code="unlabelled-organ"), "error", "unlabelled-organ"),
        (SitesMissingError("Only 1 usable answer.", ["north"], code="too-few-answers"), "missing", "too-few-answers"),
        (ValueError("a bug"), "error", "internal"),
    ],
)
def test_what_the_driver_is_told(error: Exception | None, kind: str, code: str | None, tmp_path: Path):
    control = Control(tmp_path / "run" / "control")
    write_outcome(control, "job-1", error)
    reported = read_json(control.outcome)
    assert (reported["job"], reported["kind"], reported.get("code")) == ("job-1", kind, code)
    if kind == "retry":
        assert str(tmp_path / "run") in reported["what"], "which disk"


def test_a_run_folder_that_another_process_holds_is_tried_again(tmp_path: Path):
    control = Control(tmp_path / "control")
    with only_one_process(tmp_path), pytest.raises(BusyError) as caught, only_one_process(tmp_path):
        pass
    write_outcome(control, "job-1", caught.value)
    assert read_json(control.outcome)["kind"] == "retry"


def test_an_outcome_that_cannot_be_written_is_no_further_error(tmp_path: Path):
    in_the_way = tmp_path / "control"
    in_the_way.write_text("a file where the folder should be")
    write_outcome(Control(in_the_way), "job-1", OSError(errno.ENOSPC, "No space left on device"))
    assert in_the_way.read_text().startswith("a file")


def server_kit(folder: Path, experiment, on_missing: str) -> ServerKit:
    """As much of a server's kit as a segment reads."""
    kit = ServerKit(folder)
    kit.local.mkdir(parents=True)
    agreement = experiment.agreement()
    kit.experiment.write_text(yaml.safe_dump(agreement.as_json()))
    settings = {
        "federation": "pilot",
        "coordinator": "ada@example.org",
        "host": "localhost",
        "port": 8443,
        "sites": {"north": {}, "south": {}},
        "rounds": {"on_missing": on_missing, "per_segment": 1},
        "experiment_fingerprint": agreement.fingerprint(),
    }
    kit.settings.write_text(yaml.safe_dump(settings))
    return kit


def test_an_absent_site_with_an_organ_of_its_own_does_not_end_a_run_that_proceeds(tiny, tmp_path: Path):
    """Only south knows the spleen and the kidneys. It comes in the second segment."""
    experiment = tiny(plan={"intensity": "window"}, training={**SMALL, "rounds": 3})
    kit = server_kit(tmp_path / "kit", experiment, "proceed")
    settings = load_coordinator_file(kit)
    transport = Meddling(make_workers(experiment, tmp_path))
    transport.absent = {"south"}
    checkpoints = Checkpoints(kit.run(settings) / "checkpoints")
    run_segment(kit, settings, transport, "job-1")
    assert read_json(Control(kit.control(settings)).outcome)["kind"] == "ended"
    assert checkpoints.peek() == (1, ("north",))
    transport.absent = set()
    run_segment(kit, settings, transport, "job-2")
    assert checkpoints.peek() == (2, ("north", "south"))


def test_a_run_that_waits_does_not_begin_without_a_site_unless_it_joins_later(tiny, tmp_path: Path):
    """The control."""
    experiment = tiny(plan={"intensity": "window"}, training={**SMALL, "rounds": 3})
    kit = server_kit(tmp_path / "kit", experiment, "wait")
    transport = Meddling(make_workers(experiment, tmp_path))
    transport.absent = {"south"}
    with refused("cannot-begin", SitesMissingError) as caught:
        run_segment(kit, load_coordinator_file(kit), transport, "job-1")
    assert caught.value.sites == ("south",)


class Keeping:
    """A site's worker that also takes the finished model, as a site's machine does."""

    def __init__(self, name: str, worker) -> None:
        self.name, self.worker = name, worker

    def handle(self, request: bytes) -> bytes:
        task = Task.from_meta(Message.outline(request).meta)
        if task.kind == "deliver":
            return Message(meta=answer_meta(task, self.name)).to_bytes()
        return self.worker.handle(request)


def test_who_could_not_be_given_the_model_is_written_down_for_the_next_start(tiny, tmp_path: Path):
    experiment = tiny(plan={"intensity": "window"}, training={**SMALL, "rounds": 1})
    kit = server_kit(tmp_path / "kit", experiment, "proceed")
    settings = load_coordinator_file(kit)
    away = {("south", "deliver")}
    workers = {name: Keeping(name, worker) for name, worker in make_workers(experiment, tmp_path).items()}
    transport = Meddling(workers, lambda site, kind, answer: [] if (site, kind) in away else [(site, answer)])
    finished = Control(kit.control(settings)).finished
    run_segment(kit, settings, transport, "job-1")
    assert read_json(finished) == {"rounds": 1, "sites": ["north"], "without": ["south"]}

    away.clear()
    finished.unlink()  # as the driver does when south is back
    transport.asked.clear()
    run_segment(kit, settings, transport, "job-2")
    assert transport.asked == [("deliver", "south")], "no site trains again, and north has it"
    assert read_json(finished) == {"rounds": 1, "sites": ["north", "south"], "without": []}
