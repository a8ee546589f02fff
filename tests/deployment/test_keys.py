"""Kits that are revoked and renewed: what the commands do, what the message filter refuses, what a site learns."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_engine import FakeEngine
from invoking import invoke
from kit_making import EXPERIMENT, federation
from refusing import refused

pytest.importorskip("nvflare", reason="the network extra is not installed")

from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.fuel.f3.cellnet.defs import IdentityChallengeKey, MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.message import Message
from nvflare.private.defs import CellChannel, CellChannelTopic, CellMessageHeaderKeys
from typer.testing import CliRunner

from panorgan.cli.main import app
from panorgan.deployment import processes
from panorgan.deployment.approval import record
from panorgan.deployment.certificate_checks import check_credentials
from panorgan.deployment.folders import ServerKit, SiteKit
from panorgan.deployment.kit_files import load_coordinator_file
from panorgan.deployment.refusals import RefusedError
from panorgan.deployment.renewal import renew_kits
from panorgan.deployment.revoking import revoke_kit
from panorgan.deployment.status_warnings import status_warnings
from panorgan.errors import ConfigError
from panorgan.federation.certificates import Credentials, begins, ends, read_certificate
from panorgan.federation.engine import CLOCK, REFUSED, EngineProcess
from panorgan.federation.revocation import read_revocations
from panorgan.federation.site_identity import Refusal
from panorgan.federation.transports.nvflare.message_filter import (
    MACHINE,
    ServerMessageFilter,
    SiteMessageFilter,
    machine_of,
)

DAY = 24 * 3600.0


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# -- renewal -----------------------------------------------------------------------------------------------------


def test_a_renewed_kit_has_new_keys_and_all_the_rest_stays(copy):
    kit = SiteKit(copy / "sites" / "north")
    (kit.path / "state").mkdir()
    (kit.path / "state" / "mine").write_text("kept")
    kit.egress_policy.write_text("weights: true\n")
    before, others = content(kit.path), content(copy / "sites" / "east-2")
    old_end = ends(read_certificate(Credentials.of_site(kit.startup).certificate))
    (done,) = renew_kits(federation(certificate_days=500), EXPERIMENT, copy, ["north"])
    after = content(kit.path)
    assert {name for name in after if after[name] != before.get(name)} == {
        "startup/client.crt",
        "startup/client.key",
        "README.md",
    }
    assert after.keys() == before.keys()
    assert done.here
    assert done.expires in after["README.md"].decode()
    assert ends(read_certificate(Credentials.of_site(kit.startup).certificate)) > old_end + 99 * DAY
    assert {check.verdict for check in check_credentials(Credentials.of_site(kit.startup), "north")} == {"ok"}
    assert content(copy / "sites" / "east-2") == others


def test_everybody_is_renewed_at_once_and_the_server_with_its_person(copy):
    server = ServerKit(copy / "server")
    before = content(copy)
    done = renew_kits(federation(), EXPERIMENT, copy)
    assert [one.name for one in done] == ["server", "north", "east-2"]
    changed = {name for name, now in content(copy).items() if now != before[name]}
    assert {name for name in changed if name.endswith((".crt", ".key"))} == {
        *(f"server/startup/server.{end}" for end in ("crt", "key")),
        *(f"server/admin/startup/client.{end}" for end in ("crt", "key")),
        *(f"sites/{site}/startup/client.{end}" for site in ("north", "east-2") for end in ("crt", "key")),
    }
    checks = check_credentials(Credentials.of_server(server.startup), "federation.example.org")
    checks += check_credentials(Credentials.of_site(server.admin / "startup"), "ada@example.org")
    assert {check.verdict for check in checks} == {"ok"}
    assert not (copy / "renewed").exists()


def test_a_kit_that_is_elsewhere_gets_a_parcel_with_what_must_be_copied(copy, tmp_path):
    kit = (copy / "sites" / "north").rename(tmp_path / "at-the-hospital")
    (done,) = renew_kits(federation(), EXPERIMENT, copy, ["north"])
    assert not done.here
    assert {path.name for path in (done.folder / "startup").iterdir()} == {"client.crt", "client.key", "rootCA.pem"}
    assert not (copy / "sites" / "north").exists(), "or 'init' would take it for a kit"
    for path in (done.folder / "startup").iterdir():
        (kit / "startup" / path.name).write_bytes(path.read_bytes())
    checks = check_credentials(Credentials.of_site(kit / "startup"), "north")
    assert [check.verdict for check in checks] == ["ok"] * 3


def test_renewal_needs_the_authority_and_known_names(copy):
    with refused("unknown-participant", ConfigError) as caught:
        renew_kits(federation(), EXPERIMENT, copy, ["nort"])
    assert "north" in caught.value.why
    before = content(copy)
    (copy / "ca").rename(copy / "elsewhere")
    with refused("authority-missing"):
        renew_kits(federation(), EXPERIMENT, copy)
    (copy / "elsewhere").rename(copy / "ca")
    assert content(copy) == before


def test_kits_are_valid_for_three_months_unless_said_otherwise():
    settings = federation().model_dump(exclude={"certificate_days"})
    assert type(federation())(**settings).certificate_days == 90


def test_status_warns_before_a_certificate_ends(copy):
    kit = ServerKit(copy / "server")
    settings = load_coordinator_file(kit)
    now = time.time()
    assert status_warnings(kit, settings, now) == ()
    shown = {"north": now + 10 * DAY, "east-2": now + 20 * DAY, "somebody": now}
    (kit.path / "certificates.json").write_text(json.dumps(shown))
    (warning,) = status_warnings(kit, settings, now)
    assert "renew north" in warning
    names = [
        name
        for name in ("server", "north", "east-2")
        if f"renew {name}" in " ".join(status_warnings(kit, settings, now + 390 * DAY))
    ]
    assert names == ["server", "north", "east-2"]


# -- revocation --------------------------------------------------------------------------------------------------


def test_by_name_everything_up_to_now_is_revoked_and_a_renewed_kit_is_not(copy):
    kit, site = ServerKit(copy / "server"), SiteKit(copy / "sites" / "north")
    done = revoke_kit(kit, "north")
    assert (done.changed, done.restart) == (True, False)
    until = read_revocations(kit.local / "revoked.yaml")["north"]
    assert begins(read_certificate(Credentials.of_site(site.startup).certificate)) <= until
    while time.time() < until + 1:  # certificates count in whole seconds
        time.sleep(0.05)
    renew_kits(federation(), EXPERIMENT, copy, ["north"])
    assert begins(read_certificate(Credentials.of_site(site.startup).certificate)) > until


@pytest.mark.parametrize("what", ["", "startup/client.crt"])
def test_by_a_kit_or_a_certificate_that_one_and_older_ones_are_revoked(what, copy):
    kit, site = ServerKit(copy / "server"), SiteKit(copy / "sites" / "north")
    revoke_kit(kit, str(site.path / what))
    issued = begins(read_certificate(Credentials.of_site(site.startup).certificate))
    assert read_revocations(kit.local / "revoked.yaml") == {"north": issued}


def test_a_name_that_nobody_has_is_refused(copy):
    with refused("unknown-participant", ConfigError) as caught:
        revoke_kit(ServerKit(copy / "server"), "nroth")
    assert "north" in caught.value.why
    assert not (copy / "server" / "local" / "revoked.yaml").exists()


def test_a_server_kit_from_before_there_was_a_message_filter_gets_one(copy):
    kit = ServerKit(copy / "server")
    path = kit.local / "resources.json"
    resources = json.loads(path.read_text())
    made = list(resources["components"])
    resources["components"] = [part for part in made if part["id"] != "message_filter"]
    path.write_text(json.dumps(resources))
    assert revoke_kit(kit, "north").restart
    assert json.loads(path.read_text())["components"] == made
    assert not revoke_kit(kit, "east-2").restart


def test_the_commands_say_what_they_did(copy, capfd, monkeypatch):
    kit = str(copy / "server")
    code, out, _ = invoke(capfd, monkeypatch, "federation", "revoke", "north", "--kit", kit, "--json")
    reported = json.loads(out)
    assert (code, reported["revoked"], reported["changed"]) == (0, "north", True)
    assert invoke(capfd, monkeypatch, "federation", "revoke", "north", "--kit", str(copy / "sites" / "north"))[0] == 2
    (copy.parent / "experiment.yaml").write_text(yaml.safe_dump(EXPERIMENT.as_json()))
    file = copy.parent / "federation.yaml"
    file.write_text(yaml.safe_dump({**federation().as_json(), "limits": EXPERIMENT.limits.as_json()}))
    renew = ("renew", "north", "--federation", str(file), "--out", str(copy))
    code, out, _ = invoke(capfd, monkeypatch, "federation", *renew, "--json")
    (one,) = json.loads(out)["renewed"]
    assert (code, one["name"], one["here"]) == (0, "north", True)


# -- the message filter, at the server ---------------------------------------------------------------------------


class Cell:
    """Stands where NVFlare's cell stands, and asks the filters as it does."""

    def __init__(self) -> None:
        self.filters: dict[str, Any] = {}

    def add_incoming_filter(self, channel: str, topic: str, call: Any) -> None:
        self.filters["any"] = call

    def add_incoming_request_filter(self, channel: str, topic: str, call: Any) -> None:
        self.filters["request"] = call

    def add_outgoing_reply_filter(self, channel: str, topic: str, call: Any) -> None:
        self.filters["reply"] = call

    def receive(self, message: Message) -> Refusal | None:
        """What becomes of a message: the reason of a refusal, or None."""
        for name in ("any", "request"):
            reply = self.filters[name](message)
            if reply is not None:
                assert reply.get_header(MessageHeaderKey.RETURN_CODE) == ReturnCode.UNAUTHENTICATED
                return Refusal.from_text(reply.get_header(MessageHeaderKey.ERROR))
        return None


