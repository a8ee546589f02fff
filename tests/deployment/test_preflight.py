"""Preflight: everything that can be known before a participant starts."""

from __future__ import annotations

import json
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("cryptography", reason="the network extra is not installed")

from trial_federation import Authority, free_port, tls_server, write_server_kit, write_site_kit

from panorgan.agreement import Agreement
from panorgan.config import Experiment
from panorgan.deployment import machine, versions
from panorgan.deployment.approval import record
from panorgan.deployment.check import Check
from panorgan.deployment.data_folder import FILL_IN
from panorgan.deployment.folders import ServerKit, SiteKit
from panorgan.deployment.policy_checks import check_open_policy
from panorgan.deployment.preflight import preflight, preflight_server
from panorgan.federation.egress import default_policy
from panorgan.methods.registry import methods
from panorgan.workflows.site_cases import site_settings


@pytest.fixture(autouse=True)
def well_kept_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What differs between machines that run the tests is fixed."""
    monkeypatch.setattr(machine, "_is_synchronised", lambda: True)
    monkeypatch.setattr(versions, "versions_here", lambda: {"panorgan": "0.1.0", "nvflare": "2.9.0"})
    for name in ("grpc_proxy", "https_proxy", "http_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def data(tiny: Callable[..., Experiment], cache: Path, tmp_path: Path) -> Path:
    """North's folder of the tiny federation: five cases that annotate the liver. May be damaged."""
    folder = site_settings(tiny(), cache, lambda what, done, total: None)["north"].folder
    return Path(shutil.copytree(folder, tmp_path / "data"))


@pytest.fixture
def agreement(tiny: Callable[..., Experiment]) -> Agreement:
    return tiny().agreement()


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture
def port(authority: Authority, tmp_path: Path) -> Iterator[int]:
    """A server that greets."""
    own = authority.write(tmp_path / "server", "localhost", "server", host="localhost")
    with tls_server(own) as port:
        yield port


@pytest.fixture
def kit(authority: Authority, agreement: Agreement, data: Path, port: int, tmp_path: Path) -> SiteKit:
    return write_site_kit(tmp_path / "north", authority, agreement, data, port)


def change(kit: SiteKit | ServerKit, **changes: Any) -> None:
    kit.settings.write_text(yaml.safe_dump({**yaml.safe_load(kit.settings.read_text()), **changes}))


def by_name(checks: list[Check]) -> dict[str, Check]:
    found = {check.name: check for check in checks}
    assert len(found) == len(checks), "two checks of one name"
    return found


def failed(checks: list[Check]) -> dict[str, str]:
    """Codes by name."""
    return {check.name: check.code for check in checks if check.verdict == "failed"}


def test_a_site_that_is_ready(kit: SiteKit) -> None:
    heard: list[tuple[str, int, int]] = []
    before = {path: path.read_bytes() for path in kit.path.rglob("*") if path.is_file()}
    checks = preflight(kit, on_progress=lambda *reported: heard.append(reported))
    assert {(check.verdict, check.code) for check in checks} == {("ok", "")}, checks
    counts = ("5 cases", "5 patients", "3 train", "1 validation", "1 test", "liver")
    assert all(count in by_name(checks)["data"].what for count in counts)
    assert "5 cases" in by_name(checks)["scans"].what
    assert heard[-1] == ("reading cases", 5, 5)
    assert {path: path.read_bytes() for path in kit.path.rglob("*") if path.is_file()} == before


def test_every_failure_says_what_to_do(kit: SiteKit) -> None:
    """Break everything at once: one does not hide the other."""
    (kit.startup / "client.key").chmod(0o644)
    change(
        kit, server=f"localhost:{free_port()}", min_free_disk_gb=1e9, hardware={"device": "cpu"}, min_gpu_memory_gb=8
    )
    kit.egress_policy.write_text("wheights: true\n")
    kit.experiment.write_text(kit.experiment.read_text().replace("rounds: 3", "rounds: 4"))
    checks = preflight(kit, data=False)
    assert failed(checks) == {
        "experiment": "experiment-changed",
        "egress.yaml": "unknown-setting",
        "approval": "not-approved",
        "private key": "key-exposed",
        "connection": "connection-refused",
        "device": "cpu-with-gpu-memory",
        "disk: cache": "too-little-disk",
        "disk: state": "too-little-disk",
    }
    assert all(check.fix for check in checks if check.verdict == "failed")


