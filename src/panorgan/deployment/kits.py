"""Makes a kit for each participant from one `federation.yaml`: keys, policies, settings, instructions.

A second call with more sites makes the missing kits and leaves the others as they are.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from panorgan.agreement import Agreement
from panorgan.deployment.engine import network_engine
from panorgan.deployment.folders import Kit, ServerKit, SiteKit
from panorgan.deployment.kit_files import load_coordinator_file
from panorgan.deployment.kit_texts import authority_text, server_texts, site_texts, sites_block, with_organization
from panorgan.deployment.settings import FederationSettings
from panorgan.errors import ConfigError, PanorganError
from panorgan.federation.certificates import Credentials, day, ends, read_certificate
from panorgan.federation.egress import default_policy, policy_text
from panorgan.federation.engine import Participants, StartupKits
from panorgan.federation.files import flush_folder, write_atomically
from panorgan.methods.registry import find_method
from panorgan.settings import Settings, validated
from panorgan.workflows.starting_model import check_start, copy_start
from panorgan.yaml_files import read_yaml

SERVER = "server"


@dataclass(frozen=True)
class KitsReport:
    """The result of `make_kits`. `made` and `kept` hold site names and `server`; `notes` are for the operator."""

    folder: Path
    server: Path
    sites: Mapping[str, Path]
    made: tuple[str, ...]
    kept: tuple[str, ...]
    notes: tuple[str, ...] = ()


class Identity(Settings):
    """What cannot change once kits exist: certificates and agreements depend on it. Kept in `ca/federation.yaml`."""

    name: str
    host: str
    port: int
    organization: str
    coordinator: str
    experiment_fingerprint: str


@dataclass(frozen=True)
class _Folder:
    """The result of `init`."""

    path: Path

    @property
    def authority(self) -> Path:
        return self.path / "ca"

    @property
    def identity(self) -> Path:
        return self.authority / "federation.yaml"

    @property
    def server(self) -> ServerKit:
        return ServerKit(self.path / SERVER)

    def site(self, name: str) -> SiteKit:
        return SiteKit(self.path / "sites" / name)

    def holds_kits(self) -> bool:
        return self.server.path.exists() or any((self.path / "sites").glob("*"))


def make_kits(settings: FederationSettings, experiment: Agreement, folder: Path) -> KitsReport:
    """Make the missing kits. Each appears whole or not at all; existing ones are not touched.

    The one exception: the list of sites in the server's `coordinator.yaml` follows `settings`.
    """
    _refuse_benchmark_method(experiment)
    check_start(experiment)
    place = _Folder(folder)
    _refuse_another_federation(place, _identity(settings, experiment))
    missing = [name for name in settings.sites if not place.site(name).path.exists()]
    server_is_missing = not place.server.path.exists()
    notes: list[str] = []
    if missing or server_is_missing:
        _make(settings, experiment, place, missing, server_is_missing)
    if not server_is_missing:
        notes = _update_coordinator(settings, place.server)
    present = [SERVER, *settings.sites]
    made = ([SERVER] if server_is_missing else []) + missing
    return KitsReport(
        folder=folder,
        server=place.server.path,
        sites={name: place.site(name).path for name in settings.sites},
        made=tuple(made),
        kept=tuple(name for name in present if name not in made),
        notes=tuple(notes),
    )


# -- refusals ------------------------------------------------------------------------------------------------


def _refuse_benchmark_method(experiment: Agreement) -> None:
    method = find_method(experiment.method["name"])
    if method.pooled or method.labels == "withheld":
        raise ConfigError(
            f"{method.name!r} cannot run between hospitals.",
            code="benchmark-method",
            where="method.name",
            why="it pools all cases in one place" if method.pooled else "it trains on labels that sites do not have",
            fix="It is for benchmarks on one machine. Choose another method; 'panorgan methods' lists them.",
        )


def _identity(settings: FederationSettings, experiment: Agreement) -> Identity:
    return Identity(
        name=settings.name,
        host=settings.server.host,
        port=settings.server.port,
        organization=settings.server.organization,
        coordinator=settings.coordinator,
        experiment_fingerprint=experiment.fingerprint(),
    )


def _refuse_another_federation(place: _Folder, asked: Identity) -> None:
    """Refuse changes after which existing kits would no longer match each other."""
    if not place.identity.is_file():
        if place.holds_kits():
            raise PanorganError(
                "The folder holds kits, but not the authority that made them.",
                code="authority-missing",
                where=str(place.path),
                why=f"there is no {place.identity.relative_to(place.path)}",
                fix="Restore its 'ca' folder to add sites, or choose a new folder for a new federation.",
            )
        return
    there = validated(Identity, read_yaml(place.identity, "record of the federation"), str(place.identity))
    changes = [
        f"{_WORDS[key]} was {old!r} and is now {getattr(asked, key)!r}"
        for key, old in there.as_json().items()
        if old != getattr(asked, key)
    ]
    if changes:
        raise PanorganError(
            "The kits in this folder belong to another federation.",
            code="another-federation",
            where=str(place.path),
            why="; ".join(changes),
            fix="Choose a new folder: all hospitals need new kits then. Or undo the change.",
        )


_WORDS = {
    "name": "name",
    "host": "server.host",
    "port": "server.port",
    "organization": "server.organization",
    "coordinator": "coordinator",
    "experiment_fingerprint": "the experiment's fingerprint",
}


# -- making --------------------------------------------------------------------------------------------------


def _make(
    settings: FederationSettings, experiment: Agreement, place: _Folder, sites: list[str], with_server: bool
) -> None:
    """Provision in a scratch folder, complete the kits there, then move them to their places."""
    _private(place.authority)
    with _scratch(place.path) as scratch:
        kits = _sign(settings, place, sites, scratch)
        write_atomically(place.authority / "README.md", authority_text(settings))
        record = yaml.safe_dump(_identity(settings, experiment).as_json(), sort_keys=False)
        write_atomically(place.identity, record, durable=True)
        if with_server:
            shutil.move(kits.admin, kits.server / "admin")
            _finish_server(settings, experiment, ServerKit(kits.server))
            _move_in(kits.server, place.server.path)
        for name in sites:
            _finish_site(settings, experiment, name, SiteKit(kits.sites[name]))
            _move_in(kits.sites[name], place.site(name).path)


def _sign(settings: FederationSettings, place: _Folder, sites: Iterable[str], scratch: Path) -> StartupKits:
    """The engine's kits with new keys and certificates, in a scratch folder: server, coordinator and these sites."""
    participants = Participants(
        federation=settings.name,
        host=settings.server.host,
        port=settings.server.port,
        organization=settings.server.organization,
        coordinator=settings.coordinator,
        sites={name: with_organization(name, settings.sites[name]).organization for name in sites},
        heartbeat_seconds=settings.heartbeat_seconds,
    )
    return network_engine().provision(participants, settings.certificate_days, place.authority, scratch)