def message(site: str, channel: str, topic: str, token: str = "", payload: Any = None) -> Message:
    headers = {
        MessageHeaderKey.CHANNEL: channel,
        MessageHeaderKey.TOPIC: topic,
        CellMessageHeaderKeys.CLIENT_NAME: site,
        CellMessageHeaderKeys.TOKEN: token,
        CellMessageHeaderKeys.CLIENT_IP: "10.0.0.1",
    }
    return Message(headers, payload)


def context_of(machine: str) -> FLContext:
    context = FLContext()
    context.set_prop(MACHINE, machine, private=False)
    return context


def registration(kit: SiteKit, machine: str = "a") -> Message:
    shown = Shareable()
    shown[IdentityChallengeKey.CERT] = Credentials.of_site(kit.startup).certificate.read_bytes()
    shown.set_peer_context(context_of(machine))
    return message(kit.path.name, CellChannel.SERVER_MAIN, CellChannelTopic.Register, payload=shown)


def admitted(cell: Cell, site: str, token: str) -> None:
    reply = message("server", CellChannel.SERVER_MAIN, CellChannelTopic.Register, payload={"token": token})
    reply.set_header(MessageHeaderKey.DESTINATION, site)
    reply.payload = {CellMessageHeaderKeys.TOKEN: token}
    assert cell.filters["reply"](reply) is None