def test_json_shows_the_code(kit: SiteKit) -> None:
    (kit.startup / "client.key").chmod(0o644)
    reported = {check["name"]: check for check in (check.as_json() for check in preflight(kit, data=False))}
    assert reported["private key"].keys() == {"name", "verdict", "what", "fix", "code"}
    assert (reported["private key"]["verdict"], reported["private key"]["code"]) == ("failed", "key-exposed")


# -- what may leave, and what the method sends -------------------------------------------------------------------

KEEPS = "policy-keeps-payload"


def agree_on(kit: SiteKit, tiny: Callable[..., Experiment], **method: object) -> None:
    """Another method; the policy stays as it was."""
    other = tiny(method=method).agreement()
    kit.experiment.write_text(yaml.safe_dump(other.as_json()))
    change(kit, experiment_fingerprint=other.fingerprint())


@pytest.mark.parametrize(
    "changes",
    [{"numbers": ["*"]}, {"numbers": ["cases", "*/*", "**"]}, {"numbers": ["?*"]}, {"tensors": {"*": {}}}],
    ids=["all numbers", "among others", "of any length", "all tensors"],
)
def test_a_policy_that_lets_anything_leave_is_a_warning(kit: SiteKit, changes: dict[str, Any]) -> None:
    policy = yaml.safe_load(kit.egress_policy.read_text())
    kit.egress_policy.write_text(yaml.safe_dump({**policy, **changes}))
    found = by_name(preflight(kit, data=False))["egress.yaml"]
    assert (found.verdict, found.code) == ("warning", "open-policy")
    assert found.fix


@pytest.mark.parametrize("name", sorted(methods()))
def test_no_policy_that_comes_with_a_kit_lets_anything_leave(name: str) -> None:
    assert check_open_policy(default_policy(name)) is None


def test_a_policy_that_would_keep_the_teacher_here(kit: SiteKit, tiny: Callable[..., Experiment]) -> None:
    """It was made for FedAvg. It would go unnoticed until the end of pre-training."""
    agree_on(kit, tiny, name="flkd")
    found = by_name(preflight(kit, data=False))["egress.yaml"]
    assert (found.verdict, found.code) == ("failed", "policy-keeps-payload")
    assert "teacher/*" in found.what
    assert "number loss/*" in found.what
    assert "cases" not in found.what.partition("; number")[2], "that one may leave"
    policy = yaml.safe_load(kit.egress_policy.read_text())
    # The lines of the fix, as it says.
    lines = dict(re.findall(r"under '(\w+)': '(.*?)'(?:;|\.)", found.fix))
    policy["tensors"] |= yaml.safe_load(lines["tensors"])
    policy["numbers"] += yaml.safe_load(lines["numbers"])
    kit.egress_policy.write_text(yaml.safe_dump(policy))
    assert by_name(preflight(kit, data=False))["egress.yaml"].verdict == "ok"


@pytest.mark.parametrize(
    ("changes", "verdict", "code"),
    [
        ({}, "ok", ""),
        ({"numbers": ["*"]}, "warning", "open-policy"),
        ({"weights": False}, "failed", KEEPS),
        ({"tensors": {"*": {}}}, "warning", "open-policy"),
        ({"tensors": {}}, "failed", KEEPS),
        ({"numbers": ["train_cases", "annotated/*", "plan/*", "cases", "loss", "loss/*"]}, "failed", KEEPS),
        ({"numbers": ["train_cases", "annotated/*", "cases", "loss", "loss/*", "dice/*"]}, "warning", KEEPS),
        (
            {"numbers": ["train_cases", "annotated/*", "plan/*", "cases", "dice/*", "loss", "loss/local_kd"]},
            "warning",
            KEEPS,
        ),
    ],
)
def test_a_policy_against_the_agreed_method(
    kit: SiteKit, tiny: Callable[..., Experiment], changes: dict[str, Any], verdict: str, code: str
) -> None:
    """Numbers that are named one by one may be all there are; without weights or teachers nothing can be sent."""
    agree_on(kit, tiny, name="flkd")
    kit.egress_policy.write_text(yaml.safe_dump({**default_policy("flkd").as_json(), **changes}))
    found = by_name(preflight(kit, data=False))["egress.yaml"]
    assert (found.verdict, found.code) == (verdict, code)
    assert bool(found.fix) == (verdict != "ok")


