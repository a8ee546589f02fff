"""Who should not take part gets nothing, is named in a log, and disturbs no site. Real processes, real certificates.

And an eavesdropper on the machine reads no weights, neither between sites and server nor between processes of one.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from capture import seen, sent_in_the_open, why_not, windows
from federations import same
from intruders import knock, text_of, wait_for
from loopback import Loopback
from nvflare.fuel.hci.client import file_transfer
from safetensors.torch import load_file

from panorgan.deployment.folders import SiteKit
from panorgan.deployment.refusals import RefusedError
from panorgan.deployment.renewal import renew_kits
from panorgan.deployment.revoking import revoke_kit
from panorgan.federation.certificates import Credentials
from panorgan.federation.checkpoint import Checkpoints
from panorgan.federation.events import read_events
from panorgan.federation.message import Message
from panorgan.federation.transports.nvflare.jobs import CONTROLLER, EXECUTOR, write_job
from panorgan.federation.transports.nvflare.session import NVFlareSession
from panorgan.workflows.execute import train

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("stranger", "why"),
    [
        ("plain text", "it did not speak TLS"),
        ("no certificate", "it showed no certificate"),
        ("foreign certificate", "its certificate is not valid here: unable to get local issuer certificate"),
    ],
)
def test_a_stranger_reads_nothing_and_its_address_is_in_the_log(stranger, why, disturbed_run, loopback):
    attempt = disturbed_run.knocks[stranger]
    assert attempt.received == b""
    assert f"turned away {attempt.address}: {why}" in text_of(loopback.server_kit.turned_away)


def test_a_site_with_the_right_certificate_would_read_something(loopback):
    """The control: the same greeting is answered when the certificate is right."""
    own = Credentials.of_site(loopback.site_kits["north"].startup)
    assert knock(loopback.settings.server.port, own).received


@pytest.mark.parametrize("kind", ["foreign", "posing"])
def test_a_site_with_a_false_kit_is_never_registered(kind, disturbed_run):
    words = text_of(disturbed_run.intruders[kind].path / "engine.out")
    assert "created secure channel" in words, "it did try"
    assert "Successfully registered" not in words
    assert "Got engine" not in words


def test_who_poses_as_another_is_named_by_its_certificate(disturbed_run, loopback):
    assert "turned away mallory: it said it was north" in text_of(loopback.server_kit.turned_away)
    log = text_of(loopback.server_kit.path / "log.txt")
    assert "authenticated as 'mallory' but claimed endpoint 'north' requires identity 'north'" in log


def test_a_member_that_is_not_listed_gets_no_job(disturbed_run, loopback):
    """Its certificate is valid (it was a member once), so it may connect; that is all."""
    kit = disturbed_run.intruders["member"]
    assert "Successfully registered client:mallory" in text_of(kit.path / "engine.out")
    assert "Launched job" not in text_of(kit.path / "engine.out")
    assert disturbed_run.members_connected == set(loopback.site_kits)
    (refused,) = [e.facts for e in read_events(disturbed_run.folder / "events.jsonl") if e.kind == "refused"]
    assert (refused["site"], refused["code"]) == ("mallory", "site-not-listed")


def test_the_run_is_the_same_as_without_them(disturbed_run, tmp_path):
    simulated = train(disturbed_run.experiment, tmp_path / "simulated")
    networked, local = (
        Checkpoints(folder / "checkpoints").load_latest() for folder in (disturbed_run.folder, simulated.path)
    )
    assert set(networked.sites) == {"east", "north", "south"}
    assert networked.rounds_done == local.rounds_done == 2
    assert same(networked.weights, local.weights)
    name = Path("model") / "model.safetensors"
    assert same(load_file(disturbed_run.folder / name), load_file(simulated.path / name))


# -- an eavesdropper on the machine ------------------------------------------------------------------------------------


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_no_tensor_and_no_word_of_a_message_can_be_read(disturbed_run, loopback, tmp_path):
    captured = disturbed_run.captured
    assert disturbed_run.capture.dropped == 0
    assert disturbed_run.ports <= disturbed_run.capture.ports, "no other port was open"
    manifest = json.loads((disturbed_run.folder / "manifest.json").read_text())
    weights = {
        f"{path.stem}/{key}": value
        for path in (disturbed_run.folder / "checkpoints").glob("round-*.safetensors")
        for key, value in load_file(path).items()
    }
    answers = {name: load_file(kit.path / "state" / "answer.safetensors") for name, kit in loopback.site_kits.items()}
    # The run and the experiment are named in the head of every message.
    words = [manifest["run"].encode(), manifest["fingerprint"].encode()]
    secrets = windows(weights) + [window for answer in answers.values() for window in windows(answer)] + words
    assert len(secrets) > 200

    _it_was_all_there(captured, loopback, disturbed_run)
    assert seen(secrets, captured) == []

    # The same search finds every one of them where nothing is encrypted.
    tensors = {
        **weights,
        **{f"{name}/{key}": value for name, answer in answers.items() for key, value in answer.items()},
    }
    message = Message(tensors, meta={"run": manifest["run"], "experiment": manifest["fingerprint"]}).to_bytes()
    in_the_open = sent_in_the_open(message, tmp_path / "open.pcap")
    assert {secret for _, secret in seen(secrets, in_the_open)} == set(secrets)


def _it_was_all_there(captured, loopback, run) -> None:
    """The capture holds the weights' way: from the sites to the server's port, and inside to the job's process."""
    model = sum(value.nbytes for value in Checkpoints(run.folder / "checkpoints").load_latest().weights.values())
    inside = re.findall(r"internal listener for s?tcp://[\w.]+:(\d+)", text_of(loopback.server_kit.path / "log.txt"))
    for port in (loopback.settings.server.port, int(inside[-1])):
        for direction in (0, 1):
            assert sum(len(content) for ports, content in captured.items() if ports[direction] == port) > 4 * model


