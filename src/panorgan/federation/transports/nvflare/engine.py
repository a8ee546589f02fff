"""NVFlare as the network engine. This module imports without NVFlare; what needs it says where it is missing."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from panorgan.errors import ConfigError
from panorgan.federation.certificates import Credentials, read_certificate, subject
from panorgan.federation.engine import EngineProcess, Participants, Role, SiteFiles, StartupKits
from panorgan.federation.transports.nvflare import policies
from panorgan.federation.transports.nvflare.handshakes import TRACING, Handshakes

if TYPE_CHECKING:
    from panorgan.federation.transports.nvflare.session import NVFlareSession

_SERVER_PROCESS = "nvflare.private.fed.app.server.server_train"
_SITE_PROCESS = "panorgan.federation.transports.nvflare.site_process"
_CONNECTION = {"server": "fed_server.json", "site": "fed_client.json"}
"""Which file in `startup/` says where to listen, or where to connect."""
_AUDIT_LOG = "audit.log"
"""NVFlare's record of admin commands. The driver sends two a second."""
_ERRORS_BY_KIND = {"NVFLARE_SECURE_LOGGING": "true"}
"""Environment in which NVFlare reports the kind of an error at a site to the server, and not its text."""


class NVFlareEngine:
    """Implements `federation.engine.Engine`."""

    package = "nvflare"

    # -- kits ------------------------------------------------------------------------------------------------

    def provision(self, participants: Participants, days: int, authority: Path, scratch: Path) -> StartupKits:
        """By NVFlare's own provisioning, with panorgan's policies in place of NVFlare's defaults."""
        with _installed():
            from panorgan.federation.transports.nvflare.provision import provision
        return provision(participants, days, authority, scratch)

    def site_files(self) -> SiteFiles:
        """NVFlare's policies in `local/`, and what its provisioning puts into `startup/`."""
        with _installed():
            return SiteFiles(
                {f"local/{name}": text for name, text in policies.site_policies().items()},
                tuple(f"startup/{name}" for name in ("client.crt", "client.key", "rootCA.pem", _CONNECTION["site"])),
                # NVFlare's own scripts; `site_process.py` says why panorgan does not use them.
                ("startup/start.sh", "startup/stop_fl.sh", "startup/sub_start.sh"),
            )

    def check_kit(self, kit: Path, role: Role) -> None:
        """A site's `fed_client.json` names no components; the server lets jobs name one class, and holds no code."""
        if role == "server":
            policies.check_server(kit)
        else:
            policies.check_connection(kit / "startup" / _CONNECTION["site"])

    def add_message_filter(self, kit: Path) -> bool:
        """A component in `resources.json`; the server reads it when it starts."""
        return policies.add_message_filter(kit / "local" / "resources.json")

    def server_address(self, kit: Path, role: Role) -> str:
        """As provisioned."""
        try:
            content = json.loads((kit / "startup" / _CONNECTION[role]).read_text())
            return str(content["servers"][0]["service"]["target"])
        except (OSError, ValueError, LookupError, TypeError):
            return ""

    # -- processes -------------------------------------------------------------------------------------------

    def process(self, kit: Path, role: Role) -> EngineProcess:
        """NVFlare's server, or its client cut down to what a run needs. Its name is that in the certificate."""
        settings, startup = _CONNECTION[role], kit / "startup"
        if not (startup / settings).is_file():
            raise ConfigError(
                "This is not a kit of a server or a site.",
                code="not-a-kit",
                where=str(kit),
                why=f"startup/{settings} is missing",
                fix="Point to the folder that 'panorgan federation init' made for this machine.",
            )
        own = Credentials.of_server(startup) if role == "server" else Credentials.of_site(startup)
        name, organization = subject(read_certificate(own.certificate))
        names = [f"org={organization}"] if role == "server" else [f"uid={name}", f"org={organization}"]
        return EngineProcess(
            _SERVER_PROCESS if role == "server" else _SITE_PROCESS,
            ("-m", str(kit), "-s", settings, "--set", "secure_train=true", *names, "config_folder=config"),
            TRACING if role == "server" else _ERRORS_BY_KIND,
            folders=("transfer",),  # temporary files stay in the kit
            logs=(_AUDIT_LOG,),
            read_output=(lambda on_refused: Handshakes(on_refused).keep) if role == "server" else None,
        )

    # -- segments --------------------------------------------------------------------------------------------

    def open_session(self, kit: Path, user: str) -> NVFlareSession:
        """With the kit in `admin/` of the server's kit."""
        with _installed():
            from panorgan.federation.transports.nvflare.session import NVFlareSession
        return NVFlareSession(kit, user)


@contextlib.contextmanager
def _installed() -> Iterator[None]:
    """NVFlare is an optional extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(
            "NVFlare is not installed.",
            code="nvflare-missing",
            why=f"there is no module {error.name!r}",
            fix="Install panorgan's wheel with its extra: pip install './panorgan-VERSION-py3-none-any.whl[network]'",
        ) from error
