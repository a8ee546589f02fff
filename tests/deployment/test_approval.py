"""A kit is used as the hospital approved it, or not at all."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from refusing import refused

pytest.importorskip("nvflare", reason="the network extra is not installed")

from panorgan.deployment.approval import Deviations, approve, deviations, reopen, require_approved
from panorgan.deployment.folders import ServerKit, SiteKit
from panorgan.deployment.policy_checks import check_approval, check_server_policy
from panorgan.deployment.processes import run_site
from panorgan.deployment.site_launcher import SiteLauncher
from panorgan.deployment.site_machine import SiteMachine
from panorgan.errors import ConfigError
from panorgan.federation.failures import NotApprovedError
from panorgan.federation.message import Message
from panorgan.federation.tasks import Task, answer_meta
from panorgan.federation.transports.nvflare.policies import site_policies


@pytest.fixture
def new(copy: Path, tmp_path: Path) -> SiteKit:
    """A kit as it comes, with its data folder filled in."""
    kit = SiteKit(copy / "sites" / "north")
    (tmp_path / "scans").mkdir()
    content = yaml.safe_load(kit.settings.read_text())
    kit.settings.write_text(yaml.safe_dump({**content, "data": {"folder": str(tmp_path / "scans")}}))
    return kit


@pytest.fixture
def kit(new: SiteKit) -> SiteKit:
    """Approved, and open to tampering."""
    approve(new)
    reopen(new)
    return new


def test_a_new_kit_is_not_approved_and_an_approved_one_is(new: SiteKit) -> None:
    assert deviations(new).never_approved
    assert check_approval(new).verdict == "failed"
    assert approve(new).never_approved
    assert not deviations(new)
    require_approved(new)
    assert check_approval(new).verdict == "ok"


def test_a_user_without_a_name_may_approve_too(new: SiteKit, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs under a number."""

    def no_site() -> str:
        raise KeyError("uid not found")

    monkeypatch.setattr("getpass.getuser", no_site)
    approve(new)
    assert check_approval(new).what.endswith(f"by user {os.getuid()}")


def test_an_approved_kit_is_read_only_except_for_what_the_site_writes(new: SiteKit) -> None:
    approve(new)
    for folder in (new.local, new.startup):
        for path in (folder, *folder.iterdir()):
            assert not stat.S_IMODE(path.stat().st_mode) & 0o222, path
    assert stat.S_IMODE(new.path.stat().st_mode) == 0o700
    approve(new)  # again, although it may not be written
    reopen(new)
    new.settings.write_text("edited")


COMPILED = "torch.cpython-311-x86_64-linux-gnu.so"
NEVER = Deviations(never_approved=True)
MEDDLING: dict[str, tuple[Callable[[SiteKit], object], Deviations]] = {
    "egress": (lambda kit: kit.egress_policy.write_text("weights: true"), Deviations(changed=("local/egress.yaml",))),
    "site": (lambda kit: kit.settings.write_text("name: x"), Deviations(changed=("local/site.yaml",))),
    "experiment": (lambda kit: kit.experiment.write_text(""), Deviations(changed=("local/experiment.yaml",))),
    "engine": (
        lambda kit: (kit.local / "resources.json").write_text("{}"),
        Deviations(changed=("local/resources.json",)),
    ),
    "key": (lambda kit: (kit.startup / "client.key").write_text("x"), Deviations(changed=("startup/client.key",))),
    "gone": (
        lambda kit: (kit.local / "authorization.json").unlink(),
        Deviations(missing=("local/authorization.json",)),
    ),
    "more": (
        lambda kit: (kit.startup / "x__resources.json").write_text("{}"),
        Deviations(added=("startup/x__resources.json",)),
    ),
    "folder": (lambda kit: (kit.local / "custom").mkdir(), Deviations(added=("local/custom",))),
    "module": (lambda kit: (kit.path / "torch.py").write_text(""), Deviations(modules=("torch.py",))),
    "compiled": (lambda kit: (kit.path / COMPILED).write_text(""), Deviations(modules=(COMPILED,))),
    "no record": (lambda kit: (kit.local / "approved.json").unlink(), NEVER),
    "bad record": (lambda kit: (kit.local / "approved.json").write_text("[1]"), NEVER),
}


@pytest.mark.parametrize("kind", MEDDLING)
def test_what_differs_is_named_and_nothing_starts(kind: str, kit: SiteKit) -> None:
    meddle, differs = MEDDLING[kind]
    meddle(kit)
    assert deviations(kit) == differs
    with refused("not-approved", NotApprovedError) as caught:
        run_site(kit)
    assert caught.value.why == differs.words()
    assert not kit.process_id.exists()
    found = check_approval(kit)
    assert (found.verdict, found.code) == ("failed", "not-approved")
    assert differs.words() in found.what
    assert found.fix


def test_the_words_for_what_differs_name_every_file() -> None:
    names = ("local/a", "local/b", "startup/c", "d.py")
    words = Deviations(changed=names[:1], missing=names[1:2], added=names[2:3], modules=names[3:]).words()
    assert all(name in words for name in names)


def test_a_package_in_the_kit_is_code_and_other_folders_are_not(kit: SiteKit) -> None:
    (kit.path / "data").mkdir()
    (kit.path / "data" / "convert.py").write_text("")
    assert not deviations(kit)
    (kit.path / "torch").mkdir()
    (kit.path / "torch" / "__init__.py").write_text("")
    assert deviations(kit).modules == ("torch/",)


