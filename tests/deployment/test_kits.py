"""Kits: what is in them, what is refused, and that a second call keeps them."""

from __future__ import annotations

import datetime
import json
import shutil
import stat
import sys
from pathlib import Path

import pytest
import yaml
from kit_making import EXPERIMENT, federation
from refusing import refused

pytest.importorskip("nvflare", reason="the network extra is not installed")

from cryptography import x509
from nvflare.fuel.sec.authz import AuthzContext, Person
from nvflare.security.security import FLAuthorizer

from panorgan.agreement import Agreement
from panorgan.deployment.folders import ServerKit, SiteKit
from panorgan.deployment.kit_files import load_coordinator_file
from panorgan.deployment.kits import KitsReport, make_kits
from panorgan.errors import ConfigError
from panorgan.federation.egress import default_policy, parse_policy
from panorgan.methods.registry import methods


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def kits(report: KitsReport) -> list[Path]:
    return [report.server, *report.sites.values()]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# -- what is in a kit ------------------------------------------------------------------------------------------


def test_everybody_gets_a_folder_and_only_its_owner_may_look_into_it(made: KitsReport) -> None:
    assert sorted(path.name for path in made.folder.iterdir()) == ["ca", "server", "sites"]
    assert (made.made, made.kept, made.notes) == (("server", "north", "east-2"), (), ())
    assert mode(made.folder / "ca") == 0o700
    assert mode(made.folder / "ca" / "cert.json") == 0o600
    for kit in [*kits(made), made.server / "admin"]:
        assert mode(kit) == mode(kit / "startup") == 0o700
        keys = list((kit / "startup").glob("*.key"))
        assert len(keys) == 1
        assert mode(keys[0]) == 0o600
        assert not list(kit.rglob("*.default"))


def test_the_authority_keeps_no_key_of_a_participant(made: KitsReport) -> None:
    kept = json.loads((made.folder / "ca" / "cert.json").read_text())
    assert set(kept) == {"root_cert", "root_pri_key"}
    assert not [path for kit in kits(made) for path in kit.rglob("*") if path.name == "cert.json"]


def test_certificates_name_their_owner_and_last_as_long_as_asked(made: KitsReport) -> None:
    root = x509.load_pem_x509_certificate((made.server / "startup" / "rootCA.pem").read_bytes())
    owners = {
        made.server / "startup" / "server.crt": "federation.example.org",
        made.server / "admin" / "startup" / "client.crt": "ada@example.org",
        made.sites["east-2"] / "startup" / "client.crt": "east-2",
    }
    for path, owner in owners.items():
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        certificate.verify_directly_issued_by(root)
        assert certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)[0].value == owner
        assert certificate.not_valid_after_utc - certificate.not_valid_before_utc == datetime.timedelta(days=400)
    names = x509.load_pem_x509_certificate((made.server / "startup" / "server.crt").read_bytes()).extensions
    alternative = names.get_extension_for_class(x509.SubjectAlternativeName).value
    assert alternative.get_values_for_type(x509.DNSName) == ["federation.example.org"]


# -- policies --------------------------------------------------------------------------------------------------


def test_everything_is_stored_in_the_kit(made: KitsReport) -> None:
    for kit in kits(made):
        for path in kit.rglob("*.json"):
            assert "/tmp" not in path.read_text(), path
    resources = json.loads((made.server / "local" / "resources.json").read_text())
    component = {part["id"]: part for part in resources["components"]}
    assert resources["servers"][0]["heart_beat_timeout"] == 33
    assert component["job_scheduler"]["args"]["max_jobs"] == 1
    assert not Path(component["job_manager"]["args"]["uri_root"]).is_absolute()