def test_a_policy_of_before_volumes_is_told_what_it_keeps_and_what_to_write(
    kit: SiteKit, tiny: Callable[..., Experiment]
) -> None:
    """The site can take part without; other numbers that are lacking stay a failure, and are named alone."""
    agree_on(kit, tiny, name="flkd")
    policy = default_policy("flkd").as_json()
    older = [name for name in policy["numbers"] if name != "volume/*"]
    kit.egress_policy.write_text(yaml.safe_dump({**policy, "numbers": older}))
    found = by_name(preflight(kit, data=False))["egress.yaml"]
    assert found.verdict == "warning"
    assert "number volume/*" in found.what
    (line,) = re.findall(r"under 'numbers': '(.*?)'", found.fix)
    kit.egress_policy.write_text(yaml.safe_dump({**policy, "numbers": older + yaml.safe_load(line)}))
    assert by_name(preflight(kit, data=False))["egress.yaml"].verdict == "ok"
    kit.egress_policy.write_text(yaml.safe_dump({**policy, "numbers": [n for n in older if n != "dice/*"]}))
    found = by_name(preflight(kit, data=False))["egress.yaml"]
    assert found.verdict == "failed"
    assert "volume/*" not in found.what + found.fix


def test_what_the_method_does_not_send_with_these_settings_need_not_be_allowed(
    kit: SiteKit, tiny: Callable[..., Experiment]
) -> None:
    """Without local distillation there are no teachers."""
    agree_on(kit, tiny, name="flkd", local_weight=0)
    kit.egress_policy.write_text(yaml.safe_dump({**default_policy("flkd").as_json(), "tensors": {}}))
    assert by_name(preflight(kit, data=False))["egress.yaml"].verdict == "ok"


def test_a_site_yaml_that_is_not_filled_in_does_not_hide_the_network(kit: SiteKit) -> None:
    change(kit, data={"folder": FILL_IN})
    checks = by_name(preflight(kit))
    assert (checks["site.yaml"].verdict, checks["site.yaml"].code) == ("failed", "data-folder-blank")
    assert "data.folder" in checks["site.yaml"].fix
    assert checks["experiment"].verdict == checks["certificate"].verdict == checks["encryption"].verdict == "ok"
    assert checks["data"].verdict == checks["device"].verdict == "skipped"


def test_an_empty_folder_is_reported_and_not_raised(tmp_path: Path) -> None:
    checks = preflight(SiteKit(tmp_path / "nothing"))
    assert failed(checks).keys() == {"site.yaml", "experiment", "egress.yaml", "approval", "certificate"}
    assert failed(checks)["certificate"] == "certificate-unreadable"


def test_the_address_that_counts_is_the_provisioned_one(kit: SiteKit, port: int) -> None:
    """The network engine reads startup/fed_client.json; a site.yaml that says something else misleads people."""
    provisioned = {"servers": [{"service": {"target": f"localhost:{port}"}}]}
    (kit.startup / "fed_client.json").write_text(json.dumps(provisioned))
    record(kit)
    assert not failed(preflight(kit, data=False))
    change(kit, server="localhost:1")
    checks = by_name(preflight(kit, data=False))
    assert (checks["server"].verdict, checks["server"].code) == ("failed", "address-mismatch")
    assert checks["encryption"].verdict == "ok"