@pytest.fixture
def cell(copy) -> Cell:
    found = Cell()
    ServerMessageFilter().install(found, copy / "server")
    return found


def test_the_message_filter_is_in_every_new_kit(made):
    resources = json.loads((made.server / "local" / "resources.json").read_text())
    assert any(
        part["path"] == f"{ServerMessageFilter.__module__}.ServerMessageFilter" for part in resources["components"]
    )
    for site in made.sites.values():
        resources = json.loads((site / "local" / "resources.json").read_text())
        assert any(
            part["path"] == f"{SiteMessageFilter.__module__}.SiteMessageFilter" for part in resources["components"]
        )


@pytest.mark.parametrize(
    ("channel", "topic"),
    [
        (CellChannel.SERVER_MAIN, CellChannelTopic.HEART_BEAT),
        (CellChannel.SERVER_COMMAND, "submit_update"),
        (CellChannel.AUX_COMMUNICATION, "whatever"),
    ],
)
def test_after_a_revocation_no_message_of_the_kit_gets_through(channel, topic, cell, copy):
    kit = SiteKit(copy / "sites" / "north")
    assert cell.receive(registration(kit)) is None
    admitted(cell, "north", "token")
    assert cell.receive(message("north", channel, topic, "token")) is None
    revoke_kit(ServerKit(copy / "server"), "north")
    assert cell.receive(message("north", channel, topic, "token")).code == "revoked"
    assert cell.receive(registration(kit)).code == "revoked"
    assert cell.receive(message("east-2", channel, topic, "another")) is None
    reported = json.loads((copy / "server" / "door.json").read_text())
    assert reported["north"]["code"] == "revoked"


def test_a_twin_is_refused_and_written_down(cell, copy):
    kit = SiteKit(copy / "sites" / "north")
    assert cell.receive(registration(kit)) is None
    admitted(cell, "north", "token")
    assert cell.receive(registration(kit, "b")).code == "twin"
    assert "10.0.0.1" in json.loads((copy / "server" / "door.json").read_text())["north"]["why"]
    shown = json.loads((copy / "server" / "certificates.json").read_text())
    assert shown == {"north": ends(read_certificate(Credentials.of_site(kit.startup).certificate))}