def test_jobs_may_name_our_classes_only_and_no_log_travels(made: KitsReport) -> None:
    one_class = dict.fromkeys(kits(made), "panorgan.deployment.site_job.SiteJob")
    one_class[made.server] = "panorgan.deployment.coordinator_job.CoordinatorJob"
    for kit in kits(made):
        text = (kit / "local" / "resources.json").read_text()
        resources = json.loads(text)
        assert resources["class_allow_list"] == [one_class[kit]]
        assert resources["class_list_enforcement_mode"] == "enforce"
        assert "nvflare.app_common.logging" not in text
    for kit in made.sites.values():
        resources = json.loads((kit / "local" / "resources.json").read_text())
        assert resources["allow_log_streaming"] is False
        manager = next(part for part in resources["components"] if part["id"] == "resource_manager")
        assert manager["args"]["num_of_gpus"] == manager["args"]["mem_per_gpu_in_GiB"] == 0
    for path in (made.server / "startup" / "fed_server.json", made.sites["north"] / "startup" / "fed_client.json"):
        assert json.loads(path.read_text())["require_signed_jobs"] is True
        assert '"connection_security": "mtls"' in path.read_text()


def permitted(kit: Path, right: str, role: str = "project_admin") -> bool:
    """What NVFlare's own authorizer makes of the kit's policy."""
    policy = json.loads((kit / "local" / "authorization.json").read_text())
    user = Person("ada@example.org", "coordination", role)
    return bool(FLAuthorizer("north", policy).authorize(AuthzContext(right, user, user))[0])


FORBIDDEN = ["byoc", "pwd", "ls", "cat", "head", "tail", "grep", "configure_job_log", "configure_site_log", "clone_job"]
PRIVATE = ["sys_info", "report_env", "show_errors", "show_stats", "restart", "shutdown", "call", "download_job"]


def test_nobody_may_send_code_or_look_around(made: KitsReport) -> None:
    for kit in kits(made):
        assert permitted(kit, "submit_job")
        assert permitted(kit, "abort_job")
        assert permitted(kit, "check_status")
        for role in ("project_admin", "org_admin", "lead", "member"):
            assert [right for right in FORBIDDEN if permitted(kit, right, role)] == []
    assert [right for right in PRIVATE if permitted(made.sites["north"], right)] == []


def test_the_egress_policy_is_the_methods_own(made: KitsReport) -> None:
    path = SiteKit(made.sites["north"]).egress_policy
    assert parse_policy(yaml.safe_load(path.read_text())) == default_policy("fedavg")


# -- a second call ---------------------------------------------------------------------------------------------


def test_a_new_site_leaves_the_others_as_they_are(copy: Path) -> None:
    north = SiteKit(copy / "sites" / "north")
    north.settings.write_text(north.settings.read_text() + "# edited by the hospital\n")
    server = ServerKit(copy / "server")
    edited = server.settings.read_text().replace("retries: 3", "retries: 7  # mine").replace("run: run", "run: big/run")
    server.settings.write_text(edited)
    before = contents(copy)

    report = make_kits(federation(sites=["north", "east-2", "west"]), EXPERIMENT, copy)

    after = contents(copy)
    changed = {name for name in before if after[name] != before[name]}
    assert changed == {"server/local/coordinator.yaml"}
    assert {name.split("/")[1] for name in after.keys() - before.keys()} == {"west"}
    assert (report.made, report.kept) == (("west",), ("server", "north", "east-2"))
    root = "startup/rootCA.pem"
    assert (copy / "sites" / "west" / root).read_bytes() == (north.path / root).read_bytes()
    old, new = edited.splitlines(), server.settings.read_text().splitlines()
    assert [line for line in new if line not in old] == ["  west: {organization: west, joins_later: false}"]
    assert [line for line in old if line not in new] == []
    assert "west" in load_coordinator_file(server).sites
    assert any("'rounds'" in note for note in report.notes)


def test_the_same_call_again_does_nothing(copy: Path) -> None:
    before = contents(copy)
    report = make_kits(federation(), EXPERIMENT, copy)
    assert contents(copy) == before
    assert (report.made, report.kept, report.notes) == ((), ("server", "north", "east-2"), ())


