"""Keys, certificates and start-up kits, by NVFlare's own provisioning. Nothing is printed; nothing is half done."""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cryptography import x509
from nvflare.lighter.constants import CtxKey, ParticipantType
from nvflare.lighter.entity import Participant, Project
from nvflare.lighter.impl.cert import CertBuilder
from nvflare.lighter.impl.signature import SignatureBuilder
from nvflare.lighter.impl.static_file import StaticFileBuilder
from nvflare.lighter.impl.workspace import WorkspaceBuilder
from nvflare.lighter.provisioner import Provisioner
from nvflare.lighter.utils import Identity, generate_cert, generate_keys

from panorgan.errors import ConfigError, PanorganError
from panorgan.federation.engine import Participants, StartupKits
from panorgan.federation.files import write_atomically
from panorgan.federation.transports.nvflare import policies

SCHEME = "grpc"
"""How the sites connect; TLS 1.2 or later with certificates on both sides, HTTP/2 inside."""

ROOT_DAYS = 3650
"""The authority outlives the certificates, so that a hospital may join, or renew, years later."""

STATE = "cert.json"
"""NVFlare's name for the file with the authority's key."""

_LEFT_OUT = ("readme.txt", "startup/readme.txt", "startup/system_info.ipynb", "local/privacy.json.sample")
"""What NVFlare puts into a kit and panorgan has no use for; its start scripts go as well."""


class _Certificates(CertBuilder):
    """NVFlare's certificates, valid for as long as we say (NVFlare fixes 360 days)."""

    def __init__(self, days: int) -> None:
        super().__init__(root_valid_days=ROOT_DAYS)
        self.days = days

    def get_pri_key_cert(self, participant: Participant) -> tuple[Any, x509.Certificate]:
        """A new key, and a certificate for it that ends with the authority's at the latest."""
        now = datetime.datetime.now(datetime.UTC)
        end = min(now + datetime.timedelta(days=self.days), self.root_cert.not_valid_after_utc)
        if end <= now:
            raise RuntimeError("the federation's certificate authority has expired")
        private_key, public_key = generate_keys()
        certificate = generate_cert(
            subject=Identity(participant.subject, participant.org, participant.get_prop("role")),
            issuer=Identity(self.issuer),
            signing_pri_key=self.pri_key,
            subject_pub_key=public_key,
            server_default_host=participant.get_default_host() if participant.type == ParticipantType.SERVER else None,
            not_valid_before=now,
            not_valid_after=end,
        )
        return private_key, certificate


def provision(participants: Participants, days: int, authority: Path, scratch: Path) -> StartupKits:
    """Make a kit with a new key for each participant in `scratch`; the authority, made if need be, signs them.

    NVFlare works on a copy of the authority's state; the original is replaced in one step when all went well. Only
    the authority's own key is kept: NVFlare would also keep those of all participants.
    """
    project = _project(participants)
    state = scratch / participants.federation / "state" / STATE
    state.parent.mkdir(parents=True)
    if (authority / STATE).is_file():
        shutil.copyfile(authority / STATE, state)
    builders = [
        WorkspaceBuilder(),
        StaticFileBuilder(config_folder="config", scheme=SCHEME, require_signed_jobs=True),
        _Certificates(days),
        SignatureBuilder(),
    ]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        context = Provisioner(str(scratch), builders).provision(project, logger=logging.getLogger(__name__))
    if context.get(CtxKey.BUILD_ERROR):
        raise PanorganError(
            "The kits could not be made.",
            code="kits-not-made",
            where=str(authority),
            why="; ".join(context.get_errors()) or said.getvalue().strip()[-500:],
            fix="Correct what the reason names; what was there before is unchanged.",
        )
    kept = json.loads(state.read_text())
    own = {key: kept[key] for key in (CtxKey.ROOT_CERT, CtxKey.ROOT_PRI_KEY)}
    write_atomically(authority / STATE, json.dumps(own), durable=True)
    (authority / STATE).chmod(0o600)
    made = Path(context.get_result_location())
    kits = StartupKits(
        server=made / project.get_server().name,
        admin=made / participants.coordinator,
        sites={name: made / name for name in participants.sites},
    )
    _set_policies(kits, participants.heartbeat_seconds)
    for kit in (kits.server, kits.admin, *kits.sites.values()):
        for name in _LEFT_OUT:
            (kit / name).unlink(missing_ok=True)
        for script in (kit / "startup").glob("*.sh"):  # panorgan starts the engine itself: `deployment/processes.py`
            script.unlink()
    return kits


def _set_policies(kits: StartupKits, heartbeat_seconds: int) -> None:
    """Write panorgan's policies in place of NVFlare's defaults."""
    local = kits.server / "local"
    _replace_default(local / "resources.json", lambda it: policies.server_resources(it, heartbeat_seconds))
    _replace_default(local / "authorization.json", lambda _: policies.server_authorization())
    _replace_default(local / "log_config.json", policies.log_config)
    (local / "comm_config.json").write_text(json.dumps(policies.connections(), indent=2) + "\n")
    _replace_default(kits.admin / "local" / "resources.json", policies.admin_resources)
    for kit in kits.sites.values():
        for default in (kit / "local").glob("*.default"):
            default.unlink()
        for name, text in policies.site_policies().items():
            (kit / "local" / name).write_text(text, encoding="utf-8")


def _replace_default(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Write NVFlare's file from its default and remove the default: without our file nothing may run."""
    default = path.with_name(f"{path.name}.default")
    path.write_text(json.dumps(change(json.loads(default.read_text(encoding="utf-8"))), indent=2) + "\n")
    default.unlink()


def _project(participants: Participants) -> Project:
    """NVFlare's description of the federation."""
    members: list[tuple[str, str, str, dict[str, Any]]] = [
        (ParticipantType.SERVER, participants.host, participants.organization, {"fed_learn_port": participants.port}),
        (ParticipantType.ADMIN, participants.coordinator, participants.organization, {"role": "project_admin"}),
        *((ParticipantType.CLIENT, name, owner, {}) for name, owner in participants.sites.items()),
    ]
    try:
        people = [
            Participant(kind, name, owner, props={"connection_security": "mtls", **more})
            for kind, name, owner, more in members
        ]
        return Project(participants.federation, "a panorgan federation", people)
    except ValueError as error:
        raise ConfigError(
            "A name in the federation cannot be used.",
            code="unusable-name",
            where=f"federation {participants.federation}",
            why=str(error),
            fix="Use a host name or an IPv4 address for the server, an e-mail address for the coordinator, "
            "and names that differ from each other.",
        ) from error