@contextlib.contextmanager
def sign_again(
    settings: FederationSettings, experiment: Agreement, folder: Path, sites: Iterable[str]
) -> Iterator[StartupKits]:
    """The same for existing kits, from the authority in `folder`; the scratch folder is removed afterwards."""
    place = _Folder(folder)
    if not place.identity.is_file():
        raise PanorganError(
            "The federation's authority is not here.",
            code="authority-missing",
            where=str(place.authority),
            why=f"there is no {place.identity.relative_to(place.path)}",
            fix="Bring the 'ca' folder back from its safe place; certificates can only be made with it.",
        )
    _refuse_another_federation(place, _identity(settings, experiment))
    with _scratch(place.path) as scratch:
        yield _sign(settings, place, sites, scratch)


def _finish_server(settings: FederationSettings, experiment: Agreement, kit: ServerKit) -> None:
    expires = day(ends(read_certificate(Credentials.of_server(kit.startup).certificate)))
    _write(kit, server_texts(settings, experiment, expires))
    copy_start(experiment, kit.start)
    _protect(kit)
    _protect(Kit(kit.admin))


def _finish_site(settings: FederationSettings, experiment: Agreement, name: str, kit: SiteKit) -> None:
    method = experiment.method["name"]
    policy = default_policy(method)
    expires = day(ends(read_certificate(Credentials.of_site(kit.startup).certificate)))
    texts = site_texts(settings, experiment, name, policy, expires)
    _write(kit, {**texts, "local/egress.yaml": policy_text(policy, method)})
    _protect(kit)


def _write(kit: Kit, texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
        path = kit.path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _protect(kit: Kit) -> None:
    """Let only the owner read a kit: it holds a key, and later data derived from patients' scans."""
    kit.path.chmod(0o700)
    kit.startup.chmod(0o700)
    for path in kit.startup.iterdir():
        path.chmod(0o600)


@contextlib.contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """A folder on the same disk, for the owner only, removed afterwards."""
    scratch = Path(tempfile.mkdtemp(prefix=".making-", dir=folder))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _private(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)


def _move_in(kit: Path, target: Path) -> None:
    target.parent.mkdir(exist_ok=True)
    kit.rename(target)
    flush_folder(target.parent)


# -- keeping -------------------------------------------------------------------------------------------------


def _update_coordinator(settings: FederationSettings, kit: ServerKit) -> list[str]:
    """Bring the list of sites up to date; everything else in the file is the operator's. Returns notes."""
    there = load_coordinator_file(kit)
    wanted = {name: with_organization(name, site) for name, site in settings.sites.items()}
    notes = []
    if there.sites != wanted:
        old = kit.settings.read_text(encoding="utf-8")
        new = _with_sites(old, sites_block(settings.sites))
        expected = {**yaml.safe_load(old), "sites": {name: site.as_json() for name, site in wanted.items()}}
        if yaml.safe_load(new) != expected:
            raise PanorganError(
                "The list of sites could not be updated.",
                code="sites-not-updated",
                where=str(kit.settings),
                fix=f"Write it by hand:\n{sites_block(settings.sites)}",
            )
        write_atomically(kit.settings, new, durable=True)
        notes.append(f"{kit.settings} now lists {', '.join(wanted)}; restart 'panorgan federation start'.")
    gone = sorted(set(there.sites) - set(wanted))
    if gone:
        notes.append(f"No longer in the federation: {', '.join(gone)}. Their certificates stay valid.")
    if there.rounds != settings.rounds or there.heartbeat_seconds != settings.heartbeat_seconds:
        notes.append(f"'rounds' and 'heartbeat_seconds' stay as they are in {kit.settings}; change them there.")
    return notes


def _with_sites(text: str, block: str) -> str:
    """The YAML text with another `sites:` part; comments and everything else stay as they are."""
    for key, value in yaml.compose(text, yaml.SafeLoader).value:
        if key.value == "sites":
            return text[: key.start_mark.index] + block + text[_end(value) :]
    return f"{text.rstrip()}\n\n{block}\n"


def _end(node: yaml.Node) -> int:
    """The end of a node's own text. YAML counts comments after a block as part of it."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last)
    return int(node.end_mark.index)