def test_a_list_of_sites_in_another_style_is_updated_too(copy: Path) -> None:
    server = ServerKit(copy / "server")
    content = yaml.safe_load(server.settings.read_text())
    sites = content.pop("sites")
    text = yaml.safe_dump({"sites": sites, **content}, default_flow_style=False)
    server.settings.write_text(text.replace("coordinator:", "# a comment of mine\ncoordinator:"))
    make_kits(federation(sites=["north", "west"]), EXPERIMENT, copy)
    read = load_coordinator_file(server)
    assert list(read.sites) == ["north", "west"]
    assert "# a comment of mine\ncoordinator:" in server.settings.read_text()


def test_a_kit_that_was_moved_away_is_renewed(copy: Path) -> None:
    old = (copy / "sites" / "north" / "startup" / "client.crt").read_bytes()
    shutil.rmtree(copy / "sites" / "north")
    assert make_kits(federation(), EXPERIMENT, copy).made == ("north",)
    new = x509.load_pem_x509_certificate((copy / "sites" / "north" / "startup" / "client.crt").read_bytes())
    assert new != x509.load_pem_x509_certificate(old)
    new.verify_directly_issued_by(x509.load_pem_x509_certificate((copy / "server/startup/rootCA.pem").read_bytes()))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"server": {"host": "other.example.org", "port": 8443}}, "server.host"),
        ({"server": {"host": "federation.example.org", "port": 9}}, "server.port"),
        ({"name": "other"}, "name"),
        ({"coordinator": "bob@example.org"}, "coordinator"),
    ],
)
def test_what_the_certificates_say_cannot_change(copy: Path, changes: dict[str, object], words: str) -> None:
    before = contents(copy)
    with refused("another-federation") as caught:
        make_kits(federation(**changes), EXPERIMENT, copy)
    assert caught.value.why.startswith(f"{words} ")
    assert caught.value.fix
    assert contents(copy) == before


def test_another_experiment_needs_a_new_folder(copy: Path) -> None:
    before = contents(copy)
    other = EXPERIMENT.model_copy(update={"seed": 1})
    with refused("another-federation") as caught:
        make_kits(federation(), other, copy)
    assert all(experiment.fingerprint() in caught.value.why for experiment in (EXPERIMENT, other))
    assert contents(copy) == before


def test_without_the_authority_nobody_can_be_added(copy: Path) -> None:
    shutil.rmtree(copy / "ca")
    before = contents(copy)
    with refused("authority-missing"):
        make_kits(federation(sites=["north", "west"]), EXPERIMENT, copy)
    assert contents(copy) == before


# -- refusals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, method in methods().items() if method.pooled])
def test_methods_for_benchmarks_are_refused(name: str, tmp_path: Path) -> None:
    with refused("benchmark-method", ConfigError):
        make_kits(federation(), Agreement(vocabulary=("liver",), method={"name": name}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_failed_attempt_can_be_corrected(tmp_path: Path) -> None:
    wrong = federation(server={"host": "two words"})
    with refused("unusable-name", ConfigError):
        make_kits(wrong, EXPERIMENT, tmp_path)
    too_long = federation(sites=["n" * 80])
    with refused("kits-not-made"):
        make_kits(too_long, EXPERIMENT, tmp_path)
    assert make_kits(federation(sites=["north"]), EXPERIMENT, tmp_path).made == ("server", "north")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ca", "server", "sites"]


def test_nothing_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_kits(federation(sites=["north"]), EXPERIMENT, tmp_path)
    assert capfd.readouterr() == ("", "")


def test_without_nvflare_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "panorgan.federation.transports.nvflare.provision", raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == "nvflare"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delattr("panorgan.federation.transports.nvflare.provision", raising=False)
    with refused("nvflare-missing") as caught:
        make_kits(federation(), EXPERIMENT, tmp_path)
    assert "[network]" in caught.value.fix