def test_a_path_with_spaces(kit: SiteKit) -> None:
    moved = SiteKit(kit.path.rename(kit.path.with_name("north clinic")))
    assert failed(preflight(moved, data=False)) == {"kit folder": "spaces-in-path"}


def test_a_certificate_of_another_site(kit: SiteKit, authority: Authority) -> None:
    authority.write(kit.startup, "south")
    record(kit)
    assert failed(preflight(kit, data=False)) == {"certificate": "wrong-participant"}


def test_without_data_the_folder_is_still_listed(kit: SiteKit) -> None:
    checks = by_name(preflight(kit, data=False))
    assert checks["data"].verdict == "ok"
    assert checks["scans"].verdict == "skipped"


def test_data_that_is_not_there(kit: SiteKit, data: Path) -> None:
    shutil.rmtree(data)
    assert failed(preflight(kit)) == {"data": "folder-missing", "scans: folder-missing": "folder-missing"}


def test_data_that_the_doctor_does_not_like(kit: SiteKit, data: Path) -> None:
    image = sorted((data / "imagesTr").iterdir())[0]
    image.write_bytes(image.read_bytes()[:500])
    found = by_name(preflight(kit))["scans: file-unreadable"]
    assert (found.verdict, found.code) == ("failed", "file-unreadable")
    assert image.name.removesuffix("_0000.nii.gz") in found.what


def test_a_site_that_can_teach_nothing(kit: SiteKit, agreement: Agreement, tmp_path: Path) -> None:
    other = Agreement(**{**agreement.model_dump(), "vocabulary": ("pancreas",)})
    kit.experiment.write_text(yaml.safe_dump(other.as_json()))
    change(kit, experiment_fingerprint=other.fingerprint())
    assert by_name(preflight(kit, data=False))["data"].verdict == "failed"


def test_one_patient_is_too_few(kit: SiteKit, data: Path) -> None:
    names = sorted(path.name.removesuffix(".nii.gz") for path in (data / "labelsTr").iterdir())
    change(kit, data={"folder": str(data), "leave_out": names[1:]})
    found = by_name(preflight(kit, data=False))["data"]
    assert found.verdict == "failed"
    assert "too few patients" in found.what


def test_a_site_that_only_looks_on_does_not_fit_in(kit: SiteKit, data: Path) -> None:
    change(kit, data={"folder": str(data), "external": True})
    assert failed(preflight(kit, data=False))["data"] == "external-site"


def test_other_versions_are_worth_a_look(kit: SiteKit) -> None:
    change(kit, versions={"panorgan": "0.9.0"})
    found = by_name(preflight(kit, data=False))["versions"]
    assert (found.verdict, found.code) == ("warning", "other-versions")


# -- the server --------------------------------------------------------------------------------------------------


@pytest.fixture
def server(authority: Authority, agreement: Agreement, tmp_path: Path) -> ServerKit:
    kit = write_server_kit(tmp_path / "coordinator", agreement, free_port())
    authority.write(kit.startup, "localhost", "server", host="localhost")
    authority.write(kit.admin / "startup", "ada@example.org")
    return kit


def test_a_server_that_is_ready(server: ServerKit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("panorgan.deployment.preflight.SERVER_DISK_GB", 0.0)
    checks = preflight_server(server)
    assert {check.verdict for check in checks} == {"ok"}, checks
    assert all(name in by_name(checks)["admin certificate"].what for name in ("ada@example.org", "pilot"))
    assert not (server.path / "run").exists()


def test_a_server_whose_port_is_taken(server: ServerKit) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        change(server, port=port)
        assert failed(preflight_server(server))[f"port {port}"] == "port-taken"


def test_a_server_with_another_experiment(server: ServerKit) -> None:
    server.experiment.write_text(server.experiment.read_text().replace("rounds: 3", "rounds: 4"))
    assert failed(preflight_server(server))["experiment"] == "experiment-changed"


def test_a_server_kit_without_settings(tmp_path: Path) -> None:
    checks = preflight_server(ServerKit(tmp_path))
    assert failed(checks).keys() == {"coordinator.yaml", "experiment"}
    assert by_name(checks)["port"].verdict == "skipped"