def test_a_server_that_was_restarted_learns_from_a_heartbeat_which_machine_it_hears(cell, copy):
    alive = Shareable()
    alive.set_peer_context(context_of("a"))
    heard = message("north", CellChannel.SERVER_MAIN, CellChannelTopic.HEART_BEAT, "of an earlier process", alive)
    assert cell.receive(heard) is None
    kit = SiteKit(copy / "sites" / "north")
    assert cell.receive(registration(kit, "b")).code == "twin"
    assert cell.receive(registration(kit, "a")) is None, "the same machine, started again"


@pytest.mark.parametrize(("who", "renewed"), [("north", "north"), (federation().coordinator, "server")])
def test_revoke_says_whom_to_renew(who, renewed, copy):
    """Without a name everybody would be renewed, and every site had to be restarted."""
    reported = CliRunner().invoke(
        app, ["federation", "revoke", who, "--kit", str(copy / "server")], catch_exceptions=False
    )
    assert reported.exit_code == 0
    assert f"panorgan federation renew {renewed}." in reported.stdout


# -- at the site -------------------------------------------------------------------------------------------------


def reply_with(error: str, server_time: float) -> Message:
    headers = {
        MessageHeaderKey.RETURN_CODE: ReturnCode.UNAUTHENTICATED if error else ReturnCode.OK,
        MessageHeaderKey.ERROR: error,
        MessageHeaderKey.ROUTE: [("server", server_time)],
    }
    return Message(headers)


def test_a_refused_site_keeps_the_reason_and_ends(tmp_path):
    ended: list[int] = []
    site = SiteMessageFilter(ended.append)
    site._read_reply(reply_with("", time.time()), tmp_path)
    site._read_reply(reply_with("missing auth token", time.time()), tmp_path)
    assert ended == []
    refusal = Refusal("twin", "north", "Two machines answer as north.")
    site._read_reply(reply_with(refusal.to_text(), time.time()), tmp_path)
    assert ended == [1]
    assert (tmp_path / REFUSED).read_text() == refusal.to_text()


@pytest.mark.parametrize(("code", "final"), [("twin", True), ("revoked", True), ("again", False)])
def test_a_refused_site_gives_up_only_where_trying_again_is_in_vain(code, final, tmp_path, monkeypatch):
    """The engine is refused the first time; when it is started again, it is stopped."""
    kit = SiteKit(tmp_path / "kit")
    kit.local.mkdir(parents=True)
    record(kit)
    starts: list[bool] = []

    def engine(kit: SiteKit, process: EngineProcess, on_line: object) -> tuple[int, bool]:
        starts.append((kit.path / REFUSED).exists())
        (kit.path / REFUSED).write_text(Refusal(code, "north", "Because.").to_text())
        return 1, len(starts) == 2

    monkeypatch.setattr(processes, "network_engine", FakeEngine)
    monkeypatch.setattr(processes, "_run_once", engine)
    monkeypatch.setattr(processes, "_RESTART_AFTER", 0.0)
    if final:
        with refused(code, RefusedError) as caught:
            processes.run_site(kit)
        assert caught.value.what == "Because."
        assert caught.value.exit_code == 77
        assert caught.value.fix
        assert starts == [False]
    else:
        assert processes.run_site(kit) == 0
        assert starts == [False, False], "an old reason is not repeated"


@pytest.mark.parametrize(("ahead", "word"), [(3600.0, "behind"), (-3600.0, "ahead of"), (1.0, "")])
def test_a_clock_that_is_far_off_is_said_once(ahead, word, tmp_path, caplog):
    site = SiteMessageFilter(lambda code: None)
    for _ in range(3):
        site._read_reply(reply_with("", time.time() + ahead), tmp_path)
    said = [record.message for record in caplog.records if "clock" in record.message]
    assert len(said) == (1 if word else 0)
    assert all(word in words for words in said)
    assert json.loads((tmp_path / CLOCK).read_text())["server_ahead"] == pytest.approx(ahead, abs=5)


def test_a_machine_is_the_same_after_a_restart_and_another_one_elsewhere(tmp_path):
    assert machine_of(tmp_path / "kit") == machine_of(tmp_path / "kit")
    assert machine_of(tmp_path / "kit") != machine_of(tmp_path / "copy")