def test_a_link_to_the_same_text_is_another_file(kit: SiteKit, tmp_path: Path) -> None:
    shutil.move(kit.egress_policy, tmp_path / "egress.yaml")
    kit.egress_policy.symlink_to(tmp_path / "egress.yaml")
    assert deviations(kit).changed == ("local/egress.yaml",)


@pytest.mark.parametrize("name", ["site.yaml~", ".site.yaml.swp", ".approved.json.incomplete"])
def test_what_an_editor_or_a_killed_approval_leaves_is_no_deviation(name: str, kit: SiteKit) -> None:
    (kit.local / name).write_text("")
    assert not deviations(kit)
    approve(kit)


def test_after_an_edit_the_hospital_approves_again(kit: SiteKit) -> None:
    policy = yaml.safe_load(kit.egress_policy.read_text())
    kit.egress_policy.write_text(yaml.safe_dump({**policy, "weights": False}))
    assert deviations(kit).changed == ("local/egress.yaml",)
    assert approve(kit).changed == ("local/egress.yaml",)
    assert not deviations(kit)


# -- what comes with a kit ---------------------------------------------------------------------------------------


def test_what_the_engine_may_do_is_said_by_this_installation_and_not_by_the_kit(new: SiteKit) -> None:
    """As a kit of an older version, or of a coordinator who wants more."""
    path = new.local / "resources.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "class_allow_list": ["*"]}))
    (new.local / "authorization.json").write_text("{}")
    for name in ("start.sh", "stop_fl.sh", "sub_start.sh"):
        (new.startup / name).write_text("evil")
    approve(new)
    for name, text in site_policies().items():
        assert (new.local / name).read_text() == text
    assert not list(new.startup.glob("*.sh"))


@pytest.mark.parametrize(
    "name", ["local/x__resources.json", "local/custom/x.py", "local/privacy.json", "startup/job_resources.json", "x.py"]
)
def test_a_kit_that_brings_more_is_not_approved(name: str, new: SiteKit) -> None:
    (new.path / name).parent.mkdir(exist_ok=True)
    (new.path / name).write_text("{}")
    with refused("stray-files", ConfigError) as caught:
        approve(new)
    assert Path(name).name in caught.value.what
    assert deviations(new).never_approved


def test_a_kit_whose_connection_names_a_component_is_not_approved(new: SiteKit) -> None:
    path = new.startup / "fed_client.json"
    more = {"components": [{"id": "x", "path": "os.system", "args": {"command": "true"}}]}
    path.write_text(json.dumps({**json.loads(path.read_text()), **more}))
    with refused("not-a-plain-connection", ConfigError):
        approve(new)


# -- while it runs -----------------------------------------------------------------------------------------------


def answer(machine: SiteMachine, task: Task) -> dict[str, object]:
    return dict(Message.from_bytes(machine.handle(Message(meta=task.to_meta()).to_bytes())).meta)


def test_a_policy_that_changes_between_two_requests_stops_the_answers(kit: SiteKit) -> None:
    machine, task = SiteMachine(kit, "north"), Task("join", "run")
    assert answer(machine, task)["failed"] == "wrong-experiment", "it would answer"
    policy = kit.egress_policy.read_text()
    kit.egress_policy.write_text(policy + "\n# more\n")
    assert answer(machine, task)["failed"] == "not-approved"
    kit.egress_policy.write_text(policy)
    assert answer(machine, task)["failed"] == "wrong-experiment"


def test_a_policy_that_changes_during_a_request_does_not_let_its_answer_out(
    kit: SiteKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer_and_change(machine: SiteMachine, worker: object, request: bytes, task: Task) -> bytes:
        kit.egress_policy.write_text(kit.egress_policy.read_text() + "\n# more\n")
        return Message(meta=answer_meta(task, "north")).to_bytes()

    monkeypatch.setattr(SiteMachine, "_keep_model", answer_and_change)
    assert answer(SiteMachine(kit, "north"), Task("deliver", "run"))["failed"] == "not-approved"


def test_no_job_starts_with_an_engine_that_nobody_approved(kit: SiteKit) -> None:
    launcher = SiteLauncher()
    launcher.check_kit(kit.path)
    kit.egress_policy.write_text("")
    launcher.check_kit(kit.path)  # the job itself refuses, by a code that the coordinator can read
    (kit.local / "custom").mkdir()
    with refused("not-approved", NotApprovedError) as caught:
        launcher.check_kit(kit.path)
    assert caught.value.where == "local/custom"


# -- the server --------------------------------------------------------------------------------------------------


def test_preflight_looks_at_what_jobs_may_do_at_the_server(copy: Path) -> None:
    kit = ServerKit(copy / "server")
    assert check_server_policy(kit).verdict == "ok"
    path = kit.local / "resources.json"
    resources = json.loads(path.read_text())
    path.write_text(json.dumps({**resources, "class_allow_list": ["panorgan."]}))
    found = check_server_policy(kit)
    assert (found.verdict, found.code) == ("failed", "jobs-too-free")
    path.write_text(json.dumps(resources))
    (kit.admin / "local" / "custom").mkdir()
    found = check_server_policy(kit)
    assert (found.verdict, found.code) == ("failed", "code-in-kit")
    assert "admin/local/custom" in found.what
    path.write_text("{")
    (kit.admin / "local" / "custom").rmdir()
    assert check_server_policy(kit).code == "resources-unreadable"