# -- jobs --------------------------------------------------------------------------------------------------------


@pytest.fixture
def session(loopback: Loopback) -> Iterator[NVFlareSession]:
    """The coordinator's own session, with the coordinator's own certificate."""
    opened = NVFlareSession(loopback.server_kit.admin, loopback.settings.coordinator)
    wait_for(lambda: _all_connected(opened, loopback))
    yield opened
    opened.close()


def _all_connected(session: NVFlareSession, loopback: Loopback) -> bool:
    try:
        return session.look().connected.keys() >= loopback.site_kits.keys()
    except Exception:
        return False


def _carry_code(job: Path, canary: Path) -> None:
    (job / "app" / "custom").mkdir()
    (job / "app" / "custom" / "x.py").write_text(f"open({str(canary)!r}, 'w').close()")


def _name_another_class(job: Path, canary: Path) -> None:
    bomb = {"path": "subprocess.Popen", "args": {"args": ["touch", str(canary)]}}
    path = job / "app" / "config" / "config_fed_server.json"
    content = json.loads(path.read_text())
    content["workflows"][0].update(bomb)
    path.write_text(json.dumps(content, indent=1))


def _unsigned(folder: str, *more: object) -> None:
    """In place of NVFlare's signing."""


def _changed_after_signing(sign: Callable[..., None]) -> Callable[..., None]:
    def sign_and_change(folder: str, *more: object) -> None:
        sign(folder, *more)
        with (Path(folder) / "app" / "config" / "config_fed_client.json").open("a") as file:
            file.write(" ")

    return sign_and_change


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("code", "Failed to deploy app 'app': the job brings what no job of panorgan has: custom"),
        ("class", "Failed to deploy app 'app': config_fed_server.json is not what a job of panorgan says"),
        ("unsigned", "UNSIGNED_JOB_REJECTED"),
        ("changed", "app app does not pass signature verification"),
    ],
)
def test_a_job_that_is_not_ours_is_refused_by_the_server(kind, reason, loopback, session, tmp_path, monkeypatch):
    job, canary = tmp_path / f"intruder-{kind}", tmp_path / "canary"
    write_job(job, job.name, CONTROLLER, EXECUTOR, len(loopback.site_kits))
    if kind == "code":
        _carry_code(job, canary)
    elif kind == "class":
        _name_another_class(job, canary)
    else:
        sign = _unsigned if kind == "unsigned" else _changed_after_signing(file_transfer.sign_folders)
        monkeypatch.setattr(file_transfer, "sign_folders", sign)
    name = session.submit_folder(job)
    wait_for(lambda: session.status(name).phase == "ended")
    assert session.status(name).detail == "FINISHED:FAILED_TO_RUN"
    # The state of a job is known before the reason stands in a log.
    wait_for(lambda: _told(loopback.server_kit.path / "log.txt", f"Failed to run the Job ({name})", reason))
    by = f"[U:{loopback.settings.coordinator}][A:job_mgmt.submit_job {job.name}]"
    wait_for(lambda: _told(loopback.server_kit.path / "audit.log", by))
    assert not canary.exists()
    for kit in loopback.site_kits.values():
        assert name not in text_of(kit.path / "log.txt")


def _told(log: Path, *words: str) -> bool:
    """Whether all this stands in one line."""
    return any(all(word in line for word in words) for line in text_of(log).splitlines())


# -- kits that are copied, revoked and renewed -------------------------------------------------------------------


def _site(kit: SiteKit) -> subprocess.CompletedProcess[str]:
    """`panorgan federation site`, until it ends by itself."""
    command = [sys.executable, "-P", "-m", "panorgan", "federation", "site", str(kit.path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)


def test_a_twin_is_named_at_both_ends_and_the_site_stays(loopback, session, tmp_path):
    kit = loopback.site_kits["north"]
    twin = SiteKit(Path(shutil.copytree(kit.path, tmp_path / "twin")))
    twin.process_id.unlink()
    ended = _site(twin)
    assert ended.returncode == RefusedError.exit_code
    assert "Two machines answer as north" in ended.stderr
    wait_for(lambda: "turned away north: Two machines answer as north" in text_of(loopback.server_kit.turned_away))
    assert loopback.processes["north"].poll() is None
    wait_for(lambda: _all_connected(session, loopback))


def test_a_revoked_kit_is_refused_at_once_and_a_renewed_one_is_let_in(loopback, session, experiment_with):
    """Ends as it began: the others' tests share this federation."""
    kit = loopback.site_kits["north"]
    revoke_kit(loopback.server_kit, "north")
    assert loopback.processes["north"].wait(150) == RefusedError.exit_code, "it learnt of it while it ran"
    wait_for(lambda: "north" not in session.look().connected)
    said = len(text_of(kit.path / "engine.out"))
    again = _site(kit)
    assert again.returncode == RefusedError.exit_code, "to register again does not help"
    assert "was revoked" in again.stderr
    assert "Successfully registered" not in text_of(kit.path / "engine.out")[said:]
    renew_kits(loopback.settings, experiment_with().agreement(), loopback.folder, ["north"])
    loopback.approve(kit)
    loopback.start("north")
    wait_for(lambda: _all_connected(session, loopback))
