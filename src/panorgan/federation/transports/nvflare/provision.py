"""Keys, certificates and start-up kits, by NVFlare's own provisioning. Nothing is printed; nothing is half done."""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
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
from panorgan.federation.files import write_atomically

SCHEME = "grpc"
"""How the sites connect; TLS 1.2 or later with certificates on both sides, HTTP/2 inside."""

ROOT_DAYS = 3650
"""The authority outlives the certificates, so that a hospital may join, or renew, years later."""

STATE = "cert.json"
"""NVFlare's name for the file with the authority's key."""


@dataclass(frozen=True)
class Participants:
    """Who takes part. `sites` holds each site's organisation."""

    federation: str
    host: str
    port: int
    organization: str
    coordinator: str
    sites: Mapping[str, str]


@dataclass(frozen=True)
class StartupKits:
    """Folders with `startup/` and `local/`, as NVFlare makes them."""

    server: Path
    admin: Path
    sites: Mapping[str, Path]


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
    """Make a kit with a new key for everybody named, in `scratch`, signed by the authority, which is made if need be.

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
    return StartupKits(
        server=made / project.get_server().name,
        admin=made / participants.coordinator,
        sites={name: made / name for name in participants.sites},
    )


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
