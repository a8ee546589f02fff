"""A hospital runs only code that it installed, whatever the coordinator sends. Real processes, real certificates.

The coordinator's machine is its own: the server in these tests checks nothing. Every refusal is the site's.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from hostile_coordinator import check_nothing, plant_modules, storing, write_hostile_job, writing
from intruders import text_of, wait_for
from loopback import Loopback

from panorgan.deployment.approval import reopen
from panorgan.deployment.folders import SiteKit
from panorgan.federation.checkpoint import Checkpoints
from panorgan.federation.events import read_events
from panorgan.federation.transports.nvflare.jobs import CONTROLLER, EXECUTOR, write_job
from panorgan.federation.transports.nvflare.session import NVFlareSession

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def federation(tmp_path_factory, hospitals, experiment_with) -> Iterator[Loopback]:
    """One hospital, and a coordinator that it should not trust."""
    experiment = experiment_with(vocabulary=["liver"], training={"rounds": 2, "local_steps": 1, "min_sites": 1})
    folder = tmp_path_factory.mktemp("hostile")
    made = Loopback(folder, experiment, {"north": hospitals["north"]}, per_segment=1, retries=100_000)
    check_nothing(made.server_kit)
    with made:
        yield made


@pytest.fixture
def site(federation: Loopback) -> SiteKit:
    return federation.site_kits["north"]


@pytest.fixture
def session(federation: Loopback) -> Iterator[NVFlareSession]:
    opened = NVFlareSession(federation.server_kit.admin, federation.settings.coordinator)
    wait_for(lambda: _connected(opened))
    yield opened
    opened.close()


def _connected(session: NVFlareSession) -> bool:
    try:
        return "north" in session.look().connected
    except Exception:
        return False


def _run(session: NVFlareSession, job: Path) -> str:
    name = session.submit_folder(job)
    wait_for(lambda: session.status(name).phase == "ended")
    return name


# -- what a job brings -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["function", "class", "code"])
def test_a_job_that_wants_more_than_a_run_does_nothing_at_a_site(kind, federation, site, session, tmp_path):
    """A function of panorgan that writes files; a class of panorgan that no job needs; code in the job itself."""
    policy, outside = site.egress_policy.read_bytes(), tmp_path / "outside"
    texts = {"planted.py": f"open({str(outside)!r}, 'w')", "local/egress.yaml": "weights: true\n"}
    part = {"function": writing(texts), "class": storing(outside), "code": {"id": "x", "path": "x.X", "args": {}}}[kind]
    job = write_hostile_job(tmp_path / f"hostile-{kind}", lambda config: config.update(components=[part]))
    if kind == "code":
        (job / "app" / "custom").mkdir()
        (job / "app" / "custom" / "x.py").write_text(f"open({str(outside)!r}, 'w').close()")
    name = _run(session, job)
    reason = "the job brings what no job of panorgan has" if kind == "code" else "config_fed_client.json is not what"
    # The server hears why; the job got no process at the site.
    wait_for(lambda: reason in text_of(federation.server_kit.path / "log.txt"))
    assert f"Launched job {name}" not in text_of(site.path / "log.txt")
    assert not outside.exists()
    assert not (site.path / "planted.py").exists()
    assert site.egress_policy.read_bytes() == policy


# -- what lies in the kit ----------------------------------------------------------------------------------------


def _segment(session: NVFlareSession, folder: Path) -> str:
    """An ordinary segment of the run, as `panorgan federation start` submits it."""
    return session.submit_folder(write_job(folder, folder.name, CONTROLLER, EXECUTOR, 1, ["north"], ["north"]))


def test_planted_code_is_not_imported_and_a_changed_policy_is_noticed(federation, site, session, tmp_path):
    """One ordinary job. While something is wrong the site says so; afterwards the round goes on."""
    run, canary = federation.server_kit.path / "run", tmp_path / "canary"
    planted = plant_modules(site.path, canary)
    job = _segment(session, tmp_path / "ordinary")
    wait_for(lambda: "code: psutil.py, sitecustomize.py, torch.py, yaml.py" in text_of(site.log))
    assert not canary.exists(), "the job runs, on installed code"

    policy = site.egress_policy.read_text()
    reopen(site)
    site.egress_policy.write_text(yaml.safe_dump({**yaml.safe_load(policy), "numbers": ["*"]}))
    for path in planted:
        path.unlink()
    wait_for(lambda: "why: changed: local/egress.yaml" in text_of(site.log))
    assert Checkpoints(run / "checkpoints").peek() is None, "nothing but codes was answered"

    site.egress_policy.write_text(policy)
    wait_for(lambda: session.status(job).phase == "ended")
    assert Checkpoints(run / "checkpoints").peek() == (1, ("north",))
    failed = [event.facts for event in read_events(run / "events.jsonl") if event.kind == "failed"]
    assert {(facts["site"], facts["code"]) for facts in failed} == {("north", "not-approved")}
    assert not canary.exists()


def test_no_job_starts_beside_code_in_the_engines_own_folder(federation, site, session, tmp_path):
    """NVFlare puts `local/custom` on the path of every process, and loads some of what it finds there by itself.

    The last job here: the server's half of an aborted one ends when it likes, and would be in the way of the next.
    """
    reopen(site)
    (site.local / "custom").mkdir()
    (site.local / "custom" / "evil.py").write_text("")
    job = _segment(session, tmp_path / "custom")
    wait_for(lambda: "no job is started: not as approved: local/custom" in text_of(site.path / "log.txt"))
    session.abort(job)
    wait_for(lambda: session.status(job).phase == "ended")
    assert f"Launched job {job}" not in text_of(site.path / "log.txt")
    shutil.rmtree(site.local / "custom")


def _panorgan(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "panorgan", "federation", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)


def test_preflight_and_start_name_a_policy_that_nobody_approved(federation, site):
    """The last test here: it stops the site."""
    federation.kill("north")
    reopen(site)
    site.egress_policy.write_text(site.egress_policy.read_text() + "# and more\n")
    checks = json.loads(_panorgan("preflight", str(site.path), "--no-data", "--json").stdout)["checks"]
    (found,) = [check for check in checks if check["name"] == "approval"]
    assert (found["verdict"], found["code"]) == ("failed", "not-approved")
    assert "local/egress.yaml" in found["what"]
    started = _panorgan("site", str(site.path))
    assert started.returncode == 2
    assert "changed: local/egress.yaml" in started.stderr
